"""Files of a local dataset: written whole under a temporary name, linked, fsynced, read."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hsfmt.errors import CorruptionError
from hsfmt.storage.base import BytesLike, flat_view


def temporary_name(final: str) -> str:
    """Return a name beside `final` that nobody else uses."""
    return f"{final}.{secrets.token_hex(8)}.tmp"


def open_new(path: str) -> int:
    """Return a descriptor of a file that this call makes."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write_all(fd: int, data: BytesLike) -> int:
    """Write all of `data`; return its bytes."""
    view = flat_view(data)
    done = 0
    while done < len(view):
        done += os.write(fd, view[done:])
    return done


def write_new(path: str, data: BytesLike) -> str:
    """Write a file that this call makes, durably, or leave none; return its path."""
    fd = open_new(path)
    try:
        write_all(fd, data)
        os.fsync(fd)
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(fd)
    return path


def linked(origin: str, final: str) -> str:
    """Return a temporary name beside `final` for the file at `origin`."""
    temporary = temporary_name(final)
    os.link(origin, temporary)
    return temporary


def fsync_directory(folder: str, *, must: bool) -> None:
    """Make the entries of a folder durable; one that may not be read is passed over unless it must be."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        if must:
            raise
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # some network file systems know no fsync of folders
            raise
    finally:
        os.close(fd)


@contextmanager
def opened(file: str, path: str) -> Iterator[tuple[int, int]]:
    """Open a regular file to read; yield (fd, nbytes). O_NONBLOCK, or a FIFO in its place would hang us."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptionError.at(path, expected="a regular file", got=stat.filemode(status.st_mode))
        yield fd, status.st_size
    finally:
        os.close(fd)


def fill(fd: int, offset: int, buffer: memoryview, path: str) -> None:
    """Fill `buffer` from `offset` on; `path` is for errors."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            raise _truncated(path, len(buffer), offset, done)
        done += count


def read_all(fd: int, nbytes: int, path: str) -> bytes:
    """Return the first bytes of an open file; `path` is for errors.

    They come in one piece as a rule, and a copy of it may be a gigabyte: so not by way of a bytearray.
    """
    pieces = [b""]
    done = 0
    while done < nbytes:
        pieces.append(os.read(fd, nbytes - done))
        if not pieces[-1]:
            raise _truncated(path, nbytes, 0, done)
        done += len(pieces[-1])
    return b"".join(pieces) if len(pieces) > 2 else pieces[-1]


def _truncated(path: str, nbytes: int, offset: int, done: int) -> CorruptionError:
    return CorruptionError.at(
        path,
        expected=f"{nbytes} bytes at offset {offset}",
        got=f"the end of the file after {done} bytes",
        remedy="the file was truncated: restore it, or run `hsfmt verify`",
    )
