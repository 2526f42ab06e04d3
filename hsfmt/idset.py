"""Sets of sample ids in flat memory: 16 bytes an id, whatever its length.

An id is kept as xxh3_128; at ten million ids the chance that any two collide is below 1e-24.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hsfmt import layout
from hsfmt.catalog import committed_parts, load_index, load_manifest
from hsfmt.digests import id_key
from hsfmt.header import Header
from hsfmt.index import PartIndex
from hsfmt.storage import Store

_MERGE_AT = 1 << 16


class _Ids(NamedTuple):
    """What is in a set: (high, low) halves of the merged keys, ascending, and the keys that came since.

    The halves are native columns: a search in a strided or big-endian view would copy it each time.
    """

    high: npt.NDArray[np.uint64]
    low: npt.NDArray[np.uint64]
    recent: set[bytes]


class IdSet:
    """A growing set of ids that answers membership, in any thread while one thread adds to it."""

    def __init__(self) -> None:
        # Replaced as a whole, so that who asks while another thread merges sees all of one state.
        self._ids = _Ids(np.empty(0, np.uint64), np.empty(0, np.uint64), set())

    def __len__(self) -> int:
        ids = self._ids
        return len(ids.high) + len(ids.recent)

    def __contains__(self, sample_id: object) -> bool:
        if not isinstance(sample_id, str):
            return False
        key = id_key(sample_id.encode("utf-8", "surrogatepass"))  # what is no Unicode text is in no set either
        ids = self._ids
        if key in ids.recent:
            return True
        high, low = np.frombuffer(key, ">u8").astype(np.uint64)
        start = np.searchsorted(ids.high, high, "left")
        end = np.searchsorted(ids.high, high, "right")
        return bool(np.any(ids.low[start:end] == low))

    def add(self, sample_id: str) -> None:
        """Add an id."""
        if sample_id in self:
            return
        recent = self._ids.recent
        recent.add(id_key(sample_id.encode()))
        if len(recent) >= _MERGE_AT:
            self.merge([])

    def update(self, ids: Iterable[bytes]) -> None:
        """Add many UTF-8 ids at once."""
        self.merge([id_words(ids)])

    def merge(self, batches: list[npt.NDArray[np.uint64]]) -> None:
        """Add what `id_words` returned, in one sort, which for many ids costs more than all else."""
        keys = [*batches, _words(self._ids.recent)]
        high = np.concatenate([self._ids.high, *(batch[:, 0] for batch in keys)])
        low = np.concatenate([self._ids.low, *(batch[:, 1] for batch in keys)])
        order = np.lexsort((low, high))
        high, low = high[order], low[order]
        fresh = np.ones(len(high), bool)
        fresh[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
        self._ids = _Ids(high[fresh], low[fresh], set())


def id_words(ids: Iterable[bytes]) -> npt.NDArray[np.uint64]:
    """Return the keys of UTF-8 ids, uint64 [id, 2]."""
    return _words(map(id_key, ids))


def _words(keys: Iterable[bytes]) -> npt.NDArray[np.uint64]:
    """Return uint64 [key, 2] of 16-byte keys."""
    return np.frombuffer(b"".join(keys), ">u8").astype(np.uint64).reshape(-1, 2)


class CommittedIds(AbstractSet[str]):
    """Set-like view of the ids in committed parts: for a producer that skips what is there already.

    Membership and length are answered from 16 bytes an id; iteration reads the part indexes again, one at a time.
    Holes are not members, so that a resuming producer retries them; retracted samples are.
    """

    def __init__(self, store: Store, header: Header) -> None:
        self._store = store
        self._header = header
        self._ids = IdSet()
        self._parts: list[str] = []
        self.next_source_index = 0

    @classmethod
    def _from_iterable(cls, it: Iterable[str]) -> set[str]:  # type: ignore[override]
        return set(it)

    def refresh(self) -> None:
        """Take in the parts that were committed since, by any writer; each index is read once and not kept."""
        known = set(self._parts)
        batches = []
        fresh = [part for part in committed_parts(self._store) if part not in known]
        if fresh:
            # A name that its writer was killed before it had synced is taken for committed: it must not go any more.
            self._store.sync([layout.MANIFESTS])
        for part in fresh:
            index = self._index(part)
            if index is not None:
                batches.append(id_words(index.id_bytes(row) for row in range(index.n_samples)))
                self.next_source_index = max(self.next_source_index, int(index.source_index.max()) + 1)
        if batches:
            self._ids.merge(batches)
        self._parts += fresh

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[str]:
        seen = IdSet()
        for part in self._parts:
            index = self._index(part)
            for row in range(index.n_samples if index else 0):
                sample_id = index.sample_id(row) if index else ""
                if sample_id not in seen:
                    seen.add(sample_id)
                    yield sample_id

    def _index(self, part: str) -> PartIndex | None:
        manifest = load_manifest(self._store, part, self._header)
        return load_index(self._store, manifest) if manifest.counts.samples else None
