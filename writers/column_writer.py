"""One column of the open part: rows in, chunks out, streamed straight into the open shard.

Spec: rules LAY-5 to LAY-8 and WRITE-2. Memory is a few chunk rows, whatever the size of samples, shards and parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import layout
from hsfmt.column_plan import ColumnPlan
from hsfmt.columns import STATES, Column
from hsfmt.digests import FileHasher
from hsfmt.dtypes import dtype
from hsfmt.manifest import FileEntry
from hsfmt.storage import ObjectWriter, Store
from hsfmt.writers.pipeline import Encoded, OutputThread, Pipeline
from hsfmt.zarr_metadata import shard_index

Array = npt.NDArray[Any]


class ColumnWriter:
    """Takes rows, hands whole chunk rows to the encoders, and appends what they return to the open shard in order."""

    def __init__(self, plan: ColumnPlan, store: Store, part: str, pipeline: Pipeline, output: OutputThread) -> None:
        self.plan = plan
        self.n_rows = 0
        self.files: list[FileEntry] = []
        self._store = store
        self._folder = layout.column_folder(part, plan.name)
        self._pipeline = pipeline
        self._output = output
        trailing = plan.row_shape[1:] if plan.name == STATES else plan.row_shape
        # Plane-major, so that each chunk is contiguous for the encoder.
        self._buffer_shape = (plan.n_planes, plan.chunk_rows, *trailing)
        self._buffer: Array | None = None
        self._free: list[Array] = []
        self._filled = 0
        self._table: list[tuple[int, int, int]] = []
        self._shard: ObjectWriter | None = None
        self._hasher = FileHasher()
        self._n_shards = 0

    def append(self, planes: Sequence[Array]) -> None:
        """Copy rows into the open chunk row; blocks only while all buffers are in flight.

        Parameters
        ----------
        planes
            One array [row, ...] a plane, all of the same length.
        """
        n, start = len(planes[0]), 0
        while start < n:
            if self._buffer is None:
                self._buffer = self._free.pop() if self._free else self._new_buffer()
            count = min(n - start, self.plan.chunk_rows - self._filled)
            for plane, rows in enumerate(planes):
                self._buffer[plane, self._filled : self._filled + count] = rows[start : start + count]
            self._filled += count
            self.n_rows += count
            start += count
            if self._filled == self.plan.chunk_rows:
                self._flush()

    def flush(self) -> None:
        """Hand over the last chunk row: padded with zeros, or as it is if the whole column fits in it."""
        if self._buffer is None or not self._filled:
            return
        if self.plan.may_shrink and self._filled == self.n_rows:
            self.plan = replace(self.plan, chunk_rows=self._filled, shard_rows=self._filled)
        self._buffer[:, self._filled :] = 0
        self._flush()

    def finish(self) -> tuple[Column, npt.NDArray[np.uint64]]:
        """Close the last shard and return (column, chunk table uint64 [chunk, 3]); the output thread has ended."""
        column = self.plan.column(self.n_rows)
        if self._shard is not None:
            self._close_shard(column)
        return column, self._chunk_table()

    def abort(self) -> None:
        """Leave no open object behind; the output thread has ended."""
        if self._shard is not None:
            self._shard.abort()

    def _new_buffer(self) -> Array:
        return np.empty(self._buffer_shape, dtype(self.plan.dtype_name).storage)

    def _flush(self) -> None:
        buffer, self._buffer, self._filled = self._buffer, None, 0
        assert buffer is not None
        self._pipeline.budget.acquire(buffer.nbytes)
        rows = self.plan.chunk_rows
        futures = [self._pipeline.encode(self.plan.codec, plane[:rows]) for plane in buffer]
        self._output.submit(lambda: self._write(futures), lambda: self._give_back(buffer, futures))

    def _give_back(self, buffer: Array, futures: list[Future[Encoded]]) -> None:
        for future in futures:
            future.exception()  # the encoder may still read the buffer when an earlier task failed
        self._free.append(buffer)
        self._pipeline.budget.release(buffer.nbytes)

    def _write(self, futures: list[Future[Encoded]]) -> None:
        rows_in_shard = (
            len(self._table) // self.plan.n_planes
        ) * self.plan.chunk_rows - self._n_shards * self.plan.shard_rows
        if self._shard is not None and rows_in_shard == self.plan.shard_rows:
            # A second shard exists, so the shard size is the planned one whatever the final length.
            self._close_shard(self.plan.column((self._n_shards + 1) * self.plan.shard_rows + 1))
        if self._shard is None:
            key = self.plan.column(1).shard_key(self._n_shards)
            self._shard = self._store.open_object(f"{self._folder}/{key}")
            self._hasher = FileHasher()
        for future in futures:
            encoded = future.result()
            self._table.append((self._shard.nbytes, len(encoded.payload), encoded.digest))
            for data in (encoded.payload, encoded.crc):
                self._shard.write(data)
                self._hasher.update(data)

    def _close_shard(self, column: Column) -> None:
        assert self._shard is not None
        tail = shard_index(column, self._n_shards, self._chunk_table(column.n_chunks))
        self._shard.write(tail)
        self._hasher.update(tail)
        self._shard.commit()
        path = f"{self._folder}/{column.shard_key(self._n_shards)}"
        self.files.append(FileEntry(path, self._shard.nbytes, self._hasher.digest()))
        self._shard = None
        self._n_shards += 1

    def _chunk_table(self, n_chunks: int | None = None) -> npt.NDArray[np.uint64]:
        table = np.array(self._table, np.uint64).reshape(-1, 3)
        if n_chunks is not None and len(table) < n_chunks:
            table = np.concatenate([table, np.zeros((n_chunks - len(table), 3), np.uint64)])
        return table
