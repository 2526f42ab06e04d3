"""gcsfs, with requests that fail at once: who makes them tries again, and knows until when.

By itself gcsfs tries each six times, in half a minute, also a server that can't be reached, and prints a traceback for
each time. It has one error for an object and for a bucket that is not there.
"""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import fsspec

from hsfmt.storage.retries import RetryBudget, is_transient, timeout_seconds

if TYPE_CHECKING:
    from hsfmt.storage.failures import Place

_CONNECT_SECONDS = 5
_SWITCH = "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"
# aiohttp warns of larger ones, which it would send without letting go of the event loop.
_LARGEST_BYTES = 1 << 20


def is_gcs(url: str) -> bool:
    """Say whether a URL is one of GCS, and not on top of another storage."""
    return url.startswith(("gs://", "gcs://"))


def gcs_file_system(url: str, options: Mapping[str, Any], place: Place) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return gcsfs's file system and the path that a URL has in it.

    Parameters
    ----------
    url
        Where.
    options
        For gcsfs.
    place
        Of the dataset, which knows whether the storage ever answered.

    Raises
    ------
    ImportError
        gcsfs is not installed.
    """
    # A listing that another thread began before an object was made would hide it from those who look for it.
    fixed = {"skip_instance_cache": True, "use_listings_cache": False}
    fs = _class()(**{**_timeouts(url, options), **options, **fixed})
    root = str(fs._strip_protocol(url))  # noqa: SLF001  fsspec's name for it
    once = getattr(type(fs)._request, "__wrapped__", None)  # noqa: SLF001  without what tries again
    if once is not None:
        fs._request = _Requests(fs, once, root.partition("/")[0], place)  # noqa: SLF001  all others go through it
    return fs, root


def _class() -> Any:
    """Return gcsfs's class for JSON over HTTP, unless another one is asked for.

    The one that gcsfs has chosen by default since 2026 asks over gRPC what kind of bucket it is, before each request
    until that is answered; and gRPC survives no fork.
    """
    import gcsfs.core

    is_asked_for = os.environ.get(_SWITCH, "").lower() in {"true", "1"}
    return gcsfs.GCSFileSystem if is_asked_for else gcsfs.core.GCSFileSystem


def _timeouts(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    if "requests_timeout" in {**fsspec.config.conf.get(url.partition("://")[0], {}), **options}:
        return {}
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=timeout_seconds())
    return {"requests_timeout": timeout}


class _Requests:
    """gcsfs's `_request`.

    Parameters
    ----------
    fs
        The file system.
    once
        Makes one request of it.
    bucket
        The only one that is asked for.
    place
        How errors name the dataset.
    """

    def __init__(self, fs: Any, once: Callable[..., Awaitable[Any]], bucket: str, place: Place) -> None:
        self._fs = fs
        self._once = once
        self._bucket = bucket
        self._place = place
        self._has_bucket = False

    async def __call__(self, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        # Of a step of an upload gcsfs's file knows no way back; all other requests are made again by our callers.
        is_step = method == "POST" and "/upload/" in path and kwargs.get("uploadType") != "multipart"
        budget, attempts = RetryBudget(), 0
        while True:
            try:
                answer = await self._asked(method, path, *args, **kwargs)
            except Exception as error:
                attempts += 1
                budget.failed(0)
                can_pass = is_step and is_transient(error)
                pause = budget.pause(error, attempts, answered=self._place.answered) if can_pass else None
                if pause is None:
                    raise
            else:
                self._has_bucket = self._place.answered = True
                return answer
            await asyncio.sleep(pause)

    async def _asked(self, method: str, path: str, *args: Any, data: Any = None, **kwargs: Any) -> Any:
        if isinstance(data, bytes | bytearray | memoryview) and len(data) > _LARGEST_BYTES:
            data = io.BytesIO(data)
        try:
            return await self._once(self._fs, method, path, *args, data=data, **kwargs)
        except FileNotFoundError as error:
            if not self._has_bucket and await self._is_missing():
                raise FileNotFoundError(f"The specified bucket does not exist: {self._bucket}") from error
            raise
        except OSError as error:
            if str(error).startswith("Forbidden"):  # its spelling of status 403
                raise PermissionError(str(error)) from error
            raise

    async def _is_missing(self) -> bool:
        try:
            await self._once(self._fs, "GET", "b/{}", self._bucket)
        except FileNotFoundError:
            return True
        except OSError as error:
            if not str(error).startswith("Forbidden"):  # whoever may not look at it is told that it is there
                raise
        self._has_bucket = True
        return False
