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


_OUTPUTS = "2,n//2,n-3"
_SPECFORGE = Program(
    "SpecForge eagle3", "aux=aux_hidden_state,last=hidden_state", f"{_OUTPUTS},n (its default)", "post"
)
_EAGLE = Program("SafeAILab/EAGLE ge_data", "last=hidden_state", "n", "post")
_DSPARK = Program(
    "SpecForge dspark",
    "aux=hidden_states,last=target_last_hidden_states",
    "its capture layers each + 1, then n",
    "post",
)
_DFLASH = Program("SpecForge dflash/domino", "aux=hidden_states", "its capture layers each + 1", "unknown")
_ANGELSLIM = Program("AngelSlim eagle3", "aux=hidden_states,last=target_hiddens", f"{_OUTPUTS},n", "post")
_MODELOPT_MAP = "aux=aux_hidden_states,last=hidden_states"
_MODELOPT = Program("ModelOpt (HF or TRT-LLM)", _MODELOPT_MAP, f"{_OUTPUTS},n (its default)", "post")
_MODELOPT_VLLM = Program("ModelOpt (vLLM)", _MODELOPT_MAP, "its --aux-layers as they are, then n", "pre")
_VERL = Program("verl-SpeCo", "aux=hidden_states,last=last_hidden_states", "its layers each + 1, then n", "post")
_DEEPSPEC = Program(
    "DeepSpec", "aux=target_hidden_states,last=target_last_hidden_states", "its target_layer_ids each + 1, n", "post"
)
_LAST_ONLY = Program("a dump of the last state", "last=hidden_states", "n", "pre or post")

_STATE_KEYS: dict[frozenset[str], tuple[Program, ...]] = {
    frozenset({"aux_hidden_state", "hidden_state"}): (_SPECFORGE,),
    frozenset({"hidden_state"}): (_EAGLE, _SPECFORGE),
    frozenset({"hidden_states", "target_last_hidden_states"}): (_DSPARK,),
    frozenset({"hidden_states", "target_hiddens"}): (_ANGELSLIM,),
    frozenset({"hidden_states", "aux_hidden_states"}): (_MODELOPT, _MODELOPT_VLLM),
    frozenset({"hidden_state", "aux_hidden_states"}): (
        Program("ModelOpt (raw TRT-LLM)", "aux=aux_hidden_states,last=hidden_state", f"{_OUTPUTS},n", "post"),
    ),
    frozenset({"hidden_states", "last_hidden_states"}): (_VERL,),
    frozenset({"target_hidden_states", "target_last_hidden_states"}): (_DEEPSPEC,),
}
_NO_STATES = {"input_ids", "token_ids", "loss_mask", "attention_mask", "position_ids"}


def state_keys(record: Record) -> frozenset[str]:
    """The record's keys that may hold states."""
    return frozenset(
        key
        for key, value in record.entries.items()
        if key not in _NO_STATES and (is_tensor(value) or isinstance(value, list | tuple))
    )


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
    keys = state_keys(record)
    if keys == {"hidden_states"}:
        return (_DFLASH, _LAST_ONLY)
    return _STATE_KEYS.get(keys, ())
