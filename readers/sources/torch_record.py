"""One sample as programs save it with torch.save: a dict of tensors, and which key of it holds what."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hsfmt import canonical
from hsfmt.errors import FormatError, SourceError, UsageError
from hsfmt.readers.sources import columns
from hsfmt.readers.sources.base import SourceSample
from hsfmt.readers.sources.torch_columns import LOSS_WEIGHT, NOTHING_FURTHER, FurtherColumns, token_column
from hsfmt.readers.sources.torch_file import read_torch_file
from hsfmt.readers.sources.torch_states import (
    batched,
    check_tensor,
    check_total,
    is_tensor,
    row_values,
    split_layers,
    stack_layers,
)

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from hsfmt.readers.sources.file_stamp import FileStamp
    from hsfmt.readers.sources.options import KeyMap
    from hsfmt.readers.sources.torch_file import TorchFile

_METADATA_NBYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Record:
    """What a file holds: `entries` without the keys of None values, which are in `none_keys`.

    `nbytes` is the size of the file, of the unpacked one if it is compressed; `listed` says that the dict was the one
    item of a list.
    """

    stamp: FileStamp
    entries: dict[str, Any]
    none_keys: tuple[str, ...]
    nbytes: int
    listed: bool = False

    @property
    def where(self) -> str:
        """What messages call the file."""
        return self.stamp.where

    def at(self, key: str) -> str:
        """Where an entry is, for messages."""
        return f"{self.where}[{key}]"

    def entry(self, key: str) -> Any:
        """The entry of a key.

        Raises
        ------
        SourceError
            There is none, or it is None.
        """
        if key not in self.entries:
            got = "None" if key in self.none_keys else f"the keys {', '.join(sorted(self.entries))}"
            raise SourceError.at(self.where, expected=f"an entry {key!r} as in the first readable file", got=got)
        return self.entries[key]


def load_record(path: Path, where: str) -> Record:
    """Load a file that holds one sample: a dict, or a list of one dict.

    Raises
    ------
    SourceError
        As `read_torch_file`, or it holds something else.
    OSError
        The file can't be read.
    """
    return as_record(read_torch_file(path, where))


def as_record(loaded: TorchFile) -> Record:
    """Take a loaded file as a record.

    Raises
    ------
    SourceError
        It holds something else than a dict, or a list of one.
    """
    value = loaded.value
    listed = isinstance(value, list | tuple) and len(value) == 1
    if listed:
        value = value[0]
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise SourceError.at(
            loaded.stamp.where,
            expected="a dict of one sample, with names as keys",
            got=_kind(value),
            remedy="save {'input_ids': ids, 'hidden_states': [a tensor [token, hidden] for each layer]}",
        )
    entries = {key: entry for key, entry in value.items() if entry is not None}
    none_keys = tuple(key for key, entry in value.items() if entry is None)
    return Record(loaded.stamp, entries, none_keys, loaded.nbytes, listed)


def _kind(value: Any) -> str:
    if isinstance(value, list | tuple):
        kinds = ", ".join(sorted({type(item).__name__ for item in value}))
        return f"a {type(value).__name__} of {len(value)} ({kinds or 'nothing'})"
    if isinstance(value, dict):
        return "a dict with keys that are no strings"
    return f"a {type(value).__name__}"


def resolve_roles(record: Record, key_map: KeyMap) -> KeyMap:
    """Complete the user's map by the names that speak for themselves.

    `hidden_states` alone holds all layers; beside `aux_hidden_states` it is the last one.

    Raises
    ------
    SourceError
        The record has no token ids, or no states, under these names.
    """
    keys = record.entries
    input_ids = key_map.input_ids or next((key for key in ("input_ids", "token_ids") if key in keys), None)
    if input_ids is None:
        raise SourceError.at(
            record.where,
            expected="token ids under input_ids",
            got=f"the keys {', '.join(sorted(keys)) or 'of an empty dict'}",
            remedy="name them with --map input_ids=KEY, or move files that are no samples away",
        )
    roles = replace(key_map, input_ids=input_ids)
    if key_map.loss_mask is None and "loss_mask" in keys and "loss_mask" not in key_map.ignore:
        roles = replace(roles, loss_mask="loss_mask")
    if roles.states:
        return roles
    if "hidden_states" in keys and "aux_hidden_states" in keys:
        return replace(roles, aux="aux_hidden_states", last="hidden_states")
    for key in ("hidden_states", "aux_hidden_states"):
        if key in keys:
            return replace(roles, hidden_states=key)
    raise SourceError.at(
        record.where,
        expected="states under hidden_states, or under aux_hidden_states and hidden_states",
        got=f"the keys {', '.join(sorted(keys))}",
        remedy="name them: --map hidden_states=KEY (all layers), or --map aux=KEY,last=KEY",
    )


def token_ids(record: Record, roles: KeyMap) -> Any:
    """Token ids of the record, int64 [token]."""
    key = roles.input_ids or "input_ids"
    return columns.token_ids(row_values(record.entry(key), record.at(key), record.nbytes), record.at(key))


def check_width(record: Record, roles: KeyMap, n_tokens: int, stated: int | None) -> int | None:
    """Say by which width rows [T, L*H] of several states are split, None where the shapes themselves show it.

    Parameters
    ----------
    stated
        Width that the user gives. The number of layers is no evidence: a wrong one divides the rows as well.

    Raises
    ------
    SourceError
        The states are no tensors.
    UsageError
        Nothing says how wide one state is, or what the user says does not divide the rows.
    """
    key = roles.hidden_states or roles.aux
    if key is None or roles.last is not None:
        return None
    value = record.entry(key)
    if isinstance(value, dict):
        return None
    if isinstance(value, list | tuple):
        pieces = [check_tensor(piece, record.at(key), record.nbytes) for piece in value]
        same = len(pieces) > 1 and len({piece.shape[-1:] for piece in pieces}) == 1
        return None if same else stated
    rows = batched(check_tensor(value, record.at(key), record.nbytes), n_tokens)
    if rows.ndim != 2:
        return None
    width = int(rows.shape[1])
    if stated is None:
        raise UsageError.at(
            record.at(key),
            expected="to know how wide one state is, to split rows of several layers",
            got=f"rows of width {width} in all",
            remedy="give --hidden-size (hidden_size in the model's config.json), or that file with --model-config",
        )
    if width % stated:
        raise UsageError.at(
            record.at(key),
            expected=f"rows of several states of width {stated}, as --hidden-size or --model-config says",
            got=f"rows of width {width} in all",
            remedy="give the hidden_size of the model that made the states",
        )
    return stated


def state_blocks(
    record: Record, roles: KeyMap, n_tokens: int, *, hidden_size: int | None, layer_first: bool = False
) -> list[torch.Tensor]:
    """Views [token, layers, hidden] of the record's states, in file order with the last state last.

    Parameters
    ----------
    hidden_size
        Width of a state, by which rows [T, L*H] are split; None where each row is one state, or `last` says it.
    layer_first
        Tensors of three axes are [layer, token, hidden].

    Raises
    ------
    SourceError
        Shapes, lengths or widths that do not go together.
    """
    last: list[torch.Tensor] = []
    if roles.last is not None:
        last = split_layers(record.entry(roles.last), n_tokens, None, record.at(roles.last), record.nbytes)
        shapes = [list(block.shape) for block in last]
        if len(last) != 1 or last[0].shape[1] != 1 or hidden_size not in (None, last[0].shape[2]):
            expected = f"one state a token of width {hidden_size or 'H'}"
            raise SourceError.at(record.at(roles.last), expected=expected, got=f"{shapes} [token, layer, hidden]")
        hidden_size = last[0].shape[2]
    key = roles.hidden_states or roles.aux
    if key is None:
        return last
    states = split_layers(
        record.entry(key), n_tokens, hidden_size, record.at(key), record.nbytes, layer_first=layer_first
    )
    check_total(states + last, record.where, record.nbytes)
    return states + last


def read_sample(
    record: Record,
    roles: KeyMap,
    sample_id: str,
    hidden_size: int,
    *,
    layer_first: bool = False,
    further: FurtherColumns = NOTHING_FURTHER,
) -> SourceSample:
    """Copy a sample out of a record.

    Raises
    ------
    SourceError
        As `state_blocks`; a mask that is none; an entry that no role takes, which would be lost; or the file changed
        since its bytes were checked.
    OSError
        The file is gone.
    """
    input_ids = token_ids(record, roles)
    n_tokens = len(input_ids)
    blocks = state_blocks(record, roles, n_tokens, hidden_size=hidden_size, layer_first=layer_first)
    mask, extras = None, {}
    if roles.loss_mask is not None:
        values = row_values(record.entry(roles.loss_mask), record.at(roles.loss_mask), record.nbytes)
        if further.weights:
            mask, extras[LOSS_WEIGHT] = columns.loss_weights(values, n_tokens, record.at(roles.loss_mask))
        else:
            mask = columns.loss_mask(values, n_tokens, record.at(roles.loss_mask))
    for key in further.keys:
        if key in record.entries and key not in roles.ignore:
            extras[key] = token_column(record.entries[key], n_tokens, key, record.at(key), record.nbytes)
    metadata = _metadata(record, replace(roles, ignore=(*roles.ignore, *further.keys)), n_tokens)
    sample = SourceSample(sample_id, input_ids, stack_layers(blocks, record.where), mask, metadata, extras)
    record.stamp.check_unchanged()
    return sample


def _metadata(record: Record, roles: KeyMap, n_tokens: int) -> dict[str, Any]:
    taken = {roles.input_ids, roles.hidden_states, roles.aux, roles.last, roles.loss_mask, *roles.ignore}
    metadata = {}
    for key, value in record.entries.items():
        if key in taken or (key == "attention_mask" and _all_real(record, n_tokens)):
            continue
        plain = value.item() if is_tensor(value) and value.ndim == 0 else value
        if not is_small_json(plain):
            kind = f"{plain.dtype} {list(plain.shape)}" if is_tensor(plain) else type(plain).__name__
            raise SourceError.at(
                record.at(key),
                expected="entries that hold ids, states, a mask or small JSON values",
                got=kind,
                remedy=f"leave it out with --map ignore={key}, or say what it is with --map ROLE={key}",
            )
        metadata[key] = plain
    return metadata


def _all_real(record: Record, n_tokens: int) -> bool:
    where = record.at("attention_mask")
    mask = columns.loss_mask(row_values(record.entries["attention_mask"], where, record.nbytes), n_tokens, where)
    if not mask.all():
        raise SourceError.at(
            where,
            expected="ones: every stored token real",
            got=f"{int((mask == 0).sum())} of {n_tokens} tokens that are padding",
            remedy="store samples without padding, or take it as it is with --map ignore=attention_mask",
        )
    return True


def is_small_json(value: Any) -> bool:
    """Whether a value can be kept as a sample's metadata: JSON of at most 64 KiB."""
    # A list that holds another one twice, and so on, is small in the file and endless as text.
    stack, left = [value], _METADATA_NBYTES
    while stack and left > 0:
        item = stack.pop()
        left -= 1
        if isinstance(item, dict | list | tuple):
            if len(item) > left:
                return False
            stack.extend(item.values() if isinstance(item, dict) else item)
    if stack:
        return False
    try:
        return len(canonical.dumps_metadata(value)) <= _METADATA_NBYTES
    except FormatError:
        return False
