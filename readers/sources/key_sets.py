"""Which programs write which keys. Equal keys with different meanings are why no key set alone decides a conversion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hsfmt.readers.sources.torch_states import batched, is_tensor

if TYPE_CHECKING:
    from hsfmt.readers.sources.torch_record import Record


@dataclass(frozen=True, slots=True)
class Program:
    """A program that writes a key set: what it is called, the map that reads it, and what its states are."""

    name: str
    key_map: str
    layer_ids: str
    final_norm: str


_VERL = Program("verl-SpeCo", "aux=hidden_states,last=last_hidden_states", "its layers each + 1, then n", "post")
_DEEPSPEC = Program(
    "DeepSpec", "aux=target_hidden_states,last=target_last_hidden_states", "its target_layer_ids each + 1, n", "post"
)
_LAST_ONLY = Program("a dump of the last state", "last=hidden_states", "n", "pre or post")

# Key sets that have no source of their own in torch files.
_STATE_KEYS: dict[frozenset[str], tuple[Program, ...]] = {
    frozenset({"hidden_states"}): (_LAST_ONLY,),
    frozenset({"hidden_states", "last_hidden_states"}): (_VERL,),
    frozenset({"target_hidden_states", "target_last_hidden_states"}): (_DEEPSPEC,),
}
_NO_STATES = {
    "input_ids",
    "token_ids",
    "loss_mask",
    "attention_mask",
    "position_ids",
    "inputs_embeds",
    "hidden_states_prenorm",
}


def state_keys(record: Record) -> frozenset[str]:
    """The record's keys that may hold states."""
    return frozenset(
        key
        for key, value in record.entries.items()
        if key not in _NO_STATES and (is_tensor(value) or isinstance(value, list | tuple)) and not _is_empty(value)
    )


def empty_keys(record: Record) -> tuple[str, ...]:
    """Keys of tensors [0], which stand for states that were not taken."""
    return tuple(key for key, value in record.entries.items() if key not in _NO_STATES and _is_empty(value))


def _is_empty(value: object) -> bool:
    return is_tensor(value) and value.ndim == 1 and value.numel() == 0


def says_all_layers(record: Record) -> bool:
    """Whether `hidden_states` is the one entry with states and its rank shows the layers: a list or [T, L, H]."""
    if state_keys(record) != {"hidden_states"}:
        return False
    return not is_rows(record, "hidden_states")


def is_rows(record: Record, key: str) -> bool:
    """Whether an entry is one tensor with a row a token, [T, W], which may be one state or several side by side."""
    states = record.entries[key]
    ids = record.entries.get("input_ids", record.entries.get("token_ids"))
    n_tokens = ids.numel() if is_tensor(ids) else len(ids) if isinstance(ids, list | tuple) else 0
    return is_tensor(states) and batched(states, n_tokens).ndim != 3


def programs_of(record: Record) -> tuple[Program, ...]:
    """The programs that are known to write such a record, for the message that asks the user."""
    return _STATE_KEYS.get(state_keys(record), ())


def has_ids(record: Record) -> bool:
    """Whether the record may be a sample: it has token ids."""
    return "input_ids" in record.entries or "token_ids" in record.entries


def describe(record: Record) -> str:
    """The record's keys and shapes in one line, for messages."""
    shapes = [f"{key} {_shape(value)}" for key, value in sorted(record.entries.items())]
    return ", ".join(shapes + [f"{key} None" for key in record.none_keys])


def _shape(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"list of {len(value)}"
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else str(list(shape))
