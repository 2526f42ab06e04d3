"""Source `activault`: the activations that activault stores, `{run}/{hook}/{group}--{attempt}_{job}.saved.pt`.

A file is a dict of `states` [batch, token, hidden] and `input_ids` [batch, token]; each row is a sample. Files of one
group lie in the folder of each hook and hold the same texts, each hook a layer. Older files are the tensor of states
alone: without token ids they are refused.

activault takes hidden_states[i + 1] for `blocks.i.hook_resid_post`. It also cuts the model after its deepest hook: the
state of that one has been through the model's final norm, which no file says.

Sample id: `{run}/{group}/{row}`, the run being the path of the hooks' folders below the source's folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hsfmt.errors import Problem, SourceError, UsageError
from hsfmt.readers.sources.base import CONTAINER, Claim, Source, SourceItem, SourceSample, Stray, SupportFile
from hsfmt.readers.sources.folder import natural_key, stem
from hsfmt.readers.sources.hooks import UNKNOWN_HOOK, layer_of_hook
from hsfmt.readers.sources.meaning import SourceMeaning
from hsfmt.readers.sources.sample_names import is_torch_name, stray_reason

if TYPE_CHECKING:
    from hsfmt.readers.sources.folder import Folder
    from hsfmt.readers.sources.look import Look
    from hsfmt.readers.sources.torch_file import TorchFile

STATES, IDS = "states", "input_ids"
_KNOWN = {STATES, IDS, "tensor_bytes"}
_DOCUMENTS = {"metadata.json": "metadata", "statistics.json": "statistics", "cfg.json": "config"}
_MOST_ROWS = 1 << 20
_POST = re.compile(r"blocks\.[0-9]+\.hook_resid_post")
_FINAL_NORM_FROM = (
    "activault cuts the model after its deepest hook, and transformers gives the last state after the final norm: the "
    "state of the run's deepest hook is that of no layer then, unless it is the model's last (post); leave it out "
    "with --map ignore=HOOK (and say unknown), or say pre if the version that wrote these does not cut the model"
)


@dataclass(frozen=True, slots=True)
class _Group:
    """Files of the same texts: their paths by hook, in the source's order of hooks."""

    name: str
    paths: dict[str, str]


