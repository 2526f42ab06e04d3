"""Seals that race with a seal, without a lock: each sees the snapshots that the others write, and makes itself seen.

Spec: rules SEAL-6, SEAL-9, SEAL-10. Whoever replaces the pointer looks afterwards at the snapshots that were written
since it began. One that was there before, of a seal that only then came to its pointer, would be missed: so that seal,
when it finds a snapshot that was made without what it knows, writes its own again, and is seen by its new time.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from hsfmt import digests, layout
from hsfmt.catalog import read_snapshot
from hsfmt.errors import NotFoundError
from hsfmt.retractions import retracted_by
from hsfmt.snapshot import Snapshot
from hsfmt.storage import Store

_REQUESTS = 16
_TRIES, _PAUSE = 60, 0.05


class Rivals:
    """What a seal has seen of others.

    Parameters
    ----------
    store
        The dataset; its snapshots are looked at now.

    Attributes
    ----------
    seen
        When each snapshot's index was written, by the storage's clock, by fingerprint.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._own: set[str] = set()
        self._answered: set[str] = set()
        self.seen: Mapping[str, float] = _written(store)

    def look(self, own: Snapshot, before: str | None, kept: Collection[str]) -> list[Snapshot]:
        """Return the snapshots that were written since the last look, but for this seal's own.

        Parameters
        ----------
        own
            The one that the pointer was made to name.
        before
            The one that it named just before: it may have been there for long, of a seal that came to its pointer late.
        kept
            Those that this seal began with.
        """
        self._own.add(own.fingerprint)
        found = _written(self._store)
        names = {name for name, when in found.items() if self.seen.get(name) != when}
        self.seen = {**self.seen, **found}
        if before is not None and before not in kept:
            names.add(before)
        rivals = []
        for name in sorted(names - self._own):
            with suppress(NotFoundError):  # a seal that has not written its index will list after it has
                rivals.append(read_snapshot(self._store, name)[0])
        return rivals

    def answer(self, others: list[Snapshot], own: Snapshot, index_file: bytes, replaced: Collection[str]) -> bool:
        """Write the own snapshot again if another one was made without what it tells, and say whether.

        Parameters
        ----------
        index_file
            The own index.
        replaced
            Names of parts that a committed one replaces.
        """
        if not others:
            return False
        ours = retracted_by(self._store, own, replaced)
        lacking = {
            other.fingerprint
            for other in others
            if any(entry not in other.attachments for entry in own.attachments)
            or not ours <= retracted_by(self._store, other, replaced)
        }
        if lacking <= self._answered:
            return False
        self._answered |= lacking
        path = layout.snapshot_path(own.fingerprint, "index")
        before = self._store.modified(path)
        # Until the clock tells the two apart: that of an object store may have nothing below a second.
        for _ in range(_TRIES):
            self._store.write(path, index_file)
            if before is None or self._store.modified(path) != before:
                break
            time.sleep(_PAUSE)
        return True


def _written(store: Store) -> dict[str, float]:
    """Return when each whole snapshot was written, 0 where the storage does not say."""
    names = [f"{digests.ALGORITHM}:{name}" for name in store.list(layout.SNAPSHOTS)]
    paths = {name: layout.snapshot_path(name, "index") for name in names if digests.is_digest(name)}

    def when(path: str) -> float | None:
        return store.modified(path) or (None if store.size(path) is None else 0.0)

    if store.is_local:
        times = list(map(when, paths.values()))
    else:
        with ThreadPoolExecutor(_REQUESTS) as pool:
            times = list(pool.map(when, paths.values()))
    return {name: moment for name, moment in zip(paths, times, strict=True) if moment is not None}
