"""Where the bytes of a chunk go: rows of the callers' arrays as memory, so that reads and decoders can fill them.

A chunk is read or decoded piece by piece, each small enough to stay in the cache of its core from the copy out of the
page cache to the digest, and from the decoder to the strided rows of an interleaved destination.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from hsfmt.readers.planner import Copy

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

PIECE_NBYTES = 224 << 10
# Shorter rows are staged: a buffer of its own for each would cost more than another copy of it within the cache.
MIN_ROW_NBYTES = 2 << 10
MAX_BUFFERS = 1024  # IOV_MAX of Linux and macOS
_SLICED_ROWS = 32  # rows are cut in multiples of so many


class Piece(NamedTuple):
    """Bytes [at, at + nbytes) of a chunk and the buffers that take them.

    `staged` ones are in the scratch buffer; `Places.put` takes further what of them is wanted.
    """

    at: int
    nbytes: int
    buffers: Sequence[memoryview]
    staged: bool = False


class Memory:
    """The bytes of a destination array [row, plane, ...] of any strides.

    Attributes
    ----------
    bytes
        From its first byte in memory to its last, with whatever lies between; None if the elements of a row of a plane
        do not lie side by side in order.
    origin
        Where in them row 0 of plane 0 begins.
    row_stride, plane_stride, row_nbytes
        Bytes from row to row and from plane to plane, possibly negative, and in a row of one plane.
    """

    __slots__ = ("bytes", "origin", "plane_stride", "row_nbytes", "row_stride")

    def __init__(self, array: Array) -> None:
        self.row_nbytes = math.prod(array.shape[2:]) * array.itemsize
        self.row_stride, self.plane_stride = array.strides[:2]
        self.origin = 0
        self.bytes: memoryview | None = None
        if array.flags.c_contiguous:
            self.bytes = array.reshape(-1).view(np.uint8).data
            self.plane_stride = self.row_nbytes  # NumPy leaves any stride on an axis of one
            self.row_stride = self.row_nbytes * array.shape[1]
        elif array[:1, :1].flags.c_contiguous:
            extent = self.row_nbytes
            for axis, stride in enumerate(array.strides[:2]):
                span = (array.shape[axis] - 1) * abs(stride)
                extent += span
                if stride < 0:
                    self.origin += span
                    array = np.flip(array, axis)
            first = array[:1, :1].reshape(-1).view(np.uint8)
            self.bytes = as_strided(first, (extent,), (1,)).data


class Span(NamedTuple):
    """Bytes [start, stop) of a chunk, whose rows go to `memory` from `origin` on, `stride` bytes apart."""

    start: int
    stop: int
    memory: memoryview
    origin: int
    stride: int
    row_nbytes: int

    @property
    def adjacent(self) -> bool:
        """Whether the rows lie side by side."""
        return self.stride == self.row_nbytes or self.stop - self.start == self.row_nbytes

    def run(self, at: int, stop: int) -> memoryview:
        """Return the memory of bytes [at, stop) of the chunk, of rows that are adjacent."""
        first = self.origin - self.start
        return self.memory[first + at : first + stop]

    def rows(self) -> Bytes:
        """Return the rows as uint8 [row, byte]."""
        shape = ((self.stop - self.start) // self.row_nbytes, self.row_nbytes)
        return np.ndarray(shape, np.uint8, self.memory, self.origin, (self.stride, 1))


class Places:
    """The destinations of one chunk: all rows of `spans`."""

    __slots__ = ("_direct", "_spans")

    def __init__(self, spans: list[Span], min_row_nbytes: int) -> None:
        if len(spans) > 1:
            spans.sort(key=itemgetter(0, 1))
        self._spans = spans
        self._direct = [span for span in spans if span.row_nbytes >= min_row_nbytes or span.adjacent]
        if len(spans) > 1 and any(a.stop > b.start for a, b in pairwise(spans)):
            self._direct = []

    def pieces(self, nbytes: int, scratch: Callable[[], memoryview], piece_nbytes: int) -> Iterator[Piece]:
        """Yield the chunk's bytes in order, straight to where they go, or into what `scratch` returns."""
        at = 0
        for span in self._direct:
            if at < span.start:
                yield from _staged(at, span.start, scratch())
            if span.adjacent:
                yield from run_pieces(span.run(span.start, span.stop), piece_nbytes, span.start)
            else:
                yield from _row_pieces(span, piece_nbytes)
            at = span.stop
        if at < nbytes:
            yield from _staged(at, nbytes, scratch())

    def put(self, at: int, data: memoryview) -> None:
        """Copy bytes of the chunk from `at` on to wherever they go."""
        stop = at + len(data)
        for span in self._spans:
            first, last = max(at, span.start), min(stop, span.stop)
            if first >= last:
                continue
            part = np.frombuffer(data[first - at : last - at], np.uint8)
            if span.adjacent:  # by NumPy, which gives up the interpreter's lock for it
                np.frombuffer(span.run(first, last), np.uint8)[:] = part
            else:
                _put_rows(span.rows(), first - span.start, part)

    def wanted(self, at: int, stop: int) -> bool:
        """Say whether any of the bytes [at, stop) goes anywhere."""
        return any(span.start < stop and at < span.stop for span in self._spans)

    @property
    def nbytes(self) -> int:
        """Bytes of the chunk that go anywhere, those that go to two places counted twice."""
        return sum(span.stop - span.start for span in self._spans)

    def run(self, at: int, stop: int) -> memoryview | None:
        """Return the memory that takes bytes [at, stop), if they go to one place and lie there side by side."""
        if len(self._spans) == 1:
            span = self._spans[0]
            if span.start <= at and stop <= span.stop and span.adjacent:
                return span.run(at, stop)
        return None


