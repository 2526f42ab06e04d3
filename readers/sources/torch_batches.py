"""Batches: how many samples a torch dict holds on its first axis, and the dict of one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hsfmt.errors import SourceError
from hsfmt.readers.sources.torch_columns import POSITION_IDS
from hsfmt.readers.sources.torch_states import is_tensor

if TYPE_CHECKING:
    from hsfmt.readers.sources.torch_record import Record

_MOST = 1 << 20


def batch_size(record: Record) -> int:
    """Samples in a record: the length of the first of the two axes of its token ids.

    Raises
    ------
    SourceError
        There is none, or more than a file can hold.
    """
    ids = record.entries.get("input_ids")
    if not is_tensor(ids) or ids.ndim != 2:
        return 1
    size = int(ids.shape[0])
    if not 1 <= size <= _MOST:
        raise SourceError.at(record.at("input_ids"), expected="a batch of samples", got=f"shape {list(ids.shape)}")
    return size


def take_row(record: Record, row: int, size: int) -> Record:
    """The record of one sample of a batch: views, with a batch axis of 1 left.

    Raises
    ------
    SourceError
        An entry has another number of rows, so that it is not known which of them is the sample's.
    """
    entries = {}
    for key, value in record.entries.items():
        # Positions of several axes have the batch second: [axis, batch, token].
        axis = 1 if key == POSITION_IDS and is_tensor(value) and value.ndim == 3 else 0
        entries[key] = _row(value, row, size, axis, record.at(key))
    return replace(record, entries=entries)


def _row(value: Any, row: int, size: int, axis: int, where: str) -> Any:
    if isinstance(value, list | tuple) and value and all(map(is_tensor, value)):
        return [_row(piece, row, size, axis, where) for piece in value]
    if not is_tensor(value):
        return value
    if value.ndim < 2 or value.shape[axis] != size:
        raise SourceError.at(where, expected=f"a row for each of the {size} samples", got=f"shape {list(value.shape)}")
    return value.narrow(axis, row, 1)
