"""When a request is tried again: what passes by itself, how long to wait, and when to give up.

The SDKs under fsspec each have their own exceptions, and none of them is importable here: they are told apart by
status, errno and class name.
"""

from __future__ import annotations

import errno
import math
import os
import random
import time
from collections.abc import Iterator
from typing import Any

from hsfmt.errors import HsfmtError, UsageError

_BUDGET = "HSFMT_RETRY_SECONDS"
_DEFAULT_BUDGET_SECONDS = 60.0
_TIMEOUT = "HSFMT_TIMEOUT_SECONDS"
_DEFAULT_TIMEOUT_SECONDS = 15.0
_SHORTEST_TIMEOUT_SECONDS = 0.1
# A bound for requests that fail at once; at the pauses below, time runs out first.
ATTEMPTS = 20
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0
# A server that never answered in this process is more likely misspelt than restarting.
_FIRST_CONTACT_SECONDS = 3.0

_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 509})
_TRANSIENT_ERRNO = frozenset(
    {errno.EBUSY, errno.EAGAIN, errno.EIO, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ECONNRESET, errno.EPIPE}
)
_TRANSIENT_CLASSES = frozenset(
    {"ChunkedEncodingError", "ClientConnectionError", "ClientPayloadError", "ConnectionError", "ConnectTimeout"}
    | {"ConnectTimeoutError", "EndpointConnectionError", "HTTPClientError", "IncompleteRead", "ReadTimeout"}
    | {"RemoteProtocolError", "ResponseStreamingError", "ServiceRequestError", "ServiceResponseError", "SSLEOFError"}
    | {"SSLZeroReturnError", "TransportError"}
)
# Of aiohttp's parser: what came is no HTTP, whatever status its error then has.
_UNREADABLE_CLASS = "HttpProcessingError"
_UNREACHABLE_CLASSES = frozenset(
    {"ClientConnectorError", "EndpointConnectionError", "ConnectTimeoutError", "ConnectionRefusedError", "gaierror"}
)
# botocore's for all that its HTTP client raises and that it has no name for; what passes has one.
_UNNAMED_CLASS = "HTTPClientError"
_CERTIFICATE_CLASSES = frozenset({"ClientConnectorCertificateError", "SSLCertVerificationError"})


class ShortBodyError(ConnectionError):
    """The answer held fewer bytes than the object has there."""


class WrongRangeError(ConnectionError):
    """The answer held other bytes than were asked for, by its own word."""


