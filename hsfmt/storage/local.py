"""A dataset in a folder, made durable by one order: temporary file, fsync, rename or link, fsync of the folders."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from hsfmt.errors import CorruptionError, FormatError, HsfmtError, NotFoundError, StorageError
from hsfmt.storage.base import BytesLike, ObjectWriter, Store, check_path, check_prefix, flat_view
from hsfmt.storage.exclusive import publish_new
from hsfmt.storage.files import (
    fill,
    fsync_directory,
    linked,
    open_new,
    opened,
    read_all,
    temporary_name,
    write_all,
    write_new,
)
from hsfmt.storage.folders import empty_folders, entries, walked

_T = TypeVar("_T")
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK})
_REMEDIES = {
    errno.ENOSPC: "free space on this file system and run again; committed parts are intact",
    errno.EDQUOT: "your quota is used up: free space and run again; committed parts are intact",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f) and run again; committed parts are intact",
    errno.EACCES: "check owner and permissions of the dataset's folder",
    errno.EPERM: "check owner and permissions of the dataset's folder",
    errno.EROFS: "the file system is mounted read-only",
    errno.EMFILE: "raise the limit of open files (ulimit -n) or use fewer workers",
    errno.ENFILE: "the machine's table of open files is full",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.EIO: "the device or network file system reports an I/O error: look at the kernel's log (dmesg)",
    errno.ESTALE: "the network file system lost this file: mount it again",
}


def typed_os_error(error: OSError, where: str) -> HsfmtError:
    """Return the error of this package that says what `error` says; its `errno` is kept on a `StorageError`."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in _ABSENT:
        return NotFoundError.at(where, expected="an object", got=reason)
    typed = StorageError.at(
        where, expected="the storage to work", got=reason, remedy=_REMEDIES.get(error.errno or 0, "")
    )
    typed.errno = error.errno
    return typed


@contextmanager
def os_errors_typed(where: str) -> Iterator[None]:
    """Turn any OSError of the block into this package's error about `where`."""
    try:
        yield
    except HsfmtError:
        raise
    except OSError as error:
        raise typed_os_error(error, where or "the dataset's root") from error


