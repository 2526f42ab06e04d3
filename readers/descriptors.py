"""Open files: one bounded cache a process, shared by all readers, so that a low `ulimit -n` is enough."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

from hsfmt.errors import CorruptionError
from hsfmt.readers.process_state import ForkAware

_MAX_OPEN = 64
_Key = tuple[int, str]


class _File:
    __slots__ = ("dropped", "fd", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 1
        self.dropped = False


class OpenFile:
    """A file of a dataset in the hands of one thread, which opens it anew where reading fails.

    Parameters
    ----------
    cache
        Whose descriptor it is.
    key
        Owner and path inside the dataset.
    locate
        From that path to the one in the file system.

    Attributes
    ----------
    fd
        Its descriptor, once entered.
    nbytes_read
        Bytes read so far.
    """

    __slots__ = ("_cache", "_entry", "_key", "_locate", "fd", "nbytes_read")

    def __init__(self, cache: DescriptorCache, key: _Key, locate: Callable[[str], str | None]) -> None:
        self._cache = cache
        self._key = key
        self._locate = locate
        self._entry: _File | None = None
        self.fd = -1
        self.nbytes_read = 0

    def __enter__(self) -> Self:
        self._entry = self._cache.take(self._key, self._locate)
        self.fd = self._entry.fd
        return self

    def __exit__(self, *_: object) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            self._cache.give_back(entry)

    def reopen(self) -> None:
        """Let go of the file that is open, which may have been replaced since, or its server have forgotten it."""
        self.__exit__()
        self._cache.forget(*self._key)
        self.__enter__()

    def read(self, offset: int, buffers: Sequence[Any], nbytes: int) -> None:
        """Fill up to 1024 buffers, of `nbytes` together.

        Raises
        ------
        OSError
            The system's, also from the file that was opened anew.
        CorruptionError
            The file ends before, and so does the one that was opened anew.
        """
        try:
            done = os.preadv(self.fd, buffers, offset)
            if done < nbytes:
                done = _read_rest(self.fd, offset, buffers, nbytes, done)
        except OSError:
            done = -1
        if done < nbytes:
            self.reopen()
            done = _read_rest(self.fd, offset, buffers, nbytes, 0)
            if done < nbytes:
                expected, got = f"{nbytes} bytes at offset {offset}", f"the end of the file after {done} bytes"
                raise CorruptionError.at(self._key[1], expected=expected, got=got)
        self.nbytes_read += nbytes


class DescriptorCache(ForkAware):
    """Read-only file descriptors, closed when least recently used.

    A descriptor in use is never closed, so that there can be as many more than `max_open` as there are threads reading.
    """

    def __init__(self, max_open: int = _MAX_OPEN) -> None:
        super().__init__()
        self._max_open = max_open
        self._lock = threading.Lock()
        self._files: OrderedDict[_Key, _File] = OrderedDict()
        self._gone: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._files)

    def opened(self, owner: int, path: str, locate: Callable[[str], str | None]) -> OpenFile:
        """Return `path` inside the dataset of `owner`, to be entered; `locate` gives its path in the file system."""
        return OpenFile(self, (owner, path), locate)

    def take(self, key: _Key, locate: Callable[[str], str | None]) -> _File:
        """Return a descriptor that stays open until it is given back.

        Raises
        ------
        OSError
            It can't be opened.
        CorruptionError
            It is no regular file.
        """
        return self._taken(key) or self._opened(key, locate(key[1]) or key[1])

    def give_back(self, entry: _File) -> None:
        """Let a descriptor be closed when that suits."""
        with self._lock:
            entry.users -= 1
            if entry.dropped and not entry.users:
                os.close(entry.fd)
            self._trim(self._max_open)

    def forget(self, owner: int, path: str) -> None:
        """Open `path` anew next time."""
        with self._lock:
            self._drop((owner, path))

    def release(self, owner: int) -> None:
        """Close what an owner opened. Safe in a finalizer, which can run while this very thread holds the lock."""
        self._gone.append(owner)
        if not self._lock.locked():
            with self._lock:
                self._trim(self._max_open)

    def after_fork(self) -> None:
        """Close the parent's descriptors in the child."""
        files, self._files = self._files, OrderedDict()
        self._lock = threading.Lock()
        for entry in list(files.values()):
            with suppress(OSError):
                os.close(entry.fd)

    def _taken(self, key: _Key) -> _File | None:
        with self._lock:
            entry = self._files.get(key)
            if entry is not None:
                entry.users += 1
                self._files.move_to_end(key)
            return entry

    def _opened(self, key: _Key, file: str) -> _File:
        try:
            fd = open_regular(file, key[1])
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            with self._lock:
                self._trim(0)
            fd = open_regular(file, key[1])
        with self._lock:
            entry = self._files.get(key)
            if entry is not None:  # another thread was quicker
                os.close(fd)
                entry.users += 1
                return entry
            entry = self._files[key] = _File(fd)
            return entry

    def _drop(self, key: _Key) -> None:
        entry = self._files.pop(key, None)
        if entry is not None:
            entry.dropped = True
            if not entry.users:
                os.close(entry.fd)

    def _trim(self, limit: int) -> None:
        while self._gone:
            owner = self._gone.popleft()
            for key in [key for key in self._files if key[0] == owner]:
                self._drop(key)
        if len(self._files) > limit:
            for key in [key for key, entry in self._files.items() if not entry.users][: len(self._files) - limit]:
                self._drop(key)


def _read_rest(fd: int, offset: int, buffers: Sequence[Any], nbytes: int, done: int) -> int:
    """Go on after `done` bytes; return how many of `nbytes` there were before the end of the file."""
    while done < nbytes:
        rest, skipped = [], done
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            rest.append(view[skipped:])
            skipped = max(0, skipped - len(view))
        count = os.preadv(fd, [view for view in rest if len(view)], offset + done)
        if not count:
            break
        done += count
    return done


def open_regular(file: str, path: str) -> int:
    """Open a regular file to read; O_NONBLOCK, or a FIFO in its place would hang us."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise CorruptionError.at(path, expected="a regular file", got=stat.filemode(mode))
    return fd


DESCRIPTORS = DescriptorCache()
