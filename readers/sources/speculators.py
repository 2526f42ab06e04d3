"""Source `speculators`: what `speculators prepare-data` and `generate-offline-data` leave (0.5 to 0.9, fp8 too).

An Arrow dataset (token ids, loss mask) and `hidden_states/hs_{row}.safetensors`, joined by row; each file carries its
token ids, which must equal the row's. One item a row, so that rows without a file are counted.

Sample id: `hs_{row}`, or what `hsfmt_samples.jsonl` says of the row. `source_index` is the row.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from hsfmt.errors import Problem, SourceError
from hsfmt.readers.sources import connector_file
from hsfmt.readers.sources.arrow_rows import ArrowRows, data_files
from hsfmt.readers.sources.base import Claim, Source, SourceItem, SourceSample, Stray, SupportFile
from hsfmt.readers.sources.sample_names import stray_reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hsfmt.readers.sources.folder import Folder, SourceFile
    from hsfmt.readers.sources.look import Look
    from hsfmt.readers.sources.meaning import SourceMeaning

ROW_FILE = re.compile(r"(.*/)?hs_[0-9]+\.safetensors")
STATES_FOLDER = "hidden_states/"
_STATES = re.compile(r"hidden_states/hs_(0|[1-9][0-9]{0,11})\.safetensors")
_SUPPORT = (
    (re.compile(r"(state|dataset_info)\.json"), "arrow document"),
    (re.compile(r"token_freq\.pt"), "token_freq"),
    (re.compile(r"d2t(-[0-9]+)?\.(npy|pt)"), "d2t"),
    (re.compile(r"t2d(-[0-9]+)?\.(npy|pt)"), "t2d"),
)
_LAYERS_FROM = (
    "they are the --target-layer-ids that vLLM was launched with (its eagle_aux_hidden_state_layer_ids, ascending); "
    "speculators' default is 2, n//2, n-3, n for a model of n layers"
)


def has_arrow(names: Iterable[str]) -> bool:
    """Whether a folder of these files holds an Arrow dataset."""
    return any(name == "state.json" or ("/" not in name and name.endswith(".arrow")) for name in names)


class SpeculatorsSource(Source):
    """An offline dataset of speculators 0.5 to 0.9."""

    name: ClassVar[str] = "speculators"
    summary: ClassVar[str] = "speculators 0.5 to 0.9: Arrow dataset with hidden_states/hs_{row}.safetensors"
    numbered: ClassVar[bool] = True

    @classmethod
    def claim(cls, look: Look) -> Claim | None:
        """Claim an Arrow dataset with files of rows."""
        row = next((path for path in look.names if ROW_FILE.fullmatch(path)), None)
        if row is None or not has_arrow(look.names):
            return None
        return Claim(f"an Arrow dataset and {row}", certain=True, options="--layer-ids IDS")

    def _list(self, folder: Folder) -> None:
        names = data_files(self.root, frozenset(file.path for file in folder.files if "/" not in file.path))
        self._rows = ArrowRows([self.root / name for name in names])
        states: dict[int, SourceFile] = {}
        locks: dict[str, SourceFile] = {}
        for file in folder.select(lambda file: file.problem is None or _STATES.fullmatch(file.path) is not None):
            match = _STATES.fullmatch(file.path)
            if match:
                states[int(match[1])] = file
            elif _STATES.fullmatch(file.path.removesuffix(connector_file.LOCK_SUFFIX)):
                locks[file.path.removesuffix(connector_file.LOCK_SUFFIX)] = file
            else:
                self._place_other(file.path, names)
        for row in [*range(self._rows.n_rows), *sorted(row for row in states if row >= self._rows.n_rows)]:
            path = f"{STATES_FOLDER}hs_{row}.safetensors"
            files = [file for file in (states.get(row), locks.pop(path, None)) if file is not None]
            self.items.append(self._item(row, path, files))
        self.strays.extend(
            Stray(lock.path, "the lock of a row that the dataset does not have") for lock in locks.values()
        )
        others = self._rows.other_columns
        for kept, words in ((True, "are kept as metadata of the samples"), (False, "hold no JSON and are left out")):
            if names := [name for name, is_json in others.items() if is_json is kept]:
                self.notes.append(f"Arrow columns that {words}: {', '.join(names)}")

    def _place_other(self, path: str, data_names: list[str]) -> None:
        if path in data_names:
            self.support.append(SupportFile(path, "arrow"))
            return
        for pattern, role in _SUPPORT:
            if pattern.fullmatch(path):
                self.support.append(SupportFile(path, role))
                return
        self.strays.append(Stray(path, stray_reason(path, "no part of a speculators dataset")))

    def _item(self, row: int, path: str, files: list[SourceFile]) -> SourceItem:
        problem = None
        normal = False
        if row >= self._rows.n_rows:
            problem = Problem(
                path,
                f"a row of the Arrow dataset, which has {self._rows.n_rows}",
                f"row {row}",
                "the file is left over from another dataset: move it away",
            )
        elif not files or files[0].path != path:
            normal = True
            problem = Problem(
                path,
                f"the states of row {row}",
                "no file: the row was skipped or failed when states were generated",
                "run generate-offline-data again to fill it",
            )
        else:
            problem = files[0].problem
        paths = tuple(file.path for file in files)
        return SourceItem(path, row, f"hs_{row}", paths, sum(file.nbytes for file in files), problem, normal)

    def _sample_number(self, item: SourceItem) -> int | None:
        return item.index

    def _count_samples(self) -> int | None:
        return self._rows.n_rows

    def _look(self, item: SourceItem) -> SourceMeaning:
        mask_dtype = self._rows.mask_dtype
        producer: dict[str, Any] = {"source_format": "speculators arrow"}
        if mask_dtype is not None:
            producer["speculators_version"] = "0.5 to 0.7" if mask_dtype == "bool" else "0.8 or later"
        return connector_file.look(self.root / item.key, item.key, layers_from=self._layers_from(), producer=producer)

    def _layers_from(self) -> str:
        n = self.options.model_layers()
        return _LAYERS_FROM if n is None else f"{_LAYERS_FROM} (here 2,{n // 2},{n - 3},{n})"

    def _load(self, item: SourceItem) -> SourceSample:
        if len(item.paths) > 1:
            connector_file.check_not_being_written(self.root / item.paths[1], item.key)
        ignore = self.options.key_map.ignore
        sample = connector_file.load(self.root / item.key, item.key, item.sample_id, ignore)
        row = item.index
        try:
            input_ids = self._rows.input_ids(row)
            connector_file.check_same_ids(sample.input_ids, input_ids, item.key, f"Arrow row {row}")
            sample.loss_mask = self._rows.loss_mask(row, len(input_ids))
            connector_file.add_metadata(sample, {"row": row, **self._rows.other_values(row)})
        except SourceError as error:
            raise SourceError(
                problem if problem.where.startswith(item.key) else _in_file(problem, item.key)
                for problem in error.problems
            ) from error
        return sample


def _in_file(problem: Problem, key: str) -> Problem:
    return Problem(f"{key} ({problem.where})", problem.expected, problem.got, problem.remedy)
