"""The parts of a snapshot, loaded when first asked for, each file compared with the digest that names it.

Spec: rule READ-3.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hsfmt.catalog import load_ref
from hsfmt.columns import Column
from hsfmt.errors import CorruptionError
from hsfmt.index import PartIndex
from hsfmt.layout import index_path
from hsfmt.manifest import PartManifest
from hsfmt.readers.process_state import ForkAware
from hsfmt.snapshot import Snapshot
from hsfmt.storage import Store


@dataclass(frozen=True, slots=True)
class OpenPart:
    """A part that holds samples.

    Attributes
    ----------
    number
        Its place in the snapshot's parts table.
    manifest, index
        As committed.
    """

    number: int
    manifest: PartManifest
    index: PartIndex

    @property
    def name(self) -> str:
        """Name of the part."""
        return self.manifest.part

    @property
    def columns(self) -> Mapping[str, Column]:
        """Its arrays by name."""
        return self.manifest.columns


class PartCache(ForkAware):
    """The least recently used parts go when indexes and manifests in memory exceed `max_nbytes`; one always stays.

    Parameters
    ----------
    store, snapshot
        Where, and which parts.
    max_nbytes
        Bytes of index and manifest files.
    """

    def __init__(self, store: Store, snapshot: Snapshot, max_nbytes: int) -> None:
        super().__init__()
        self._store = store
        self._snapshot = snapshot
        self._max_nbytes = max_nbytes
        self._parts: OrderedDict[int, OpenPart] = OrderedDict()
        self.after_fork()

    def after_fork(self) -> None:
        """Take a new lock; what is loaded stays. Another thread may have been halfway through a change."""
        self._lock = threading.Lock()
        self._nbytes = sum(map(self._cost, self._parts))

    def get(self, number: int) -> OpenPart:
        """Return a part by its place in the snapshot's parts table.

        Raises
        ------
        NotFoundError, CorruptionError, HeaderMismatchError
            A file of it is missing, or not the one that the snapshot names.
        """
        with self._lock:
            part = self._parts.get(number)
            if part is not None:
                self._parts.move_to_end(number)
                return part
        part = self._load(number)
        with self._lock:
            if number not in self._parts:
                self._parts[number] = part
                self._nbytes += self._cost(number)
            self._trim()
        return part

    def _trim(self) -> None:
        while self._nbytes > self._max_nbytes and len(self._parts) > 1:
            oldest, _ = self._parts.popitem(last=False)
            self._nbytes -= self._cost(oldest)

    def _cost(self, number: int) -> int:
        ref = self._snapshot.parts[number]
        return ref.index_nbytes + ref.manifest_nbytes

    def _load(self, number: int) -> OpenPart:
        ref = self._snapshot.parts[number]
        loaded = load_ref(self._store, ref, self._snapshot.header)
        if loaded.index is None:
            raise CorruptionError.at(index_path(ref.name), expected="a part with samples", got="a part of holes only")
        return OpenPart(number, loaded.manifest, loaded.index)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("caches are made anew in each process")
