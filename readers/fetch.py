"""Fetch, check and decode what the planner laid out. Who reads bytes that do not match their digest gets an error.

Chunks that are not encoded are read straight to where they go and compared there: after an error the destinations hold
anything. What is encoded is decoded only once it was compared.

Spec: rules READ-1, READ-3 and READ-4.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy.typing as npt
import xxhash

from hsfmt.errors import CorruptionError, HsfmtError, NotFoundError, Problem, StorageError
from hsfmt.readers.cached_entry import CachedEntry
from hsfmt.readers.delivery import Delivery
from hsfmt.readers.descriptors import DESCRIPTORS, OpenFile
from hsfmt.readers.local_cache import CachedRange, LocalCache, ranges_of
from hsfmt.readers.planner import ChunkRead, Coalescing, RangeRead
from hsfmt.readers.process_state import ForkAware
from hsfmt.readers.scatter import PIECE_NBYTES, Destinations, Places, run_pieces
from hsfmt.readers.threads import Scratch, default_threads, needs_pool, run_all, run_coming
from hsfmt.storage import Store
from hsfmt.storage.base import Arrivals, BytesLike
from hsfmt.storage.local import os_errors_typed

Array = npt.NDArray[Any]
Naming = Callable[[Iterable[int]], tuple[str, ...]]

_REMEDY = "restore the file from a copy, or run `hsfmt verify --level full` to see all that is damaged"
# Small chunks that are read together stay in cache locally; a request, though, costs latency.
_LOCAL_RANGE_NBYTES = 4 << 20
# What a thread does at a time: an interrupt or another thread's error waits for it.
_RUN_NBYTES = 64 << 20
_RUNS_A_THREAD = 16
_UNCHECKED_PIECE_NBYTES = 64 << 20
# A piece of a chunk stays in the cache of its core, which pays with one thread or two. More of them spend their time
# taking the interpreter's lock from each other: after every read, digest (those of single rows do not even give it up),
# block and copy. Then a chunk is done in three large steps; on 8 threads that is 3 times as fast, and 1.7 with zstd.
_MAX_FINE_THREADS = 2
_COARSE_PIECE_NBYTES = 4 << 20
# One connection is slower than the link: more of them share the work, and decoding starts sooner.
_REMOTE_RANGE_NBYTES = 8 << 20
_LOCAL_GAP_NBYTES = 64 << 10

_OWNERS = itertools.count()
_SCRATCH = Scratch()


@dataclass(frozen=True, slots=True)
class _Incoming:
    """Ranges of a plan on their way from a remote store, and the numbers of those that went where they go."""

    arrivals: Arrivals
    ranges: Sequence[RangeRead]
    targets: Destinations | None
    coarse: bool
    delivered: list[int] = field(default_factory=list)


class Fetcher(ForkAware):
    """Executes plans on one store.

    Parameters
    ----------
    store
        Where the shards lie.
    check
        Compare every payload with its digest.
    n_threads
        Threads that decode; None: as the process allows.
    cache
        Of a remote store's chunks. Not used without checks: it must not hold what nobody has compared.
    named
        Whether errors name a remote dataset beside the path: not in what a repair writes down, which is the same
        wherever the dataset lies.
    """

    def __init__(
        self,
        store: Store,
        *,
        check: bool,
        n_threads: int | None = None,
        cache: LocalCache | None = None,
        named: bool = True,
    ) -> None:
        super().__init__()
        self._store = store
        self._check = check
        self._n_threads = n_threads
        self._named = named and not store.is_local
        self._cache = cache if check and not store.is_local else None
        self._owner = next(_OWNERS)
        self._nbytes_read = 0
        self.after_fork()
        weakref.finalize(self, DESCRIPTORS.release, self._owner).atexit = False

    def after_fork(self) -> None:
        """Take a new lock; another thread may have held it."""
        self._lock = threading.Lock()

    @property
    def nbytes_read(self) -> int:
        """Bytes read from the storage so far, those read again and those between near chunks included."""
        return self._nbytes_read

    @property
    def coalescing(self) -> Coalescing:
        """What suits the store."""
        if self._store.is_local:
            return Coalescing(_LOCAL_GAP_NBYTES, _LOCAL_RANGE_NBYTES)
        return Coalescing(self._store.gap_nbytes, _REMOTE_RANGE_NBYTES)

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        DESCRIPTORS.release(self._owner)

    def execute(self, ranges: Sequence[RangeRead], targets: Sequence[Array], naming: Naming) -> None:
        """Fill the destinations; after an error they hold anything, and nobody writes to them any more.

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
        n_threads = self._n_threads or default_threads(remote=not self._store.is_local)
        inline = not needs_pool(read.column.codec for read in ranges)
        coarse = n_threads > _MAX_FINE_THREADS
        destinations = Destinations(targets, scatter=not (coarse and self._check))
        try:
            if self._store.is_local:
                runs = _runs(ranges, n_threads)
                run_all(lambda run: self._read_run(run, destinations, coarse=coarse), runs, n_threads, inline=inline)
                return
            self._read_remote(ranges, destinations, coarse=coarse, inline=inline)
        except (CorruptionError, NotFoundError) as error:
            raise _named(error, ranges, naming) from error

    def warm(self, ranges: Sequence[RangeRead], naming: Naming) -> int:
        """Read, check and keep what the local cache lacks of these ranges; raises as `execute`.

        Returns
        -------
        int
            Bytes of all chunks of the ranges, those included that were there.
        """
        assert self._cache is not None, "asked for by a reader with a cache"
        _, wanted = self._cache.split(ranges, self.coalescing.max_gap_nbytes)
        try:
            self._fetch([], wanted, None, coarse=False, inline=True)
        except (CorruptionError, NotFoundError) as error:
            raise _named(error, ranges, naming) from error
        self._cache.drain()
        return sum(chunk.nbytes for read in ranges for chunk in read.chunks)

    def _read_remote(self, ranges: Sequence[RangeRead], targets: Destinations, *, coarse: bool, inline: bool) -> None:
        """Read from the local cache what is there, and all else, and what is damaged there, from the store."""
        if self._cache is None:
            self._fetch([], ranges, targets, coarse=coarse, inline=inline)
            return
        gap = self.coalescing.max_gap_nbytes
        here, wanted = self._cache.split(ranges, gap)
        self._fetch(here, wanted, targets, coarse=coarse, inline=inline)
        again = [read for cached in here for read in ranges_of(cached.read, cached.failed, gap)]
        self._fetch([], again, targets, coarse=coarse, inline=inline)

    def _fetch(
        self,
        here: Sequence[CachedRange],
        wanted: Sequence[RangeRead],
        targets: Destinations | None,
        *,
        coarse: bool,
        inline: bool,
    ) -> None:
        """Take what is cached while the rest is in flight."""
        n_threads = self._n_threads or default_threads(remote=True)
        from_cache = [partial(self._read_cached, cached, targets, coarse=coarse) for cached in here if targets]
        if not wanted:
            run_all(_call, from_cache, n_threads, inline=inline)
            return
        self._count(sum(read.nbytes for read in wanted))
        with self._store.read_each([(read.path, read.offset, read.nbytes) for read in wanted]) as arrivals:
            incoming = _Incoming(arrivals, wanted, targets, coarse)
            arriving = iter(partial(self._next_of, incoming), None)
            work = partial(_call_or_close, arrivals)
            run_coming(work, chain(from_cache, arriving), n_threads, inline=inline, abandon=arrivals.close)
        if len(incoming.delivered) != len(wanted):
            got = f"{len(incoming.delivered)}"
            raise StorageError.at(self._store.url, expected=f"{len(wanted)} ranges", got=got)

    def _read_cached(self, cached: CachedRange, targets: Destinations, *, coarse: bool) -> None:
        """Read chunks out of the local cache as those of a local file; what is not as it should be, is noted."""
        assert self._cache is not None, "it said where they are"
        delivery = Delivery(cached.read.column, cached.read.path, targets, _SCRATCH, coarse=coarse)
        for chunk, path, places in [(chunk, path, delivery.places(chunk)) for chunk, path in cached.found]:
            try:
                with CachedEntry(path, chunk.offset) as entry:
                    taken = self._read_once(chunk, places, delivery, entry)
            except OSError as error:
                if isinstance(error, HsfmtError):
                    raise
                taken = False
            if not taken:
                self._cache.reject(cached, chunk, path)

    def _next_of(self, incoming: _Incoming) -> Callable[[], None] | None:
        """Wait for whichever range arrives next, and return what takes it to where it goes; None at the end."""
        arrived = incoming.arrivals.take()
        return None if arrived is None else partial(self._take, incoming, *arrived)

    def _take(self, incoming: _Incoming, number: int, body: BytesLike) -> None:
        """Check and decode a range that has arrived, while others are in flight."""
        read, targets = incoming.ranges[number], incoming.targets
        coarse = incoming.coarse
        delivery = None if targets is None else Delivery(read.column, read.path, targets, _SCRATCH, coarse=coarse)
        self._deliver(read, memoryview(body), delivery, None)
        incoming.arrivals.let_go(number)
        incoming.delivered.append(number)

    def _read_run(self, run: Sequence[RangeRead], targets: Destinations, *, coarse: bool) -> None:
        """Read ranges of one file."""
        path = run[0].path
        delivery = Delivery(run[0].column, path, targets, _SCRATCH, coarse=coarse)
        with os_errors_typed(path), DESCRIPTORS.opened(self._owner, path, self._store.local_path) as file:
            try:
                if delivery.small:
                    for read in run:
                        self._read_together(read, delivery, file)
                    return
                # All places first: after each chunk, what of the interpreter they take is out of the cache.
                chunks = [chunk for read in run for chunk in read.chunks]
                for chunk, places in [(chunk, delivery.places(chunk)) for chunk in chunks]:
                    self._read_chunk(chunk, places, delivery, file)
            finally:
                self._count(file.nbytes_read)

    def _read_together(self, read: RangeRead, delivery: Delivery, file: OpenFile) -> None:
        """Read all chunks of a range at once."""
        body = _SCRATCH.get("encoded", read.nbytes).data
        file.read(read.offset, (body,), read.nbytes)
        self._deliver(read, body, delivery, file)

    def _read_chunk(self, chunk: ChunkRead, places: Places | None, delivery: Delivery, file: OpenFile) -> None:
        """Read one chunk: straight to where it goes if it is not encoded, else into a buffer that is decoded."""
        if not self._read_once(chunk, places, delivery, file):
            delivery.deliver(chunk, self._read_again(chunk, delivery.path, file))

    def _read_once(
        self, chunk: ChunkRead, places: Places | None, delivery: Delivery, file: OpenFile | CachedEntry
    ) -> bool:
        """Read and deliver one chunk, and say whether it has its digest; else it was not delivered, or not whole."""
        if places:
            return self._fill(places, chunk, file, coarse=delivery.coarse)
        payload = _SCRATCH.get("encoded", chunk.nbytes).data
        digest = xxhash.xxh3_64()
        for at, nbytes, buffers, _ in run_pieces(payload, _piece_nbytes(coarse=delivery.coarse)):
            file.read(chunk.offset + at, buffers, nbytes)
            if self._check:
                digest.update(buffers[0])
        if self._check and digest.intdigest() != chunk.digest:
            return False
        delivery.deliver(chunk, payload)
        return True

    def _fill(self, places: Places, chunk: ChunkRead, file: OpenFile | CachedEntry, *, coarse: bool) -> bool:
        """Read a chunk that is not encoded, and say whether it has its digest, taken of each piece while in cache."""
        offset = chunk.offset
        if not self._check:
            for at, nbytes, buffers, staged in places.pieces(chunk.nbytes, _staging, _UNCHECKED_PIECE_NBYTES):
                if not staged or places.wanted(at, at + nbytes):
                    file.read(offset + at, buffers, nbytes)
                    if staged:
                        places.put(at, buffers[0])
            return True
        digest = xxhash.xxh3_64()
        staging = partial(_staging, coarse=coarse)
        for at, nbytes, buffers, staged in places.pieces(chunk.nbytes, staging, _piece_nbytes(coarse=coarse)):
            file.read(offset + at, buffers, nbytes)
            deque(map(digest.update, buffers), maxlen=0)
            if staged:
                places.put(at, buffers[0])
        return digest.intdigest() == chunk.digest

    def _deliver(self, read: RangeRead, body: memoryview, delivery: Delivery | None, file: OpenFile | None) -> None:
        """Check the chunks of a range, keep them in the local cache if there is one, and deliver what goes anywhere."""
        for chunk in read.chunks:
            start = chunk.offset - read.offset
            payload = body[start : start + chunk.nbytes]
            if self._check and xxhash.xxh3_64_intdigest(payload) != chunk.digest:
                payload = self._read_again(chunk, read.path, file)
            if self._cache is not None:  # first: what is delivered may be overwritten
                self._cache.add(read, chunk, payload, wait=delivery is None)
            if delivery is not None:
                delivery.deliver(chunk, payload)

    def _read_again(self, chunk: ChunkRead, path: str, file: OpenFile | None) -> memoryview:
        """Return the payload of a second read: of the disk or network, not of the file that was open so far."""
        payload = memoryview(bytearray(chunk.nbytes))
        if file is not None:
            file.reopen()
            file.read(chunk.offset, (payload,), chunk.nbytes)
        else:
            self._count(chunk.nbytes)
            self._store.read_into(path, chunk.offset, payload)
        actual = xxhash.xxh3_64_intdigest(payload)
        if actual != chunk.digest:
            twice = f"read twice from {self._store.url}" if self._named else "read twice"
            expected, got = f"xxh3_64 {chunk.digest:016x}", f"{actual:016x}, {twice}"
            raise CorruptionError.at(chunk.place(path), expected=expected, got=got, remedy=_REMEDY)
        return payload

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes_read += nbytes