class Destinations:
    """The callers' arrays by target number, and their memory, looked at once each.

    Parameters
    ----------
    arrays
        [row, plane, ...] in the column's storage dtype, any strides.
    scatter
        Read rows that do not lie side by side straight to where they go, rather than by way of a scratch buffer.
    """

    def __init__(self, arrays: Sequence[Array], *, scatter: bool = True) -> None:
        self.arrays = arrays
        self._min_row_nbytes = MIN_ROW_NBYTES if scatter else 1 << 62
        self._memories: dict[int, Memory] = {}

    def places(self, copies: Sequence[Copy]) -> Places | None:
        """Return where a chunk goes, or None if the elements of a row do not lie side by side somewhere."""
        spans = []
        for target, plane, dst, src, n_rows in copies:
            memory = self._memories.get(target)
            if memory is None:
                memory = self._memories[target] = Memory(self.arrays[target])
            if memory.bytes is None:
                return None
            origin = memory.origin + dst * memory.row_stride + plane * memory.plane_stride
            n = memory.row_nbytes
            spans.append(Span(src * n, (src + n_rows) * n, memory.bytes, origin, memory.row_stride, n))
        return Places(spans, self._min_row_nbytes)


def run_pieces(run: memoryview, piece_nbytes: int, start: int = 0) -> Iterator[Piece]:
    """Yield the pieces of bytes that lie side by side; the first is number `start` of the chunk."""
    for at in range(0, len(run), piece_nbytes):
        part = run[at : at + piece_nbytes]
        yield Piece(start + at, len(part), (part,))


def _row_pieces(span: Span, piece_nbytes: int) -> Iterator[Piece]:
    at, stop, memory, origin, stride, row_nbytes = span
    n_rows = (stop - at) // row_nbytes
    step = max(1, min(MAX_BUFFERS, piece_nbytes // row_nbytes, -(-n_rows // _SLICED_ROWS) * _SLICED_ROWS))
    # Cut when they are needed: the views of one piece are in the cache, those of the whole chunk would not be.
    cut = _slicer(abs(stride), max(step, 2), row_nbytes)
    for row in range(0, n_rows, step):
        n = min(step, n_rows - row)
        first, last = origin + row * stride, origin + (row + n - 1) * stride
        buffers = cut(memory[min(first, last) : max(first, last) + row_nbytes])[:n]
        yield Piece(at + row * row_nbytes, n * row_nbytes, buffers if stride > 0 else buffers[::-1])


def _staged(at: int, stop: int, scratch: memoryview) -> Iterator[Piece]:
    while at < stop:
        nbytes = min(len(scratch), stop - at)
        yield Piece(at, nbytes, (scratch[:nbytes],), staged=True)
        at += nbytes


@lru_cache(maxsize=64)
def _slicer(stride: int, n_rows: int, row_nbytes: int) -> Callable[[memoryview], tuple[memoryview, ...]]:
    """Return a function that cuts memory into rows; one call for all of them, since there are many.

    Rows beyond the memory are empty, so that one function does for as many rows or fewer.
    """
    return itemgetter(*(slice(at, at + row_nbytes) for at in range(0, n_rows * stride, stride)))


def _put_rows(rows: Bytes, first: int, data: Bytes) -> None:
    """Copy bytes to rows, from byte `first` of all of them on: the rest of a row, whole rows, and a row's beginning."""
    row_nbytes = rows.shape[1]
    row, column = divmod(first, row_nbytes)
    if column:
        n = min(row_nbytes - column, len(data))
        rows[row, column : column + n] = data[:n]
        data, row = data[n:], row + 1
    n_rows = len(data) // row_nbytes
    if n_rows:
        rows[row : row + n_rows] = data[: n_rows * row_nbytes].reshape(n_rows, row_nbytes)
    rest = data[n_rows * row_nbytes :]
    if len(rest):
        rows[row + n_rows, : len(rest)] = rest
