"""Source `saelens`: activations that SAELens caches, as an Arrow dataset of `save_to_disk`.

A row is a sample of fixed length: a column for each hook, Array2D(context, d_in) of float32 or float16, and token_ids.
The dataset is the folder itself, or each of its folders that has a state.json, as the `shard_{i:05d}` of a run that was
not consolidated. Rows are read one at a time. Sample id: the Arrow file's path below the folder without its extension,
and the row's number in that file: so it stays the same where other files are gone. A file of state.json that is not
there was never copied, or deleted after a conversion, which knows what was in it.

Hooks of the residual stream say which layers they are, and come before the model's final norm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hsfmt.errors import Problem, SourceError, UsageError
from hsfmt.readers.sources import columns
from hsfmt.readers.sources.arrow_arrays import ArrayColumn, array_columns, read_row
from hsfmt.readers.sources.arrow_rows import named_files
from hsfmt.readers.sources.arrow_stream import Batch, scan_stream
from hsfmt.readers.sources.base import CONTAINER, Claim, Source, SourceItem, SourceSample, Stray, SupportFile
from hsfmt.readers.sources.file_stamp import FileStamp
from hsfmt.readers.sources.folder import stem
from hsfmt.readers.sources.hooks import UNKNOWN_HOOK, layer_of_hook
from hsfmt.readers.sources.meaning import SourceMeaning
from hsfmt.readers.sources.sample_names import stray_reason

if TYPE_CHECKING:
    from hsfmt.readers.sources.folder import Folder
    from hsfmt.readers.sources.look import Look

_STATE, _INFO = "state.json", "dataset_info.json"
_IDS = ("token_ids", "input_ids")
_DTYPES = ("float32", "float16")
_NOT_KNOWN = (
    "pre if the state of the last layer was taken before the model's final norm, post if after it; unknown if the last "
    "layer is not stored or you can't find out"
)


@dataclass(frozen=True, slots=True)
class _File:
    """An Arrow file: its path, its batches, the rows before each of them, and its stamp when they were listed."""

    path: str
    batches: tuple[Batch, ...]
    starts: tuple[int, ...]
    stamp: FileStamp


class SaeLensSource(Source):
    """A folder with cached activations of SAELens."""

    name: ClassVar[str] = "saelens"
    summary: ClassVar[str] = "SAELens' cached activations: Arrow datasets with a column for each hook, and token_ids"
    needs_all_files: ClassVar[bool] = True

    @classmethod
    def claim(cls, look: Look) -> Claim | None:
        """Claim a folder with an Arrow dataset that has columns of two axes and token ids."""
        for path in look.names:
            folder, slash, name = path.rpartition("/")
            info = look.document(f"{folder}{slash}{_INFO}") if name == _STATE else None
            features = info.get("features") if isinstance(info, dict) else None
            if not isinstance(features, dict):
                continue
            arrays = [
                key for key, kind in features.items() if isinstance(kind, dict) and kind.get("_type") == "Array2D"
            ]
            if arrays:
                known = "token_ids" in features and all(layer_of_hook(key) is not None for key in arrays)
                options = "" if known else "--layer-ids IDS --final-norm NORM"
                certain = "token_ids" in features
                return Claim(f"{folder}{slash}{_INFO} with columns {', '.join(features)}"[:300], certain, options)
        return None

    def _list(self, folder: Folder) -> None:
        key_map = self.options.key_map
        if key_map.aux or key_map.last or key_map.loss_mask:
            remedy = "name one column with hidden_states=COLUMN, or leave columns out with ignore=COLUMN"
            raise UsageError.at("--map", expected="hidden_states, input_ids or ignore", got="others", remedy=remedy)
        self._files: dict[str, _File] = {}
        self._columns: dict[str, ArrayColumn | None] = {}
        self._first = ""
        names = [file.path for file in (*folder.files, *folder.broken)]
        for path in names:
            if path == _STATE or path.endswith("/" + _STATE):
                self._add_dataset(folder, path.removesuffix(_STATE), names)
        for file in folder.files:
            name = file.path.rpartition("/")[2]
            if file.path in self._files:
                self.support.append(SupportFile(file.path, CONTAINER))
            elif name in (_STATE, _INFO):
                self.support.append(SupportFile(file.path, "dataset description"))
            else:
                reason = f"not named by a {_STATE}" if name.endswith(".arrow") else "no file of an Arrow dataset"
                self.strays.append(Stray(file.path, stray_reason(file.path, reason)))
        self._ids, self._hooks = self._choose() if self._files else ("", ())

    def _add_dataset(self, folder: Folder, prefix: str, names: list[str]) -> None:
        folder.check(prefix + _STATE)
        sizes = {file.path: file.nbytes for file in folder.files}
        present = frozenset(name.removeprefix(prefix) for name in names if name.startswith(prefix))
        try:
            files = named_files(self.root / prefix, present)
        except SourceError as error:
            raise SourceError(replace(problem, where=prefix + problem.where) for problem in error.problems) from error
        missing = [prefix + name for name in files if name not in present]
        if missing:
            shown = ", ".join(missing[:5]) + (" …" if len(missing) > 5 else "")
            self.notes.append(f"{prefix}{_STATE} names {len(missing)} files that are not there: {shown}")
        for name in files:
            path = prefix + name
            folder.check(path)
            if name in present:
                self._add_file(path, sizes[path])
                continue
            expected = f"the Arrow file that {_STATE} names"
            remedy = "copy the dataset again, whole; if --delete-source deleted it, pass --delete-source again"
            problem = Problem(path, expected, "no such file", remedy)
            self.items.append(SourceItem(path, len(self.items), stem(path), (), 0, problem))

    def _add_file(self, path: str, nbytes: int) -> None:
        """Add the rows of an Arrow file."""
        stamp = FileStamp.take(self.root / path, path)
        schema, batches = scan_stream(self.root / path, path)
        found = array_columns(schema, path)
        if not self._files:
            self._columns, self._first = found, path
        elif found != self._columns:
            raise SourceError.at(path, expected=f"the columns of {self._first}", got=", ".join(found) or "none")
        starts = (0, *np.cumsum([batch.n_rows for batch in batches], dtype=object).tolist())
        n_rows = int(starts[-1])
        if n_rows > nbytes:
            raise SourceError.at(path, expected=f"rows that fit {nbytes} bytes", got=f"{n_rows} rows")
        self._files[path] = _File(path, tuple(batches), starts, stamp)
        for i in range(n_rows):
            share = nbytes // n_rows + (nbytes % n_rows if i == 0 else 0)
            item = SourceItem(f"{path}[{i}]", len(self.items), f"{stem(path)}/{i}", (), share, shared=(path,))
            self.items.append(item)

    def _choose(self) -> tuple[str, tuple[str, ...]]:
        """The column of the token ids, and those of the states in the order of their layers."""
        found, key_map = self._columns, self.options.key_map
        ids = key_map.input_ids or next((name for name in _IDS if name in found), "")
        column = found.get(ids)
        if column is None or len(column.lists) != 1:
            raise SourceError.at(
                self._first,
                expected=f"token ids, a list of integers in the column {ids or _IDS[0]}",
                got=f"the columns {', '.join(found) or 'none'}",
                remedy="cache the activations with a SAELens that stores token_ids: samples need them",
            )
        left = [name for name in found if name != ids and name not in key_map.ignore]
        hooks = [name for name in left if (array := found[name]) is not None and len(array.lists) == 2]
        if key_map.hidden_states is not None:
            others = {name for name in hooks if name != key_map.hidden_states}
            left, hooks = [name for name in left if name not in others], [name for name in hooks if name not in others]
        problems = [
            Problem(f"{self._first}[{name}]", "states of two axes", "another column", f"--map ignore={name}")
            for name in left
            if name not in hooks
        ]
        for name in hooks:
            array = found[name]
            if array is not None and array.dtype.name not in _DTYPES:
                problems.append(Problem(f"{self._first}[{name}]", " or ".join(_DTYPES), array.dtype.name))
        if problems:
            raise SourceError(problems)
        if not hooks:
            got = f"the columns {', '.join(found)}"
            raise SourceError.at(self._first, expected="a column with the states of a hook", got=got)
        layers = {name: layer_of_hook(name) for name in hooks}
        if None not in layers.values():
            hooks.sort(key=lambda name: layers[name] or 0)
        return ids, tuple(hooks)

    def _look(self, item: SourceItem) -> SourceMeaning:
        sample = self._read(item)
        layers = [layer_of_hook(name) for name in self._hooks]
        known = [layer for layer in layers if layer is not None]
        if len(set(known)) < len(known):
            twice = next(layer for layer in known if known.count(layer) > 1)
            both = [name for name, layer in zip(self._hooks, layers, strict=True) if layer == twice]
            remedy = " or ".join(f"--map ignore={name}" for name in both)
            got = f"{' and '.join(both)}, which are both state {twice}"
            raise UsageError.at(self._first, expected="each state once", got=got, remedy=remedy)
        names, all_known = ", ".join(self._hooks), len(known) == len(layers)
        return SourceMeaning(
            hidden_size=sample.hidden_states.shape[2],
            n_layers=len(self._hooks),
            dtype=sample.hidden_states.dtype.name,
            layers=tuple(known) if all_known else None,
            layers_from=f"the hooks {names}" + ("" if all_known else f", in this order: {UNKNOWN_HOOK}"),
            final_norm="pre" if all_known else None,
            final_norm_from="hooks of the residual stream come before the final norm" if all_known else _NOT_KNOWN,
            producer={"source_format": "saelens activations", "hooks": list(self._hooks)},
        )

    def _load(self, item: SourceItem) -> SourceSample:
        return self._read(item)

    def _read(self, item: SourceItem) -> SourceSample:
        file = self._files[item.shared[0]]
        row = int(item.key.rpartition("[")[2][:-1])
        number = int(np.searchsorted(np.array(file.starts), row, side="right")) - 1
        batch, place = file.batches[number], row - file.starts[number]
        path = self.root / file.path

        def read(name: str) -> Any:
            column = self._columns[name]
            assert column is not None
            return read_row(path, file.path, batch, column, place)

        ids = columns.token_ids(read(self._ids), f"{item.key}[{self._ids}]")
        layers = [read(name) for name in self._hooks]
        # In a file that was written since it was listed, the batches may lie elsewhere, or be more of them.
        file.stamp.check_unchanged()
        for name, layer in zip(self._hooks, layers, strict=True):
            if layer.shape != (len(ids), layers[0].shape[1]) or not layer.size:
                raise SourceError.at(
                    f"{item.key}[{name}]",
                    expected=f"{len(ids)} states, one a token, of one width",
                    got=f"shape {list(layer.shape)}",
                )
        return SourceSample(item.sample_id, ids, np.stack(layers, axis=1))
