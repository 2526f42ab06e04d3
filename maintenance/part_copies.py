"""Copying the files of parts between stores: several at a time, each compared with its digest, in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from hsfmt.errors import CorruptionError
from hsfmt.manifest import FileEntry
from hsfmt.readers.verification.objects import file_digest
from hsfmt.storage import Store
from hsfmt.storage.copying import MOST_HELD_NBYTES as READ_AHEAD_NBYTES
from hsfmt.storage.local import LocalStore

# As hsfmt/storage/uploads.py has them, which needs fsspec to be imported: the part of an upload that fills, and what of
# all uploads is on its way.
WRITE_BEHIND_NBYTES, IN_FLIGHT_NBYTES = 8 << 20, 64 << 20
FILE_NBYTES = READ_AHEAD_NBYTES + WRITE_BEHIND_NBYTES
"""Memory that a file takes while it is copied, at most, besides what is on its way."""


class _StoppedError(Exception):
    """Another file failed, or the run was interrupted."""


@dataclass
class Copied:
    """Bytes so far: copied through this process, copied by the server, read back, and files that were copied anew."""

    copied: int = 0
    by_server: int = 0
    read_back: int = 0
    again: int = 0


class Copies:
    """Files being copied; as a context manager, none is at the end of the block.

    Parameters
    ----------
    source, destination
        From where to where.
    connections
        Files at a time.
    read_back
        Read each file back and compare its digest once more.
    advance
        Called with the number of bytes after each block and each file copied by the server; by one thread at a time.
    """

    def __init__(
        self,
        source: Store,
        destination: Store,
        *,
        connections: int,
        read_back: bool,
        advance: Callable[[int], None] | None = None,
    ) -> None:
        self.done = Copied()
        self._source = source
        self._destination = destination
        self._read_back = read_back
        self._advance = advance or (lambda _: None)
        self._pool = ThreadPoolExecutor(connections, "hsfmt-copy")
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._first: BaseException | None = None
        # A hard link would be no copy of its own.
        self._by_server = not isinstance(destination, LocalStore) and destination.shares_storage(source)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stopped.set()
        self._pool.shutdown(wait=True, cancel_futures=error is not None)

    def start(self, entries: Iterable[FileEntry]) -> list[Future[None]]:
        """Copy these files, after those that were started before."""
        return [self._pool.submit(self._run, self._copy, entry) for entry in entries]

    def start_checks(self, entries: Iterable[FileEntry]) -> list[Future[None]]:
        """Read files that are there already back, and copy those anew that are not what they must be."""
        return [self._pool.submit(self._run, self._check, entry) for entry in entries]

    def wait(self, futures: Iterable[Future[None]]) -> None:
        """Wait until these are done.

        Raises
        ------
        NotFoundError, CorruptionError, StorageError
            What any file has failed with first; the others are given up.
        """
        try:
            for future in futures:
                future.result()
        except _StoppedError:
            assert self._first is not None
            raise self._first from None

    def _run(self, action: Callable[[FileEntry], None], entry: FileEntry) -> None:
        if self._stopped.is_set():
            raise _StoppedError
        try:
            action(entry)
        except _StoppedError:
            raise
        except BaseException as error:
            with self._lock:
                self._first = self._first or error
            self._stopped.set()
            raise

    def _copy(self, entry: FileEntry) -> None:
        # Of another size it is damaged, which a copy that compares will say.
        by_server = self._by_server and self._source.size(entry.path) == entry.nbytes
        if by_server and self._destination.link(self._source, entry.path):
            self._moved(entry.nbytes, by_server=True)
        else:
            self._copy_through(entry)
        if self._read_back and not self._is_right(entry):
            self._copy_through(entry)
            if not self._is_right(entry):
                where = f"{self._destination.url}: {entry.path}"
                remedy = "the storage does not keep what is written to it: check it, and run again"
                raise CorruptionError.at(where, expected=entry.digest, got="another digest, twice", remedy=remedy)

    def _check(self, entry: FileEntry) -> None:
        if not self._is_right(entry):
            with self._lock:
                self.done.again += 1
            self._copy(entry)

    def _copy_through(self, entry: FileEntry) -> None:
        with suppress(CorruptionError):  # what came wrong once may come right
            self._destination.copy_from(self._source, entry.path, entry.nbytes, entry.digest, self._moved)
            return
        self._destination.copy_from(self._source, entry.path, entry.nbytes, entry.digest, self._moved)

    def _is_right(self, entry: FileEntry) -> bool:
        def read(nbytes: int) -> None:
            if self._stopped.is_set():
                raise _StoppedError
            with self._lock:
                self.done.read_back += nbytes

        return file_digest(self._destination, entry.path, entry.nbytes, read) == entry.digest

    def _moved(self, nbytes: int, *, by_server: bool = False) -> None:
        if self._stopped.is_set():
            raise _StoppedError
        with self._lock:
            if by_server:
                self.done.by_server += nbytes
            else:
                self.done.copied += nbytes
            self._advance(nbytes)