class ActivaultSource(Source):
    """A folder of activault's files."""

    name: ClassVar[str] = "activault"
    summary: ClassVar[str] = "activault's {hook}/{group}.saved.pt: dicts of states and input_ids, a batch a file"

    @classmethod
    def claim(cls, look: Look) -> Claim | None:
        """Claim a folder of dicts with just these entries."""
        for record in look.records if look.torch_names else ():
            states, ids = record.entries.get(STATES), record.entries.get(IDS)
            shape, rows = getattr(states, "shape", ()), getattr(ids, "shape", ())
            if len(shape) == 3 and tuple(shape[:2]) == tuple(rows):
                evidence = f"{record.where} with {STATES} {list(shape)} and {IDS} {list(rows)}"
                return Claim(evidence, certain=set(record.entries) <= _KNOWN, options="--final-norm NORM")
        return None

    def _list(self, folder: Folder) -> None:
        from hsfmt.readers.sources.torch_containers import TorchContainers

        key_map = self.options.key_map
        if key_map.states or key_map.input_ids or key_map.loss_mask:
            remedy = "leave all but ignore=HOOK out of --map, which leaves a hook's folder out"
            raise UsageError.at("--map", expected="ignore=HOOK alone", got="others", remedy=remedy)
        self._containers = TorchContainers()
        self._hooks: tuple[str, ...] = ()
        self._rows: dict[str, int] = {}
        files = {file.path: file for file in folder.select(lambda file: is_torch_name(file.name))}
        used = {path for path in files if self._hook(path) not in key_map.ignore}
        for file in folder.files:
            if file.path in used:
                self.support.append(SupportFile(file.path, CONTAINER))
            elif file.name in _DOCUMENTS:
                self.support.append(SupportFile(file.path, _DOCUMENTS[file.name]))
            else:
                reason = "of a hook that is left out" if file.path in files else "no .pt file"
                self.strays.append(Stray(file.path, stray_reason(file.path, reason, used)))
        # A folder whose files are all gone is still one of the run's: it has its metadata.
        described = {self._hook(file.path) for file in folder.files if file.name == "metadata.json"}
        groups, twice = self._group(sorted(used, key=natural_key), described - set(key_map.ignore))
        sizes = {path: file.nbytes for path, file in files.items()}
        broken = {path: file.problem for path, file in files.items() if file.problem is not None}
        for group in groups:
            problem = twice.get(group.name) or next(filter(None, map(broken.get, group.paths.values())), None)
            self._add(group, problem or self._missing(group), sizes)

    def _hook(self, path: str) -> str:
        """The folder that a file lies in, which is named for the hook."""
        return path.rpartition("/")[0].rpartition("/")[2] or self.root.resolve().name

    def _group(self, paths: list[str], described: set[str]) -> tuple[list[_Group], dict[str, Problem]]:
        found: dict[str, dict[str, str]] = {}
        twice: dict[str, Problem] = {}
        for path in paths:
            hook, run = self._hook(path), path.rpartition("/")[0].rpartition("/")[0]
            base = stem(path).rpartition("/")[2].removesuffix(".saved").partition("--")[0]
            name = f"{run}/{base}" if run else base
            other = found.setdefault(name, {}).setdefault(hook, path)
            if other != path:
                remedy = "move one of them away"
                twice[name] = Problem(path, f"one file of this group for {hook}", f"{other} too", remedy)
        hooks = sorted(described.union(*found.values()), key=self._order)
        self._hooks = tuple(hooks)
        return [
            _Group(name, {hook: group[hook] for hook in hooks if hook in group}) for name, group in found.items()
        ], twice

    @staticmethod
    def _order(hook: str) -> tuple[float, Any]:
        layer = layer_of_hook(hook)
        return (float("inf") if layer is None else layer), natural_key(hook)

    def _missing(self, group: _Group) -> Problem | None:
        missing = [hook for hook in self._hooks if hook not in group.paths]
        if not missing:
            return None
        path = next(iter(group.paths.values()))
        return Problem(path, f"a file of this group for {', '.join(missing)} too", "none", "fetch the missing files")

    def _add(self, group: _Group, problem: Problem | None, sizes: dict[str, int]) -> None:
        shared = tuple(group.paths.values())
        counts = {} if problem is not None else {path: n for path in shared if (n := self._n_rows(path)) is not None}
        if len(set(counts.values())) > 1:
            got = ", ".join(f"{n} in {path}" for path, n in counts.items())
            expected = "as many rows in the file of each hook, which are of one group"
            problem = Problem(shared[0], expected, got, "fetch the files of this group again, all of one run")
        self._rows[shared[0]] = n_rows = max(counts.values(), default=1)
        nbytes = sum(sizes[path] for path in shared)
        for row in range(n_rows):
            share = nbytes // n_rows + (nbytes % n_rows if row == 0 else 0)
            item = SourceItem(shared[0], len(self.items), f"{group.name}/{row}", (), share, problem, shared=shared)
            self.items.append(item)

    def _n_rows(self, path: str) -> int | None:
        """Rows of a file; None where only reading it tells what is wrong."""
        found = self._containers.glance(self.root / path, path)
        states = found.value.get(STATES) if found is not None and isinstance(found.value, dict) else None
        shape: tuple[int, ...] = getattr(states, "shape", ())
        return int(shape[0]) if len(shape) == 3 and 1 <= shape[0] <= _MOST_ROWS else None

    def _look(self, item: SourceItem) -> SourceMeaning:
        sample = self._read(item)
        layers = [layer_of_hook(hook) if _POST.fullmatch(hook) else None for hook in self._hooks]
        known = [layer for layer in layers if layer is not None]
        all_known = len(known) == len(layers)
        names = ", ".join(self._hooks)
        return SourceMeaning(
            hidden_size=sample.hidden_states.shape[2],
            n_layers=len(self._hooks),
            dtype=sample.hidden_states.dtype.name,
            layers=tuple(known) if all_known else None,
            layers_from=f"the hooks {names}" + ("" if all_known else f", in this order: {UNKNOWN_HOOK}"),
            final_norm=None,
            final_norm_from=_FINAL_NORM_FROM,
            producer={"source_format": "activault", "hooks": list(self._hooks)},
        )

    def _load(self, item: SourceItem) -> SourceSample:
        return self._read(item)

    def _read(self, item: SourceItem) -> SourceSample:
        from hsfmt.readers.sources import columns
        from hsfmt.readers.sources.torch_states import stack_layers

        row = int(item.sample_id.rpartition("/")[2])
        ids, blocks, files = None, [], []
        for path in item.shared:
            loaded = self._containers.load(self.root / path, path)
            states, found = _row(loaded, path, row, self._rows[item.key])
            found = columns.token_ids(found, f"{path}[{IDS}][{row}]")
            columns.check_n_tokens(states.shape[0], len(found), f"{path}[{STATES}]", "fetch the file again")
            if ids is None:
                ids = found
            elif len(found) != len(ids) or (found != ids).any():
                raise SourceError.at(
                    f"{path}[{IDS}][{row}]",
                    expected=f"the token ids of {item.shared[0]}, which is of the same group",
                    got="others",
                    remedy="convert each hook by itself: --map ignore=HOOK",
                )
            blocks.append(states[:, None])
            files.append(loaded)
        assert ids is not None
        stacked = stack_layers(blocks, item.key)
        for loaded in files:
            loaded.stamp.check_unchanged()
        return SourceSample(item.sample_id, ids, stacked)


