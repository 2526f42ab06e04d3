"""Checked chunks and documents of remote datasets on a local disk: looked up before a request, added after it.

Whatever comes out of the cache is compared with its digest like what comes from the storage. What it holds is named by
what it is (the part, its index's digest, column, chunk, and the payload's digest), not by where it came from: snapshots
and datasets that share a part share its entries.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import xxhash

from hsfmt.errors import HsfmtError
from hsfmt.readers.cache_filling import Filler
from hsfmt.readers.planner import ChunkRead, RangeRead
from hsfmt.readers.process_state import ForkAware
from hsfmt.storage.cache_entries import read_entry
from hsfmt.storage.cache_folder import CacheFolder
from hsfmt.storage.cache_layout import EntryName, key_of
from hsfmt.storage.cache_settings import CacheSettings
from hsfmt.tables import MAX_TABLE_NBYTES

_T = TypeVar("_T")
_SEAL_NBYTES = 16


@dataclass(slots=True)
class CachedRange:
    """Chunks of a range that are in the cache.

    Attributes
    ----------
    read
        The range.
    found
        (chunk, path of its entry).
    failed
        Those of them that turned out not to be there as they should.
    """

    read: RangeRead
    found: list[tuple[ChunkRead, str]] = field(default_factory=list)
    failed: list[ChunkRead] = field(default_factory=list)


class LocalCache(ForkAware):
    """What a process does with one cache folder.

    Parameters
    ----------
    settings
        Which folder, and its limit.

    Attributes
    ----------
    folder
        The entries.
    n_hits, n_misses, n_damaged
        Chunks found, not found, and found to be something else.
    n_documents
        Those that were not found.
    """

    def __init__(self, settings: CacheSettings) -> None:
        super().__init__()
        self.folder = CacheFolder(settings.folder, settings.limit_nbytes)
        self._filler = Filler(self.folder)
        self.n_hits = self.n_misses = self.n_damaged = self.n_documents = 0
        self.after_fork()

    def after_fork(self) -> None:
        """Take a new lock; another thread may have held it."""
        self._lock = threading.Lock()

    def split(self, ranges: Sequence[RangeRead], max_gap_nbytes: int) -> tuple[list[CachedRange], list[RangeRead]]:
        """Return the chunks of these ranges that are here, and ranges of those that are not."""
        here: list[CachedRange] = []
        wanted: list[RangeRead] = []
        n_hits = n_misses = 0
        for read in ranges:
            cached = CachedRange(read)
            missing = []
            for chunk in read.chunks:
                path = self.folder.locate(_name(read, chunk))
                if path is None:
                    missing.append(chunk)
                else:
                    cached.found.append((chunk, path))
            n_hits, n_misses = n_hits + len(cached.found), n_misses + len(missing)
            if cached.found:
                here.append(cached)
                wanted += ranges_of(read, missing, max_gap_nbytes)
            else:
                wanted.append(read)
        with self._lock:
            self.n_hits, self.n_misses = self.n_hits + n_hits, self.n_misses + n_misses
        return here, wanted

    def reject(self, cached: CachedRange, chunk: ChunkRead, path: str) -> None:
        """Note that an entry is not what it should be, and remove it."""
        self.folder.forget(path)
        cached.failed.append(chunk)
        with self._lock:
            self.n_damaged += 1

    def add(self, read: RangeRead, chunk: ChunkRead, payload: memoryview, *, wait: bool = False) -> None:
        """Keep a payload that was compared with its digest; it is written later, by another thread."""
        # What is decoded is overwritten by that.
        body = payload if read.column.codec == "none" else bytes(payload)
        self._filler.add(_name(read, chunk), body, wait=wait)

    def drain(self) -> None:
        """Wait until what was added is written, or given up."""
        self._filler.drain()

    def document(
        self, what: tuple[str, str], nbytes: int | None, parse: Callable[[bytes], _T], read: Callable[[], bytes]
    ) -> _T:
        """Return a document that a digest names, parsed and checked, out of the cache or as `read` returns it.

        Parameters
        ----------
        what
            Its kind and digest.
        nbytes
            Its size, if that is known.
        parse
            Parses it and compares it with the digest.
        read
            Reads it from the storage.
        """
        body = self.get_document(what, nbytes)
        if body is not None:
            try:
                return parse(body)
            except HsfmtError:
                self.forget_document(what)
        body = read()
        parsed = parse(body)
        self.add_document(what, body)
        return parsed

    def get_document(self, what: tuple[str, str], nbytes: int | None) -> bytes | None:
        """Return a document as it was added, None if it is not here or damaged."""
        key = key_of("document", *what)
        name = self.folder.find(key) if nbytes is None else EntryName(key, nbytes + _SEAL_NBYTES)
        path = None if name is None else self.folder.locate(name)
        if name is None or path is None or name.nbytes > MAX_TABLE_NBYTES + _SEAL_NBYTES:
            return None
        sealed = read_entry(path, name.nbytes)
        if sealed is not None and len(sealed) >= _SEAL_NBYTES and _sealed(key, sealed[:-_SEAL_NBYTES]) == sealed:
            return sealed[:-_SEAL_NBYTES]
        self.folder.forget(path)
        with self._lock:
            self.n_damaged += 1
        return None

    def add_document(self, what: tuple[str, str], body: bytes) -> None:
        """Keep a document that was compared with its digest, and came from the storage."""
        with self._lock:
            self.n_documents += 1
        key = key_of("document", *what)
        self._filler.add(EntryName(key, len(body) + _SEAL_NBYTES), _sealed(key, body))

    def forget_document(self, what: tuple[str, str]) -> None:
        """Remove a document that is another one."""
        name = self.folder.find(key_of("document", *what))
        path = None if name is None else self.folder.locate(name)
        if path is not None:
            self.folder.forget(path)


_CACHES: dict[CacheSettings, LocalCache] = {}


def shared_cache(settings: CacheSettings | None) -> LocalCache | None:
    """Return the cache of these settings in this process: one, whoever asks."""
    return None if settings is None else _CACHES.setdefault(settings, LocalCache(settings))


def ranges_of(read: RangeRead, chunks: Sequence[ChunkRead], max_gap_nbytes: int) -> list[RangeRead]:
    """Return ranges for some chunks of a range, without those between them that are not worth reading along."""
    ranges: list[RangeRead] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offset):
        last = ranges[-1] if ranges else None
        if last is not None and chunk.offset - (last.offset + last.nbytes) <= max_gap_nbytes:
            last.chunks.append(chunk)
            last.nbytes = chunk.offset + chunk.nbytes - last.offset
        else:
            ranges.append(RangeRead(read.column, read.path, chunk.offset, chunk.nbytes, [chunk], read.part))
    return ranges


def _name(read: RangeRead, chunk: ChunkRead) -> EntryName:
    number, digest = f"{chunk.number}", f"{chunk.digest:016x}"
    return EntryName(key_of("chunk", read.part, read.column.name, number, digest, f"{chunk.nbytes}"), chunk.nbytes)


def _sealed(key: str, body: bytes) -> bytes:
    """Return a document with a digest of it and of its key, which no other document fits."""
    return body + xxhash.xxh3_128_digest(key.encode() + body)
