"""Objects streamed to S3 and Azure: in parts, a few at a time; the object appears when all of them are there.

Spec: rules WRITE-3, WRITE-9, WRITE-12. Nothing is stored under the name before the commit, and an abort or a kill
leaves what was there: an upload that was never completed is no object. A killed one is found by
`Store.unfinished_uploads` where the storage can list such.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar

from fsspec.asyn import get_loop

from hsfmt.errors import HsfmtError, StorageError
from hsfmt.storage.base import BytesLike, ObjectWriter, Upload, flat_view
from hsfmt.storage.clients.base import TakesParts
from hsfmt.storage.clients.s3_client import S3Client
from hsfmt.storage.failures import Place, attempt_async
from hsfmt.storage.retries import RetryBudget, timeout_seconds

PART_NBYTES = 8 << 20  # S3 takes no less than 5 MiB, and Azure any
"""What an open object holds in memory at most besides what is on its way, up to 8 GiB of it; then parts grow."""
MOST_IN_FLIGHT_NBYTES = 64 << 20
"""What the parts on their way hold together, of all open objects of this process; Python 3.11 copies them once more."""
# S3 takes 10,000 parts, Azure 50,000: after each so many, parts are twice as large.
_PARTS_OF_A_SIZE = 1000
_ABORT_SECONDS = 60.0
_PATIENCE = 3
_SLOWEST_NBYTES_A_SECOND = 64 << 10

_T = TypeVar("_T")


class InFlight:
    """A bound on the bytes on their way; a part above the bound goes alone.

    Shared by all objects, so that one alone has many parts in flight, and many open ones no more memory than that.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: dict[Future[Any], int] = {}
        self._freed = threading.Condition()

    def submit(self, nbytes: int, start: Callable[[], Future[_T]]) -> Future[_T]:
        """Wait until `nbytes` fit; return what `start` begins."""
        with self._freed:
            self._freed.wait_for(lambda: not self._parts or sum(self._parts.values()) + nbytes <= self._limit)
            future = start()
            self._parts[future] = nbytes
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: Future[Any]) -> None:
        with self._freed:
            self._parts.pop(future, None)
            self._freed.notify_all()


_in_flight = InFlight(MOST_IN_FLIGHT_NBYTES)


def _forked() -> None:
    global _in_flight  # noqa: PLW0603  those of the parent do not end in a child
    _in_flight = InFlight(MOST_IN_FLIGHT_NBYTES)


os.register_at_fork(after_in_child=_forked)


