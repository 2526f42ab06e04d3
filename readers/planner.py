"""The planner: from rows and layers to byte ranges of shards and the places their chunks go. Pure arithmetic.

A chunk is checked whole, so that a window reads whole chunks; chunks lie in C order, so that rows with all their planes
(layers) are one contiguous range a shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hsfmt import layout
from hsfmt.columns import Column


class Window(NamedTuple):
    """Rows [start, stop) of a column's planes (positions on its second axis, any order), for destination `target`."""

    start: int
    stop: int
    planes: Sequence[int]
    target: int


class Copy(NamedTuple):
    """`n_rows` rows of a chunk from `src` on, which go to plane `plane` of destination `target` from row `dst` on."""

    target: int
    plane: int
    dst: int
    src: int
    n_rows: int


class ChunkRead(NamedTuple):
    """A chunk to fetch, check and decode once, wherever it goes.

    `number` is its row in the chunk table, `offset` its byte offset in the shard, `nbytes` and `digest` (xxh3_64) those
    of its payload.
    """

    number: int
    offset: int
    nbytes: int
    digest: int
    copies: list[Copy]

    def place(self, path: str) -> str:
        """Return the name of the chunk in errors; `path` is its shard's."""
        return f"{path}: chunk {self.number}, bytes {self.offset} to {self.offset + self.nbytes}"


@dataclass(slots=True)
class RangeRead:
    """One contiguous byte range of a shard, and the chunks in it.

    Attributes
    ----------
    column
        Whose chunks they are.
    path
        The shard inside the dataset.
    offset, nbytes
        Where it lies, in bytes.
    chunks
        Ascending by offset.
    part
        What names the part in whatever dataset: its name, and the digest of its index.
    """

    column: Column
    path: str
    offset: int
    nbytes: int
    chunks: list[ChunkRead]
    part: str = ""


@dataclass(frozen=True, slots=True)
class Coalescing:
    """How near chunks become one range.

    Attributes
    ----------
    max_gap_nbytes
        Bytes between two chunks that are read along rather than skipped.
    max_range_nbytes
        A range of several chunks is no longer than this.
    """

    max_gap_nbytes: int = 128 << 10
    max_range_nbytes: int = 1 << 62


def plan(
    part: str,
    column: Column,
    chunks: npt.NDArray[np.uint64],
    windows: Iterable[Window],
    coalescing: Coalescing,
    index_digest: str = "",
) -> list[RangeRead]:
    """Return the byte ranges that hold the windows; a chunk that several windows touch is read once.

    Parameters
    ----------
    part, column
        Whose rows they are.
    chunks
        The column's chunk table, uint64 [chunk, 3]: offset in the shard, payload nbytes, xxh3_64.
    windows
        Rows within the column; none of them empty.
    coalescing
        When two chunks become one range.
    index_digest
        Of the part.
    """
    copies = _copies(column, windows)
    numbers = sorted(copies)
    per_shard = column.chunk_rows_per_shard * column.n_planes
    folder = layout.column_folder(part, column.name)
    ranges: list[RangeRead] = []
    shard, path, end = -1, "", 0
    for number, (offset, nbytes, digest) in zip(numbers, chunks[numbers].tolist(), strict=True):
        chunk = ChunkRead(number, offset, nbytes, digest, copies[number])
        last = ranges[-1] if ranges else None
        if (
            last is not None
            and number // per_shard == shard
            and offset - end <= coalescing.max_gap_nbytes
            and offset + nbytes - last.offset <= coalescing.max_range_nbytes
        ):
            last.chunks.append(chunk)
            last.nbytes = offset + nbytes - last.offset
        else:
            if number // per_shard != shard:
                shard = number // per_shard
                path = f"{folder}/{column.shard_key(shard)}"
            ranges.append(RangeRead(column, path, offset, nbytes, [chunk], f"{part} {index_digest}"))
        end = offset + nbytes
    return ranges


def _copies(column: Column, windows: Iterable[Window]) -> dict[int, list[Copy]]:
    """Return, for each chunk that a window touches, what of it goes where."""
    copies: dict[int, list[Copy]] = {}
    rows, n_planes = column.chunk_rows, column.n_planes
    for start, stop, planes, target in windows:
        for chunk_row in range(start // rows, -(-stop // rows)):
            first = chunk_row * rows
            src = max(start - first, 0)
            dst = first + src - start
            n_rows = min(stop - first, rows) - src
            for place, plane in enumerate(planes):
                number = chunk_row * n_planes + plane
                copies.setdefault(number, []).append(Copy(target, place, dst, src, n_rows))
    return copies
