"""A sample of a verl-SpeCo shard: a dict of tensors, as `DraftFeatureSample.to_dict` makes it.

input_ids [T], loss_mask float32 [T], hidden_states [T, L*H] or a list of [T, H], and perhaps last_hidden_states [T, H]
(or `target` in its place, as verl-SpeCo's reader takes it), target_logprobs [row, k, 2], position_ids [T], metadata.
Where the metadata's `hidden_states_layout` ends with `_plus_last`, the last of the states side by side in hidden_states
is the final one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hsfmt.errors import SourceError
from hsfmt.readers.sources import columns, torch_record
from hsfmt.readers.sources.options import KeyMap
from hsfmt.readers.sources.torch_columns import LOSS_WEIGHT, FurtherColumns
from hsfmt.readers.sources.torch_file import read_torch_file
from hsfmt.readers.sources.torch_states import STATE_DTYPES, check_tensor, is_tensor, row_values

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from hsfmt.readers.sources.base import SourceItem, SourceSample
    from hsfmt.readers.sources.file_stamp import FileStamp
    from hsfmt.readers.sources.json_document import Document
    from hsfmt.readers.sources.meaning import SourceMeaning
    from hsfmt.readers.sources.options import SourceOptions
    from hsfmt.readers.sources.torch_record import Record

LOGPROBS = "target_logprobs"
_STATES = ("input_ids", "loss_mask", "hidden_states")
_LAST = ("last_hidden_states", "target")
_OTHERS = ("schema_version", "algorithm", LOGPROBS, "position_ids", "metadata")
_LAYOUTS = ("eagle3_aux_plus_last", "dflash_aux_plus_last", "dflash_aux")
_LIST_LENGTH = 32 << 10
# What views may share in a shard; and the least that an entry of a sample takes in it.
_SHARED_NBYTES, _ENTRY_NBYTES, _MIN_ENTRIES = 64 << 20, 16, 1000
_IGNORE = "leave it out with --map ignore={}"


@dataclass(frozen=True, slots=True)
class LoadedShard:
    """A shard in memory: its samples, and the stamp and size of its file."""

    samples: list[Any]
    stamp: FileStamp
    nbytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """What a sample shows of the store; `layout` and `target_layer_ids` are None where it does not say them."""

    hidden_size: int
    n_layers: int
    dtype: str
    has_last: bool
    layout: str | None
    target_layer_ids: list[int] | None
    model: str | None
    extras: dict[str, dict[str, Any]]


def load_shard(path: Path, name: str, line: Document) -> LoadedShard:
    """Load a whole shard and hold it to its line of the manifest.

    Raises
    ------
    SourceError
        As `read_torch_file`; or it is no shard, or has other samples than the line says.
    OSError
        The file can't be read.
    """
    loaded = read_torch_file(path, name)
    value = loaded.value
    samples = value.get("samples") if isinstance(value, dict) else None
    if not isinstance(samples, list):
        raise SourceError.at(name, expected="a dict with a list `samples`", got=type(value).__name__)
    expected = line.integer("num_samples", 0, 1 << 40)
    if len(samples) != expected:
        got = f"{len(samples)}: the shard was overwritten, or is another one"
        raise SourceError.at(name, expected=f"{expected} samples, as {line.where} says", got=got)
    _check_payload(samples, name, loaded.nbytes)
    n_supervised = _supervised(samples, name, loaded.nbytes)
    if type(line.get("num_tokens")) is int and n_supervised is not None and line.get("num_tokens") != n_supervised:
        expected_words = f"loss masks of {line.get('num_tokens')} tokens together, as {line.where} says"
        got = f"{n_supervised}: the shard was overwritten, or is another one"
        raise SourceError.at(name, expected=expected_words, got=got)
    return LoadedShard(samples, loaded.stamp, loaded.nbytes)


def _check_payload(samples: list[Any], name: str, nbytes: int) -> None:
    """Refuse samples that are the same few tensors many times over, which would take for ever, and fill the disk."""
    n_values, total = 0, 0
    for sample in samples:
        for value in sample.values() if isinstance(sample, dict) else ():
            for entry in value if isinstance(value, list | tuple) else (value,):
                n_values += 1
                size = entry.numel() * entry.element_size() if is_tensor(entry) else 0
                # One tensor that is too large alone is the fault of its sample.
                total += size if size <= nbytes + _SHARED_NBYTES else 0
                if n_values > max(nbytes // _ENTRY_NBYTES, _MIN_ENTRIES) or total > nbytes + _SHARED_NBYTES:
                    got = f"more than {n_values} entries and {total} bytes of tensors, which are the same again"
                    raise SourceError.at(name, expected=f"samples that fit their shard of {nbytes} bytes", got=got)


def _supervised(samples: list[Any], name: str, nbytes: int) -> int | None:
    """The sum of the loss masks as verl-SpeCo takes it, a sample at a time and cut; None where one has no mask."""
    total = 0
    for i, sample in enumerate(samples):
        mask = sample.get("loss_mask") if isinstance(sample, dict) else None
        if not is_tensor(mask):
            return None
        total += int(check_tensor(mask, f"{name}:{i}[loss_mask]", nbytes).float().sum().item())
    return total


def read_states_meaning(shard: LoadedShard, number: int, where: str, options: SourceOptions) -> Found:
    """Find out what the states of a sample are, and which further columns the samples of its shard have.

    Raises
    ------
    SourceError
        It is no sample, or its states are none.
    UsageError
        Nothing says how wide a state is.
    """
    record, metadata = _record(shard, number, where)
    roles = _roles(record, metadata, options.key_map)
    n_tokens = len(torch_record.token_ids(record, roles))
    width = torch_record.check_width(record, roles, n_tokens, options.state_width())
    blocks = torch_record.state_blocks(record, roles, n_tokens, hidden_size=width)
    model = metadata.get("target_model_path")
    return Found(
        hidden_size=blocks[0].shape[2],
        n_layers=sum(block.shape[1] for block in blocks),
        dtype=str(blocks[0].dtype).removeprefix("torch."),
        has_last=roles.last is not None or metadata.get("hidden_states_layout") != "dflash_aux",
        layout=metadata.get("hidden_states_layout"),
        target_layer_ids=_layer_ids(metadata, where),
        model=model if isinstance(model, str) and model else None,
        extras=_extras(shard.samples, options),
    )


def read_sample(
    shard: LoadedShard, number: int, item: SourceItem, meaning: SourceMeaning, options: SourceOptions
) -> SourceSample:
    """Copy a sample out of a shard.

    Raises
    ------
    SourceError
        It is no sample, is of another layout or layers than the first one, or has something that would be lost.
    """
    record, metadata = _record(shard, number, item.key)
    facts = meaning.producer["verl_speco"]
    for name, value in (
        ("hidden_states_layout", metadata.get("hidden_states_layout")),
        ("target_layer_ids", _layer_ids(metadata, item.key)),
    ):
        if facts.get(name) != value:
            where = f"{item.key}[metadata][{name}]"
            remedy = "samples of other layers belong into a dataset of their own: split the store"
            expected = f"{facts.get(name)} as in the first sample that can be read"
            raise SourceError.at(where, expected=expected, got=str(value), remedy=remedy)
    roles = _roles(record, metadata, options.key_map)
    _check_same_last(record, metadata, options.key_map)
    kept = {name: record.entries[name] for name in record.entries if name not in _OTHERS}
    states = replace(record, entries={name: value for name, value in kept.items() if name not in roles.ignore})
    further = FurtherColumns(weights=options.loss_weights)
    sample = torch_record.read_sample(states, roles, item.sample_id, meaning.hidden_size, further=further)
    sample.metadata |= _metadata(record, metadata, len(sample.input_ids), options.key_map.ignore)
    if LOGPROBS in record.entries and LOGPROBS not in options.key_map.ignore:
        sample.extras[LOGPROBS] = _logprobs(record, meaning)
        sample.whole_extras = frozenset({LOGPROBS})
    return sample


def _record(shard: LoadedShard, number: int, where: str) -> tuple[Record, dict[str, Any]]:
    value = shard.samples[number]
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise SourceError.at(where, expected="a dict of one sample, with names as keys", got=type(value).__name__)
    entries = {key: entry for key, entry in value.items() if entry is not None}
    version, metadata = entries.get("schema_version", 1), entries.get("metadata", {})
    if type(version) is not int or version != 1:
        raise SourceError.at(f"{where}[schema_version]", expected="1", got=repr(version)[:100])
    if not isinstance(metadata, dict) or not all(isinstance(key, str) for key in metadata):
        raise SourceError.at(f"{where}[metadata]", expected="a dict with names as keys", got=type(metadata).__name__)
    layout = metadata.get("hidden_states_layout")
    if layout is not None and layout not in _LAYOUTS:
        expected = f"one of {', '.join(_LAYOUTS)}"
        raise SourceError.at(f"{where}[metadata][hidden_states_layout]", expected=expected, got=repr(layout)[:100])
    none_keys = tuple(key for key, entry in value.items() if entry is None)
    stamp = replace(shard.stamp, where=where)
    return torch_record.Record(stamp=stamp, entries=entries, none_keys=none_keys, nbytes=shard.nbytes), metadata


def _lasts(record: Record, metadata: dict[str, Any], given: KeyMap) -> tuple[str | None, list[str]]:
    """The key of a last state that lies apart, and the keys that have to hold the last state once more."""
    found = [name for name in _LAST if name in record.entries and name not in given.ignore]
    # Here the states side by side end with it already.
    if not found or str(metadata.get("hidden_states_layout")).endswith("_plus_last"):
        return None, found
    return found[0], found[1:]


def _roles(record: Record, metadata: dict[str, Any], given: KeyMap) -> KeyMap:
    """Which keys hold what; the user can only leave some out."""
    last, again = _lasts(record, metadata, given)
    mask = None if "loss_mask" in given.ignore else "loss_mask"
    for name in filter(None, ("input_ids", "hidden_states", mask)):
        record.entry(name)
    ignore = (*given.ignore, *again)
    if last is None:
        return KeyMap("input_ids", hidden_states="hidden_states", loss_mask=mask, ignore=ignore)
    return KeyMap("input_ids", aux="hidden_states", last=last, loss_mask=mask, ignore=ignore)


def _check_same_last(record: Record, metadata: dict[str, Any], given: KeyMap) -> None:
    """Refuse another last state beside the one that is read, which would be lost."""
    last, again = _lasts(record, metadata, given)
    for name in again:
        other = _unbatched(check_tensor(record.entries[name], record.at(name), record.nbytes))
        value = record.entries[last or "hidden_states"]
        value = value[-1] if isinstance(value, list | tuple) else value
        read = _unbatched(check_tensor(value, record.at(last or "hidden_states"), record.nbytes))
        read = read[..., -other.shape[-1] :] if other.ndim else read
        if read.dtype != other.dtype or not torch.equal(_bits(read), _bits(other)):
            expected = f"the same as the last state in {last or 'hidden_states'}, which is read"
            raise SourceError.at(record.at(name), expected=expected, got="another one", remedy=_IGNORE.format(name))


def _unbatched(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[0] if tensor.ndim == 3 and tensor.shape[0] == 1 else tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor


def _layer_ids(metadata: dict[str, Any], where: str) -> list[int] | None:
    ids = metadata.get("target_layer_ids")
    if is_tensor(ids) and ids.ndim == 1 and ids.numel() <= 4096:
        ids = ids.tolist()
    if ids is None:
        return None
    if not isinstance(ids, list | tuple) or len(ids) > 4096 or any(type(i) is not int for i in ids):
        raise SourceError.at(f"{where}[metadata][target_layer_ids]", expected="layer numbers", got=repr(ids)[:100])
    return list(ids)


def _extras(samples: list[Any], options: SourceOptions) -> dict[str, dict[str, Any]]:
    """The further columns of a shard's samples, as the first of them that has one shows it."""
    found: dict[str, dict[str, Any]] = {}
    if options.loss_weights and "loss_mask" not in options.key_map.ignore:
        found[LOSS_WEIGHT] = {"kind": "token", "dtype": "float32", "shape": []}
    for sample in samples if LOGPROBS not in options.key_map.ignore else ():
        value = sample.get(LOGPROBS) if isinstance(sample, dict) else None
        if is_tensor(value) and value.ndim >= 3 and value.dtype in STATE_DTYPES:
            dtype = str(value.dtype).removeprefix("torch.")
            found[LOGPROBS] = {"kind": "ragged", "dtype": dtype, "shape": list(value.shape[-2:])}
            break
    return found


