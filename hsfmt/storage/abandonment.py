"""Giving up what other threads wait for: answers of a storage that nobody wants any more."""

from __future__ import annotations

import threading
import weakref
from types import TracebackType
from typing import Protocol

_HERE = threading.local()


class Waited(Protocol):
    """What a thread may be waiting for."""

    def abandon(self) -> None:
        """Let those who wait get an error; callable from any thread, and without locks."""


class Abandonment:
    """As a context manager: work of one or several threads whose requests `give_up` ends, those under way and later.

    Called by a signal handler or the garbage collector too, in whatever thread: there are no locks.
    """

    def __init__(self) -> None:
        self._over = False
        self._waited: dict[int, weakref.ref[Waited]] = {}

    def __enter__(self) -> None:
        _HERE.stack = (self, getattr(_HERE, "stack", None))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _HERE.stack = _HERE.stack[1]

    def give_up(self) -> None:
        """Let what is waited for within raise StorageError, now and from now on."""
        self._over = True
        for reference in list(self._waited.values()):
            waited = reference()
            if waited is not None:
                waited.abandon()

    def _add(self, waited: Waited) -> None:
        number = id(waited)
        self._waited[number] = weakref.ref(waited, lambda _: self._waited.pop(number, None))
        if self._over:  # looked at once it is entered: who gives up sets that first
            waited.abandon()


def wait_for(waited: Waited) -> None:
    """Let `waited` be given up with the work that this thread does, if that can be."""
    stack = getattr(_HERE, "stack", None)
    if stack is not None:
        stack[0]._add(waited)  # noqa: SLF001  the other half of it