def _call(work: Callable[[], None]) -> None:
    work()


def _call_or_close(arrivals: Arrivals, work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException:
        arrivals.close()  # threads that wait for more would do so for as long as it takes
        raise


def _piece_nbytes(*, coarse: bool) -> int:
    return _COARSE_PIECE_NBYTES if coarse else PIECE_NBYTES


def _staging(*, coarse: bool = False) -> memoryview:
    return _SCRATCH.get("staged", _piece_nbytes(coarse=coarse)).data


def _runs(ranges: Sequence[RangeRead], n_threads: int) -> list[list[RangeRead]]:
    """Put ranges of one file together, as long as there are several such runs for each thread."""
    limit = _RUN_NBYTES
    if n_threads > 1:
        limit = min(limit, sum(read.nbytes for read in ranges) // (n_threads * _RUNS_A_THREAD))
    runs: list[list[RangeRead]] = []
    path, nbytes = "", 0
    for read in ranges:
        nbytes += read.nbytes
        if read.path == path and nbytes <= limit:
            runs[-1].append(read)
        else:
            runs.append([read])
            path, nbytes = read.path, read.nbytes
    return runs


def _named(error: HsfmtError, ranges: Sequence[RangeRead], naming: Naming) -> CorruptionError:
    """Return the error with the samples that the damaged chunk (or, of a missing file, all its chunks) belongs to."""
    problems = []
    for problem in error.problems:
        reads = [read for read in ranges if problem.where.partition(":")[0] == read.path]
        exact = [chunk for read in reads for chunk in read.chunks if problem.where == chunk.place(read.path)]
        chunks = exact or [chunk for read in reads for chunk in read.chunks]
        samples = naming(sorted({copy.target for chunk in chunks for copy in chunk.copies}))
        remedy = problem.remedy or _REMEDY
        expected = "a shard of the part" if isinstance(error, NotFoundError) else problem.expected
        problems.append(Problem(problem.where, expected, problem.got, remedy, samples))
    return CorruptionError(problems)
