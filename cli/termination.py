"""SIGTERM, by which schedulers preempt a job: it ends a command as Ctrl-C does, with its report."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Within this, SIGTERM raises Terminated, once; in the main thread, and where nobody else handles it."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        # After it came, the process is about to end, and a second one must not spoil that.
        if signal.getsignal(signal.SIGTERM) is _interrupt:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _interrupt(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