class StatusError(OSError):
    """An HTTP status that is a failure.

    Attributes
    ----------
    status
        The status.
    retry_after
        Seconds that the server asks to wait, or 0.
    """

    def __init__(self, status: int, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(f"HTTP {status} {reason}".strip())
        self.status = status
        self.retry_after = retry_after


class RetryBudget:
    """The time that a batch of requests may spend on failures: while any of its requests is in trouble, it runs.

    Used by one thread at a time.
    """

    def __init__(self) -> None:
        self._seconds = retry_seconds()
        self._spent = 0.0
        self._since = 0.0
        self._in_trouble: set[int] = set()

    def failed(self, number: int) -> None:
        """Note that a request is in trouble."""
        if not self._in_trouble:
            self._since = time.monotonic()
        self._in_trouble.add(number)

    def recovered(self, number: int) -> None:
        """Note that it was answered."""
        if number in self._in_trouble:
            self._in_trouble.remove(number)
            if not self._in_trouble:
                self._spent += time.monotonic() - self._since

    def pause(self, error: BaseException, attempts: int, *, answered: bool) -> float | None:
        """Return how many seconds to wait before the next attempt, None to give up.

        Parameters
        ----------
        error
            What the last attempt ended with.
        attempts
            How many there were.
        answered
            Whether the server ever answered.
        """
        limit = self._seconds
        if not answered and is_unreachable(error):
            limit = min(limit, _FIRST_CONTACT_SECONDS)
        running = time.monotonic() - self._since if self._in_trouble else 0.0
        seconds = pause_seconds(attempts, retry_after(error))
        if attempts >= ATTEMPTS or self._spent + running + seconds > limit:
            return None
        return seconds


def pause_seconds(attempts: int, at_least: float) -> float:
    """Return a random pause: growing, fully jittered, so that many clients do not come back together."""
    longest = min(_FIRST_PAUSE_SECONDS * 2.0 ** (attempts - 1), _LONGEST_PAUSE_SECONDS)
    return at_least + random.random() * longest  # noqa: S311  spreads clients, hides nothing


def retry_seconds() -> float:
    """Return the budget in seconds: HSFMT_RETRY_SECONDS, 60 unless it is set.

    Raises
    ------
    UsageError
        It is no number of seconds.
    """
    return _seconds(_BUDGET, _DEFAULT_BUDGET_SECONDS)


def timeout_seconds() -> float:
    """Return how long a connection may be silent: HSFMT_TIMEOUT_SECONDS, 15 unless it is set; raises likewise."""
    return max(_seconds(_TIMEOUT, _DEFAULT_TIMEOUT_SECONDS), _SHORTEST_TIMEOUT_SECONDS)


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UsageError.at(name, expected="a number of seconds from 0 on", got=repr(text)[:100])
    return seconds


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may well succeed a moment later."""
    if isinstance(error, HsfmtError | FileNotFoundError | PermissionError) or is_untrusted(error):
        return False
    if unusable_setting(error) is not None:
        return False
    if isinstance(error, ConnectionError | TimeoutError) or class_names(error) & _TRANSIENT_CLASSES:
        return True
    if any(_UNREADABLE_CLASS in class_names(each) for each in chain(error)):
        return True
    code = status(error)
    if code in _TRANSIENT_STATUS:
        return True
    if code is not None and code >= 300:  # an errno that an SDK chose for want of a better one says less
        return False
    return isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO


def is_unreachable(error: BaseException) -> bool:
    """Return whether no connection came about."""
    names = set().union(*map(class_names, chain(error)))
    # botocore calls a connection that was reset an endpoint that it can't connect to.
    return bool(names & _UNREACHABLE_CLASSES) and "ConnectionResetError" not in names


def is_untrusted(error: BaseException) -> bool:
    """Return whether the server's certificate is not trusted."""
    # botocore has one class for all that goes wrong with TLS, and no cause.
    return any(
        class_names(each) & _CERTIFICATE_CLASSES
        or ("SSLError" in class_names(each) and "certificate verify failed" in str(each))
        for each in chain(error)
    )


def unusable_setting(error: BaseException) -> BaseException | None:
    """Return what kept S3's driver from making a request at all, and will again; None if it is something else.

    As the file of a certificate authority that is not there, a proxy that is no URL, or a timeout that is no number.
    """
    for each in chain(error):
        inner = getattr(each, "kwargs", {}).get("error") if type(each).__name__ == _UNNAMED_CLASS else None
        if isinstance(inner, FileNotFoundError | IsADirectoryError | NotADirectoryError | PermissionError | TypeError):
            return inner
        if isinstance(inner, ValueError) and not isinstance(inner, UnicodeDecodeError):
            return inner
        if isinstance(inner, BaseException) and "InvalidProxiesConfigError" in class_names(inner):
            return inner
    return None


def status(error: BaseException) -> int | None:
    """Return the HTTP status that an error of an SDK, or what caused it, carries in any of their ways."""
    for name in ("status", "code"):  # of the error itself: parsers' errors, which may be the cause, have a code too
        value = getattr(error, name, None)
        if isinstance(value, int):
            return value
    for each in chain(error):
        value = _response(each).get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(value, int):
            return value
    return None


def retry_after(error: BaseException) -> float:
    """Return how many seconds the server asked to wait, 0 if it did not say."""
    for each in chain(error):
        seconds = getattr(each, "retry_after", None)
        if isinstance(seconds, int | float):
            return float(seconds)
        headers = _response(each).get("ResponseMetadata", {}).get("HTTPHeaders", {})
        if "retry-after" in headers:
            return parse_retry_after(headers["retry-after"])
    return 0.0


def parse_retry_after(text: str | None) -> float:
    """Return the seconds of a Retry-After header; those that give a date are too rare to be parsed."""
    return float(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 6 else 0.0


def error_code(error: BaseException) -> str:
    """Return the code of an S3 error ("NoSuchBucket"), "" if there is none."""
    for each in chain(error):
        code = _response(each).get("Error", {}).get("Code")
        if isinstance(code, str):
            return code
    return ""


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised from."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__


def class_names(error: BaseException) -> set[str]:
    """Return the names of an error's classes."""
    return {ancestor.__name__ for ancestor in type(error).__mro__}


def _response(error: BaseException) -> dict[str, Any]:
    response = getattr(error, "response", None)
    return response if isinstance(response, dict) else {}
