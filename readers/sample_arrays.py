"""What comes back from a reader: samples as arrays, and the samples on their way.

Spec: rules READ-1 and READ-5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import canonical
from hsfmt.columns import CORE_COLUMNS, IDS, MASK, STATES, Column
from hsfmt.errors import CorruptionError, UsageError
from hsfmt.readers.batch import ReadBatch, Rows
from hsfmt.readers.part_cache import OpenPart
from hsfmt.readers.sample_requests import SampleRequest, targets, window

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class SampleArrays:
    """A sample, or a window of its tokens. The arrays belong to the caller.

    Attributes
    ----------
    sample_id
        Its id.
    input_ids
        int64 [token].
    loss_mask
        bool [token].
    hidden_states
        [token, layer, hidden], bit patterns in the storage dtype: uint16 for bfloat16, uint8 for float8_e4m3fn. Without
        tokens if the request has pieces.
    extras
        By column name, in storage dtypes: [token, ...], [...] or [row, ...] by the column's kind; None is a null.
    extra_dtypes
        The element types of the extras by name.
    meta
        The metadata object as stored.
    """

    sample_id: str
    input_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    hidden_states: Array
    extras: Mapping[str, Array | None] = field(default_factory=dict)
    extra_dtypes: Mapping[str, str] = field(default_factory=dict)
    meta: bytes = b"{}"

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata object."""
        document: dict[str, Any] = canonical.loads(self.meta, f"metadata of {self.sample_id}", metadata=True)
        return document


@dataclass(slots=True)
class PendingSample:
    """A sample whose bytes are on the way."""

    sample_id: str
    meta: bytes
    states: Array
    ids: Rows
    mask: Rows
    extras: dict[str, Rows | None]
    extra_dtypes: dict[str, str]

    def arrays(self) -> SampleArrays:
        """Return the sample once its bytes have come.

        Raises
        ------
        CorruptionError
            The loss mask holds something else than 0 and 1.
        """
        mask = self.mask.array()
        if np.any(mask > 1):
            where = f"loss_mask of {self.sample_id}"
            raise CorruptionError.at(where, expected="0 or 1", got=str(int(mask.max())), samples=(self.sample_id,))
        return SampleArrays(
            sample_id=self.sample_id,
            input_ids=self.ids.array().astype(np.int64, copy=False),
            loss_mask=mask.view(np.bool_),
            hidden_states=self.states,
            extras={name: None if rows is None else _value(rows) for name, rows in self.extras.items()},
            extra_dtypes=self.extra_dtypes,
            meta=self.meta,
        )


def ask(
    batch: ReadBatch,
    number: int,
    place: tuple[OpenPart, int],
    request: SampleRequest,
    planes: Sequence[int],
    extras: Sequence[str] | None,
) -> PendingSample:
    """Add what a request needs to a batch.

    Parameters
    ----------
    batch
        Reads it later, in one go with the rest.
    number
        The sample's number in the batch.
    place
        Its part, and its row there.
    request
        Which of its tokens, and where to.
    planes
        Positions on the layer axis.
    extras
        Names of the extra columns wanted; None: all.

    Raises
    ------
    UsageError
        A window, `out`, piece or extra column that does not fit.
    """
    part, row = place
    index, columns = part.index, part.columns
    first, end = int(index.token_offsets[row]), int(index.token_offsets[row + 1])
    start, stop = window(request, end - first)
    rows = (first + start, first + stop)
    states, pieces = targets(request, (start, stop), planes, columns[STATES])
    for piece in pieces:
        span = first + piece.start, first + piece.stop
        batch.own(batch.into(part, columns[STATES], span, piece.planes, piece.out), number)
    asked: dict[str, Rows | None] = {}
    for name in _extra_names(part, extras):
        span = _extra_rows(part, columns[name], row, rows)
        asked[name] = batch.rows(part, columns[name], span, number) if index.valid[name][row] else None
    return PendingSample(
        sample_id=index.sample_id(row),
        meta=index.meta_bytes(row),
        states=states,
        ids=batch.rows(part, columns[IDS], rows, number),
        mask=batch.rows(part, columns[MASK], rows, number),
        extras=asked,
        extra_dtypes={name: columns[name].dtype_name for name in asked},
    )


def _extra_names(part: OpenPart, wanted: Sequence[str] | None) -> list[str]:
    stored = sorted(name for name in part.columns if name not in CORE_COLUMNS)
    if wanted is None:
        return stored
    missing = [name for name in wanted if name not in stored]
    if missing:
        expected = f"columns of part {part.name}: {', '.join(stored) or 'it has no extra ones'}"
        raise UsageError.at("extras", expected=expected, got=", ".join(missing))
    return list(wanted)


def _extra_rows(part: OpenPart, column: Column, row: int, tokens: tuple[int, int]) -> tuple[int, int]:
    """Return the rows of an extra column that belong to a sample, or to the wanted tokens of it."""
    if column.kind == "token":
        return tokens
    if column.kind == "sample":
        return row, row + 1
    offsets = part.index.offsets[column.name]
    return int(offsets[row]), int(offsets[row + 1])


def _value(rows: Rows) -> Array:
    array = rows.array()
    if rows.column.dtype_name == "bool":
        array = array.view(np.bool_)
    return array.reshape(array.shape[1:]) if rows.column.kind == "sample" else array
