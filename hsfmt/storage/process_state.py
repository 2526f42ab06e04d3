"""What a forked child must not touch: connections and loops of its parent, even to close them.

Sockets and the selectors that watch them are shared with the parent: closing a connection in the child would take it
out of the parent's selector. So the child keeps them, unused, until it ends.
"""

from __future__ import annotations

import os
import weakref

# By identity: file systems with equal settings are equal.
_LIVE: dict[int, weakref.ref[object]] = {}
_ABANDONED: list[object] = []


def abandoned_in_child(item: object) -> None:
    """Never let a forked child of this process drop `item`."""
    number = id(item)
    _LIVE[number] = weakref.ref(item, lambda _: _LIVE.pop(number, None))


def _forked() -> None:
    _ABANDONED.extend(item for item in [reference() for reference in list(_LIVE.values())] if item is not None)
    _LIVE.clear()


os.register_at_fork(after_in_child=_forked)
