"""What the rest of the package may ask of a storage: one small interface, whatever lies below it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self

from hsfmt.errors import FormatError

BytesLike = bytes | bytearray | memoryview

_MAX_PATH_NBYTES = 1024  # the longest key of S3, the shortest limit of the storages in use


def check_path(path: str) -> str:
    """Return `path` if it is a safe path inside a dataset.

    Parameters
    ----------
    path
        POSIX path relative to the dataset's root, as found in a manifest or made by the library.

    Raises
    ------
    FormatError
        If it is empty or absolute, has an empty, "." or ".." segment, a backslash, a colon (drive letters, URL schemes
        and fsspec chains), a control character, or is longer than 1024 bytes of UTF-8.
    """
    problem = _path_problem(path)
    if problem:
        shown = ascii(path if len(path) <= 200 else path[:200] + "…")
        raise FormatError.at(
            shown,
            expected="a relative POSIX path inside the dataset",
            got=problem,
            remedy="the document that names this path is damaged or hostile",
        )
    return path


def check_prefix(prefix: str) -> str:
    """Return `prefix` without trailing slashes if it is a safe folder inside a dataset; "" is the root.

    Raises
    ------
    FormatError
        As `check_path`.
    """
    stripped = prefix.rstrip("/") if prefix != "/" else prefix
    return check_path(stripped) if stripped else ""


def _path_problem(path: str) -> str:
    if not path:
        return "an empty path"
    if path.startswith("/"):
        return "an absolute path"
    if any(character in "\\:" or ord(character) < 32 or ord(character) == 127 for character in path):
        return "a backslash, colon or control character"
    segments = path.split("/")
    if "" in segments:
        return "an empty segment"
    if "." in segments or ".." in segments:
        return "a '.' or '..' segment"
    try:
        nbytes = len(path.encode())
    except UnicodeEncodeError:
        return "characters outside Unicode"
    return f"{nbytes} bytes" if nbytes > _MAX_PATH_NBYTES else ""


def flat_view(data: BytesLike) -> memoryview:
    """Return the bytes of a contiguous buffer, without a copy; also of one with a zero in its shape."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


class ObjectWriter(ABC):
    """An object being streamed; nobody else sees it under its name before `commit()` (locally and on object stores).

    As a context manager it aborts when the block ends without a commit, by an exception or not.
    """

    nbytes: int = 0
    """Bytes taken so far."""

    @abstractmethod
    def write(self, data: BytesLike) -> None:
        """Append `data`, a contiguous buffer, which may be reused afterwards.

        Raises
        ------
        StorageError
            If the storage refuses; abort then.
        """

    @abstractmethod
    def commit(self) -> None:
        """Make the object appear whole under its name; its directory is made durable by `Store.sync`.

        Raises
        ------
        StorageError
            If the storage refuses; nothing was committed then.
        """

    @abstractmethod
    def abort(self) -> None:
        """Leave nothing behind; does nothing after `commit()` or a former `abort()`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class Store(ABC):
    """Objects under POSIX paths below one root. All paths go through `check_path`. Picklable, usable after fork.

    Every method raises `StorageError` when the storage fails, and `FormatError` for an unsafe path.
    """

    url: str
    """Where the dataset lies, as it can be given to `open_store` again (an absolute path if local)."""

    is_local: bool = False

    @abstractmethod
    def read(self, path: str, max_nbytes: int) -> bytes:
        """Return the whole object, by one request.

        Raises
        ------
        NotFoundError
            If there is none.
        CorruptionError
            If it is larger than `max_nbytes`; no more than that is ever allocated.
        """

    @abstractmethod
    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the object's bytes from `offset` on.

        Raises
        ------
        NotFoundError
            If there is no such object.
        CorruptionError
            If the object ends before the buffer is full.
        """

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Return the bytes of many (path, offset, nbytes) ranges, fetched together where the storage can.

        Raises
        ------
        NotFoundError, CorruptionError
            As `read_into`.
        """
        results = []
        for path, offset, nbytes in ranges:
            buffer = bytearray(nbytes)
            self.read_into(path, offset, memoryview(buffer))
            results.append(bytes(buffer))
        return results

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Return the object's size in bytes, None if there is no such object (a folder is none)."""

    @abstractmethod
    def list(self, prefix: str) -> list[str]:
        """Return the names (of objects and folders) directly under `prefix`, sorted, all caches off; [] if absent."""

    @abstractmethod
    def walk(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield (path, nbytes) of every object below `prefix`, sorted by path segments, all caches off."""

    @abstractmethod
    def create(self, path: str, data: BytesLike) -> bool:
        """Create the object durably, unless it exists.

        Returns
        -------
        bool
            True if this call created it, False if it was there already; its content is not looked at.
        """

    @abstractmethod
    def write(self, path: str, data: BytesLike) -> None:
        """Write the whole object durably; it appears whole, replacing a former one atomically."""

    def replace(self, path: str, data: BytesLike) -> None:
        """Write an object that may exist: `write`, under the name that says so."""
        self.write(path, data)

    @abstractmethod
    def open_object(self, path: str) -> ObjectWriter:
        """Start a streamed object."""

    @abstractmethod
    def sync(self, directories: Iterable[str]) -> None:
        """Make what was committed in `directories` survive a power cut (them and all their parents); "" is the root."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove one object.

        Raises
        ------
        NotFoundError
            If there is none.
        """

    def free_nbytes(self) -> int | None:
        """Return the bytes that can still be written, None where there is no such number."""
        return None

    def local_path(self, path: str) -> str | None:
        """Return the object's file path for readers that open it themselves, None if the store is not local.

        Raises
        ------
        FormatError
            If the path is unsafe, or a symbolic link leads out of the dataset's root.
        """
        check_path(path)
        return None