class LocalStore(Store):
    """A dataset in a folder.

    A file may itself be a symbolic link (a hub's download cache is made of them; digests judge the content), but no
    folder on the way may lead out of the root, for reading or writing.

    Parameters
    ----------
    root
        The folder; it need not exist before the first write.
    """

    is_local = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.url = os.path.abspath(os.path.expanduser(os.fspath(root)))
        self._root = os.path.realpath(self.url)

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    def local_path(self, path: str) -> str:
        folder, _, name = check_path(path).rpartition("/")
        return os.path.join(self._directory(folder), name)

    def read(self, path: str, max_nbytes: int) -> bytes:
        with os_errors_typed(path), opened(self.local_path(path), path) as (fd, nbytes):
            if nbytes > max_nbytes:
                raise CorruptionError.at(path, expected=f"at most {max_nbytes} bytes", got=f"{nbytes} bytes")
            return read_all(fd, nbytes, path)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        with os_errors_typed(path), opened(self.local_path(path), path) as (fd, _):
            fill(fd, offset, flat_view(buffer), path)

    def size(self, path: str) -> int | None:
        try:
            status = os.stat(self.local_path(path))
        except OSError as error:
            if isinstance(error, HsfmtError):
                raise
            if error.errno in _ABSENT:
                return None
            raise typed_os_error(error, path) from error
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def list(self, prefix: str) -> list[str]:
        with os_errors_typed(prefix):
            return [entry.name for entry in entries(self._directory(check_prefix(prefix)))]

    def walk(self, prefix: str) -> Iterator[tuple[str, int]]:
        prefix = check_prefix(prefix)
        with os_errors_typed(prefix):
            yield from walked(self._directory(prefix), prefix)

    def create(self, path: str, data: BytesLike) -> bool:
        with os_errors_typed(path):
            final, temporary = self._written(path, data)
            try:
                created = publish_new(temporary, final)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
            # Also when it was there: the one who made it may not have come to this line, and we rely on it from now on.
            self._sync_to_root(os.path.dirname(final))
        return created

    def write(self, path: str, data: BytesLike) -> None:
        with os_errors_typed(path):
            final, temporary = self._written(path, data)
            try:
                os.rename(temporary, final)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
            self._sync_to_root(os.path.dirname(final))

    def open_object(self, path: str) -> ObjectWriter:
        with os_errors_typed(path):
            return self._in_folder(path, lambda final: _LocalObjectWriter(path, final))

    def sync(self, directories: Iterable[str]) -> None:
        done: set[str] = set()
        for directory in sorted(set(directories), key=len, reverse=True):
            with os_errors_typed(directory):
                self._sync_to_root(self._directory(check_prefix(directory)), done)

    def remove(self, path: str) -> None:
        with os_errors_typed(path):
            os.unlink(self.local_path(path))

    def modified(self, path: str) -> float | None:
        try:
            status = os.stat(self.local_path(path), follow_symlinks=False)
        except OSError as error:
            if isinstance(error, HsfmtError):
                raise
            if error.errno in _ABSENT:
                return None
            raise typed_os_error(error, path) from error
        # A hard link, a rename or a copy that keeps times is new here, however old the content is.
        return max(status.st_mtime, status.st_ctime)

    def above(self, names: Collection[str]) -> Iterator[Store]:  # noqa: ARG002  whatever they are called
        folder = self._root
        while folder != os.path.dirname(folder):
            folder = os.path.dirname(folder)
            yield LocalStore(folder)

    def remove_folder(self, path: str) -> None:
        with os_errors_typed(path), suppress(FileNotFoundError, NotADirectoryError):
            try:
                os.rmdir(self.local_path(path))
            except OSError as error:
                if error.errno not in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR}:
                    raise

    def empty_folders(self, prefix: str) -> Sequence[tuple[str, ...]]:
        prefix = check_prefix(prefix)
        with os_errors_typed(prefix):
            return empty_folders(self._directory(prefix), prefix)[1]

    def is_same(self, source: Store, path: str) -> bool:
        if not isinstance(source, LocalStore):
            return False
        with os_errors_typed(path):
            here, there = self.local_path(path), source.local_path(path)
            # Without a second link it is one name by two ways: a mount, or a symbolic link from here to there.
            return os.path.samefile(here, there) and not os.path.islink(here) and os.stat(here).st_nlink > 1

    def shares_storage(self, source: Store) -> bool:
        if not isinstance(source, LocalStore):
            return False
        with os_errors_typed(""):
            return os.stat(_existing(self._root)).st_dev == os.stat(_existing(source._root)).st_dev  # noqa: SLF001  its own kind

    def link(self, source: Store, path: str) -> bool:
        if not isinstance(source, LocalStore):
            return False
        with os_errors_typed(path):
            # A file may be a symbolic link (a hub's cache); what it leads to is what is meant.
            origin = os.path.realpath(source.local_path(path))
            with opened(origin, path) as (fd, _):
                os.fsync(fd)  # it may have come there by a copy that did not
            final = temporary = ""
            try:
                final, temporary = self._in_folder(path, lambda final: (final, linked(origin, final)))
                os.rename(temporary, final)
            except OSError as error:
                if error.errno in _NO_LINK:
                    return False
                raise
            finally:
                # Renaming one link of a file to another one does nothing.
                with suppress(OSError):
                    os.unlink(temporary)
        return True

    def free_nbytes(self) -> int | None:
        with os_errors_typed(""):
            status = os.statvfs(_existing(self._root))
        return status.f_bavail * status.f_frsize

    def _directory(self, prefix: str) -> str:
        if not prefix:
            return self._root
        directory = os.path.join(self._root, prefix)
        if os.path.commonpath([self._root, os.path.realpath(directory)]) != self._root:
            raise FormatError.at(
                prefix,
                expected="a folder inside the dataset",
                got="a symbolic link that leads out of it",
                remedy="replace the link by the folder itself",
            )
        return directory

    def _make_folders(self, wanted: str) -> None:
        """Make a folder and those above it, those above the root durably."""
        missing = []
        folder = self._root
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        if missing:
            # Whoever made that one may have been killed before its entry was durable, and nobody else looks there.
            fsync_directory(os.path.dirname(folder), must=False)
        for folder in reversed(missing):
            with suppress(FileExistsError):
                os.mkdir(folder)
            fsync_directory(os.path.dirname(folder), must=False)
        os.makedirs(wanted, exist_ok=True)

    def _in_folder(self, path: str, make: Callable[[str], _T]) -> _T:
        """Return what `make` makes of the file path, again if a collection takes its folder away meanwhile."""
        for left in (2, 1, 0):
            final = self.local_path(path)
            try:
                self._make_folders(os.path.dirname(final))
                return make(final)
            except FileNotFoundError:
                if not left or os.path.isdir(os.path.dirname(final)):
                    raise
        raise AssertionError

    def _written(self, path: str, data: BytesLike) -> tuple[str, str]:
        """Write the data under a temporary name; return the file path and that name."""
        return self._in_folder(path, lambda final: (final, write_new(temporary_name(final), data)))

    def _sync_to_root(self, folder: str, done: set[str] | None = None) -> None:
        done = set() if done is None else done
        while folder not in done:
            done.add(folder)
            fsync_directory(folder, must=True)
            if folder == self._root:
                # The entry of the root itself; the folder above may be one that we may search but not read.
                fsync_directory(os.path.dirname(folder), must=False)
                return
            folder = os.path.dirname(folder)


class _LocalObjectWriter(ObjectWriter):
    def __init__(self, path: str, final: str) -> None:
        self.nbytes = 0
        self._path = path
        self._final = final
        self._temporary = temporary_name(final)
        self._fd: int | None = open_new(self._temporary)

    def write(self, data: BytesLike) -> None:
        with os_errors_typed(self._path):
            self.nbytes += write_all(self._open_fd(), data)

    def commit(self) -> None:
        try:
            with os_errors_typed(self._path):
                fd = self._open_fd()
                os.fsync(fd)
                self._fd = None
                os.close(fd)
                os.rename(self._temporary, self._final)
        except BaseException:
            self._discard()
            raise
        self._temporary = ""

    def abort(self) -> None:
        self._discard()

    def _open_fd(self) -> int:
        if self._fd is None:
            raise StorageError.at(self._path, expected="an object still open", got="one committed or aborted")
        return self._fd

    def _discard(self) -> None:
        fd, self._fd = self._fd, None
        with suppress(OSError):
            if fd is not None:
                os.close(fd)
        if self._temporary:
            with suppress(OSError):
                os.unlink(self._temporary)
            self._temporary = ""


def _existing(folder: str) -> str:
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder
