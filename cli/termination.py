"""What ends a command early: Ctrl-C, and SIGTERM, by which schedulers preempt a job. Both end it with its report."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_AGAIN_SECONDS = 0.05


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


@contextmanager
def no_interruption_is_lost() -> Iterator[None]:
    """Within this, an interruption comes again if Python drops it, in the main thread.

    One that strikes in a finalizer, or in what runs when a weak reference dies, is printed as an "exception ignored":
    the command would go on as if nothing had been.
    """
    main_thread = threading.main_thread()
    if threading.current_thread() is not main_thread or main_thread.ident is None:
        yield
        return
    former, ident = sys.unraisablehook, main_thread.ident
    timers: list[threading.Timer] = []

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if not isinstance(dropped.exc_value, KeyboardInterrupt) or threading.current_thread() is not main_thread:
            former(dropped)
            return
        number = signal.SIGINT
        if isinstance(dropped.exc_value, Terminated):
            number = signal.SIGTERM
            signal.signal(signal.SIGTERM, _interrupt)
        # Not at once: it would strike in this very hook, whose exceptions are dropped too.
        timer = threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, (ident, number))
        timer.daemon = True
        timers.append(timer)
        timer.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = former
        for timer in timers:
            timer.cancel()