def _row(loaded: TorchFile, path: str, row: int, n_rows: int) -> tuple[Any, Any]:
    """States [token, hidden] and token ids [token] of one of the rows listed, still views of the file's."""
    from hsfmt.readers.sources.torch_states import STATE_DTYPES, check_tensor, is_tensor, row_values

    value = loaded.value
    if is_tensor(value):
        remedy = "samples need token ids: store the activations with a version of activault that keeps input_ids"
        got = f"a tensor {list(value.shape)} alone"
        raise SourceError.at(path, expected=f"a dict of {STATES} and {IDS}", got=got, remedy=remedy)
    keys = sorted(map(str, value)) if isinstance(value, dict) else []
    if not {STATES, IDS} <= set(keys) or not set(keys) <= _KNOWN:
        got = f"the keys {', '.join(keys)[:200]}" if keys else f"a {type(value).__name__}"
        raise SourceError.at(path, expected=f"a dict of {STATES} and {IDS}", got=got)
    states = check_tensor(value[STATES], f"{path}[{STATES}]", loaded.nbytes)
    if states.dtype not in STATE_DTYPES:
        raise SourceError.at(f"{path}[{STATES}]", expected="bfloat16, float16 or float32", got=str(states.dtype))
    ids = row_values(value[IDS], f"{path}[{IDS}]", loaded.nbytes)
    if states.ndim != 3 or 0 in states.shape or ids.shape != tuple(states.shape[:2]):
        got = f"{STATES} {list(states.shape)} and {IDS} {list(ids.shape)}"
        raise SourceError.at(path, expected=f"{STATES} [batch, token, hidden] and {IDS} [batch, token]", got=got)
    if states.shape[0] != n_rows:
        expected = f"{n_rows} rows, as when the folder was listed"
        raise SourceError.at(path, expected=expected, got=f"{states.shape[0]} rows")
    return states[row], ids[row]
