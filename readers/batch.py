"""One plan for many reads: all columns of all samples of a batch are fetched together, each chunk once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt.columns import Column
from hsfmt.readers.chunk_cache import ChunkCache, Key
from hsfmt.readers.fetch import Fetcher
from hsfmt.readers.part_cache import OpenPart
from hsfmt.readers.planner import RangeRead, Window, plan

Array = npt.NDArray[Any]

# Chunks of narrow columns are 64 KiB: they go through the cache. Larger ones are decoded where they are wanted.
_MAX_CACHED_CHUNK_NBYTES = 128 << 10


@dataclass(slots=True)
class Rows:
    """Rows of a column, there after `ReadBatch.execute`.

    Attributes
    ----------
    column
        Whose rows.
    n_rows
        How many.
    pieces
        (array [row, ...], first row in it, rows of it), in order.
    """

    column: Column
    n_rows: int
    pieces: list[tuple[Array, int, int]] = field(default_factory=list)

    def array(self) -> Array:
        """Return the rows as an array of the column's storage dtype that belongs to the caller."""
        out = np.empty((self.n_rows, *self.column.shape[1:]), self.column.dtype.storage)
        at = 0
        for array, first, n_rows in self.pieces:
            out[at : at + n_rows] = array[first : first + n_rows]
            at += n_rows
        return out


class ReadBatch:
    """Collects what to read, then reads it in one go.

    Parameters
    ----------
    fetcher
        Executes the plan.
    cache
        Chunks of narrow columns at hand.
    """

    def __init__(self, fetcher: Fetcher, cache: ChunkCache) -> None:
        self._fetcher = fetcher
        self._cache = cache
        self._targets: list[Array] = []
        self._owners: list[set[int]] = []
        self._windows: dict[tuple[int, str], tuple[OpenPart, list[Window]]] = {}
        self._fresh: dict[Key, int] = {}

    def into(self, part: OpenPart, column: Column, rows: tuple[int, int], planes: Sequence[int], out: Array) -> int:
        """Read rows [start, stop) of some planes into `out` [row, plane, ...]; return the target's number."""
        self._targets.append(out)
        self._owners.append(set())
        number = len(self._targets) - 1
        if rows[1] > rows[0]:
            _, windows = self._windows.setdefault((part.number, column.name), (part, []))
            windows.append(Window(*rows, planes, number))
        return number

    def own(self, target: int, owner: int) -> None:
        """Say that `owner`, a number of the caller's, is concerned when this target can't be read."""
        self._owners[target].add(owner)

    def rows(self, part: OpenPart, column: Column, rows: tuple[int, int], owner: int) -> Rows:
        """Read rows [start, stop) of a column of one plane."""
        start, stop = rows
        result = Rows(column, stop - start)
        if column.chunk_nbytes > _MAX_CACHED_CHUNK_NBYTES:
            out = np.empty((stop - start, *column.shape[1:]), column.dtype.storage)
            self.own(self.into(part, column, rows, (0,), out[:, None]), owner)
            result.pieces.append((out, 0, stop - start))
            return result
        for chunk_row in range(start // column.chunk_rows, -(-stop // column.chunk_rows) if stop > start else 0):
            first = chunk_row * column.chunk_rows
            array = self._chunk(part, column, chunk_row, owner)
            src = max(start - first, 0)
            result.pieces.append((array, src, min(stop - first, column.chunk_rows) - src))
        return result

    def execute(self, naming: Callable[[Iterable[int]], tuple[str, ...]]) -> None:
        """Fetch, check and decode; `naming` gives the sample ids of owners, for errors.

        Raises
        ------
        CorruptionError, StorageError
            As `Fetcher.execute`.
        """
        self._fetcher.execute(self._ranges(), self._targets, self._named(naming))
        for key, target in self._fresh.items():
            self._cache.put(key, self._targets[target][:, 0])

    def warm(self, naming: Callable[[Iterable[int]], tuple[str, ...]]) -> int:
        """Bring what is not in the local cache there, without decoding; return the bytes of all, and raise as above."""
        return self._fetcher.warm(self._ranges(), self._named(naming))

    def _ranges(self) -> list[RangeRead]:
        ranges: list[RangeRead] = []
        for (_, name), (part, windows) in self._windows.items():
            column = part.columns[name]
            table = part.index.chunks[name]
            ranges += plan(part.name, column, table, windows, self._fetcher.coalescing, part.index_digest)
        return ranges

    def _named(self, naming: Callable[[Iterable[int]], tuple[str, ...]]) -> Callable[[Iterable[int]], tuple[str, ...]]:
        def named(targets: Iterable[int]) -> tuple[str, ...]:
            return naming(sorted(set().union(*(self._owners[target] for target in targets))))

        return named

    def _chunk(self, part: OpenPart, column: Column, chunk_row: int, owner: int) -> Array:
        key = (part.number, column.name, chunk_row)
        cached = self._cache.get(key)
        if cached is not None:
            return cached
        if key not in self._fresh:
            first = chunk_row * column.chunk_rows
            stop = min(first + column.chunk_rows, column.n_rows)
            out = np.empty((stop - first, 1, *column.shape[1:]), column.dtype.storage)
            self._fresh[key] = self.into(part, column, (first, stop), (0,), out)
        target = self._fresh[key]
        self.own(target, owner)
        return self._targets[target][:, 0]
