"""Source `memmap`: the activation caches of dictionary_learning (the fork of crosscoder_learning and diffing tools).

A cache is a folder with `tokens.pt` [token], `sequence_ranges.pt` and, for each submodule, a folder `{name}_{in|out}/`
of `shard_{k}.memmap` with `.meta`, and `config.json`; there may be several caches below the source's folder. The ranges
are the starts of the sequences and the end of the last one, or a pair [start, stop] each. Each sequence is a sample,
each submodule a layer, in natural order of the names.

A cache that was shuffled, or has no tokens, has lost which states make a text: refused. Which layers the submodules are
is in no file. Where the first tokens of each text were left out, no file tells that either.

Sample id: the cache's path below the source's folder, and the number of the sequence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hsfmt.errors import Problem, SourceError, UsageError
from hsfmt.readers.sources import columns
from hsfmt.readers.sources.base import CONTAINER, Claim, Source, SourceItem, SourceSample, Stray, SupportFile
from hsfmt.readers.sources.file_stamp import FileStamp
from hsfmt.readers.sources.folder import natural_key
from hsfmt.readers.sources.meaning import SourceMeaning
from hsfmt.readers.sources.memmap_shards import CONFIG, META, Submodule, read_rows, read_submodule
from hsfmt.readers.sources.sample_names import stray_reason

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hsfmt.readers.sources.folder import Folder
    from hsfmt.readers.sources.look import Look

TOKENS, RANGES = "tokens.pt", "sequence_ranges.pt"
FINAL_NORM_FROM = (
    "pre if the submodules are decoder layers, whose output comes before the model's final norm; post if the last one "
    "is that norm; unknown if the last layer is not stored or you can't find out"
)
# By its description a submodule is known even where its shards are gone.
_SHARD = re.compile(r"(?P<folder>(?:.*/)?[^/]+)/shard_[0-9]+\.(?:memmap|meta)")
_STATISTICS = {"mean.pt", "std.pt", "M2.pt", "count.pt"}
_FACTS = ("batch_size", "context_len", "io", "shard_size")


@dataclass(frozen=True, slots=True)
class _Cache:
    """A cache: its path with a slash at the end, or nothing; its submodules, and where its sequences lie.

    `stamp` is that of the file that says where they lie.
    """

    path: str
    submodules: tuple[Submodule, ...]
    ranges: NDArray[np.int64]
    stamp: FileStamp

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(submodule.name.removeprefix(self.path) for submodule in self.submodules)


class MemmapSource(Source):
    """A folder with activation caches."""

    name: ClassVar[str] = "memmap"
    summary: ClassVar[str] = (
        "activation caches of dictionary_learning forks: {submodule}_out/shard_{k}.memmap, tokens.pt"
    )
    needs_all_files: ClassVar[bool] = True

    @classmethod
    def claim(cls, look: Look) -> Claim | None:
        """Claim a folder with shards beside which a config says how many there are."""
        for name in look.names:
            match = _SHARD.fullmatch(name if "/" in name else f"./{name}")
            if match is None:
                continue
            config = look.document(f"{match['folder']}/{CONFIG}".removeprefix("./"))
            known = isinstance(config, dict) and {"shard_count", "d_model", "total_size"} <= set(config)
            return Claim(f"{name} beside {CONFIG}", certain=known, options="--layer-ids IDS --final-norm NORM")
        return None

    def _list(self, folder: Folder) -> None:
        if self.options.key_map.states or self.options.key_map.input_ids or self.options.key_map.loss_mask:
            remedy = "leave all but ignore=FOLDER out of --map, which leaves a submodule out"
            raise UsageError.at("--map", expected="ignore=FOLDER alone: there are no keys", got="others", remedy=remedy)
        self._tokens: dict[str, NDArray[np.int64]] = {}
        names = [file.path for file in (*folder.files, *folder.broken)]
        alone = next((name for name in names if _SHARD.fullmatch(f"x/{name}") and "/" not in name), None)
        if alone is not None:
            remedy = f"give the folder around it: {self.root.resolve().parent}"
            raise UsageError.at(
                str(self.root), expected=f"the folder with {TOKENS}", got=f"{alone} itself", remedy=remedy
            )
        found = {match["folder"] for name in names if (match := _SHARD.fullmatch(name))}
        ignored = {path for path in found if path.rpartition("/")[2] in self.options.key_map.ignore}
        groups: dict[str, list[str]] = {}
        for path in sorted(found - ignored, key=natural_key):
            groups.setdefault(path.rpartition("/")[0], []).append(path)
        self._caches = [self._cache(folder, path, submodules) for path, submodules in groups.items()]
        if len({cache.names for cache in self._caches}) > 1:
            got = " and ".join(f"{', '.join(cache.names)} in {cache.path or '.'}" for cache in self._caches[:3])
            remedy = "convert each cache by itself, or leave folders out with --map ignore=FOLDER"
            raise SourceError.at(str(self.root), expected="the same submodules in each cache", got=got, remedy=remedy)
        self._present = set(names)
        for cache in self._caches:
            self._add_items(cache)
        self._add_others(folder)

    def _cache(self, folder: Folder, path: str, submodules: list[str]) -> _Cache:
        prefix = f"{path}/" if path else ""
        read = tuple(read_submodule(folder, submodule) for submodule in submodules)
        first = read[0]
        for submodule in read:
            where = f"{submodule.name}/{CONFIG}"
            if submodule.config.get("shuffle_shards"):
                raise SourceError.at(
                    f"{where}[shuffle_shards]",
                    expected="rows in the order of the texts",
                    got="shuffled ones: no sample can be put together from them",
                    remedy="collect the activations with store_tokens=True, shuffle_shards=False",
                )
            for what in ("n_rows", "hidden_size", "dtype"):
                if getattr(submodule, what) != getattr(first, what):
                    expected = f"{what} {getattr(first, what)} as in {first.name}"
                    raise SourceError.at(where, expected=expected, got=str(getattr(submodule, what)))
        names = {file.path for file in (*folder.files, *folder.broken)}
        for name, option in ((TOKENS, "store_tokens"), (RANGES, "store_sequence_ranges")):
            if f"{prefix}{name}" not in names:
                raise SourceError.at(
                    f"{prefix}{name}",
                    expected="the file beside the submodules' folders, which tells the texts",
                    got=f"none ({option} is {first.config.get(option)!r} in {first.name}/{CONFIG})",
                    remedy="give the folder that has it, or collect the activations with store_tokens=True",
                )
        folder.check(f"{prefix}{RANGES}")
        folder.check(f"{prefix}{TOKENS}")
        stamp = FileStamp.take(self.root / f"{prefix}{RANGES}", f"{prefix}{RANGES}")
        return _Cache(prefix, read, self._read_ranges(f"{prefix}{RANGES}", first.n_rows), stamp)

    def _read_ranges(self, path: str, n_rows: int) -> NDArray[np.int64]:
        """Read the ranges [sequence, 2], held to be in order, apart and within the rows."""
        values = self._read_integers(path, 2)
        if values.ndim == 1:
            ranges = np.stack([values[:-1], values[1:]], axis=1)
        elif values.shape[1] == 2:
            ranges = values
        else:
            raise SourceError.at(path, expected="starts, or pairs of start and stop", got=f"shape {list(values.shape)}")
        bad = (ranges[:, 1] < ranges[:, 0]) | (ranges[:, 0] < 0) | (ranges[:, 1] > n_rows)
        bad[1:] |= ranges[1:, 0] < ranges[:-1, 1]
        if bad.any():
            first = int(bad.argmax())
            got = f"{ranges[first].tolist()} after {ranges[first - 1].tolist() if first else 'none'}"
            expected = f"ranges within {n_rows} rows, in order and apart"
            raise SourceError.at(f"{path}[{first}]", expected=expected, got=got)
        covered = int((ranges[:, 1] - ranges[:, 0]).sum())
        if covered != n_rows:
            raise SourceError.at(
                path, expected=f"ranges of all {n_rows} rows", got=f"ranges of {covered} rows together"
            )
        return ranges

    def _read_integers(self, path: str, rank: int) -> NDArray[np.int64]:
        from hsfmt.readers.sources.torch_file import read_torch_file
        from hsfmt.readers.sources.torch_states import row_values

        loaded = read_torch_file(self.root / path, path)
        values = row_values(loaded.value, path, loaded.nbytes)
        if not 1 <= values.ndim <= rank or values.dtype.kind not in "iu" or not values.size:
            got = f"{values.dtype.name} of shape {list(values.shape)}"
            raise SourceError.at(path, expected="a tensor of integers", got=got)
        return np.array(values, dtype=np.int64)

    def _add_items(self, cache: _Cache) -> None:
        row_nbytes = sum(submodule.row_nbytes for submodule in cache.submodules)
        problems = {path: problem for submodule in cache.submodules for path, problem in submodule.problems.items()}
        for i, (start, stop) in enumerate(cache.ranges.tolist()):
            key = f"{cache.path}{RANGES}[{i}]"
            shared = tuple(path for submodule in cache.submodules for path in submodule.shards_of(start, stop))
            empty = None if stop > start else Problem(key, "at least one token", "an empty sequence")
            problem = empty or next((problems[path] for path in shared if path in problems), None)
            shared = tuple(path for path in shared if path in self._present)
            nbytes, sample_id = (stop - start) * row_nbytes, f"{cache.path}{i}"
            item = SourceItem(key, len(self.items), sample_id, (), nbytes, problem, shared=shared)
            self.items.append(replace(item, normal_hole=True) if empty else item)

    def _add_others(self, folder: Folder) -> None:
        roles = {path: CONTAINER for cache in self._caches for sub in cache.submodules for path in sub.shards}
        for cache in self._caches:
            roles |= {f"{cache.path}{TOKENS}": "tokens", f"{cache.path}{RANGES}": "sequence ranges"}
        folders = {sub.name for cache in self._caches for sub in cache.submodules}
        for file in folder.files:
            inside, _, name = file.path.rpartition("/")
            if file.path in roles:
                self.support.append(SupportFile(file.path, roles[file.path]))
            elif inside in folders and name == CONFIG:
                self.support.append(SupportFile(file.path, "config"))
            elif inside in folders and name in _STATISTICS:
                self.support.append(SupportFile(file.path, "statistics"))
            elif inside in folders and name.endswith(META) and f"{file.path.removesuffix(META)}.memmap" in roles:
                self.support.append(SupportFile(file.path, "shard shape"))
            else:
                self.strays.append(Stray(file.path, stray_reason(file.path, "no file of an activation cache")))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokens": {}}

    def n_tokens(self, item: SourceItem) -> int | None:
        """Tokens of the sequence."""
        cache, number = self._place(item)
        return int(cache.ranges[number, 1] - cache.ranges[number, 0])

    def _look(self, item: SourceItem) -> SourceMeaning:
        cache, _ = self._place(item)
        first = cache.submodules[0]
        names = ", ".join(cache.names)
        return SourceMeaning(
            hidden_size=first.hidden_size,
            n_layers=len(cache.submodules),
            dtype=first.dtype.name,
            layers=None,
            layers_from=f"they are the submodules {names}, in this order: the output of decoder layer i is i + 1, its "
            "input is i; a submodule that is no state between layers has no id: leave it out with --map ignore=FOLDER",
            final_norm=None,
            final_norm_from=FINAL_NORM_FROM,
            producer={
                "source_format": "memmap activation cache",
                "submodules": list(cache.names),
                **{name: first.config[name] for name in _FACTS if isinstance(first.config.get(name), int | str)},
            },
        )

    def _load(self, item: SourceItem) -> SourceSample:
        cache, number = self._place(item)
        cache.stamp.check_unchanged()
        start, stop = cache.ranges[number].tolist()
        tokens = self._tokens_of(cache)
        first = cache.submodules[0]
        states = np.empty((stop - start, len(cache.submodules), first.hidden_size), dtype=first.dtype)
        rows = np.empty((stop - start, first.hidden_size), dtype=first.dtype)
        for layer, submodule in enumerate(cache.submodules):
            read_rows(self.root, submodule, start, rows)
            states[:, layer] = rows
        ids = columns.token_ids(tokens[start:stop], f"{cache.path}{TOKENS}")
        return SourceSample(item.sample_id, ids, states)

    def _place(self, item: SourceItem) -> tuple[_Cache, int]:
        path, _, number = item.key.rpartition(f"{RANGES}[")
        return next(cache for cache in self._caches if cache.path == path), int(number[:-1])

    def _tokens_of(self, cache: _Cache) -> NDArray[np.int64]:
        """The token ids of a cache, read once a process."""
        if cache.path not in self._tokens:
            path = f"{cache.path}{TOKENS}"
            tokens = self._read_integers(path, 1)
            n_rows = cache.submodules[0].n_rows
            if len(tokens) != n_rows:
                raise SourceError.at(
                    path, expected=f"{n_rows} token ids, one a row of the shards", got=str(len(tokens))
                )
            self._tokens[cache.path] = tokens
        return self._tokens[cache.path]
