"""Reading through a client: tried again while that can help, and nothing passed on that is not what was asked for."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from hsfmt.errors import CorruptionError, HsfmtError, ObjectChangedError, StorageError
from hsfmt.storage.arrivals import ArrivalsInFlight, in_order
from hsfmt.storage.base import Arrivals, BytesLike
from hsfmt.storage.clients.base import Body, Client
from hsfmt.storage.clients.choice import Faster
from hsfmt.storage.failures import Place, shown, typed_failure
from hsfmt.storage.pace import Pace
from hsfmt.storage.retries import RetryBudget, ShortBodyError, is_transient, pause_seconds, timeout_seconds

_MAX_VERSIONS = 4096
_COUNTED_WHOLE_NBYTES = 8 << 20  # of objects whose size is not known, for the bound on what is held
# However little arrives: drivers notice sooner when nothing does.
_SLOWEST_NBYTES_A_SECOND = 16 << 10
_PATIENCE = 8
# A faster client that never succeeded is given up after so many failures.
_MAX_FIRST_FAILURES = 4


class RangeReader:
    """Objects of one dataset, in one process.

    Parameters
    ----------
    client
        Reads them.
    place
        How errors name the dataset.
    faster
        Opens another client for ranges, on the loop, when the first are asked for; None: there is none. What it can't
        read, for whatever reason, `client` is asked for, and says why.

    Attributes
    ----------
    client
        As given.
    pace
        Measured so far.
    """

    def __init__(self, client: Client, place: Place, faster: Faster | None = None) -> None:
        self.client = client
        self.pace = Pace()
        self._place = place
        self._versions: OrderedDict[str, tuple[int | None, str | None]] = OrderedDict()
        self._open_faster = faster
        self._faster: asyncio.Future[Client | None] | None = None
        self._faster_failures = 0

    def read_many(self, requests: Sequence[tuple[str, int]]) -> list[BytesLike]:
        """Return whole objects, (path, max_nbytes) each; raises as `Store.read`."""
        budget = RetryBudget()

        async def fetch(number: int) -> BytesLike:
            path, max_nbytes = requests[number]
            # One byte more than allowed shows an object that is too large without a request for its size.
            body = await self._retried(path, (0, max_nbytes + 1), number, budget)
            if len(body.data) > max_nbytes or (body.object_nbytes or 0) > max_nbytes:
                raise CorruptionError.at(path, expected=f"at most {max_nbytes} bytes", got="a larger object")
            return body.data

        sizes = [max_nbytes + 1 for _, max_nbytes in requests]
        with ArrivalsInFlight(fetch, [min(nbytes, _COUNTED_WHOLE_NBYTES) for nbytes in sizes]) as arrivals:
            return in_order(arrivals, len(requests))

    def read_each(self, ranges: Sequence[tuple[str, int, int]]) -> Arrivals:
        """Return the bytes of ranges as they arrive; raises as `Store.read_each`."""
        budget = RetryBudget()

        async def fetch(number: int) -> BytesLike:
            path, offset, nbytes = ranges[number]
            if not nbytes:
                return b""
            body = await self._retried(path, (offset, offset + nbytes), number, budget, exact=True)
            return body.data

        return ArrivalsInFlight(fetch, [nbytes for _, _, nbytes in ranges])

    def nbytes(self, path: str) -> int | None:
        """Return the size of an object by a request of its own; None where the storage does not say it."""
        budget = RetryBudget()
        found: list[int | None] = []

        async def fetch(number: int) -> BytesLike:
            async def ask(client: Client) -> Body:
                return Body(b"", await client.nbytes(path))

            found.append((await self._attempts(path, ask, number, budget)).object_nbytes)
            return b""

        with ArrivalsInFlight(fetch, [0]) as arrivals:
            in_order(arrivals, 1)
        return found[0]

    def forget(self, path: str) -> None:
        """Expect any version of an object that this process has written or removed."""
        self._versions.pop(path, None)

    async def _retried(
        self, path: str, span: tuple[int, int], number: int, budget: RetryBudget, *, exact: bool = False
    ) -> Body:
        start, end = span
        seconds = _PATIENCE * timeout_seconds() + (end - start) / _SLOWEST_NBYTES_A_SECOND

        async def get(client: Client) -> Body:
            began = time.monotonic()
            async with asyncio.timeout(seconds):
                body = await client.get(path, start, end)
            self.pace.note(len(body.data), body.first_byte_seconds, time.monotonic() - began)
            await self._check(client, path, span, body, exact=exact)
            return body

        faster = await self._faster_client() if exact else None
        if faster is not None:
            try:
                body = await get(faster)
            except (asyncio.CancelledError, HsfmtError):
                raise
            except BaseException:  # noqa: BLE001  the other client says what is wrong; Rust's panics are none of ours
                budget.failed(number)
                self._count_failure()
                await asyncio.sleep(pause_seconds(1, 0.0))
            else:
                self._faster_failures = -1
                self._place.answered = True
                return body
        return await self._attempts(path, get, number, budget)

    async def _attempts(
        self, path: str, ask: Callable[[Client], Awaitable[Body]], number: int, budget: RetryBudget
    ) -> Body:
        attempts = 0
        while True:
            try:
                body = await ask(self.client)
            except HsfmtError:
                raise
            except Exception as error:  # noqa: BLE001  raised typed
                attempts += 1
                budget.failed(number)
                answered = self._place.answered
                pause = budget.pause(error, attempts, answered=answered) if is_transient(error) else None
                if pause is None:
                    raise typed_failure(error, path, self._place, attempts) from shown(error, self._place)
            else:
                self._place.answered = True
                budget.recovered(number)
                return body
            await asyncio.sleep(pause)

    async def _faster_client(self) -> Client | None:
        if self._open_faster is None:
            return None
        if self._faster is None:
            self._faster = asyncio.ensure_future(self._opened_faster(self._open_faster))
        return await asyncio.shield(self._faster)

    async def _opened_faster(self, opened: Faster) -> Client | None:
        try:
            return await opened()
        except HsfmtError:
            raise
        except Exception:  # noqa: BLE001  the other client will say what is wrong
            return None

    def _count_failure(self) -> None:
        if self._faster_failures >= 0:
            self._faster_failures += 1
            if self._faster_failures >= _MAX_FIRST_FAILURES:
                self._open_faster = None

    async def _check(self, client: Client, path: str, span: tuple[int, int], body: Body, *, exact: bool) -> None:
        """Compare an answer with what was asked for, and with what the object was before."""
        start, end = span
        n_wanted, n_got = end - start, len(body.data)
        if exact:
            self._compare_version(path, body)
        if n_got > n_wanted:
            raise StorageError.at(
                path,
                expected=f"{n_wanted} bytes at offset {start}",
                got=f"{n_got} bytes",
                remedy="the server does not honour range requests",
            )
        if exact:
            if n_got < n_wanted:
                nbytes = body.object_nbytes if body.object_nbytes is not None else await client.nbytes(path)
                if nbytes is not None and nbytes < end:
                    raise CorruptionError.at(
                        path,
                        expected=f"{n_wanted} bytes at offset {start}",
                        got=f"an object of {nbytes} bytes",
                        remedy="the object was truncated: restore it, or run `hsfmt verify`",
                    )
                raise ShortBodyError(f"{n_got} of {n_wanted} bytes at offset {start}")
        elif body.object_nbytes is not None and n_got < min(body.object_nbytes, n_wanted):
            raise ShortBodyError(f"{n_got} of {body.object_nbytes} bytes")

    def _compare_version(self, path: str, body: Body) -> None:
        now = (body.object_nbytes, body.version)
        before = self._versions.setdefault(path, now)
        if any(None not in pair and pair[0] != pair[1] for pair in zip(before, now, strict=True)):
            remedy = "committed objects are never replaced: find out who did, and open the dataset again"
            raise ObjectChangedError.at(path, expected=f"{_named(before)}, as before", got=_named(now), remedy=remedy)
        if None in before:
            self._versions[path] = (
                before[0] if before[0] is not None else now[0],
                before[1] if before[1] is not None else now[1],
            )
        if len(self._versions) > _MAX_VERSIONS:
            self._versions.popitem(last=False)


def _named(version: tuple[int | None, str | None]) -> str:
    nbytes, tag = version
    size = "an object" if nbytes is None else f"an object of {nbytes} bytes"
    return f"{size} with ETag {tag[:64]}" if tag else size