class WriterInParts(ObjectWriter):
    """An object of a bucket, as a single request if it is small.

    Parameters
    ----------
    client
        Where.
    path
        Inside the dataset.
    place
        How errors name the dataset.
    """

    def __init__(self, client: TakesParts, path: str, place: Place) -> None:
        self.nbytes = 0
        self._client = client
        self._path = path
        self._place = place
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop = get_loop()
        self._upload: str | None = None
        self._pending = bytearray()
        self._n_parts = 0
        self._in_flight: list[tuple[int, Future[str]]] = []
        self._receipts: dict[int, str] = {}
        self._is_open = True

    def write(self, data: BytesLike) -> None:
        self._check_open()
        view = flat_view(data)
        self.nbytes += len(view)
        while len(view):
            space = self._part_nbytes() - len(self._pending)
            self._pending += view[:space]
            view = view[space:]
            if len(self._pending) == self._part_nbytes():
                self._send()

    def commit(self) -> None:
        self._check_open()
        try:
            if self._upload is None:
                body = bytes(self._pending)
                self._finish(self._retried(lambda: self._client.put(self._path, body), len(body)))
            else:
                if self._pending:
                    self._send()
                self._collect(wait_for_all=True)
                self._finish(self._complete(self._upload))
            nbytes = self._finish(self._retried(lambda: self._client.nbytes(self._path)))
        except BaseException:
            self.abort()
            raise
        self._is_open = False
        self._pending = bytearray()
        if nbytes != self.nbytes:
            raise StorageError.at(self._path, expected=f"{self.nbytes} bytes stored", got=f"{nbytes} bytes")

    def abort(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._pending = bytearray()
        if os.getpid() != self._pid:
            return  # the upload is the parent's
        for _, future in self._in_flight:
            future.cancel()
        wait([future for _, future in self._in_flight], _ABORT_SECONDS)  # a part that arrives later would stay
        self._in_flight.clear()
        upload = self._upload
        if upload is not None:
            with suppress(HsfmtError, TimeoutError):
                aborting = self._retried(lambda: self._client.abort(self._path, upload))
                self._submit(aborting).result(_ABORT_SECONDS)

    def _check_open(self) -> None:
        if not self._is_open:
            raise StorageError.at(self._path, expected="an object still open", got="one committed or aborted")

    def _part_nbytes(self) -> int:
        return PART_NBYTES << (self._n_parts // _PARTS_OF_A_SIZE)

    def _send(self) -> None:
        if self._upload is None:
            self._upload = self._finish(self._retried(lambda: self._client.begin(self._path)))
        self._collect()
        upload, number, body = self._upload, self._n_parts + 1, bytes(self._pending)
        self._pending, self._n_parts = bytearray(), number
        future = _in_flight.submit(len(body), lambda: self._submit(self._send_part(upload, number, body)))
        self._in_flight.append((number, future))

    async def _send_part(self, upload: str, number: int, body: bytes) -> str:
        return await self._retried(lambda: self._client.send_part(self._path, upload, number, body), len(body))

    def _collect(self, *, wait_for_all: bool = False) -> None:
        """Take the results of the parts that have arrived, in order; raises what one failed with."""
        while self._in_flight and (wait_for_all or self._in_flight[0][1].done()):
            number, future = self._in_flight[0]
            self._receipts[number] = future.result()
            self._in_flight.pop(0)

    async def _complete(self, upload: str) -> None:
        receipts = [receipt for _, receipt in sorted(self._receipts.items())]
        attempts = 0

        async def complete() -> None:
            nonlocal attempts
            attempts += 1
            try:
                await self._client.complete(self._path, upload, receipts)
            except FileNotFoundError:
                # Of an attempt whose answer was lost there may be the object, and no upload any more.
                if attempts == 1 or await self._client.nbytes(self._path) != self.nbytes:
                    raise

        await self._retried(complete)

    async def _retried(self, action: Callable[[], Awaitable[_T]], nbytes: int = 0) -> _T:
        # Drivers do not notice a server that is silent before it takes the body.
        seconds = _PATIENCE * timeout_seconds() + nbytes / _SLOWEST_NBYTES_A_SECOND

        async def within_time() -> _T:
            async with asyncio.timeout(seconds):
                return await action()

        return await attempt_async(self._path, within_time, self._place, RetryBudget())

    def _submit(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _finish(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return self._submit(coroutine).result()


async def list_uploads(client: S3Client) -> list[Upload]:
    """Return the uploads below a client's root that were neither completed nor aborted."""
    found: dict[tuple[str, str], Upload] = {}
    markers: dict[str, str] = {}
    prefix = client.key("")
    while True:
        page = await client.call("list_multipart_uploads", "", Prefix=prefix, **markers)
        entries = [entry for entry in page.get("Uploads", ()) if entry["Key"].startswith(prefix)]
        new = [entry for entry in entries if (entry["Key"], entry["UploadId"]) not in found]
        for entry in new:
            at = entry["Initiated"].timestamp()
            path, number = entry["Key"].removeprefix(prefix), entry["UploadId"]
            found[entry["Key"], number] = Upload(path, number, await _last_sent(client, path, number, at))
        if not page.get("IsTruncated") or not new:
            return sorted(found.values(), key=lambda upload: (upload.path, upload.at))
        markers = {
            "KeyMarker": page.get("NextKeyMarker") or entries[-1]["Key"],
            "UploadIdMarker": page.get("NextUploadIdMarker") or entries[-1]["UploadId"],
        }


async def _last_sent(client: S3Client, path: str, upload: str, began: float) -> float:
    """Return when the last part arrived, so that an upload at work is not taken for old."""
    marker = 0
    with suppress(FileNotFoundError):  # ended meanwhile
        while True:
            page = await client.call("list_parts", path, UploadId=upload, PartNumberMarker=marker)
            parts = page.get("Parts", ())
            began = max([began, *(part["LastModified"].timestamp() for part in parts)])
            if not page.get("IsTruncated") or not parts:
                break
            marker = parts[-1]["PartNumber"]
    return began
