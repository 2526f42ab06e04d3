"""What must not cross a fork: locks, threads and file descriptors of the parent.

The child of a fork has one thread, and copies of locks that another one may have held; a hook makes all of it new
before that thread goes on. Objects that are pickled start new by themselves.
"""

from __future__ import annotations

import os
import weakref


class ForkAware:
    """Base of objects that a forked child has to reset before it uses them."""

    def __init__(self) -> None:
        _LIVE.add(self)

    def after_fork(self) -> None:
        """Make locks new and forget what belongs to the parent; called in the child, which has one thread."""
        raise NotImplementedError


_LIVE: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def _reset() -> None:
    for item in list(_LIVE):
        item.after_fork()


os.register_at_fork(after_in_child=_reset)
