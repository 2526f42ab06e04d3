"""The bound on bytes of states in host memory: taken before rows are copied, given back once they are written."""

from __future__ import annotations

import threading
import time


class Room:
    """Bytes that may be in flight. Waiting for them has a deadline.

    Parameters
    ----------
    limit
        Most bytes at once.

    Attributes
    ----------
    high_water
        Most bytes that were taken at once.
    waited_seconds, longest_wait
        Time spent waiting: of all calls together, and of the longest.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.high_water = 0
        self.waited_seconds = 0.0
        self.longest_wait = 0.0
        self._used = 0
        self._given = threading.Condition()

    @property
    def used(self) -> int:
        """Bytes that are taken now."""
        return self._used

    def take(self, nbytes: int, deadline: float) -> bool:
        """Take bytes, waiting for them until `deadline` (time.monotonic()); return whether they were had."""
        with self._given:
            started = time.monotonic()
            self._given.wait_for(lambda: self._used + nbytes <= self.limit, max(0.0, deadline - started))
            waited = time.monotonic() - started
            self.waited_seconds += waited
            self.longest_wait = max(self.longest_wait, waited)
            if self._used + nbytes > self.limit:
                return False
            self._used += nbytes
            self.high_water = max(self.high_water, self._used)
            return True

    def give(self, nbytes: int) -> None:
        """Give bytes back."""
        with self._given:
            self._used -= nbytes
            self._given.notify_all()
