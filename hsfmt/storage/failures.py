"""What failures of remote storages mean in this package's errors: one line that says what to do."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

from hsfmt.errors import AccessError, HsfmtError, NotFoundError, StorageError, UsageError
from hsfmt.storage import retries
from hsfmt.storage.redaction import redacted, shows_nothing
from hsfmt.storage.retries import RetryBudget, ShortBodyError, WrongRangeError

_T = TypeVar("_T")

_NO_CREDENTIALS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "DefaultCredentialsError"}
    | {"TokenRetrievalError", "ProfileNotFound", "AzureCredentialsError"}
)
_NO_PROXY = frozenset({"ClientProxyConnectionError", "ProxyConnectionError"})
_CHECK_PROXY = "check HTTP_PROXY and HTTPS_PROXY; NO_PROXY names the hosts that are reached without one"
# Of botocore, which looks at settings, and at parameters, before it sends anything.
_REFUSED_SETTING = re.compile("Config|DataNotFound|Invalid|NoRegion|ParamValidation|Unknown|Unsupported")
_CREDENTIALS = {
    "s3": 'set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; storage_options={"anon": True} or '
    "FSSPEC_S3_ANON=true reads public buckets",
    "gs": 'run `gcloud auth application-default login`, or give storage_options={"token": ...}; "anon" reads public '
    "buckets",
    "az": "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or "
    'AZURE_STORAGE_SAS_TOKEN, or run `az login`; storage_options={"anon": True} or AZURE_STORAGE_ANON=true reads '
    "public containers",
    "hf": "set HF_TOKEN to a token that may read this repository, or run `hf auth login`",
}
_ENDPOINT = {
    "s3": "check AWS_ENDPOINT_URL (or endpoint_url in storage_options), and that the server runs",
    "gs": "check the network, and STORAGE_EMULATOR_HOST (or endpoint_url in storage_options) where one is set",
    "az": "check the account's name (AZURE_STORAGE_ACCOUNT_NAME, or the BlobEndpoint of a connection string), and the "
    "network",
    "hf": "check HF_ENDPOINT and the network",
}


@dataclass
class Place:
    """A remote dataset as errors name it.

    Attributes
    ----------
    url
        Without secrets.
    scheme
        Of the URL, the general one where several name the same storage.
    secrets
        What must not be shown.
    answered
        Whether the storage answered in this process yet.
    """

    url: str
    scheme: str = ""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    answered: bool = field(default=False, compare=False)

    def redacted(self, text: str) -> str:
        """Return a text without secrets, on one line."""
        return " ".join(redacted(text, self.secrets).split())


def attempt(where: str, action: Callable[[], _T], place: Place) -> _T:
    """Run an idempotent request, again with growing pauses while its failure is of a kind that passes.

    Raises
    ------
    NotFoundError, StorageError
        What the last failure means, with `where` as its place; errors of this package pass through at once.
    """
    budget = RetryBudget()
    attempts = 0
    while True:
        try:
            result = action()
        except HsfmtError:
            raise
        except Exception as error:  # noqa: BLE001  raised typed
            attempts += 1
            budget.failed(0)
            pause = budget.pause(error, attempts, answered=place.answered) if retries.is_transient(error) else None
            if pause is None:
                raise typed_failure(error, where, place, attempts) from shown(error, place)
        else:
            place.answered = True
            return result
        time.sleep(pause)


async def attempt_async(where: str, action: Callable[[], Awaitable[_T]], place: Place, budget: RetryBudget) -> _T:
    """Run an idempotent request on an event loop, as `attempt`; `budget` is this request's alone."""
    attempts = 0
    while True:
        try:
            result = await action()
        except HsfmtError:
            raise
        except Exception as error:  # noqa: BLE001  raised typed
            attempts += 1
            budget.failed(0)
            pause = budget.pause(error, attempts, answered=place.answered) if retries.is_transient(error) else None
            if pause is None:
                raise typed_failure(error, where, place, attempts) from shown(error, place)
        else:
            place.answered = True
            return result
        await asyncio.sleep(pause)


def shown(error: BaseException, place: Place) -> BaseException | None:
    """Return the error to raise another one from: none if a traceback of it would show a secret."""
    return error if shows_nothing(error, place.secrets) else None


def typed_failure(error: BaseException, where: str, place: Place, attempts: int = 1) -> HsfmtError:
    """Return this package's error for whatever an SDK raised about `where`."""
    if isinstance(error, HsfmtError):
        return error
    where = where or "the dataset's root"
    tries = f" ({attempts} attempts)" if attempts > 1 else ""
    reason = f"{_reason(error, place)}{tries}"
    storage_wide = _storage_wide(error, place, reason)
    if storage_wide is not None:
        typed: HsfmtError = storage_wide
    elif isinstance(error, FileNotFoundError | NotADirectoryError) or retries.status(error) in {404, 410}:
        typed = NotFoundError.at(where, expected="an object", got=reason)
    elif isinstance(error, ShortBodyError | WrongRangeError):
        remedy = f"the connection to {place.url} is unreliable, or something between alters answers"
        got = f"{place.redacted(str(error))}{tries}"
        typed = StorageError.at(where, expected="a whole answer", got=got, remedy=remedy)
    else:
        remedy = "run again; if it stays, check network and endpoint" if retries.is_transient(error) else ""
        got = f"{reason}, from {place.url}"
        kind = AccessError if retries.is_unreachable(error) else StorageError
        typed = kind.at(where, expected="the storage to work", got=got, remedy=remedy)
    if isinstance(typed, OSError):
        typed.errno = getattr(error, "errno", None)
    return typed


