"""An entry of the local cache in the hands of the thread that reads it."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any, Self

from hsfmt.storage.cache_entries import open_entry


class CachedEntry:
    """A file with one payload, opened for one read: what is evicted meanwhile takes its place on the disk until then.

    Parameters
    ----------
    path
        The file.
    offset
        Of its first byte in the shard, from where offsets are counted.

    Raises
    ------
    OSError
        It went away.
    """

    __slots__ = ("_fd", "_offset", "_path")

    def __init__(self, path: str, offset: int) -> None:
        self._path = path
        self._offset = offset
        self._fd = -1

    def __enter__(self) -> Self:
        self._fd = open_entry(self._path)
        return self

    def __exit__(self, *_: object) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)

    def read(self, offset: int, buffers: Sequence[Any], nbytes: int) -> None:
        """Fill up to 1024 buffers, of `nbytes` together.

        Raises
        ------
        OSError
            It can't be read, or ends before.
        """
        if os.preadv(self._fd, buffers, offset - self._offset) != nbytes:
            raise OSError(errno.EIO, "shorter than its name says, or read by halves")
