"""Objects that are read one after the other, fetched from a remote store so many at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from hsfmt.errors import CorruptionError, NotFoundError
from hsfmt.storage.base import Reads, Store

Document = tuple[str, int | None]

# Of one round trip: as few at first as it takes to see whether more are wanted.
_FIRST_OBJECTS = 8
_MAX_OBJECTS = 64
MAX_NBYTES = 64 << 20
# What an object counts of which the size is not known. A larger one is read by itself.
_USUAL_NBYTES = 1 << 20


def read_together(store: Store, documents: Iterable[Document]) -> Reads:
    """Return what reads these objects, each once and in this order, in few round trips; others as the store does.

    At most 64 MiB of them are held, or one that is larger. Errors are those of reading one alone.

    Parameters
    ----------
    store
        Where they are; a local one is returned as it is.
    documents
        (path, size in bytes, or None where it is not known).
    """
    return store if store.is_local else _Together(store, documents)


class _Together:
    def __init__(self, store: Store, documents: Iterable[Document]) -> None:
        self.url = store.url
        self._store = store
        self._coming = deque(documents)
        self._paths = {path for path, _ in self._coming}
        self._bodies: dict[str, bytes] = {}
        self._max_objects = _FIRST_OBJECTS

    def read(self, path: str, max_nbytes: int) -> bytes:
        if path in self._paths:
            self._fetch_from(path)
        body = self._bodies.pop(path, None)
        # One that was fetched is given out once: who reads it again means the storage.
        return self._store.read(path, max_nbytes) if body is None or len(body) > max_nbytes else body

    def _fetch_from(self, path: str) -> None:
        """Fetch this object with those that come after it; those before it were not wanted."""
        self._bodies.clear()
        while self._coming[0][0] != path:
            self._paths.discard(self._coming.popleft()[0])
        window: list[tuple[str, int]] = []
        nbytes = 0
        while self._coming and len(window) < self._max_objects:
            name, size = self._coming[0]
            counted = _USUAL_NBYTES if size is None else size
            if window and nbytes + counted > MAX_NBYTES:
                break
            nbytes += counted
            window.append((name, counted))
            self._paths.discard(self._coming.popleft()[0])
        self._max_objects = min(2 * self._max_objects, _MAX_OBJECTS)
        if len(window) < 2:
            return
        try:
            bodies = self._store.read_many(window)
        except (NotFoundError, CorruptionError):
            return  # one by one: which of them it is decides what the error says
        self._bodies.update(zip((name for name, _ in window), bodies, strict=True))
