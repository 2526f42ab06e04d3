"""What the rest of the package may ask of a storage: one small interface, whatever lies below it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from hsfmt.errors import FormatError
from hsfmt.storage.copying import copy_object

BytesLike = bytes | bytearray | memoryview

_MAX_PATH_NBYTES = 1024  # the longest key of S3, the shortest limit of the storages in use
_DEFAULT_GAP_NBYTES = 1 << 20


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


@dataclass(frozen=True, slots=True)
class Upload:
    """An object's upload that was begun and not ended: no object, but stored, and paid for.

    Attributes
    ----------
    path
        Of the object that it was to become.
    upload_id
        The storage's name for it.
    at
        When anything of it arrived last, in seconds of the storage's own clock.
    """

    path: str
    upload_id: str
    at: float


class Reads(Protocol):
    """What reading whole objects needs of a store."""

    url: str
    """As `Store.url`."""

    def read(self, path: str, max_nbytes: int) -> bytes:
        """Return the whole object; see `Store.read`."""


class Arrivals(Iterator[tuple[int, BytesLike]]):
    """(number, body) of ranges, in the order in which they arrive; threads may share it.

    As a context manager it is closed at the end of the block.
    """

    @abstractmethod
    def close(self) -> None:
        """Give up what was not taken yet; threads that wait for more find that it has ended."""

    def take(self) -> tuple[int, BytesLike] | None:
        """Return the next one, None at the end; its bytes count as held until `let_go`."""
        return next(self, None)

    def let_go(self, number: int) -> None:
        """Let more be asked for in place of one that was taken: nobody holds its body any more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _OneByOne(Arrivals):
    """Ranges that are read when they are asked for."""

    def __init__(self, store: Store, ranges: Sequence[tuple[str, int, int]]) -> None:
        self._store = store
        self._ranges = ranges
        self._numbers: Iterator[int] = iter(list(range(len(ranges))))  # next() of a list's iterator is atomic

    def __next__(self) -> tuple[int, BytesLike]:
        number = next(self._numbers)
        path, offset, nbytes = self._ranges[number]
        body = bytearray(nbytes)
        self._store.read_into(path, offset, memoryview(body))
        return number, body

    def close(self) -> None:
        self._numbers = iter(())


class Store(ABC):
    """Objects under POSIX paths below one root. All paths go through `check_path`. Picklable, usable after fork.

    Every method raises `StorageError` when the storage fails, and `FormatError` for an unsafe path.
    """

    url: str
    """Where the dataset lies, as it can be given to `open_store` again (an absolute path if local).

    What is secret in a URL (user info, signatures) is left out.
    """

    is_local: bool = False

    can_list: bool = True
    """Whether it can say which objects there are."""

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
        results = [b""] * len(ranges)
        with self.read_each(ranges) as arrivals:
            for number, body in arrivals:
                results[number] = bytes(body)
        return results

    def read_each(self, ranges: Sequence[tuple[str, int, int]]) -> Arrivals:
        """Return the bytes of many (path, offset, nbytes) ranges as they arrive; close it when enough were taken.

        The bodies are the taker's own. What the iterator raises is as of `read_into`; nothing follows it.
        """
        return _OneByOne(self, ranges)

    def read_many(self, requests: Sequence[tuple[str, int]]) -> list[bytes]:
        """Return the whole objects of many (path, max_nbytes), fetched together where the storage can.

        Raises
        ------
        NotFoundError, CorruptionError
            As `read`.
        """
        return [self.read(path, max_nbytes) for path, max_nbytes in requests]

    @property
    def gap_nbytes(self) -> int:
        """Bytes between two ranges that are better read along than left out by a second request."""
        return _DEFAULT_GAP_NBYTES

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

    @abstractmethod
    def modified(self, path: str) -> float | None:
        """Return when the object was last written or given this name, in seconds of the storage's own clock.

        None if there is no such object, or the storage does not say.
        """

    def above(self, names: Collection[str]) -> Iterator[Store]:  # noqa: ARG002  for those that are not local
        """Yield the folders that this one lies in, nearest first.

        Where each costs a request these are two at most: those that it lies in by way of a folder of these names.
        """
        yield from ()

    def remove_folder(self, path: str) -> None:  # noqa: B027  storages without folders have nothing to do
        """Remove a folder if it is empty; does nothing if it is not, or not there."""

    def empty_folders(self, prefix: str) -> Sequence[tuple[str, ...]]:
        """Return the folders below `prefix` without any object in or below them: each with all in it, deepest first."""
        check_prefix(prefix)
        return []

    def is_same(self, source: Store, path: str) -> bool:  # noqa: ARG002  for those that can tell
        """Say whether the object of this path is one and the same here and there: a hard link, not a copy."""
        check_path(path)
        return False

    def shares_storage(self, source: Store) -> bool:  # noqa: ARG002  for those that can
        """Say whether `link` can be expected to work from there."""
        return False

    def link(self, source: Store, path: str) -> bool:  # noqa: ARG002  for those that can
        """Give an object of another dataset the same path here, without its bytes passing through this process.

        A hard link, or a copy made by the server. It replaces a former object of this path; its folder is made durable
        by `sync`.

        Returns
        -------
        bool
            False where the two storages can't do that; nothing was changed then.

        Raises
        ------
        NotFoundError
            There is no such object in `source`.
        """
        return False

    def copy_from(
        self, source: Store, path: str, nbytes: int, digest: str, advance: Callable[[int], None] | None = None
    ) -> None:
        """Copy an object of another dataset to the same path here, comparing its digest on the way.

        Parameters
        ----------
        source, path
            The object; it appears here whole, and its folder is made durable by `sync`.
        nbytes, digest
            What it must be.
        advance
            Called with the number of bytes after each block; what it raises ends the copy.

        Raises
        ------
        NotFoundError
            There is no such object in `source`.
        CorruptionError
            It is another one; nothing appears here then.
        """
        copy_object(source, self, path, nbytes, digest, advance)

    def unfinished_uploads(self) -> Sequence[Upload]:
        """Return the uploads that were neither completed nor aborted, where the storage has such a thing."""
        return ()

    def abort_upload(self, upload: Upload) -> None:
        """Remove what arrived of an upload; does nothing if it has ended meanwhile."""
        check_path(upload.path)

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
