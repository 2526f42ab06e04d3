"""Source `speculators-pt`: the `data_{i}` files of speculators up to 0.4.

* 0.3 and 0.4: `data_{i}.pt` with a list of [T, H], beside data_config.json, whose layer_ids mean "after layer i" (HF
  index i + 1); every state is taken before the final norm.
* 0.1 and 0.2 (research scripts): `data_{i}.ckpt` with three layers side by side and `target`, the state after the
  final norm; the layers are 3, n//2+1, n-2 and n of a model of n layers, which no file says.

Sample id: the file's path below the folder without its extension, or what `hsfmt_samples.jsonl` says of its number.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, ClassVar

from hsfmt.errors import SourceError, UsageError
from hsfmt.readers.sources.base import Claim, Source, SourceItem, SourceSample, Stray, SupportFile
from hsfmt.readers.sources.folder import file_items
from hsfmt.readers.sources.meaning import SourceMeaning
from hsfmt.readers.sources.options import KeyMap
from hsfmt.readers.sources.sample_names import stray_reason

if TYPE_CHECKING:
    from hsfmt.readers.sources.folder import Folder
    from hsfmt.readers.sources.look import Look
    from hsfmt.readers.sources.torch_record import Record

DATA = re.compile(r"data_[0-9]{1,12}\.(pt|ckpt)")
CONFIG = "data_config.json"
LENGTHS = "sample_lengths.json"
LIST_KEYS = frozenset({"input_ids", "hidden_states", "loss_mask"})
CONCAT_KEYS = frozenset({"input_ids", "hidden_state", "target", "loss_mask"})
_LIST_ROLES = KeyMap(input_ids="input_ids", hidden_states="hidden_states", loss_mask="loss_mask")
_CONCAT_ROLES = KeyMap(input_ids="input_ids", aux="hidden_state", last="target", loss_mask="loss_mask")
_SUPPORT = {
    CONFIG: "data_config",
    LENGTHS: "sample_lengths",
    "token_freq.pt": "token_freq",
    "d2t.npy": "d2t",
    "t2d.npy": "t2d",
    "d2t.pt": "d2t",
    "t2d.pt": "t2d",
}
_BATCH_SIZE = re.compile(r"--batch-size[ =]([0-9]+)")
_DOCUMENT_NBYTES = 256 << 20


class SpeculatorsPtSource(Source):
    """Data files of speculators 0.1 to 0.4."""

    name: ClassVar[str] = "speculators-pt"
    summary: ClassVar[str] = "speculators 0.3/0.4 data_{i}.pt with data_config.json, and 0.1/0.2 data_{i}.ckpt"
    numbered: ClassVar[bool] = True
    _config_path: str | None = None

    @classmethod
    def claim(cls, look: Look) -> Claim | None:
        """Claim a folder all of whose torch files are data_{i}, by their keys and data_config.json."""
        if not all(DATA.fullmatch(path.rpartition("/")[2]) for path in look.torch_names):
            return None
        has_config = any(path.rpartition("/")[2] == CONFIG for path in look.names)
        for record in look.samples[:1]:
            keys = frozenset(record.entries)
            if keys == CONCAT_KEYS:
                return Claim(f"{record.where} with hidden_state and target", certain=True)
            if keys == LIST_KEYS and has_config:
                return Claim(f"{record.where} beside {CONFIG}", certain=True)
        return None

    def _list(self, folder: Folder) -> None:
        self._config: dict[str, Any] = {}
        self._lengths: dict[str, dict[str, Any]] = {}
        self.items = file_items(folder.select(lambda file: DATA.fullmatch(file.name) is not None))
        for file in folder.files:
            if DATA.fullmatch(file.name):
                continue
            if file.name in _SUPPORT:
                self.support.append(SupportFile(file.path, _SUPPORT[file.name]))
                self._read_support(file.path, file.name)
            else:
                reason = stray_reason(file.path, "no data_{i}.pt or data_{i}.ckpt", {item.key for item in self.items})
                self.strays.append(Stray(file.path, reason))
        for name in ("token_freq.pt", "d2t.npy", "t2d.npy"):
            beside = any(support.path == name for support in self.support)
            if not beside and self._config_path == CONFIG and (self.root.parent / name).is_file():
                self.support.append(SupportFile(f"../{name}", _SUPPORT[name]))
        self._note_known_bug()
        self._note_gaps()

    def _read_support(self, path: str, name: str) -> None:
        if name == LENGTHS:
            self._lengths[path.removesuffix(name)] = _read_document(self, path)
        elif name == CONFIG:
            config = _read_document(self, path)
            if self._config_path is not None and _layer_ids(config, path) != _layer_ids(self._config, path):
                raise UsageError.at(
                    path,
                    expected=f"the layer ids of {self._config_path}",
                    got="others: these files do not belong into one dataset",
                    remedy="convert each folder by itself",
                )
            self._config, self._config_path = config, path

    def _note_known_bug(self) -> None:
        command = _at(self._config, "reproducibility", "command")
        size = _BATCH_SIZE.search(command) if isinstance(command, str) else None
        if size and int(size[1]) > 10 and str(self._config.get("speculators_version", "")).startswith("0.4"):
            self.notes.append(
                f"speculators 0.4 with --batch-size {size[1]} gave loss masks to other samples of the batch (it sorted "
                "request numbers as text); the lengths are checked, but masks of equal length can't be told apart"
            )

    def _note_gaps(self) -> None:
        """Say which numbers have no file: they count up from 0 in each folder, and sample_lengths.json has them."""
        found: dict[str, set[int]] = {}
        for item in self.items:
            folder, name = _split(item.key)
            found.setdefault(folder, set()).add(int(_number(name)))
        for folder, numbers in found.items():
            expected = set(range(max(numbers))) | {
                int(key) for key in self._lengths.get(folder, {}) if key.isascii() and key.isdigit()
            }
            gaps = sorted(expected - numbers)
            if gaps:
                shown = ", ".join(map(str, gaps[:10])) + (" …" if len(gaps) > 10 else "")
                where = f" in {folder}" if folder else ""
                self.notes.append(f"the numbers of data_{{i}}{where} have gaps, {len(gaps)} without a file: {shown}")

    def _sample_number(self, item: SourceItem) -> int | None:
        return int(_number(_split(item.key)[1]))

    def _look(self, item: SourceItem) -> SourceMeaning:
        from hsfmt.readers.sources.torch_record import load_record, state_blocks, token_ids

        record = load_record(self.root / item.key, item.key)
        roles = _roles(record)
        blocks = state_blocks(record, roles, len(token_ids(record, roles)), hidden_size=None)
        n_layers = sum(block.shape[1] for block in blocks)
        hidden_size, dtype = blocks[0].shape[2], str(blocks[0].dtype).removeprefix("torch.")
        if roles is _CONCAT_ROLES:
            return self._concatenated_meaning(hidden_size, n_layers, dtype, item.key)
        return self._listed_meaning(hidden_size, n_layers, dtype)

    def _concatenated_meaning(self, hidden_size: int, n_layers: int, dtype: str, key: str) -> SourceMeaning:
        if n_layers != 4:
            raise SourceError.at(key, expected="three layers in hidden_state beside target", got=f"{n_layers - 1}")
        n = self.options.model_layers()
        layers = None if n is None else (3, n // 2 + 1, n - 2, n)
        if layers is not None and list(layers) != sorted(set(layers)):
            layers = None
        return SourceMeaning(
            hidden_size=hidden_size,
            n_layers=n_layers,
            dtype=dtype,
            layers=layers,
            layers_from="speculators 0.1/0.2 take 3, n//2+1, n-2 and n of a model of n layers: give its config with "
            "--model-config, or the numbers",
            final_norm="post",
            final_norm_from="speculators 0.1/0.2 store transformers' last hidden state, which is after the final norm",
            producer={"source_format": "speculators data_*.ckpt", "speculators_version": "0.1 or 0.2"},
        )

    def _listed_meaning(self, hidden_size: int, n_layers: int, dtype: str) -> SourceMeaning:
        layers = None
        if self._config_path is not None:
            # The generator captures a set of layers in ascending order, whatever order was asked for.
            layers = tuple(sorted({i + 1 for i in _layer_ids(self._config, self._config_path)}))
            if len(layers) != n_layers:
                got = f"{len(layers)}: {', '.join(map(str, layers))}"
                raise SourceError.at(f"{self._config_path}[layer_ids]", expected=f"{n_layers} layers", got=got)
            width = _at(self._config, "model", "hidden_size")
            if width not in (None, hidden_size):
                raise SourceError.at(f"{self._config_path}[hidden_size]", expected=str(hidden_size), got=str(width))
        model = _at(self._config, "model", "target_model_path")
        version = self._config.get("speculators_version")
        producer = {"source_format": "speculators data_*.pt"}
        return SourceMeaning(
            hidden_size=hidden_size,
            n_layers=n_layers,
            dtype=dtype,
            layers=layers,
            layers_from=f"layer_ids in {self._config_path}, each + 1"
            if layers
            else f"they are hidden_states.layer_ids in the {CONFIG} that lay beside the files, each + 1",
            final_norm="pre",
            final_norm_from="speculators 0.3/0.4 take every state before the final norm",
            model=model if isinstance(model, str) else None,
            producer=producer | ({"speculators_version": version} if isinstance(version, str) else {}),
        )

    def _load(self, item: SourceItem) -> SourceSample:
        from hsfmt.readers.sources.torch_record import load_record, read_sample

        record = load_record(self.root / item.key, item.key)
        sample = read_sample(record, _roles(record), item.sample_id, self.meaning().hidden_size)
        folder, name = _split(item.key)
        known = self._lengths.get(folder, {}).get(_number(name))
        if known not in (None, len(sample.input_ids)):
            raise SourceError.at(item.key, expected=f"{known} tokens as {LENGTHS} says", got=str(len(sample.input_ids)))
        return sample


def _split(path: str) -> tuple[str, str]:
    folder, slash, name = path.rpartition("/")
    return folder + slash, name


def _number(name: str) -> str:
    return name.removeprefix("data_").rpartition(".")[0]


def _roles(record: Record) -> KeyMap:
    keys = frozenset(record.entries)
    if keys == CONCAT_KEYS:
        return _CONCAT_ROLES
    if keys == LIST_KEYS:
        states = record.entries["hidden_states"]
        if isinstance(states, list) and all(getattr(state, "ndim", None) == 2 for state in states):
            return _LIST_ROLES
        got = f"a {type(states).__name__}" if not isinstance(states, list) else "a list of other things"
        raise SourceError.at(record.at("hidden_states"), expected="a list of [token, hidden]", got=got)
    raise SourceError.at(
        record.where,
        expected=f"the keys {', '.join(sorted(LIST_KEYS))} (0.3/0.4) or {', '.join(sorted(CONCAT_KEYS))} (0.1/0.2)",
        got=", ".join(sorted(keys)) or "none",
    )


def _read_document(source: Source, path: str) -> dict[str, Any]:
    with (source.root / path).open("rb") as file:
        data = file.read(_DOCUMENT_NBYTES)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SourceError.at(path, expected="a JSON document", got=str(error)) from error
    if not isinstance(document, dict):
        raise SourceError.at(path, expected="a JSON object", got=type(document).__name__)
    return document


def _layer_ids(config: dict[str, Any], path: str) -> set[int]:
    ids = _at(config, "hidden_states", "layer_ids")
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
        raise SourceError.at(
            f"{path}[hidden_states.layer_ids]", expected="a list of layer numbers", got=repr(ids)[:100]
        )
    return set(ids)


def _at(document: dict[str, Any], outer: str, inner: str) -> Any:
    part = document.get(outer)
    return part.get(inner) if isinstance(part, dict) else None
