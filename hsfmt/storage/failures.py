"""Failures of remote storages: which of them pass by themselves, and what they mean in this package's errors.

The SDKs under fsspec each have their own exceptions, and none of them is importable here: they are told apart by
status, errno and class name.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from typing import TypeVar

from hsfmt.errors import HsfmtError, NotFoundError, StorageError

_T = TypeVar("_T")

_ATTEMPTS = 5
_FIRST_DELAY_SECONDS = 0.1
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_TRANSIENT_ERRNO = frozenset({errno.EBUSY, errno.EAGAIN, errno.EIO, errno.ETIMEDOUT, errno.ECONNRESET, errno.EPIPE})
_TRANSIENT_CLASSES = frozenset(
    {"ClientConnectionError", "ClientPayloadError", "HTTPClientError", "IncompleteRead", "ServiceRequestError"}
)


class ShortBodyError(ConnectionError):
    """The answer held fewer bytes than the object has there."""


def attempt(where: str, action: Callable[[], _T]) -> _T:
    """Run an idempotent request, again with growing pauses while its failure is of a kind that passes.

    Raises
    ------
    NotFoundError, StorageError
        What the last failure means, with `where` as its place; errors of this package pass through at once.
    """
    delay = _FIRST_DELAY_SECONDS
    for left in reversed(range(_ATTEMPTS)):
        try:
            return action()
        except HsfmtError:
            raise
        except Exception as error:
            if left == 0 or not is_transient(error):
                raise typed_failure(error, where) from error
        time.sleep(delay * (1 + random.random()))  # noqa: S311 - spreads clients, hides nothing
        delay *= 3
    raise AssertionError


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error of an SDK carries, in any of their ways."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    for status in (getattr(error, "status", None), getattr(error, "code", None), response):
        if isinstance(status, int):
            return status
    return None


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may well succeed a moment later."""
    if isinstance(error, HsfmtError | FileNotFoundError | PermissionError):
        return False
    if isinstance(error, ConnectionError | TimeoutError) or _status(error) in _TRANSIENT_STATUS:
        return True
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
        return True
    return any(ancestor.__name__ in _TRANSIENT_CLASSES for ancestor in type(error).__mro__)


def typed_failure(error: Exception, where: str) -> HsfmtError:
    """Return this package's error for whatever an SDK raised about `where`."""
    where = where or "the dataset's root"
    if isinstance(error, HsfmtError):
        return error
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return NotFoundError.at(where, expected="an object", got=reason)
    if isinstance(error, ShortBodyError):
        return StorageError.at(where, expected="a whole answer", got=str(error), remedy="the connection is unreliable")
    if isinstance(error, PermissionError) or _status(error) in {401, 403}:
        remedy = "check the credentials, and that they may read and write this bucket"
    else:
        remedy = "run again; if it stays, check network and endpoint" if is_transient(error) else ""
    typed = StorageError.at(where, expected="the storage to work", got=reason, remedy=remedy)
    typed.errno = getattr(error, "errno", None)
    return typed
