"""Ranges from a web server. A server without ranges is found out before a body is read."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from hsfmt.errors import StorageError
from hsfmt.storage.clients.base import (
    Body,
    Client,
    check_content_range,
    range_header,
    strong_version,
    unsatisfied_nbytes,
)
from hsfmt.storage.clients.web_address import RedirectPolicy, WebAddress
from hsfmt.storage.clients.whole_objects import WholeObjects
from hsfmt.storage.process_state import abandoned_in_child
from hsfmt.storage.retries import ShortBodyError, StatusError, WrongRangeError, parse_retry_after, timeout_seconds

if TYPE_CHECKING:
    import aiohttp

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 5
_CONNECT_SECONDS = 10
_N_CONNECTIONS = 64
_READ_NBYTES = 1 << 20
_NO_RANGES = (
    'storage_options={"whole_objects": True} (--storage-option whole_objects=true) downloads each object as a whole '
    "when it is first needed; better serve the files by a server that knows ranges (nginx, Apache, Caddy, any CDN), "
    "or copy the dataset"
)


class HttpClient(Client):
    """Objects on a web server.

    Parameters
    ----------
    address
        The dataset's root.
    redirects
        Which may be followed.
    whole_objects
        Download objects as a whole from servers that ignore ranges.
    session_options
        For `aiohttp.ClientSession`.
    """

    def __init__(
        self,
        address: WebAddress,
        redirects: RedirectPolicy,
        *,
        whole_objects: bool = False,
        session_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._address = address
        self._redirects = redirects
        self._whole = WholeObjects() if whole_objects else None
        self._session_options = dict(session_options or {})
        self._session: aiohttp.ClientSession | None = None
        # Not aiohttp's `trust_env`, which would send passwords of ~/.netrc too.
        self._proxies = getproxies()

    async def address(self) -> WebAddress:
        """Return the dataset's root."""
        return self._address

    async def get(self, path: str, start: int, end: int) -> Body:
        """Return the bytes [start, end) of an object."""
        if self._whole is not None and (kept := await self._whole.read(path, start, end)) is not None:
            return kept
        began = time.monotonic()
        address = await self.address()
        async with self._answered(address, "GET", address.of(path), {"Range": range_header(start, end)}) as answer:
            first_byte = time.monotonic() - began
            version = strong_version(answer.headers.get("ETag"))
            if answer.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                return Body(b"", unsatisfied_nbytes(answer.headers.get("Content-Range")), version)
            if answer.status == HTTPStatus.PARTIAL_CONTENT:
                stop, nbytes = check_content_range(answer.headers.get("Content-Range"), start, end)
                return Body(await _exactly(answer, stop - start), nbytes, version, first_byte)
            # 200: the whole object. That will do if it is no more than what was asked for.
            nbytes = answer.content_length
            if start == 0 and nbytes is not None and nbytes <= end:
                return Body(await _exactly(answer, nbytes), nbytes, version, first_byte)
            if self._whole is None:
                size = "an object" if nbytes is None else f"all {nbytes} bytes"
                got = f"{size} of {path} instead of bytes {start} to {end}"
                host = _host(answer)
                raise StorageError.at(host, expected="a server that answers ranges", got=got, remedy=_NO_RANGES)
            return await self._whole.keep(path, answer.content.iter_any(), nbytes, version, (start, end))

    async def nbytes(self, path: str) -> int | None:
        """Return the size of an object."""
        address = await self.address()
        async with self._answered(address, "HEAD", address.of(path), {}) as answer:
            return answer.content_length

    async def document(self, address: WebAddress, url: str, max_nbytes: int) -> bytes:
        """Return a small document from the same server."""
        async with self._answered(address, "GET", url, {}) as answer:
            data = bytearray()
            async for piece in answer.content.iter_any():
                data += piece
                if len(data) > max_nbytes:
                    raise StorageError.at(_host(answer), expected=f"at most {max_nbytes} bytes", got="more")
            return bytes(data)

    @asynccontextmanager
    async def _answered(
        self, address: WebAddress, method: str, url: str, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, follow its redirects, and raise for failures; the body is read or given up in the block."""
        from yarl import URL

        session = self._open_session()
        own = address.headers
        for _ in range(_MAX_REDIRECTS + 1):
            sent = {"Accept-Encoding": "identity", **own, **headers}
            answer = await session.request(
                method, URL(url, encoded=True), headers=sent, allow_redirects=False, proxy=self._proxy(url)
            )
            try:
                if answer.status not in _REDIRECTS:
                    _raise_for(answer)
                    yield answer
                    return
                url, same = self._redirects.follow(url, answer.headers.get("Location"))
                if not same:
                    own = {}  # what was given for one server is not for another
            finally:
                # Ends the connection if a part of the body was not read, else gives it back.
                answer.close() if not answer.content.at_eof() else answer.release()
        raise StorageError.at(_host(answer), expected=f"at most {_MAX_REDIRECTS} redirects", got="more")

    def _proxy(self, url: str) -> str | None:
        """Return the proxy that the environment names for a URL."""
        parts = urlsplit(url)
        proxy = self._proxies.get(parts.scheme)
        return None if proxy is None or proxy_bypass(parts.netloc) else proxy

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            options: dict[str, Any] = {
                "connector": aiohttp.TCPConnector(limit=_N_CONNECTIONS),
                "timeout": aiohttp.ClientTimeout(
                    total=None, sock_connect=_CONNECT_SECONDS, sock_read=timeout_seconds()
                ),
                "cookie_jar": aiohttp.DummyCookieJar(),
                "auto_decompress": False,
                "read_bufsize": _READ_NBYTES,
            }
            self._session = aiohttp.ClientSession(**options | self._session_options)
            abandoned_in_child(self._session)
            weakref.finalize(self, _close, asyncio.get_running_loop(), self._session)
        return self._session


async def _exactly(answer: aiohttp.ClientResponse, nbytes: int) -> memoryview:
    """Return a body of `nbytes` bytes."""
    encoding = answer.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        got, remedy = f"{encoding}-encoded ones", "turn compression off there"
        raise StorageError.at(_host(answer), expected="the bytes as they are", got=got, remedy=remedy)
    data, at = bytearray(nbytes), 0
    async for piece in answer.content.iter_any():
        if at + len(piece) > nbytes:
            raise WrongRangeError(f"more than {nbytes} bytes")
        data[at : at + len(piece)] = piece
        at += len(piece)
    if at < nbytes:
        raise ShortBodyError(f"{at} of {nbytes} bytes")
    return memoryview(data)


def _raise_for(answer: aiohttp.ClientResponse) -> None:
    code = answer.status
    if code in {HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE}:
        return
    if code in {HTTPStatus.NOT_FOUND, HTTPStatus.GONE}:
        raise FileNotFoundError(f"HTTP {code} {answer.reason or ''}".strip())
    raise StatusError(code, answer.reason or "", parse_retry_after(answer.headers.get("Retry-After")))


def _host(answer: aiohttp.ClientResponse) -> str:
    return urlsplit(str(answer.url)).netloc.rpartition("@")[2]


def _close(loop: asyncio.AbstractEventLoop, session: aiohttp.ClientSession) -> None:
    if loop.is_running() and not session.closed:
        asyncio.run_coroutine_threadsafe(session.close(), loop)
