"""Fetch, check and decode what the planner laid out. A byte that does not match its digest goes nowhere.

Spec: rules READ-1, READ-3 and READ-4.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hsfmt.codecs import decode_into
from hsfmt.columns import STATES
from hsfmt.errors import CorruptionError, HsfmtError, NotFoundError, Problem
from hsfmt.readers.descriptors import DESCRIPTORS
from hsfmt.readers.planner import ChunkRead, Coalescing, RangeRead
from hsfmt.readers.threads import Scratch, default_threads, needs_pool, run_all
from hsfmt.storage import Store
from hsfmt.storage.local import os_errors_typed

Array = npt.NDArray[Any]
Naming = Callable[[Iterable[int]], tuple[str, ...]]

_REMEDY = "restore the file from a copy, or run `hsfmt verify --level full` to see all that is damaged"
# Locally a chunk or so a task, so that threads are busy and scratch stays in cache; a request, though, costs latency.
_LOCAL_RANGE_NBYTES = 4 << 20
_REMOTE_RANGE_NBYTES = 32 << 20
_LOCAL_GAP_NBYTES = 64 << 10
_REMOTE_GAP_NBYTES = 1 << 20

_OWNERS = itertools.count()
_SCRATCH = Scratch()


class Fetcher:
    """Executes plans on one store.

    Parameters
    ----------
    store
        Where the shards lie.
    check
        Compare every payload with its digest.
    n_threads
        Threads that decode; None: as the process allows.
    """

    def __init__(self, store: Store, *, check: bool, n_threads: int | None = None) -> None:
        self._store = store
        self._check = check
        self._n_threads = n_threads
        self._owner = next(_OWNERS)
        weakref.finalize(self, DESCRIPTORS.release, self._owner).atexit = False

    @property
    def coalescing(self) -> Coalescing:
        """What suits the store."""
        if self._store.is_local:
            return Coalescing(_LOCAL_GAP_NBYTES, _LOCAL_RANGE_NBYTES)
        return Coalescing(_REMOTE_GAP_NBYTES, _REMOTE_RANGE_NBYTES)

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        DESCRIPTORS.release(self._owner)

    def execute(self, ranges: Sequence[RangeRead], targets: Sequence[Array], naming: Naming) -> None:
        """Fill the destinations.

        Parameters
        ----------
        ranges
            The plan.
        targets
            By target number: [row, plane, ...] in the column's storage dtype, any strides.
        naming
            From target numbers to the ids of the samples that they belong to, for errors.

        Raises
        ------
        CorruptionError
            A shard is missing or short, or a chunk's bytes are not those that were committed, also when read once more.
        StorageError
            The storage fails.
        """
        n_threads = self._n_threads or default_threads()
        inline = not needs_pool(read.column.codec for read in ranges)
        try:
            if self._store.is_local:
                run_all(lambda read: self._read_local(read, targets), list(ranges), n_threads, inline=inline)
                return
            bodies = self._store.read_ranges([(read.path, read.offset, read.nbytes) for read in ranges])
            jobs = list(zip(ranges, bodies, strict=True))
            run_all(lambda job: self._deliver(job[0], memoryview(job[1]), targets), jobs, n_threads, inline=inline)
        except (CorruptionError, NotFoundError) as error:
            raise _named(error, ranges, naming) from error

    def _read_local(self, read: RangeRead, targets: Sequence[Array]) -> None:
        body = _SCRATCH.get("encoded", read.nbytes).data
        self._pread(read.path, read.offset, body)
        self._deliver(read, body, targets)

    def _pread(self, path: str, offset: int, body: memoryview) -> None:
        try:
            self._pread_open(path, offset, body)
        except (CorruptionError, OSError):
            # The file that is open may have been replaced since, or its server have forgotten it.
            DESCRIPTORS.forget(self._owner, path)
            self._pread_open(path, offset, body)

    def _pread_open(self, path: str, offset: int, body: memoryview) -> None:
        done = 0
        with os_errors_typed(path), DESCRIPTORS.opened(self._owner, path, self._store.local_path) as fd:
            while done < len(body):
                count = os.preadv(fd, [body[done:]], offset + done)
                if count == 0:
                    expected, got = f"{len(body)} bytes at offset {offset}", f"the end of the file after {done} bytes"
                    raise CorruptionError.at(path, expected=expected, got=got, remedy=_REMEDY)
                done += count

    def _deliver(self, read: RangeRead, body: memoryview, targets: Sequence[Array]) -> None:
        for chunk in read.chunks:
            start = chunk.offset - read.offset
            payload = body[start : start + chunk.nbytes]
            if self._check and xxhash.xxh3_64_intdigest(payload) != chunk.digest:
                payload = self._read_again(read, chunk)
            _decode(read, chunk, payload, targets)

    def _read_again(self, read: RangeRead, chunk: ChunkRead) -> memoryview:
        """Return the payload of a second read: of the disk or network, not of the file that was open so far."""
        payload = memoryview(bytearray(chunk.nbytes))
        if self._store.is_local:
            DESCRIPTORS.forget(self._owner, read.path)
            self._pread(read.path, chunk.offset, payload)
        else:
            self._store.read_into(read.path, chunk.offset, payload)
        actual = xxhash.xxh3_64_intdigest(payload)
        if actual != chunk.digest:
            expected, got = f"xxh3_64 {chunk.digest:016x}", f"{actual:016x}, read twice"
            raise CorruptionError.at(_place(read, chunk), expected=expected, got=got, remedy=_REMEDY)
        return payload


def _place(read: RangeRead, chunk: ChunkRead) -> str:
    return f"{read.path}: chunk {chunk.number}, bytes {chunk.offset} to {chunk.offset + chunk.nbytes}"


def _decode(read: RangeRead, chunk: ChunkRead, payload: memoryview, targets: Sequence[Array]) -> None:
    column = read.column
    storage = column.dtype.storage
    shape = (column.chunk_rows, *column.shape[2 if column.name == STATES else 1 :])
    if column.codec == "none":
        raw = np.frombuffer(payload, np.uint8)
        if len(raw) != column.chunk_nbytes:
            got = f"{len(raw)} bytes"
            raise CorruptionError.at(_place(read, chunk), expected=f"{column.chunk_nbytes} bytes", got=got)
    else:
        whole = _whole_destination(column.chunk_rows, chunk, targets)
        if whole is not None:
            decode_into(column.codec, payload, whole.reshape(-1).view(np.uint8), _place(read, chunk))
            return
        raw = _SCRATCH.get("decoded", column.chunk_nbytes)
        decode_into(column.codec, payload, raw, _place(read, chunk))
    values = raw.view(storage).reshape(shape)
    for target, plane, dst, src, n_rows in chunk.copies:
        targets[target][dst : dst + n_rows, plane] = values[src : src + n_rows]


def _whole_destination(chunk_rows: int, chunk: ChunkRead, targets: Sequence[Array]) -> Array | None:
    """Return the destination that takes the chunk as it comes out of the decoder, if there is just that one."""
    if len(chunk.copies) != 1:
        return None
    target, plane, dst, _, n_rows = chunk.copies[0]
    place = targets[target][dst : dst + n_rows, plane]
    return place if n_rows == chunk_rows and place.flags.c_contiguous else None


def _named(error: HsfmtError, ranges: Sequence[RangeRead], naming: Naming) -> CorruptionError:
    """Return the error with the samples that the damaged chunk (or, of a missing file, all its chunks) belongs to."""
    problems = []
    for problem in error.problems:
        reads = [read for read in ranges if problem.where.partition(":")[0] == read.path]
        exact = [chunk for read in reads for chunk in read.chunks if problem.where == _place(read, chunk)]
        chunks = exact or [chunk for read in reads for chunk in read.chunks]
        samples = naming(sorted({copy.target for chunk in chunks for copy in chunk.copies}))
        remedy = problem.remedy or _REMEDY
        expected = "a shard of the part" if isinstance(error, NotFoundError) else problem.expected
        problems.append(Problem(problem.where, expected, problem.got, remedy, samples))
    return CorruptionError(problems)
