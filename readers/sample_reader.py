"""Samples of a snapshot as NumPy arrays: the reader under every view. No torch here.

Spec: rules READ-1 to READ-6.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import attachments, digests
from hsfmt.errors import CorruptionError, SampleNotFoundError, StorageError, UsageError
from hsfmt.header import Header
from hsfmt.layout import index_path
from hsfmt.naming import names_dataset
from hsfmt.readers.batch import ReadBatch
from hsfmt.readers.chunk_cache import ChunkCache
from hsfmt.readers.fetch import Fetcher
from hsfmt.readers.local_cache import LocalCache, shared_cache
from hsfmt.readers.open_snapshot import SampleIds, SnapshotChoice, choose_snapshot, sample_number
from hsfmt.readers.part_cache import OpenPart, PartCache
from hsfmt.readers.sample_arrays import PendingSample, SampleArrays, ask
from hsfmt.readers.sample_requests import Piece, SampleRequest, integer, layer_planes
from hsfmt.readers.second_read import read_twice
from hsfmt.snapshot import Snapshot
from hsfmt.storage import Store, open_store
from hsfmt.storage.cache_settings import CacheSettings, cache_settings

__all__ = ["Piece", "ReadOptions", "SampleArrays", "SampleReader", "SampleRequest"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a reader works, whatever it reads.

    Attributes
    ----------
    unsafe_skip_checks
        Do not compare chunks with their digests. For benchmarks only.
    n_threads
        Threads that fetch and decode; None: up to 4, and 1 in a worker of a DataLoader.
    part_cache_nbytes, chunk_cache_nbytes
        Memory for indexes of parts, and for decoded chunks of narrow columns.
    cache_dir
        A folder on a local disk that keeps what was read of remote datasets, shared by all processes that name it.
        None: the one that HSFMT_CACHE_DIR names, if any; "": none. Local datasets are not cached, nor is what is read
        without checks.
    cache_size
        The most that it may hold: bytes, or a text like 200GiB. None: what HSFMT_CACHE_SIZE says, else 32 GiB.

    Raises
    ------
    UsageError
        A number that is none, or too small.
    """

    unsafe_skip_checks: bool = False
    n_threads: int | None = None
    part_cache_nbytes: int = 512 << 20
    chunk_cache_nbytes: int = 32 << 20
    cache_dir: str | os.PathLike[str] | None = None
    cache_size: int | str | None = None

    def __post_init__(self) -> None:
        if self.n_threads is not None:
            integer(self.n_threads, "n_threads", "an integer from 1 on, or None", 1)
        for name in ("part_cache_nbytes", "chunk_cache_nbytes"):
            integer(getattr(self, name), name, "an integer from 0 on", 0)
        cache_settings(self.cache_dir, self.cache_size)


@dataclass(slots=True)
class _Opened:
    """What a reader holds in one process."""

    snapshot: Snapshot
    parts: PartCache
    chunks: ChunkCache
    fetcher: Fetcher
    lengths: npt.NDArray[np.int64] | None = None
    ids: SampleIds | None = None
    by_hash: npt.NDArray[np.int64] | None = None