def _storage_wide(error: BaseException, place: Place, reason: str) -> HsfmtError | None:
    """Return the error of what is wrong with all of the storage, whichever object was asked for."""
    names = set().union(*map(retries.class_names, retries.chain(error)))
    set_wrong = _set_wrong(error, names, place, reason)
    if set_wrong is not None:
        return set_wrong
    if is_no_bucket(error):
        bucket = urlsplit(place.url).netloc.partition("@")[0] or place.url
        kind = "container" if place.scheme == "az" else "bucket"
        remedy = f"check the {kind}'s name; {_ENDPOINT.get(place.scheme, 'check the endpoint')}"
        return AccessError.at(place.url, expected=f"a {kind} {bucket!r}", got=reason, remedy=remedy)
    if names & _NO_CREDENTIALS or "Unable to locate credentials" in str(error):
        remedy = _CREDENTIALS.get(place.scheme, "give them by storage_options or as the driver's documentation says")
        return AccessError.at(place.url, expected="credentials", got=reason, remedy=remedy)
    if isinstance(error, PermissionError) or retries.status(error) in {401, 403}:
        known = _CREDENTIALS.get(place.scheme)
        remedy = "check the credentials, and that they may read (or write) this place" + (f": {known}" if known else "")
        return AccessError.at(place.url, expected="to be let in", got=reason, remedy=remedy)
    if retries.is_untrusted(error):
        variable = "AWS_CA_BUNDLE" if place.scheme == "s3" else "SSL_CERT_FILE"
        remedy = f"check the address, and that the server's certificate authority is installed here ({variable})"
        return AccessError.at(place.url, expected="a server with a trusted certificate", got=reason, remedy=remedy)
    if retries.is_unreachable(error) and not place.answered:
        remedy = _ENDPOINT.get(place.scheme, "check the address, and that the server runs")
        return AccessError.at(place.url, expected="a server that can be reached", got=reason, remedy=remedy)
    return None


def _set_wrong(error: BaseException, names: set[str], place: Place, reason: str) -> HsfmtError | None:
    """Return the error of a setting that no request can succeed with."""
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        # What a driver does not know reaches some constructor of its own.
        expected = f"options that the driver of {place.scheme}:// knows"
        return UsageError.at("storage_options", expected=expected, got=reason, remedy="check their names")
    if "EndpointResolutionError" in names or "Invalid endpoint" in str(error):
        remedy = "write AWS_ENDPOINT_URL (or endpoint_url in storage_options) as http://HOST:PORT or https://HOST"
        return AccessError.at(place.url, expected="the URL of an endpoint", got=reason, remedy=remedy)
    if names & _NO_PROXY:
        return AccessError.at(place.url, expected="a proxy that can be reached", got=reason, remedy=_CHECK_PROXY)
    inner = retries.unusable_setting(error)
    if isinstance(inner, OSError):
        remedy = "check AWS_CA_BUNDLE (or verify in client_kwargs)"
        return AccessError.at(place.url, expected="the file of a certificate authority", got=reason, remedy=remedy)
    if (inner is not None and "InvalidProxiesConfigError" in retries.class_names(inner)) or _is_no_url(names, place):
        return AccessError.at(place.url, expected="the URL of a proxy", got=reason, remedy=_CHECK_PROXY)
    if "InvalidURL" in names:
        return AccessError.at(
            place.url, expected="the URL of an endpoint", got=reason, remedy=_ENDPOINT.get(place.scheme, "")
        )
    if inner is not None or ("BotoCoreError" in names and any(map(_REFUSED_SETTING.match, names))):
        remedy = "check storage_options, the bucket's name, the variables AWS_*, and ~/.aws/config"
        return AccessError.at(place.url, expected="settings that S3 can be asked with", got=reason, remedy=remedy)
    return None


def _is_no_url(names: set[str], place: Place) -> bool:
    """Say whether what aiohttp can't make a request to is a proxy: other addresses of web servers were looked at."""
    return "InvalidURL" in names and place.scheme in {"hf", "http"}


def is_no_bucket(error: BaseException) -> bool:
    """Return whether there is not even the bucket."""
    # The message is all there is where a driver raises its own error without the cause.
    said = str(error)
    is_said = "specified bucket does not exist" in said or "specified container does not exist" in said
    return is_said or retries.error_code(error) == "NoSuchBucket"


def is_taken(error: BaseException) -> bool:
    """Return whether an object was not created because there is one.

    Raises
    ------
    ConnectionError
        Another creator is at work, and it can't be told yet.
    """
    if retries.error_code(error) == "ConditionalRequestConflict":
        raise ConnectionError("another creator is at work") from error
    # s3fs makes an invalid argument of it.
    is_precondition = retries.error_code(error) == "PreconditionFailed" or retries.status(error) == 412
    return isinstance(error, FileExistsError) or is_precondition


def _reason(error: BaseException, place: Place) -> str:
    text = place.redacted(str(error))[:500]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
