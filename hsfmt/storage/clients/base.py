"""What a client of a remote storage does: one request for one range. Retries and checks are not its business."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from hsfmt.storage.base import BytesLike
from hsfmt.storage.retries import WrongRangeError

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
_UNSATISFIED = re.compile(r"bytes \*/([0-9]{1,18})")


class Body(NamedTuple):
    """What a request for a range was answered with.

    `data` are the bytes: fewer than asked for only where the object ends, none where the range lies beyond.
    `object_nbytes` is the size of the whole object, `version` its strong ETag, and `first_byte_seconds` how long the
    answer took to begin: None where the storage does not say.
    """

    data: BytesLike
    object_nbytes: int | None = None
    version: str | None = None
    first_byte_seconds: float | None = None


class Client(ABC):
    """Reads objects below a root; all of it runs on fsspec's event loop, in the process that made the client."""

    @abstractmethod
    async def get(self, path: str, start: int, end: int) -> Body:
        """Return the bytes [start, end) of an object.

        Raises
        ------
        FileNotFoundError
            There is no such object.
        Exception
            Whatever the driver raises.
        """

    @abstractmethod
    async def nbytes(self, path: str) -> int | None:
        """Return the size of an object by a request of its own, None if the storage does not say; raises as `get`."""


class TakesParts(Client):
    """A client of a storage that takes objects in parts too; each method is a request, but for what it says.

    All raise FileNotFoundError where there is no such upload, or object, and else whatever the driver raises. Nothing
    is seen under the name before `complete`, or `put`.
    """

    @abstractmethod
    async def put(self, path: str, body: bytes) -> None:
        """Store a whole object."""

    @abstractmethod
    async def begin(self, path: str) -> str:
        """Begin an upload; return its name. Where the storage needs no such thing, by no request."""

    @abstractmethod
    async def send_part(self, path: str, upload: str, number: int, body: bytes) -> str:
        """Send the part of a number, which counts from 1; return what `complete` is told of it."""

    @abstractmethod
    async def complete(self, path: str, upload: str, receipts: Sequence[str]) -> None:
        """Make the object of all parts, in this order."""

    @abstractmethod
    async def abort(self, path: str, upload: str) -> None:
        """Forget the parts, where the storage can be told to."""


def range_header(start: int, end: int) -> str:
    """Return the value of a Range header."""
    return f"bytes={start}-{end - 1}"


def check_content_range(text: str | None, start: int, end: int) -> tuple[int, int | None]:
    """Return (end of what was sent, size of the object) by a Content-Range header.

    Raises
    ------
    WrongRangeError
        It is not the range that was asked for.
    """
    match = _CONTENT_RANGE.fullmatch(text or "")
    if match is None:
        raise WrongRangeError(f"a partial answer with Content-Range {(text or 'none')[:100]!r}")
    first, last = int(match[1]), int(match[2])
    total = None if match[3] == "*" else int(match[3])
    wanted = end if total is None else min(end, total)
    if first != start or last + 1 > end or (total is not None and last + 1 != wanted):
        raise WrongRangeError(f"bytes {first} to {last + 1} instead of {start} to {wanted}")
    return last + 1, total


def unsatisfied_nbytes(text: str | None) -> int | None:
    """Return the size of the object by the Content-Range header of a 416."""
    match = _UNSATISFIED.fullmatch(text or "")
    return int(match[1]) if match else None


def strong_version(etag: str | None) -> str | None:
    """Return an ETag in one spelling, None if it is weak: that says nothing about bytes."""
    return etag.strip('"') if etag and not etag.startswith("W/") else None
