"""Many requests in flight on fsspec's event loop, their results in the order of arrival, within bounds.

Spec: none; this is how, not what.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from fsspec.asyn import get_loop

from hsfmt.errors import StorageError
from hsfmt.storage.abandonment import wait_for
from hsfmt.storage.base import Arrivals, BytesLike

# Of one call.
MAX_REQUESTS = 32
# Of all calls of a process together: each may be a connection, and so a descriptor; and what they asked for, or what
# arrived and was not taken yet.
MAX_ALL_REQUESTS = 128
MAX_HELD_NBYTES = 256 << 20
# Of all calls of a process together: what they asked for and has not arrived. Less than what may be read ahead, so that
# batches arrive one after the other rather than all at once, after which there would be nothing under way.
MAX_FLYING_NBYTES = 128 << 20

Fetch = Callable[[int], Coroutine[Any, Any, BytesLike]]


class ArrivalsInFlight(Arrivals):
    """What requests answer, as the answers arrive.

    Parameters
    ----------
    fetch
        Makes the request of a number and returns its body; called on the loop.
    sizes
        Bytes of each body at most, by number.
    """

    def __init__(self, fetch: Fetch, sizes: Sequence[int]) -> None:
        self._flight = _Flight(fetch, sizes)
        self._close = weakref.finalize(self, self._flight.cancel)
        self._close.atexit = False
        self._flight.start()
        wait_for(self)

    def __next__(self) -> tuple[int, BytesLike]:
        arrived = self.take()
        if arrived is None:
            raise StopIteration
        self.let_go(arrived[0])
        return arrived

    def take(self) -> tuple[int, BytesLike] | None:
        """Return the next one, None at the end; its bytes count as held until `let_go`."""
        arrived = self._flight.arrived.get()
        if isinstance(arrived, tuple):
            return arrived
        self._flight.arrived.put(None)  # for other threads, and for who asks again
        if arrived is None:
            return None
        self.close()
        try:
            raise arrived
        finally:
            del arrived  # the error refers to this frame, which would refer to it

    def let_go(self, number: int) -> None:
        """Let more be asked for in place of one that was taken: nobody holds its body any more."""
        self._flight.taken(number)

    def close(self) -> None:
        """Cancel what is in flight; threads that wait for it are told that nothing comes any more."""
        if self._close.alive:
            self._flight.cancel()  # as often as an interrupt comes between the two: a call of `_close` would be lost
            self._close.detach()

    def abandon(self) -> None:
        """Cancel what is in flight; who waits for it gets an error, as what it has so far may be taken for all."""
        if self._close.alive:
            self._flight.arrived.put(_given_up())
            self.close()


class _Room:
    """What the calls on one loop hold together; used on that loop alone.

    The ones that began first go first, so that batches which are read ahead do not hold up the one that is waited for.
    A call that holds nothing may always go on: above the limits, each of them has one range.
    """

    def __init__(self) -> None:
        self.flights: list[_Flight] = []  # the oldest first

    @property
    def held_nbytes(self) -> int:
        return sum(flight.held_nbytes for flight in self.flights)

    def has_place(self, flight: _Flight, nbytes: int) -> bool:
        if not flight.held_nbytes:
            return True
        n_requests = sum(flight.n_requests for flight in self.flights)
        if n_requests >= MAX_ALL_REQUESTS or self.held_nbytes + nbytes > MAX_HELD_NBYTES:
            return False
        if sum(flight.flying_nbytes for flight in self.flights) + nbytes > MAX_FLYING_NBYTES:
            return False
        return not any(older.needs_room for older in self.flights[: self.flights.index(flight)])

    def changed(self) -> None:
        """Wake the oldest that waits for room; it wakes the next one."""
        waiting = next((flight for flight in self.flights if flight.needs_room), None)
        if waiting is not None:
            waiting.change.set()


_ROOMS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Room] = weakref.WeakKeyDictionary()


def held_nbytes() -> int:
    """Return the bytes that were asked for in this process, or arrived, and were not taken yet."""
    room = _ROOMS.get(get_loop())
    return 0 if room is None else room.held_nbytes


class _Flight:
    """The part that lives on the loop; apart from the iterator, so that dropping that one ends it.

    Attributes
    ----------
    arrived
        (number, body), or the error that ended it all, or None at the end.
    held_nbytes
        Bytes asked for, or arrived and not let go of.
    flying_nbytes
        Of these, the ones that have not arrived.
    needs_room
        Whether it waits for others to hold less.
    change
        Set when it may go on.
    """

    def __init__(self, fetch: Fetch, sizes: Sequence[int]) -> None:
        self.arrived: SimpleQueue[tuple[int, BytesLike] | BaseException | None] = SimpleQueue()
        self.held_nbytes = self.flying_nbytes = 0
        self.needs_room = False
        self.change = asyncio.Event()
        self._fetch = fetch
        self._sizes = sizes
        self._tasks: set[asyncio.Task[None]] = set()
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop = get_loop()
        self._main: asyncio.Task[None] | None = None
        self._room: _Room | None = None
        self._cancelled = False
        self._failed = False

    @property
    def n_requests(self) -> int:
        """Requests under way."""
        return len(self._tasks)

    def start(self) -> None:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            raise StorageError.at("fsspec's event loop", expected="calls from other threads", got="one on its own")
        self._loop.call_soon_threadsafe(self._begin)

    def taken(self, number: int) -> None:
        """Let go of a body; called in the thread that took it."""
        self._loop.call_soon_threadsafe(self._release, self._sizes[number])

    def cancel(self) -> None:
        self.arrived.put(None)
        # A forked child holds a copy of a loop that runs in its parent.
        if os.getpid() == self._pid and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel)

    def _begin(self) -> None:
        if not self._cancelled:
            self._room = _ROOMS.setdefault(self._loop, _Room())
            self._room.flights.append(self)
            self._main = self._loop.create_task(self._run())

    def _cancel(self) -> None:
        self._cancelled = True
        if self._main is not None:
            self._main.cancel()
        self._leave()

    def _release(self, nbytes: int) -> None:
        self.held_nbytes -= nbytes
        if self._main is None or (self._main.done() and not self.held_nbytes):
            self._leave()
        elif self._room is not None:
            self.change.set()
            self._room.changed()

    def _leave(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.flights.remove(self)
            room.changed()

    async def _run(self) -> None:
        assert self._room is not None
        room = self._room
        try:
            for number, nbytes in enumerate(self._sizes):
                while len(self._tasks) >= MAX_REQUESTS or not room.has_place(self, nbytes):
                    self.needs_room = len(self._tasks) < MAX_REQUESTS
                    self.change.clear()
                    await self.change.wait()
                self._has_room()
                self.held_nbytes += nbytes
                self.flying_nbytes += nbytes
                task = self._loop.create_task(self._one(number))
                self._tasks.add(task)
                task.add_done_callback(partial(self._ended, nbytes))
            while self._tasks:
                self.change.clear()
                await self.change.wait()
            self.arrived.put(None)
        except asyncio.CancelledError:
            # By this flight alone. Raised, it would refer to this frame, and so to what failed, as the task to it.
            pass
        finally:
            self._has_room()
            for task in self._tasks:
                task.cancel()

    def _has_room(self) -> None:
        if self.needs_room:
            self.needs_room = False
            if self._room is not None:
                self._room.changed()

    def _ended(self, nbytes: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.flying_nbytes -= nbytes
        self.change.set()
        if self._room is not None:
            self._room.changed()

    async def _one(self, number: int) -> None:
        try:
            body = await self._fetch(number)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            # One of them is raised; what nobody takes would be kept by the frames that it refers to.
            if not (self._failed or self._cancelled):
                self._failed = True
                self.arrived.put(error)
            if self._main is not None:
                self._main.cancel()
        else:
            self.arrived.put((number, body))


def _given_up() -> StorageError:
    return StorageError.at("reading ahead", expected="a batch that is still wanted", got="one that was given up")


def in_order(arrivals: Iterator[tuple[int, BytesLike]], n: int) -> list[BytesLike]:
    """Return all bodies by number."""
    bodies: list[BytesLike] = [b""] * n
    for number, body in arrivals:
        bodies[number] = body
    return bodies
