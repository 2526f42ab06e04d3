"""What the columns of a part will be before its length is known: chunk and shard sizes as writers choose them.

Spec: rules LAY-5 and LAY-6. Pure arithmetic on shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hsfmt.columns import (
    IDS,
    MASK,
    MAX_CHUNK_NBYTES,
    STATES,
    Column,
    column_chunk_rows,
    fitted_shard_rows,
    max_shard_rows,
    parse_column,
    state_chunk_rows,
)
from hsfmt.dtypes import dtype
from hsfmt.errors import UsageError
from hsfmt.header import Header

ColumnKind = tuple[str, str, tuple[int, ...]]
"""Kind, Zarr data type name and shape of a row."""


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """What a column will be before its length is known.

    Attributes
    ----------
    row_shape
        Shape of a row: (layer, hidden) for `hidden_states`.
    chunk_rows, shard_rows
        Rows of a chunk; most rows of a shard.
    may_shrink
        Whether a column that fits in one chunk gets a chunk of just its rows, without padding.
    """

    name: str
    kind: str
    dtype_name: str
    row_shape: tuple[int, ...]
    codec: str
    chunk_rows: int
    shard_rows: int
    may_shrink: bool = True

    @property
    def n_planes(self) -> int:
        """Chunks side by side in one chunk row."""
        return self.row_shape[0] if self.name == STATES else 1

    def column(self, n_rows: int) -> Column:
        """Return the column once its length is known."""
        if self.may_shrink and 0 < n_rows < self.chunk_rows:
            return replace(self, chunk_rows=n_rows, shard_rows=n_rows).column(n_rows)
        row_nbytes = math.prod(self.row_shape) * dtype(self.dtype_name).itemsize
        shard_rows = min(self.shard_rows, fitted_shard_rows(n_rows, self.chunk_rows, row_nbytes))
        return Column(
            self.name, self.kind, self.dtype_name, (n_rows, *self.row_shape), self.chunk_rows, shard_rows, self.codec
        )


@dataclass(frozen=True, slots=True)
class GridOptions:
    """Sizes that a caller may ask for, in rows; None takes the preferred ones. For small samples, and for tests."""

    chunk_tokens: int | None = None
    shard_tokens: int | None = None


def plan_columns(header: Header, codec: str, extras: Mapping[str, ColumnKind], grid: GridOptions) -> list[ColumnPlan]:
    """Plan all columns of a part.

    Raises
    ------
    UsageError, FormatError
        The format has no such column.
    """
    columns: dict[str, ColumnKind] = {
        STATES: ("token", header.dtype, (header.n_layers, header.hidden_size)),
        IDS: ("token", "int32", ()),
        MASK: ("token", "uint8", ()),
        **extras,
    }
    return [plan_column(name, *column, codec, grid) for name, column in columns.items()]


def plan_column(
    name: str, kind: str, dtype_name: str, row_shape: tuple[int, ...], codec: str, grid: GridOptions
) -> ColumnPlan:
    """Choose chunk and shard sizes (rules LAY-5, LAY-6).

    Raises
    ------
    UsageError, FormatError
        Sizes that the format does not have: no writer may commit what no reader takes.
    """
    for option, rows in (("chunk_tokens", grid.chunk_tokens), ("shard_tokens", grid.shard_tokens)):
        if rows is not None and not _is_positive(rows):
            raise UsageError.at(option, expected="a positive number of tokens", got=repr(rows)[:60])
    itemsize = dtype(dtype_name).itemsize
    row_nbytes = math.prod(row_shape) * itemsize
    if name == STATES:
        chunk_rows = grid.chunk_tokens or state_chunk_rows(row_shape[1], itemsize)
    elif grid.chunk_tokens is not None:
        # The size was chosen with the states in mind: other columns follow it as far as their rows allow.
        chunk_rows = min(grid.chunk_tokens, max(1, MAX_CHUNK_NBYTES // row_nbytes))
    else:
        chunk_rows = column_chunk_rows(row_nbytes)
    shard_rows = max_shard_rows(chunk_rows, row_nbytes)
    if grid.shard_tokens is not None:
        shard_rows = min(shard_rows, chunk_rows * max(1, grid.shard_tokens // chunk_rows))
    plan = ColumnPlan(name, kind, dtype_name, row_shape, codec, chunk_rows, shard_rows, may_shrink=False)
    parse_column(name, plan.column(1).to_json(), f"column {name}")
    return replace(plan, may_shrink=grid.chunk_tokens is None)


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
