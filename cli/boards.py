"""Where a slice of a conversion says how far it is, and reads whether to go on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from hsfmt.cli.progress import Progress

GO_ON, FINISH, ABANDON = 0, 1, 2


class Board(Protocol):
    """Where a slice says how far it is, and reads whether to go on."""

    def advance(self, nbytes: int) -> None:
        """Count an item done."""

    def order(self) -> int:
        """Return GO_ON, FINISH (commit what was taken) or ABANDON (commit nothing of the open part)."""


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
    """The board of a conversion within this process."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._items = self._nbytes = 0

    def advance(self, nbytes: int) -> None:
        """Count an item done."""
        self._items += 1
        self._nbytes += nbytes
        self._progress.update(self._nbytes, f"{self._items:,} files")

    def order(self) -> int:
        """Return GO_ON: an interruption comes as KeyboardInterrupt."""
        return GO_ON


class SharedBoard:
    """Figures in shared memory: order, items, nbytes. No queue, which a stopping parent might leave full."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared
        self._parent = os.getppid()
        self._stopped = False

    def stop(self) -> None:
        """Abandon the slice that runs here, whatever the parent says."""
        self._stopped = True

    def advance(self, nbytes: int) -> None:
        """Count an item done."""
        with self._shared.get_lock():
            self._shared[1] += 1
            self._shared[2] += nbytes

    def order(self) -> int:
        """Return the parent's order."""
        if self._stopped or os.getppid() != self._parent:  # it was killed: nobody is left who would seal or report
            return ABANDON
        order: int = self._shared[0]
        return order
