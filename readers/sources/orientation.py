"""Which axis of [token, layer, hidden] or [layer, token, hidden] counts the tokens: seen where the lengths differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsfmt.errors import SourceError
from hsfmt.readers.sources.torch_states import batched, check_tensor

if TYPE_CHECKING:
    from hsfmt.readers.sources.options import KeyMap
    from hsfmt.readers.sources.torch_record import Record

TOKENS_FIRST = "[token, layer, hidden]"
LAYERS_FIRST = "[layer, token, hidden]"


class AmbiguousOrientationError(SourceError):
    """A record with as many tokens as layers, whose axes can't be told apart without other records."""


def find_orientation(record: Record, roles: KeyMap, n_tokens: int) -> str | None:
    """Say which axis of the record's states counts the tokens; `last`, of one layer, is not looked at.

    Returns
    -------
    str or None
        `TOKENS_FIRST` or `LAYERS_FIRST`; None where there is no tensor of three axes, or none whose lengths fit.

    Raises
    ------
    AmbiguousOrientationError
        There are as many tokens as layers.
    SourceError
        Both kinds are in one entry, or the states are no tensors.
    """
    key = roles.hidden_states or roles.aux
    value = record.entry(key) if key is not None else None
    if key is None or isinstance(value, dict):
        return None
    where = record.at(key)
    pieces = value if isinstance(value, list | tuple) else [value]
    tensors = [batched(check_tensor(piece, where, record.nbytes), n_tokens) for piece in pieces]
    # [1, 1, H] reads the same both ways.
    shapes = [tuple(tensor.shape) for tensor in tensors if tensor.ndim == 3 and tuple(tensor.shape[:2]) != (1, 1)]
    telling = [shape for shape in shapes if (shape[0] == n_tokens) != (shape[1] == n_tokens)]
    found = {TOKENS_FIRST if shape[0] == n_tokens else LAYERS_FIRST for shape in telling}
    if len(found) > 1:
        raise SourceError.at(where, expected="one order of the axes", got=f"{TOKENS_FIRST} and {LAYERS_FIRST}")
    if found:
        return found.pop()
    square = [shape for shape in shapes if shape[:2] == (n_tokens, n_tokens)]
    if square:
        raise AmbiguousOrientationError.at(
            where,
            expected=f"{TOKENS_FIRST} or {LAYERS_FIRST}, told apart by their lengths",
            got=f"as many layers as tokens, shape {list(square[0])}",
        )
    return None
