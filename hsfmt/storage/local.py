"""A dataset in a folder, made durable by one order: temporary file, fsync, rename or link, fsync of the folders."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from hsfmt.errors import CorruptionError, FormatError, HsfmtError, NotFoundError, StorageError
from hsfmt.storage.base import BytesLike, ObjectWriter, Store, check_path, check_prefix, flat_view
from hsfmt.storage.exclusive import publish_new

_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
_REMEDIES = {
    errno.ENOSPC: "free space on this file system and run again; committed parts are intact",
    errno.EDQUOT: "your quota is used up: free space and run again; committed parts are intact",
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
        with os_errors_typed(path), _opened(self.local_path(path), path) as (fd, nbytes):
            if nbytes > max_nbytes:
                raise CorruptionError.at(path, expected=f"at most {max_nbytes} bytes", got=f"{nbytes} bytes")
            buffer = bytearray(nbytes)
            _fill(fd, 0, memoryview(buffer), path)
        return bytes(buffer)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        with os_errors_typed(path), _opened(self.local_path(path), path) as (fd, _):
            _fill(fd, offset, flat_view(buffer), path)

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
            return [entry.name for entry in _entries(self._directory(check_prefix(prefix)))]

    def walk(self, prefix: str) -> Iterator[tuple[str, int]]:
        prefix = check_prefix(prefix)
        with os_errors_typed(prefix):
            yield from _walked(self._directory(prefix), prefix)

    def create(self, path: str, data: BytesLike) -> bool:
        with os_errors_typed(path):
            final = self._prepared(path)
            temporary = _temporary_name(final)
            try:
                _write_new(temporary, data)
                created = publish_new(temporary, final)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
            # Also when it was there: the one who made it may not have come to this line, and we rely on it from now on.
            self._sync_to_root(os.path.dirname(final))
        return created

    def write(self, path: str, data: BytesLike) -> None:
        with os_errors_typed(path):
            final = self._prepared(path)
            temporary = _temporary_name(final)
            try:
                _write_new(temporary, data)
                os.rename(temporary, final)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
            self._sync_to_root(os.path.dirname(final))

    def open_object(self, path: str) -> ObjectWriter:
        with os_errors_typed(path):
            return _LocalObjectWriter(path, self._prepared(path))

    def sync(self, directories: Iterable[str]) -> None:
        done: set[str] = set()
        for directory in sorted(set(directories), key=len, reverse=True):
            with os_errors_typed(directory):
                self._sync_to_root(self._directory(check_prefix(directory)), done)

    def remove(self, path: str) -> None:
        with os_errors_typed(path):
            os.unlink(self.local_path(path))

    def free_nbytes(self) -> int | None:
        folder = self._root
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        with os_errors_typed(""):
            status = os.statvfs(folder)
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

    def _prepared(self, path: str) -> str:
        """Return the file path after making the folders above it, those above the root durably."""
        final = self.local_path(path)
        missing = []
        folder = self._root
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        if missing:
            # Whoever made that one may have been killed before its entry was durable, and nobody else looks there.
            _fsync_directory(os.path.dirname(folder), must=False)
        for folder in reversed(missing):
            with suppress(FileExistsError):
                os.mkdir(folder)
            _fsync_directory(os.path.dirname(folder), must=False)
        os.makedirs(os.path.dirname(final), exist_ok=True)
        return final

    def _sync_to_root(self, folder: str, done: set[str] | None = None) -> None:
        done = set() if done is None else done
        while folder not in done:
            done.add(folder)
            _fsync_directory(folder, must=True)
            if folder == self._root:
                # The entry of the root itself; the folder above may be one that we may search but not read.
                _fsync_directory(os.path.dirname(folder), must=False)
                return
            folder = os.path.dirname(folder)


class _LocalObjectWriter(ObjectWriter):
    def __init__(self, path: str, final: str) -> None:
        self.nbytes = 0
        self._path = path
        self._final = final
        self._temporary = _temporary_name(final)
        self._fd: int | None = _open_new(self._temporary)

    def write(self, data: BytesLike) -> None:
        with os_errors_typed(self._path):
            self.nbytes += _write_all(self._open_fd(), data)

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


def _temporary_name(final: str) -> str:
    return f"{final}.{secrets.token_hex(8)}.tmp"


def _open_new(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _write_all(fd: int, data: BytesLike) -> int:
    view = flat_view(data)
    done = 0
    while done < len(view):
        done += os.write(fd, view[done:])
    return done


def _write_new(path: str, data: BytesLike) -> None:
    fd = _open_new(path)
    try:
        _write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def _fsync_directory(folder: str, *, must: bool) -> None:
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
def _opened(file: str, path: str) -> Iterator[tuple[int, int]]:
    """Open a regular file to read; yield (fd, nbytes). O_NONBLOCK, or a FIFO in its place would hang us."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptionError.at(path, expected="a regular file", got=stat.filemode(status.st_mode))
        yield fd, status.st_size
    finally:
        os.close(fd)


def _fill(fd: int, offset: int, buffer: memoryview, path: str) -> None:
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            raise CorruptionError.at(
                path,
                expected=f"{len(buffer)} bytes at offset {offset}",
                got=f"the end of the file after {done} bytes",
                remedy="the file was truncated: restore it, or run `hsfmt verify`",
            )
        done += count


def _entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _walked(directory: str, prefix: str) -> Iterator[tuple[str, int]]:
    # Names are given as they are, unchecked: a stray file of an odd name is to be reported, not to stop the walk.
    for entry in _entries(directory):
        path = f"{prefix}/{entry.name}" if prefix else entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _walked(entry.path, path)
        else:
            with suppress(FileNotFoundError):  # a temporary file that was renamed meanwhile
                yield path, _listed_nbytes(entry)


def _listed_nbytes(entry: os.DirEntry[str]) -> int:
    try:
        status = entry.stat()
    except OSError:  # a link to nowhere is listed, with the size of the link itself
        status = entry.stat(follow_symlinks=False)
    return status.st_size if stat.S_ISREG(status.st_mode) else entry.stat(follow_symlinks=False).st_size
