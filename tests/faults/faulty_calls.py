"""Calls of the operating system that fail, come short or never return, for paths below one folder.

Everything the package does to a file goes through `os` or `io.open`; both are replaced here, so that a run can be
repeated with its k-th call failing. A process that dies is one whose every further call has no effect: that is exactly
what a file system sees of a kill, and costs no process.
"""

import errno
import io
import os
import threading
from contextlib import contextmanager
from pathlib import Path

READ = ("stat", "lstat", "scandir", "listdir", "preadv", "read", "statvfs", "fstat")
WRITE = ("write", "fsync", "rename", "replace", "link", "unlink", "remove", "mkdir", "rmdir", "ftruncate")
BOTH = ("open", "close")
CALLS = READ + WRITE + BOTH
SHORT, DIES = "short", "dies"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ERRORS = (errno.EIO, errno.ENOSPC, errno.EINTR, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ESTALE)


def calls_that(fault):
    """Return the calls that a fault can hit: a process that dies before it only looks died before it changed something.

    lstat is left out: it is what realpath() makes of every folder, and it goes on where that fails.
    """
    if fault == SHORT:
        return ("write", "preadv", "read")
    if fault == DIES or fault in _FULL:
        return (*WRITE, "open")
    return tuple(name for name in CALLS if name != "lstat")


_IO_OPEN = io.open


class DeadError(BaseException):
    """What a killed process would have done next did not happen."""


class Faults:
    """Counts the calls below `root`, and makes the k-th fail.

    Parameters
    ----------
    root
        Calls for other paths are left alone.
    k
        Which call fails, from 1 on; None to count only.
    fault
        An errno, SHORT (writes and reads move half of what they were asked for) or DIES.
    persistent
        Whether all later calls of that name fail too.
    calls
        Names of the calls that count.
    """

    def __init__(self, root, k=None, fault=None, *, persistent=False, calls=CALLS):
        self.root, self.k, self.fault, self.persistent, self.calls = str(root), k, fault, persistent, frozenset(calls)
        self.seen = []
        self.failed = None
        self.on_failure = lambda target: None
        self._dead = False
        self._lock = threading.Lock()
        self._real = {name: getattr(os, name) for name in CALLS}
        self._io_open = io.open

    def path_of(self, target):
        if isinstance(target, int):
            try:
                return str(Path(f"/proc/self/fd/{target}").readlink())
            except OSError:
                return ""
        try:
            return os.path.abspath(os.fsdecode(target))  # noqa: PTH100 - resolve() makes calls that count
        except TypeError:
            return ""

    def verdict(self, name, target):
        """Count a call; return None, or the fault to apply to it."""
        path = self.path_of(target)
        if name not in self.calls or not path.startswith(self.root):
            return None
        with self._lock:
            if self._dead:
                return DIES
            self.seen.append((name, path))
            if self.failed is None and len(self.seen) == self.k:
                self.failed = (name, path)
                self._dead = self.fault == DIES
                self.on_failure(target)
                return self.fault
            again = self.persistent and self.failed is not None and self.failed[0] == name
            return self.fault if again else None

    def replaced(self, name):
        real = self._real[name]

        def call(target, *args, **kwargs):
            fault = self.verdict(name, target)
            if fault is None:
                return real(target, *args, **kwargs)
            if name == "close":
                real(target)  # the descriptor is gone whatever close() reports
                if fault == SHORT:
                    return None
            if fault == DIES:
                raise DeadError(name)
            if fault != SHORT:
                shown = () if isinstance(target, int) else (os.fspath(target),)
                raise OSError(fault, os.strerror(fault), *shown)
            if name == "write":
                return real(target, memoryview(args[0])[: max(1, len(args[0]) // 2)])
            if name == "preadv":
                first = memoryview(args[0][0]).cast("B")
                return real(target, [first[: max(1, len(first) // 2)]], *args[1:])
            if name == "read":
                return real(target, max(1, args[0] // 2))
            return real(target, *args, **kwargs)

        return call

    def open_file(self, file, mode="r", buffering=-1, *args, **kwargs):
        """Stand for io.open; a binary file that is written goes through os.write and os.close, so that they fail."""
        fault = self.verdict("open", file)
        if fault == DIES:
            raise DeadError("open")
        if fault not in (None, SHORT):
            raise OSError(fault, os.strerror(fault), os.fspath(file))
        if isinstance(file, int) or "b" not in mode or not self.path_of(file).startswith(self.root):
            return self._io_open(file, mode, buffering, *args, **kwargs)
        if self._io_open is _IO_OPEN:
            return buffered(RawFile(file, mode.replace("b", "")), mode, buffering)
        return self._io_open(file, mode, buffering, *args, **kwargs)  # a recorder's

    @contextmanager
    def active(self):
        """Replace the calls while the block runs."""
        for name in CALLS:
            setattr(os, name, self.replaced(name))
        io.open = self.open_file
        supported = (os.supports_fd, os.supports_follow_symlinks, os.supports_dir_fd)
        added = [{getattr(os, n) for n in CALLS if self._real[n] in s} for s in supported]
        for functions, mine in zip(supported, added, strict=True):
            functions.update(mine)
        try:
            yield self
        finally:
            for name, real in self._real.items():
                setattr(os, name, real)
            io.open = self._io_open
            for functions, mine in zip(supported, added, strict=True):
                functions.difference_update(mine)


class RawFile(io.FileIO):
    """A file of io.open that is written and closed by calls of `os`, where they can be replaced."""

    def write(self, data):
        return os.write(self.fileno(), data)

    def close(self):
        if not self.closed:
            fd = self.fileno()
            copy = os.dup(fd)
            super().close()
            os.close(copy)


def buffered(raw, mode, buffering):
    """Return what io.open would have made of a raw file."""
    if buffering == 0:
        return raw
    if "+" in mode:
        return io.BufferedRandom(raw)
    return io.BufferedReader(raw) if mode.startswith("r") else io.BufferedWriter(raw)
