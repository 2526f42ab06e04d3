"""Ctrl-C and SIGTERM at moments of our choosing, around code that an exception anywhere would leave locked for ever."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 3


@contextmanager
def interruptions_wait(*, second_strikes: bool = False) -> Iterator[Callable[[], None]]:
    """Within this, an interruption waits until the yielded function is called, at the latest until the end.

    A pool of processes, and the locks of its futures, are not made for a KeyboardInterrupt that strikes in the middle
    of them: a lock that stays held keeps the pool from ending. The function hands the first that came to the handler
    there was before, which raises; what comes after it is taken for the same one. Whoever presses Ctrl-C a third time
    ends the process at once. Outside the main thread, where Python runs no handlers, nothing waits, nor does a signal
    that no Python function handles.

    Parameters
    ----------
    second_strikes
        Whether the second Ctrl-C strikes where it comes, for work between whose safe moments there may be minutes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    came: list[int] = []
    delivered: list[int] = []

    def wait(number: int, frame: Any) -> None:
        del frame
        came.append(number)
        n_presses = came.count(signal.SIGINT)
        if second_strikes and n_presses > 1:
            deliver()
        if n_presses >= _PATIENCE:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)

    def deliver() -> None:
        if came and not delivered:
            delivered.append(came[0])
            former[came[0]](came[0], None)

    former: dict[int, Callable[[int, Any], Any]] = {}
    try:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                former[number] = handler
                signal.signal(number, wait)
        yield deliver
    finally:
        for each, handler in former.items():
            # The former handler may have set another: SIGTERM that came once is ignored from then on.
            if signal.getsignal(each) is wait:
                signal.signal(each, handler)
        deliver()