def _logprobs(record: Record, meaning: SourceMeaning) -> NDArray[Any]:
    """Target log-probabilities [row, k, 2]: rows are not tokens, since the last one has no successor."""
    where = record.at(LOGPROBS)
    tensor = check_tensor(record.entries[LOGPROBS], where, record.nbytes)
    while tensor.ndim > 3 and tensor.shape[0] == 1:
        tensor = tensor[0]
    column = meaning.extras.get(LOGPROBS)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if column is None or tensor.ndim != 3 or list(tensor.shape[1:]) != column["shape"] or dtype != column["dtype"]:
        wanted = "none, as in the first shard" if column is None else f"{column['dtype']} [row, *{column['shape']}]"
        got = f"{dtype} {list(tensor.shape)}"
        raise SourceError.at(where, expected=wanted, got=got, remedy=_IGNORE.format(LOGPROBS))
    native, bits = STATE_DTYPES[tensor.dtype]
    copied: NDArray[Any] = tensor.contiguous().view(bits).numpy().copy()
    return copied.view(native)


def _metadata(record: Record, metadata: dict[str, Any], n_tokens: int, ignored: tuple[str, ...]) -> dict[str, Any]:
    """What a sample says of itself in JSON; positions that count up by one are told by the first."""
    found: dict[str, Any] = {}
    for name, value in metadata.items():
        if name not in ignored and value is not None:
            found[name] = _plain(value, f"{record.where}[metadata][{name}]", name)
    algorithm = record.entries.get("algorithm")
    if algorithm is not None:
        found.setdefault("algorithm", _plain(algorithm, record.at("algorithm"), "algorithm"))
    if "position_ids" in record.entries and "position_ids" not in ignored:
        where = record.at("position_ids")
        positions = columns.token_ids(row_values(record.entries["position_ids"], where, record.nbytes), where)
        if len(positions) != n_tokens:
            raise SourceError.at(where, expected=f"{n_tokens} positions", got=str(len(positions)))
        if np.array_equal(positions, positions[0] + np.arange(n_tokens)):
            found["first_position"] = int(positions[0])
        else:
            found["position_ids"] = _plain(positions.tolist(), where, "position_ids")
    return found


def _plain(value: Any, where: str, name: str) -> Any:
    """A value as small JSON; small tensors become lists."""
    if is_tensor(value) and value.numel() <= _LIST_LENGTH and not value.is_quantized:
        value = value.tolist()
    if not torch_record.is_small_json({name: value}):
        remedy = _IGNORE.format(name)
        got = f"{type(value).__name__} {list(value.shape)}" if is_tensor(value) else type(value).__name__
        raise SourceError.at(where, expected="a value that fits 64 KiB of JSON", got=got, remedy=remedy)
    return value
