"""Memory files (memfd) that torch maps as if another process had sent them; one that came back is used again.

Fresh memory costs more than reading into it: each page is zeroed on its first touch. So a worker keeps its files and
maps one again once nobody has it any more. A lock says so, which the kernel drops with the last descriptor and the last
mapping, in whatever process: what is sent is a description of its own of the file, locked; and while it exists, the
worker's own description can't be locked.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable

import torch
import torch.multiprocessing

from hsfmt.errors import StorageError
from hsfmt.readers.process_state import ForkAware

_MAP = "_new_shared_fd_cpu"  # what torch itself maps with what it receives
_MIN_KEPT_NBYTES = 1 << 20
_MAX_KEPT_NBYTES = 1 << 30
_MAX_KEPT_FILES = 8


class _File:
    """A memory file; it takes no memory until its pages are touched."""

    __slots__ = ("fd", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create("hsfmt-batch", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, nbytes)
        except OSError:
            os.close(self.fd)
            raise

    def is_free(self) -> bool:
        """Say whether no description that `map` opened exists any more."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return True

    def map(self, nbytes: int) -> torch.UntypedStorage:
        """Return the first `nbytes` bytes through a new, locked description."""
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            map_shared: Callable[[int, int], torch.UntypedStorage] = getattr(torch.UntypedStorage, _MAP)
            return map_shared(fd, nbytes)
        finally:
            os.close(fd)


class SharedMemory(ForkAware):
    """Hands out shared memory of a worker process; keeps up to 8 files of 1 GiB together, the least recently used go.

    Descriptors of a parent are closed in its child: there they would be of no use, and keep the memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._files: list[_File] = []
        self._lock = threading.Lock()

    def after_fork(self) -> None:
        """Close the parent's files."""
        files, self._files = self._files, []
        self._lock = threading.Lock()
        for file in files:
            os.close(file.fd)

    def storage(self, nbytes: int) -> torch.UntypedStorage | None:
        """Return `nbytes` bytes, uninitialised, or None where torch has to copy: it shares by name, say.

        Raises
        ------
        StorageError
            No further file may be opened.
        """
        if not nbytes or not _is_sent_by_descriptor():
            return None
        try:
            with self._lock:
                return self._map(nbytes)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return None
            # torch would need a descriptor too, and what fails while it sends never arrives: the trainer would wait.
            remedy = "raise `ulimit -n`, or hold fewer batches at a time (workers x prefetch_factor)"
            raise StorageError.at("worker", expected="a free file descriptor", got=str(error), remedy=remedy) from error
        except (RuntimeError, TypeError):  # no memory to map; the signature of another torch
            return None

    def _map(self, nbytes: int) -> torch.UntypedStorage:
        size = _file_nbytes(nbytes)
        file = next((file for file in self._files if file.nbytes == size and file.is_free()), None)
        if file is None:
            file = _File(size)
        else:
            self._files.remove(file)
        try:
            return file.map(nbytes)
        finally:
            if nbytes < _MIN_KEPT_NBYTES:
                os.close(file.fd)
            else:
                self._files.append(file)
            while len(self._files) > _MAX_KEPT_FILES or sum(file.nbytes for file in self._files) > _MAX_KEPT_NBYTES:
                os.close(self._files.pop(0).fd)


def _file_nbytes(nbytes: int) -> int:
    """Return the size of the file for `nbytes` bytes: few sizes, so that a file fits many a batch."""
    return 1 << (nbytes - 1).bit_length()


def _is_sent_by_descriptor() -> bool:
    """Say whether torch sends a mapped file as it is; older or newer ones may lack the function that maps it."""
    by_descriptor = torch.multiprocessing.get_sharing_strategy() == "file_descriptor"  # type: ignore[no-untyped-call]
    return bool(by_descriptor) and hasattr(os, "memfd_create") and hasattr(torch.UntypedStorage, _MAP)


SHARED_MEMORY = SharedMemory()
