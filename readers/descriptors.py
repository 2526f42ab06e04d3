"""Open files: one bounded cache a process, shared by all readers, so that a low `ulimit -n` is enough."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

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

    @contextmanager
    def opened(self, owner: int, path: str, locate: Callable[[str], str | None]) -> Iterator[int]:
        """Yield the descriptor of `path` inside the dataset of `owner`; `locate` gives its path in the file system.

        Raises
        ------
        OSError
            It can't be opened.
        CorruptionError
            It is no regular file.
        """
        key = (owner, path)
        entry = self._taken(key) or self._opened(key, locate(path) or path)
        try:
            yield entry.fd
        finally:
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


def open_regular(file: str, path: str) -> int:
    """Open a regular file to read; O_NONBLOCK, or a FIFO in its place would hang us."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise CorruptionError.at(path, expected="a regular file", got=stat.filemode(mode))
    return fd


DESCRIPTORS = DescriptorCache()
