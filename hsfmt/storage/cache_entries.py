"""Single files of a cache folder: reserved, written, read, and removed to make room; the steps of cache_folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from hsfmt.storage.cache_layout import charged, named_nbytes

ABANDONED_SECONDS = 300.0
_FREED_SHARE = 32  # of a quota, beyond what is needed: listing and sorting pay for several entries
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(slots=True)
class Reserved:
    """An entry that is about to be written, and the descriptor that does it."""

    path: str
    fd: int
    body: memoryview


def read_entry(path: str, nbytes: int) -> bytes | None:
    """Return an entry's bytes, None if they are not there."""
    try:
        fd = os.open(path, _READ_FLAGS)
    except OSError:
        return None
    try:
        body = bytearray(nbytes)
        done = 0
        while done < nbytes and (count := os.preadv(fd, [memoryview(body)[done:]], done)):
            done += count
        return bytes(body) if done == nbytes else None
    except OSError:
        return None
    finally:
        os.close(fd)


def open_entry(path: str) -> int:
    """Open an entry to read; it is kept open no longer than needed, since what was evicted then stays on the disk.

    Raises
    ------
    OSError
        It went away.
    """
    return os.open(path, _READ_FLAGS)


def listed(folder: str) -> Iterator[tuple[str, int]]:
    """Yield (name, nbytes) of the entries in a subfolder, reservations included, at what their names say."""
    try:
        with os.scandir(folder) as found:
            names = [entry.name for entry in found]
    except FileNotFoundError:
        return
    for name in names:
        nbytes = named_nbytes(name)
        if nbytes is not None:
            yield name, nbytes


def make_room(folder: str, quota: int) -> bool:
    """Evict until the subfolder fits its quota, reservations counted in full; say whether it does."""
    names = list(listed(folder))
    total = sum(charged(nbytes) for _, nbytes in names)
    if total <= quota:
        return True
    old: list[tuple[int, str, int]] = []
    for name, nbytes in names:
        path, size = f"{folder}/{name}", charged(nbytes)
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            total -= size
            continue
        if status.st_size >= nbytes:
            old.append((status.st_mtime_ns, path, size))
        elif is_abandoned(status):
            old.append((0, path, size))
    wanted = quota - quota // _FREED_SHARE
    for _, path, size in sorted(old):
        if total <= wanted:
            break
        with suppress(FileNotFoundError):
            os.unlink(path)
        total -= size
    return total <= quota


def is_abandoned(status: os.stat_result) -> bool:
    """Say whether nobody has written to an unfinished entry for so long that its writer must be gone."""
    return time.time() - status.st_mtime > ABANDONED_SECONDS


def reserve(path: str) -> int | None:
    """Create an empty entry and return its descriptor, None if it is there, or on its way by another process.

    Raises
    ------
    OSError
        It can't be created.
    """
    for attempt in range(3):
        try:
            return os.open(path, _NEW_FLAGS, 0o666)
        except FileExistsError:
            with suppress(FileNotFoundError):
                status = os.lstat(path)
                if status.st_size >= (named_nbytes(os.path.basename(path)) or 0) or not is_abandoned(status):
                    return None
                os.unlink(path)
        except FileNotFoundError:
            if attempt:
                raise
            with suppress(FileExistsError):
                os.mkdir(os.path.dirname(path))
    return None


def write(item: Reserved) -> None:
    """Write the bytes of an entry and close it; raises OSError."""
    done = 0
    while done < len(item.body):
        done += os.write(item.fd, item.body[done:])
    fd, item.fd = item.fd, -1
    os.close(fd)
