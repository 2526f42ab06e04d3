"""A dataset in a container of Azure's."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from fsspec.asyn import get_loop, sync

from hsfmt.errors import NotFoundError, StorageError, UsageError
from hsfmt.storage.base import BytesLike, ObjectWriter, Store, check_path, check_prefix
from hsfmt.storage.clients.azure_account import OPTIONS, connected, parse_azure_url
from hsfmt.storage.clients.azure_client import AzureClient
from hsfmt.storage.clients.choice import missing_driver
from hsfmt.storage.failures import attempt
from hsfmt.storage.range_reader import RangeReader
from hsfmt.storage.ranged import RangedStore
from hsfmt.storage.retries import timeout_seconds
from hsfmt.storage.uploads import WriterInParts

_PATIENCE = 8
_SLOWEST_NBYTES_A_SECOND = 64 << 10

_T = TypeVar("_T")


class AzureStore(RangedStore):
    """A dataset at an az, abfs or abfss URL.

    Parameters
    ----------
    url
        SCHEME://CONTAINER/PREFIX, with @ACCOUNT.dfs.core.windows.net behind the container to name the account there.
    storage_options
        `account_name`, `account_key`, `sas_token`, `connection_string`, `credential`, `anon` and others of adlfs's.
    """

    def _open_reader(self) -> RangeReader:
        unknown = sorted(set(self._options) - OPTIONS)
        if unknown:
            expected = f"options among {', '.join(sorted(OPTIONS))}"
            raise UsageError.at("storage_options", expected=expected, got=", ".join(unknown))
        place = parse_azure_url(self._url)

        def connect() -> tuple[Any, Any]:
            try:
                return connected(place, self._setting, self.url)
            except ImportError as error:
                raise missing_driver(self.url, error) from error

        return RangeReader(AzureClient(connect, place.container, place.prefix), self._place)

    def size(self, path: str) -> int | None:
        try:
            return self._reader().nbytes(check_path(path))
        except NotFoundError:
            return None

    def list(self, prefix: str) -> list[str]:
        checked, client = check_prefix(prefix), self._client()
        return self._ask(prefix, lambda: client.names(checked))

    def walk(self, prefix: str) -> Iterator[tuple[str, int]]:
        checked, client = check_prefix(prefix), self._client()
        found = self._ask(prefix, lambda: client.objects(checked))
        yield from sorted(found, key=lambda item: item[0].split("/"))

    def create(self, path: str, data: BytesLike) -> bool:
        client, body, creator = self._changing(path), bytes(data), uuid.uuid4().hex
        # Of an attempt whose answer was lost, also one that aiohttp made by itself, the one in our way is ourselves.
        return self._ask(path, lambda: client.create(path, body, creator), len(body))

    def write(self, path: str, data: BytesLike) -> None:
        client, body = self._changing(path), bytes(data)
        self._ask(path, lambda: client.put(path, body), len(body))

    def open_object(self, path: str) -> ObjectWriter:
        return WriterInParts(self._changing(path), path, self._place)

    def sync(self, directories: Iterable[str]) -> None:
        for directory in directories:
            check_prefix(directory)

    def remove(self, path: str) -> None:
        client = self._changing(path)
        if self.size(path) is None:
            raise NotFoundError.at(path, expected="an object", got="nothing of that name")
        with suppress(NotFoundError):  # of an attempt that did arrive, also one that aiohttp made by itself
            self._ask(path, lambda: client.delete(path))

    def modified(self, path: str) -> float | None:
        client = self._client()
        check_path(path)
        try:
            return float(self._ask(path, lambda: client.properties(path)).last_modified.timestamp())
        except NotFoundError:
            return None

    def shares_storage(self, source: Store) -> bool:
        if not isinstance(source, AzureStore) or self._options != source._options:  # noqa: SLF001  its own kind
            return False
        return self._account() == source._account()  # noqa: SLF001  likewise

    def link(self, source: Store, path: str) -> bool:
        if not isinstance(source, AzureStore) or not self.shares_storage(source):
            return False
        nbytes = source.size(path)
        if nbytes is None:
            raise NotFoundError.at(path, expected="an object", got="nothing of that name")
        client, origin = self._changing(path), source._client()  # noqa: SLF001  likewise
        if not self._ask(path, lambda: client.copy(origin, path), nbytes):
            return False
        if self.size(path) != nbytes:
            raise StorageError.at(path, expected=f"{nbytes} bytes copied", got=f"{self.size(path)} bytes")
        return True

    def _account(self) -> str:
        client, answered = self._client(), self._place.answered
        found = self._ask("", client.account)
        self._place.answered = answered  # there was no request
        return found

    def _client(self) -> AzureClient:
        client = self._reader().client
        assert isinstance(client, AzureClient)
        return client

    def _changing(self, path: str) -> AzureClient:
        """Return the client, for an object that is about to become another one by our own hand."""
        client = self._client()
        self._reader().forget(check_path(path))
        return client

    def _ask(self, path: str, request: Callable[[], Awaitable[_T]], nbytes: int = 0) -> _T:
        """Make a request that takes or moves so many bytes, again while that can help."""
        seconds = _PATIENCE * timeout_seconds() + nbytes / _SLOWEST_NBYTES_A_SECOND

        async def within_time() -> _T:
            async with asyncio.timeout(seconds):
                return await request()

        def result() -> _T:
            found: _T = sync(get_loop(), within_time)
            return found

        return attempt(path, result, self._place)
