"""Where a slice of a conversion says how far it is, and reads whether to go on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from hsfmt.cli.progress import Progress

GO_ON, FINISH, ABANDON = 0, 1, 2
# Places in the shared memory of a SharedBoard.
ORDER, ITEMS, NBYTES, USED, TICKETS, SERVED = range(6)
N_SHARED = 6
_POLL_SECONDS = 0.01


class Board(Protocol):
    """Where a slice says how far it is, and reads whether to go on."""

    def advance(self, nbytes: int) -> None:
        """Count an item done."""

    def order(self) -> int:
        """Return GO_ON, FINISH (commit what was taken) or ABANDON (commit nothing of the open part)."""

    def room(self, nbytes: int) -> AbstractContextManager[None]:
        """Wait until an item of that size fits into memory beside those of the other workers, and hold the room."""


def until_told(numbers: Sequence[int], board: Board) -> Iterator[int]:
    """Yield the numbers until the board says FINISH.

    Raises
    ------
    KeyboardInterrupt
        It says ABANDON.
    """
    for number in numbers:
        order = board.order()
        if order == ABANDON:
            raise KeyboardInterrupt
        if order == FINISH:
            return
        yield number


class LocalBoard:
    """The board of a conversion within this process.

    Parameters
    ----------
    progress
        Is told how far it is.
    interrupt
        Raises an interruption that came, between two items.
    """

    def __init__(self, progress: Progress, interrupt: Callable[[], None] = lambda: None) -> None:
        self._progress = progress
        self._interrupt = interrupt
        self._items = self._nbytes = 0

    def advance(self, nbytes: int) -> None:
        """Count an item done."""
        self._items += 1
        self._nbytes += nbytes
        self._progress.update(self._nbytes, f"{self._items:,} {self._progress.noun}")

    def order(self) -> int:
        """Return GO_ON; an interruption that came is raised as KeyboardInterrupt."""
        self._interrupt()
        return GO_ON

    def room(self, nbytes: int) -> AbstractContextManager[None]:
        """There is nobody to wait for."""
        del nbytes
        return nullcontext()


class SharedBoard:
    """Figures in shared memory. No queue, which a stopping parent might leave full.

    Parameters
    ----------
    shared
        int64 [N_SHARED], with a lock.
    memory_nbytes
        What the items that are in memory at once may take together, None for any size.
    """

    def __init__(self, shared: Any, memory_nbytes: int | None = None) -> None:
        self._shared = shared
        self._memory_nbytes = memory_nbytes
        self._parent = os.getppid()
        self._stopped = False

    def stop(self) -> None:
        """Abandon the slice that runs here, whatever the parent says."""
        self._stopped = True

    def advance(self, nbytes: int) -> None:
        """Count an item done."""
        with self._shared.get_lock():
            self._shared[ITEMS] += 1
            self._shared[NBYTES] += nbytes

    def order(self) -> int:
        """Return the parent's order."""
        if self._stopped or os.getppid() != self._parent:  # it was killed: nobody is left who would seal or report
            return ABANDON
        order: int = self._shared[ORDER]
        return order

    @contextmanager
    def room(self, nbytes: int) -> Iterator[None]:
        """Wait for room, in the order of asking, so that none waits for ever; an item above the budget runs alone."""
        if self._memory_nbytes is None:
            yield
            return
        with self._shared.get_lock():
            ticket = self._shared[TICKETS]
            self._shared[TICKETS] += 1
        while not self._takes(ticket, nbytes, self._memory_nbytes):
            if self.order() == ABANDON:  # nobody is served any more
                raise KeyboardInterrupt
            time.sleep(_POLL_SECONDS)
        try:
            yield
        finally:
            with self._shared.get_lock():
                self._shared[USED] -= nbytes

    def _takes(self, ticket: int, nbytes: int, limit: int) -> bool:
        shared = self._shared
        with shared.get_lock():
            used = shared[USED]
            if shared[SERVED] != ticket or (used and used + nbytes > limit):
                return False
            shared[SERVED] += 1
            shared[USED] += nbytes
            return True
