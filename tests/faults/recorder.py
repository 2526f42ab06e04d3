"""What a run does to the files below one folder, call by call: of what a power cut leaves a part."""

import io
import os
import threading
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from faulty_calls import RawFile, buffered

NAMED = ("rename", "replace", "link", "unlink", "remove", "mkdir", "rmdir")
KINDS = {"replace": "rename", "remove": "unlink"}
CALLS = ("open", "write", "fsync", "ftruncate", *NAMED)


class Recorder:
    """Records what changes files below `root`, in the order in which it happened."""

    def __init__(self, root):
        self.root = str(root)
        self.trace = []
        self._lock = threading.RLock()
        self._files = {}
        self._n_files = 0
        self._real = {name: getattr(os, name) for name in CALLS}
        self._io_open = io.open
        # Faults may replace these later on; what a recorder looks at is nobody's call.
        self._fstat, self._lstat = os.fstat, os.lstat

    def note(self, *event):
        self.trace.append(event)

    def _below(self, path):
        if isinstance(path, int):
            return None
        path = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - a link is not what it leads to
        return os.path.relpath(path, self.root) if path.startswith(self.root) else None

    def _exists(self, path):
        with suppress(FileNotFoundError):
            self._lstat(path)
            return True
        return False

    def _fd_path(self, fd):
        return self._below(Path(f"/proc/self/fd/{fd}").readlink())

    def _opened(self, fd, path, *, created, emptied):
        if created:
            self._n_files += 1
            self._files[self._fstat(fd).st_ino] = self._n_files
            self.note("create", path, self._n_files)
        elif emptied:
            self.note("truncate", self.file_of(fd), 0)

    def file_of(self, fd):
        """Return the number of a file; one that was there before is known by its path."""
        return self._files.get(self._fstat(fd).st_ino) or self._fd_path(fd)

    def open(self, path, flags, *args, **kwargs):
        with self._lock:
            below = self._below(path)
            new = below is not None and flags & os.O_CREAT and not self._exists(path)
            fd = self._real["open"](path, flags, *args, **kwargs)
            self._opened(fd, below, created=new, emptied=below is not None and flags & os.O_TRUNC)
            return fd

    def open_file(self, file, mode="r", buffering=-1, *args, **kwargs):
        below = self._below(file)
        if below is None or "b" not in mode or mode.startswith("r"):
            return self._io_open(file, mode, buffering, *args, **kwargs)
        with self._lock:
            new = not self._exists(file)
            raw = RawFile(file, mode.replace("b", ""))
            self._opened(raw.fileno(), below, created=new, emptied="w" in mode)
        return buffered(raw, mode, buffering)

    def write(self, fd, data):
        with self._lock:
            if self._fd_path(fd) is None:
                return self._real["write"](fd, data)
            at = os.lseek(fd, 0, os.SEEK_CUR)
            done = self._real["write"](fd, data)
            self.note("write", self.file_of(fd), at, bytes(memoryview(data).cast("B")[:done]))
            return done

    def ftruncate(self, fd, nbytes):
        with self._lock:
            self._real["ftruncate"](fd, nbytes)
            if self._fd_path(fd) is not None:
                self.note("truncate", self.file_of(fd), nbytes)

    def fsync(self, fd):
        with self._lock:
            self._real["fsync"](fd)
            path = self._fd_path(fd)
            if path is not None:
                folder = Path(f"/proc/self/fd/{fd}").is_dir()
                self.note("sync folder", path) if folder else self.note("sync", self.file_of(fd))

    def sync_failed(self, fd):
        """Note that this fsync failed: what it was to make durable is lost, and a later one will not say so."""
        path = self._fd_path(fd)
        folder = Path(f"/proc/self/fd/{fd}").is_dir()
        self.note("lost folder", path) if folder else self.note("lost", self.file_of(fd))

    def _named(self, kind, path, *args, **kwargs):
        with self._lock:
            result = self._real[kind](path, *args, **kwargs)
            if (below := self._below(path)) is not None:
                others = [self._below(args[0])] if kind in ("rename", "replace", "link") else []
                self.note(KINDS.get(kind, kind), below, *others)
            return result

    @contextmanager
    def active(self):
        """Record while the block runs."""
        for name in CALLS:
            setattr(os, name, partial(self._named, name) if name in NAMED else getattr(self, name))
        io.open = self.open_file
        try:
            yield self
        finally:
            for name, function in self._real.items():
                setattr(os, name, function)
            io.open = self._io_open
