"""A folder of checked copies of remote bytes, shared by many processes, without locks and within a limit.

An entry's name is there from the beginning: created exclusively while the file is empty, it reserves the bytes that it
carries. Only then is the subfolder listed and made to fit its quota, and only then are bytes written. Of any entries
that hold bytes, the one whose writer listed last saw the names of all others, so that together they are within the
quota. A reservation is a file shorter than its name says; one of a process that was killed goes when it is old. If its
process was slow only, it goes on to write into a file without a name.

Nothing is synced: whoever reads an entry compares it with its digest anyway.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hsfmt.errors import HsfmtError
from hsfmt.storage.base import BytesLike, flat_view
from hsfmt.storage.cache_entries import Reserved, is_abandoned, listed, make_room, reserve, write
from hsfmt.storage.cache_layout import (
    LAYOUT_FILE,
    EntryName,
    charged,
    layout_bytes,
    leaf,
    leaves,
    n_folders_for,
    parse_layout,
)
from hsfmt.storage.local import LocalStore

_log = logging.getLogger("hsfmt")

_TOUCH_SECONDS = 60.0
_PAUSE_SECONDS = 60.0
_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(slots=True)
class CacheUsage:
    """What a cache folder holds.

    Attributes
    ----------
    n_entries, nbytes
        Complete entries, and what they take on disk.
    n_unfinished, unfinished_nbytes
        Entries that are being written, or whose writers were killed.
    oldest, newest
        Times of the least and the most recent use, in seconds since 1970, accurate to a minute; 0 without entries.
    """

    n_entries: int = 0
    nbytes: int = 0
    n_unfinished: int = 0
    unfinished_nbytes: int = 0
    oldest: float = 0.0
    newest: float = 0.0


class CacheFolder:
    """Entries below one folder. What can't be read is not there; what can't be written is left out, and warned of once.

    Parameters
    ----------
    path
        The folder, which need not exist.
    limit_nbytes
        The most that all its entries together take on disk. Of processes with several limits, the largest holds.

    Attributes
    ----------
    failure
        Why nothing could be written last time, "" if it could.
    too_large
        Bytes of an entry that the limit had no room for, 0 if there was none.
    """

    def __init__(self, path: str, limit_nbytes: int) -> None:
        self.path = path
        self.limit_nbytes = limit_nbytes
        self.failure = ""
        self.too_large = 0
        self._n_folders: int | None = None
        self._swept = False
        self._paused_until = 0.0
        self._warned: set[str] = set()

    @property
    def writable(self) -> bool:
        """Whether it is worth while to try: after a failure, not for a minute."""
        return time.monotonic() >= self._paused_until

    def locate(self, name: EntryName) -> str | None:
        """Return the path of an entry that is there and as long as it should be; it counts as used now."""
        folder = self._folder(name.key)
        if folder is None:
            return None
        path = f"{folder}/{name}"
        try:
            status = os.lstat(path)
        except OSError:
            return None
        if status.st_size != name.nbytes or not stat.S_ISREG(status.st_mode):
            if status.st_size >= name.nbytes or is_abandoned(status):
                self.forget(path)
            return None
        if time.time() - status.st_mtime > _TOUCH_SECONDS:
            with suppress(OSError):
                os.utime(path)
        return path

    def find(self, key: str) -> EntryName | None:
        """Return the name of the entry of a key whose size is not known."""
        folder = self._folder(key)
        with suppress(OSError):
            for name, nbytes in listed(folder) if folder is not None else ():
                if name.startswith(f"{key}-"):
                    return EntryName(key, nbytes)
        return None

    def forget(self, path: str) -> None:
        """Remove an entry that is not what it should be."""
        with suppress(OSError):
            os.unlink(path)

    def insert(self, entries: Sequence[tuple[EntryName, BytesLike]]) -> int:
        """Add entries; return how many. Those that are there, or too large for the limit, are left out."""
        if not entries or not self.writable:
            return 0
        try:
            n_folders = self._opened_layout()
            if n_folders is None:
                return 0
            if not self._swept:
                self._sweep(n_folders)
                self._swept = True
            quota = self.limit_nbytes // n_folders
            return sum(self._insert_into(f, quota, batch) for f, batch in self._batches(entries, n_folders, quota))
        except Exception as error:  # noqa: BLE001  whatever it is, a cache fails no read
            self._pause(error)
            return 0

    def usage(self) -> CacheUsage:
        """Return what is there now.

        Raises
        ------
        OSError
            It can't be listed.
        """
        usage = CacheUsage()
        for _, folder in leaves(self.path):
            for name, nbytes in listed(folder):
                try:
                    status = os.lstat(f"{folder}/{name}")
                except FileNotFoundError:
                    continue
                if status.st_size < nbytes:
                    usage.n_unfinished += 1
                    usage.unfinished_nbytes += charged(status.st_size)
                    continue
                usage.n_entries += 1
                usage.nbytes += charged(status.st_size)
                usage.oldest = min(usage.oldest or status.st_mtime, status.st_mtime)
                usage.newest = max(usage.newest, status.st_mtime)
        return usage

    def clear(self) -> tuple[int, int]:
        """Remove all entries, and what says that it is a cache; return their number and bytes on disk.

        Processes that use it go on, and begin it anew.

        Raises
        ------
        OSError
            Something can't be removed.
        """
        n_entries = nbytes = 0
        self._n_folders = None
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, LAYOUT_FILE))
        tops = set()
        for _, folder in leaves(self.path):
            tops.add(os.path.dirname(folder))
            for name, _ in listed(folder):
                path = f"{folder}/{name}"
                with suppress(FileNotFoundError):
                    size = charged(os.lstat(path).st_size)
                    os.unlink(path)
                    n_entries, nbytes = n_entries + 1, nbytes + size
            with suppress(OSError):
                os.rmdir(folder)
        for top in tops:
            with suppress(OSError):
                os.rmdir(top)
        return n_entries, nbytes

    def _folder(self, key: str) -> str | None:
        n_folders = self._n_folders or self._read_layout()
        return None if n_folders is None else leaf(self.path, n_folders, key)

    def _read_layout(self) -> int | None:
        self._n_folders = None
        with suppress(OSError), open(os.path.join(self.path, LAYOUT_FILE), "rb") as file:
            self._n_folders = parse_layout(file.read(1024))
        return self._n_folders

    def _opened_layout(self) -> int | None:
        """Return the number of subfolders, making the cache if there is none."""
        if self._read_layout() is None:  # always anew: it may have been cleared, and begun with another number
            LocalStore(self.path).create(LAYOUT_FILE, layout_bytes(n_folders_for(self.limit_nbytes)))
            if self._read_layout() is None:
                self.failure = f"another {LAYOUT_FILE}"
                self._warn("a file of a cache", self.failure, "run `hsfmt cache clear`")
                self._paused_until = time.monotonic() + _PAUSE_SECONDS
        if self._n_folders is not None:
            os.makedirs(os.path.join(self.path, str(self._n_folders)), exist_ok=True)
        return self._n_folders

    def _batches(
        self, entries: Sequence[tuple[EntryName, BytesLike]], n_folders: int, quota: int
    ) -> Iterator[tuple[str, list[tuple[EntryName, BytesLike]]]]:
        """Yield (subfolder, entries that go there together): no more than a quarter of its quota, or one."""
        batches: dict[str, list[tuple[EntryName, BytesLike]]] = {}
        sizes: dict[str, int] = {}
        for name, body in entries:
            size = charged(name.nbytes)
            if size > quota:
                self.too_large = name.nbytes
                remedy = "raise the limit, or run `hsfmt cache clear` if it was lowered"
                self._warn(f"entries of at most {quota} bytes", f"one of {name.nbytes}", remedy)
                continue
            folder = leaf(self.path, n_folders, name.key)
            if folder in batches and sizes[folder] + size > quota // 4:
                yield folder, batches.pop(folder)
            batches.setdefault(folder, []).append((name, body))
            sizes[folder] = sizes.get(folder, 0) + size if len(batches[folder]) > 1 else size
        yield from batches.items()

    def _insert_into(self, folder: str, quota: int, batch: Sequence[tuple[EntryName, BytesLike]]) -> int:
        reserved: list[Reserved] = []
        n_written = 0
        try:
            for name, body in batch:
                path = f"{folder}/{name}"
                fd = reserve(path)
                if fd is not None:
                    reserved.append(Reserved(path, fd, flat_view(body)))
            if not reserved or not make_room(folder, quota):
                return 0
            while reserved:
                write(reserved[-1])
                n_written += 1
                reserved.pop()
        except FileNotFoundError:
            self._n_folders = None  # cleared meanwhile: another layout may follow
        finally:
            for item in reserved:
                with suppress(OSError):
                    os.close(item.fd)
                self.forget(item.path)
        return n_written

    def _sweep(self, n_folders: int) -> None:
        """Fit all subfolders to this limit, which may be lower than before, and remove those of former layouts."""
        for number, folder in leaves(self.path):
            if number == n_folders:
                make_room(folder, self.limit_nbytes // n_folders)
                continue
            for name, _ in listed(folder):
                self.forget(f"{folder}/{name}")
            with suppress(OSError):
                os.rmdir(folder)
                os.rmdir(os.path.dirname(folder))

    def _pause(self, error: Exception) -> None:
        """Go on without writing for a while."""
        self._paused_until = time.monotonic() + _PAUSE_SECONDS
        problems = error.problems if isinstance(error, HsfmtError) else ()
        reason = problems[0].got if problems else getattr(error, "strerror", None)
        full = "free space there, or lower the cache's limit"
        is_full = getattr(error, "errno", None) in _FULL
        remedy = full if is_full else "check the folder's permissions, or name another one"
        self.failure = reason or type(error).__name__
        self._warn("to write entries", self.failure, remedy)

    def _warn(self, expected: str, got: str, remedy: str) -> None:
        if expected not in self._warned:
            self._warned.add(expected)
            text = "cache %s: expected %s, got %s; reading goes on without — %s"
            _log.warning(text, self.path, expected, got, remedy)
