"""Source `transformers`: torch files of what `output_hidden_states=True` gives, with the token ids beside it.

The dict has `input_ids`, `attention_mask` where rows are padded, and the states as `hf_outputs` says. Padding is left
out by the attention mask alone. A bare tuple or stack has no token ids, and a pickled ModelOutput is not loaded: both
are refused with what to save instead.

All n + 1 states of a model of n layers are its layers 0 to n, which the model's config shows. What any other number of
them is, and what a file's own numbers count, only the user knows. So is it with the last state: nearly all models of
transformers give it after their final norm, but no file says so.

Sample id: the file's path below the folder without its extension; in a batch of several `{path}/{number in the batch}`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from hsfmt.errors import SourceError, UsageError
from hsfmt.readers.sources.base import CONTAINER, Claim, Source, SourceItem, SourceSample, Stray, SupportFile
from hsfmt.readers.sources.folder import file_items
from hsfmt.readers.sources.meaning import SourceMeaning
from hsfmt.readers.sources.sample_names import SIDE_FILES, TORCH_SUFFIXES, is_torch_name, stray_reason
from hsfmt.readers.sources.twins import load_with_twin, twin_notes

if TYPE_CHECKING:
    from hsfmt.readers.sources.folder import Folder
    from hsfmt.readers.sources.hf_outputs import Outputs
    from hsfmt.readers.sources.look import Look

FINAL_NORM_FROM = (
    "post if the state after the last layer is among these and transformers gave it, the last of its tuple: after "
    "the model's final norm (Llama, Qwen, Mistral and nearly all others); pre if a hook took it before; unknown if the "
    "last layer is not stored or you can't find out"
)
_PEEKS = 4
_OPTIONS = "--model-config PATH --final-norm NORM (or --layer-ids IDS)"


class TransformersSource(Source):
    """A folder of saved outputs of transformers models."""

    name: ClassVar[str] = "transformers"
    summary: ClassVar[str] = "torch files of transformers' hidden_states (tuple, stack or dict by layer) with input_ids"

    @classmethod
    def claim(cls, look: Look) -> Claim | None:
        """Claim a folder whose first torch files hold states by layer that no other source takes."""
        for path in look.torch_names[:_PEEKS]:
            try:
                look.folder.check(path)
                found = _claim(look, path)
            except (SourceError, OSError):
                continue
            if found is not None:
                return found
        return None

    def _list(self, folder: Folder) -> None:
        key_map = self.options.key_map
        if key_map.aux or key_map.last:
            remedy = "name the entry with all layers: --map hidden_states=KEY"
            raise UsageError.at(
                "--map", expected="one entry with the states of all layers", got="aux or last", remedy=remedy
            )
        from hsfmt.readers.sources.torch_containers import TorchContainers

        self._numbers: tuple[int, ...] | None = None
        self._containers = TorchContainers()
        self._rows: dict[str, int] = {}
        files = file_items(folder.select(lambda file: is_torch_name(file.name)))
        samples = {path for item in files for path in item.paths}
        for file in folder.files:
            if file.path in samples:
                continue
            if file.name in SIDE_FILES:
                self.support.append(SupportFile(file.path, SIDE_FILES[file.name]))
            else:
                otherwise = f"not a {', '.join(TORCH_SUFFIXES)} file"
                self.strays.append(Stray(file.path, stray_reason(file.path, otherwise, samples)))
        self.notes.extend(twin_notes(files))
        for item in files:
            self._add(item, self._n_rows(item))

    def _add(self, item: SourceItem, n_rows: int) -> None:
        if n_rows == 1:
            self.items.append(replace(item, index=len(self.items)))
            return
        self._rows[item.key] = n_rows
        self.support.extend(SupportFile(path, CONTAINER) for path in item.paths)
        for row in range(n_rows):
            nbytes = item.nbytes // n_rows + (item.nbytes % n_rows if row == 0 else 0)
            sample_id = f"{item.sample_id}/{row}"
            self.items.append(
                SourceItem(item.key, len(self.items), sample_id, (), nbytes, item.problem, shared=item.paths)
            )

    def _n_rows(self, item: SourceItem) -> int:
        if item.problem is not None:
            return 1
        from hsfmt.readers.sources.hf_outputs import find_outputs

        try:
            found = self._containers.glance(self.root / item.key, item.key)
            return 1 if found is None else find_outputs(found, self.options.key_map).n_rows
        except SourceError:
            return 1  # as loading it says

    def _outputs(self, item: SourceItem, path: str) -> Outputs:
        from hsfmt.readers.sources.hf_outputs import load_outputs

        containers = self._containers if item.shared else None
        outputs = load_outputs(self.root / path, path, self.options.key_map, containers)
        listed = self._rows.get(item.key, 1)
        if outputs.n_rows != listed:
            since = "when the folder was listed" if path == item.key else f"in {item.key}, its twin"
            raise SourceError.at(path, expected=f"rows: {listed}, as {since}", got=str(outputs.n_rows))
        return outputs

    def _look(self, item: SourceItem) -> SourceMeaning:
        from hsfmt.readers.sources.hf_outputs import MissingMaskError, take_sample

        outputs = self._outputs(item, item.key)
        try:
            take_sample(outputs, _row_of(item), self.options.key_map)
        except MissingMaskError as error:
            raise UsageError(error.problems) from error
        self._numbers = outputs.numbers
        layers, layers_from = self._layers(outputs)
        return SourceMeaning(
            hidden_size=int(outputs.states[0].shape[2]),
            n_layers=len(outputs.states),
            dtype=str(outputs.states[0].dtype).removeprefix("torch."),
            layers=layers,
            layers_from=layers_from,
            final_norm=None,
            final_norm_from=FINAL_NORM_FROM,
            producer={"source_format": "transformers hidden_states"}
            | ({"layer_keys": list(outputs.numbers)} if outputs.numbers else {}),
        )

    def _layers(self, outputs: Outputs) -> tuple[tuple[int, ...] | None, str]:
        found, n = outputs.numbers, self.options.model_layers()
        n_states = len(outputs.states)
        if n is not None and n_states == n + 1 and found in (None, tuple(range(n + 1))):
            return tuple(range(n + 1)), f"all {n + 1} states of a model of {n} layers (--model-config)"
        whole = (
            f"if these are all states of a model of {n_states - 1} layers, give its config with --model-config; else "
        )
        count = "they count like HF hidden_states: 0 is the embeddings, k the state after k layers, n after the last"
        if found is None:
            return None, f"{whole if n is None else ''}the program that saved them knows; {count}"
        same, after = ",".join(map(str, found)), ",".join(str(number + 1) for number in found)
        return None, (
            f"{whole if n is None else ''}the files number them {same}: --layer-ids {same} if these are indices of "
            f"hidden_states, --layer-ids {after} if number i is the output of layer i; {count}"
        )

    def _load(self, item: SourceItem) -> SourceSample:
        return load_with_twin(replace(item, paths=item.paths or item.shared), lambda path: self._read(item, path))

    def _read(self, item: SourceItem, path: str) -> SourceSample:
        from hsfmt.readers.sources.hf_outputs import take_sample
        from hsfmt.readers.sources.torch_record import read_sample

        meaning = self.meaning()
        outputs = self._outputs(item, path)
        row = _row_of(item)
        if outputs.numbers != self._numbers:
            expected = f"the layers {_words(self._numbers)} as in the source's first readable file"
            raise SourceError.at(path, expected=expected, got=_words(outputs.numbers))
        record, roles = take_sample(outputs, row, self.options.key_map)
        return read_sample(record, roles, item.sample_id, meaning.hidden_size)


def _row_of(item: SourceItem) -> int:
    return int(item.sample_id.rpartition("/")[2]) if item.shared else 0


def _words(numbers: tuple[int, ...] | None) -> str:
    return "without numbers" if numbers is None else ", ".join(map(str, numbers))


def _claim(look: Look, path: str) -> Claim | None:
    from hsfmt.readers.sources import hf_outputs
    from hsfmt.readers.sources.options import KeyMap
    from hsfmt.readers.sources.torch_containers import map_torch_file
    from hsfmt.readers.sources.torch_file import read_torch_file
    from hsfmt.readers.sources.torch_states import is_tensor

    file = look.folder.root / path
    try:
        loaded = map_torch_file(file, path) or read_torch_file(file, path)
    except SourceError as error:
        is_output = any("transformers." in problem.got for problem in error.problems)
        return Claim(f"{path}, a pickled output of transformers", certain=True) if is_output else None
    value: Any = loaded.value
    if isinstance(value, list | tuple):
        shapes = {tuple(item.shape) if is_tensor(item) else None for item in value}
        is_outputs = len(value) > 1 and len(shapes) == 1 and all(shape and len(shape) == 3 for shape in shapes)
        return (
            Claim(f"{path} with {hf_outputs.describe(value)}", certain=True, options=_OPTIONS) if is_outputs else None
        )
    if is_tensor(value):
        evidence = f"{path} with {hf_outputs.describe(value)}"
        return Claim(evidence, certain=False, options=_OPTIONS) if value.ndim == 4 else None
    outputs = hf_outputs.find_outputs(loaded, KeyMap())
    if outputs.numbers is None and outputs.n_rows == 1:
        return None  # as the source `pt` reads it too
    states = value.get(hf_outputs.STATES)
    by_layer = (
        outputs.numbers is not None or isinstance(states, list | tuple) or (is_tensor(states) and states.ndim == 4)
    )
    evidence = f"{path} with {len(outputs.states)} layers of shape {list(outputs.states[0].shape)} and token ids"
    return Claim(evidence, certain=by_layer, options=_OPTIONS)