class SampleReader:
    """Reads the samples of one snapshot; opening reads two files, whatever the number of parts.

    Picklable and usable after a fork: caches, files and threads are made in each process on first use.

    Parameters
    ----------
    url
        The dataset, or its store.
    snapshot
        None: the sealed one; "live": all that is committed now; or a fingerprint.
    options
        How to read.
    storage_options
        For fsspec URLs.

    Raises
    ------
    NotFoundError
        No dataset, or never sealed, or no such snapshot.
    CorruptionError
        The snapshot's bytes are not those that were written.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Store,
        *,
        snapshot: str | None = None,
        options: ReadOptions | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.store = url if isinstance(url, Store) else open_store(url, storage_options)
        self.options = options or ReadOptions()
        self._cache_settings = cache_settings(self.options.cache_dir, self.options.cache_size)
        self._choice, chosen = read_twice(self.store, lambda: choose_snapshot(self.store, snapshot, self.cache))
        self._opened: _Opened | None = self._open(chosen)

    def _open(self, snapshot: Snapshot) -> _Opened:
        options, cache = self.options, self.cache
        check = not options.unsafe_skip_checks
        return _Opened(
            snapshot=snapshot,
            parts=PartCache(self.store, snapshot, options.part_cache_nbytes, cache),
            chunks=ChunkCache(options.chunk_cache_nbytes),
            fetcher=Fetcher(self.store, check=check, n_threads=options.n_threads, cache=cache),
        )

    @property
    def cache(self) -> LocalCache | None:
        """The local cache, None where there is none: for local datasets, and where nothing names a folder."""
        return None if self.store.is_local else shared_cache(self._cache_settings)

    @property
    def count_fetched(self) -> Callable[[], int] | None:
        """Returns a number that grows with what the local cache does not have; None where there is no such cache."""
        fetcher, cache = self._state.fetcher, self.cache
        return None if cache is None else lambda: fetcher.nbytes_read + cache.n_documents

    @property
    def _state(self) -> _Opened:
        if self._opened is None:
            self._opened = self._open(read_twice(self.store, lambda: self._choice.load(self.store, self.cache)))
        return self._opened

    def __getstate__(self) -> tuple[Store, ReadOptions, SnapshotChoice, CacheSettings | None]:
        return self.store, self.options, self._choice, self._cache_settings

    def __setstate__(self, state: tuple[Store, ReadOptions, SnapshotChoice, CacheSettings | None]) -> None:
        self.store, self.options, self._choice, self._cache_settings = state
        self._opened = None

    @property
    def snapshot(self) -> Snapshot:
        """What is read; out of a pickle it is loaded on first use."""
        return self._state.snapshot

    @property
    def parts(self) -> PartCache:
        """The parts that the snapshot names."""
        return self._state.parts

    def __len__(self) -> int:
        return self.snapshot.n_samples

    @names_dataset
    def attachments(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays that belong to the dataset as a whole, by name, read and checked by each call.

        Raises
        ------
        CorruptionError, NotFoundError
            One is missing or damaged.
        """
        return attachments.load(self.store, self.snapshot.attachments, f"snapshot {self.snapshot.fingerprint}")

    @property
    def header(self) -> Header:
        """What the data means."""
        return self.snapshot.header

    @property
    def fingerprint(self) -> str:
        """The snapshot's name and digest."""
        return self._choice.fingerprint

    @property
    def is_live(self) -> bool:
        """Whether the snapshot was asked for as "live": this process resolved it, and it is stored nowhere."""
        return self._choice.live is not None

    @property
    def content_digest(self) -> str:
        """Digest of the (id, content) pairs, whatever their order, parts and codecs."""
        return self.snapshot.content_digest

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample, int64 [sample], read-only."""
        state = self._state
        if state.lengths is None:
            lengths = state.snapshot.n_tokens.astype(np.int64)
            lengths.flags.writeable = False
            state.lengths = lengths
        return state.lengths

    @property
    def sample_ids(self) -> SampleIds:
        """The ids in order; the first use reads one file."""
        state = self._state
        if state.ids is None:
            state.ids = SampleIds(
                read_twice(self.store, lambda: self._choice.load_ids(self.store, state.snapshot, self.cache))
            )
        return state.ids

    @names_dataset
    def index_of(self, sample_id: str) -> int:
        """Return the number of the sample with that id.

        Raises
        ------
        SampleNotFoundError
            There is none in this snapshot.
        """
        if isinstance(sample_id, str):
            state, hashes = self._state, self.snapshot.id_hash
            if state.by_hash is None:
                state.by_hash = np.argsort(hashes, kind="stable")
            wanted = np.uint64(digests.id_hash(sample_id.encode("utf-8", "surrogatepass")))
            at = int(np.searchsorted(hashes, wanted, sorter=state.by_hash))
            for number in state.by_hash[at:]:
                if hashes[number] != wanted:
                    break
                if self.sample_ids[int(number)] == sample_id:
                    return int(number)
        remedy = "`hsfmt ls` lists the ids; retracted samples and holes are not served"
        got = repr(sample_id)[:200]
        raise SampleNotFoundError.at(self.fingerprint, expected="an id of this snapshot", got=got, remedy=remedy)

    def read(
        self,
        index: int,
        start: int | None = None,
        stop: int | None = None,
        layers: Sequence[int] | None = None,
        out: Array | None = None,
    ) -> SampleArrays:
        """Return a sample, or its tokens [start, stop).

        Parameters
        ----------
        index
            Number of the sample; negative ones count from the end.
        start, stop
            Tokens, 0 <= start <= stop <= length; None: from the first, to the last.
        layers
            HF ids, a subset of the header's in ascending order; None: all.
        out
            Takes the states: [token, layer, hidden] of the storage dtype's size, any strides. After an error it holds
            anything.

        Raises
        ------
        IndexError
            There is no such sample.
        UsageError
            A window, layer or `out` that does not fit.
        CorruptionError, NotFoundError, StorageError
            It can't be read as it was committed.
        """
        return self.read_requests([SampleRequest(index, start, stop, out)], layers=layers)[0]

    def read_many(self, indices: Iterable[int], layers: Sequence[int] | None = None) -> list[SampleArrays]:
        """Return whole samples, read by one plan; raises as `read`."""
        return self.read_requests([SampleRequest(index) for index in indices], layers=layers)

    @names_dataset
    def read_requests(
        self,
        requests: Sequence[SampleRequest],
        *,
        layers: Sequence[int] | None = None,
        extras: Sequence[str] | None = None,
    ) -> list[SampleArrays]:
        """Return what is asked for, read by one plan.

        Parameters
        ----------
        requests
            Samples and windows; the same one may come twice.
        layers
            As in `read`.
        extras
            Names of the extra columns wanted; None: all.

        Raises
        ------
        IndexError, UsageError, CorruptionError, NotFoundError, StorageError
            As `read`.
        """
        planes = layer_planes(self.header, layers)
        batch = ReadBatch(self._state.fetcher, self._state.chunks)
        pending: list[PendingSample] = []

        def naming(owners: Iterable[int]) -> tuple[str, ...]:
            return tuple(dict.fromkeys(pending[owner].sample_id for owner in owners))

        try:
            self._load_parts(requests)
            for number, request in enumerate(requests):
                pending.append(ask(batch, number, self.locate(request.index), request, planes, extras))
            batch.execute(naming)
            return [sample.arrays() for sample in pending]
        except MemoryError as error:
            # Whoever wrote a sample may say that it has 2^31 tokens.
            tokens = sum(int(self.lengths[request.index]) for request in requests)
            expected = f"memory for {len(requests)} sample(s) of {tokens} tokens, or for their windows"
            remedy = "read a window of the tokens, fewer layers, or fewer samples at once"
            raise StorageError.at("memory", expected=expected, got=str(error) or "none", remedy=remedy) from error

    @names_dataset
    def warm(self, indices: Iterable[int], layers: Sequence[int] | None = None) -> int:
        """Bring samples into the local cache without decoding them, as far as they are not there.

        Returns
        -------
        int
            Encoded bytes of the chunks that these samples lie in.

        Raises
        ------
        UsageError
            There is no cache: the dataset is local, no folder was named, or nothing is checked.
        IndexError, CorruptionError, NotFoundError, StorageError
            As `read`.
        """
        if self.cache is None or self.options.unsafe_skip_checks:
            remedy = "give cache_dir, or set HSFMT_CACHE_DIR; what lies on a local disk is not cached"
            raise UsageError.at(self.store.url, expected="a remote dataset and a cache", got="none", remedy=remedy)
        requests = [SampleRequest(index) for index in indices]
        planes = layer_planes(self.header, layers)
        batch = ReadBatch(self._state.fetcher, ChunkCache(0))
        self._load_parts(requests)
        places = enumerate(map(self.locate, [request.index for request in requests]))
        asked = zip(places, requests, strict=True)
        pending = [ask(batch, number, place, request, planes, None) for (number, place), request in asked]
        return batch.warm(lambda owners: tuple(dict.fromkeys(pending[owner].sample_id for owner in owners)))

    @names_dataset
    def load_parts(self, indices: Iterable[int]) -> None:
        """Load manifests and indexes of the parts that samples lie in, as far as they are not loaded; raises as `read`.

        Parameters
        ----------
        indices
            Numbers of samples.
        """
        requests = [SampleRequest(index) for index in indices]
        self._load_parts(requests)
        for request in requests:
            self.locate(request.index)

    def _load_parts(self, requests: Sequence[SampleRequest]) -> None:
        """Load the parts of a batch together; a request for a sample that is not there is refused later."""
        numbers: list[Any] = [request.index for request in requests]
        integers = [int(number) for number in numbers if isinstance(number, int | np.integer)]
        known = [number for number in integers if -len(self) <= number < len(self)]
        self.parts.load(self.snapshot.part[known].tolist())

    def locate(self, index: int) -> tuple[OpenPart, int]:
        """Return (part, row) of a sample, compared with what the snapshot says of it.

        Raises
        ------
        IndexError, CorruptionError, NotFoundError
            No such sample; its part is missing or another.
        """
        number = sample_number(index, len(self))
        snapshot = self.snapshot
        part = self.parts.get(int(snapshot.part[number]))
        row = int(snapshot.row[number])
        offsets = part.index.token_offsets
        if 0 <= row < part.index.n_samples:
            same = int(offsets[row + 1] - offsets[row]) == snapshot.n_tokens[number]
            if same and digests.id_hash(part.index.id_bytes(row)) == snapshot.id_hash[number]:
                return part, row
        expected = f"sample {number} of snapshot {self.fingerprint} in row {row}"
        raise CorruptionError.at(index_path(part.name), expected=expected, got="another sample")

    def close(self) -> None:
        """Close the files that are open; reading goes on to work."""
        self._state.fetcher.close()
