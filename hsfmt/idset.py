"""Sets of sample ids in flat memory: 16 bytes an id, whatever its length.

An id is kept as xxh3_128; at ten million ids the chance that any two collide is below 1e-24.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet

import numpy as np
import numpy.typing as npt

from hsfmt.catalog import committed_parts, load_index, load_manifest
from hsfmt.digests import id_key
from hsfmt.header import Header
from hsfmt.index import PartIndex
from hsfmt.storage import Store

_MERGE_AT = 1 << 16


class IdSet:
    """A growing set of ids that answers membership."""

    def __init__(self) -> None:
        self._sorted: npt.NDArray[np.void] = np.empty(0, "V16")
        self._recent: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)

    def __contains__(self, sample_id: object) -> bool:
        if not isinstance(sample_id, str):
            return False
        key = id_key(sample_id.encode())
        if key in self._recent:
            return True
        words = _words(self._sorted)
        high, low = np.frombuffer(key, ">u8")
        start, end = np.searchsorted(words[:, 0], [high], "left")[0], np.searchsorted(words[:, 0], [high], "right")[0]
        return bool(np.any(words[start:end, 1] == low))

    def add(self, sample_id: str) -> None:
        """Add an id."""
        if sample_id in self:
            return
        self._recent.add(id_key(sample_id.encode()))
        if len(self._recent) >= _MERGE_AT:
            self._merge(np.frombuffer(b"".join(self._recent), "V16"))
            self._recent.clear()

    def update(self, ids: Iterable[bytes]) -> None:
        """Add many UTF-8 ids at once."""
        self._merge(np.frombuffer(b"".join(map(id_key, ids)), "V16"))

    def _merge(self, keys: npt.NDArray[np.void]) -> None:
        words = _words(np.concatenate([self._sorted, keys]))
        words = words[np.lexsort((words[:, 1], words[:, 0]))]
        fresh = np.ones(len(words), bool)
        fresh[1:] = np.any(words[1:] != words[:-1], axis=1)
        self._sorted = np.ascontiguousarray(words[fresh]).view("V16").reshape(-1)


def _words(keys: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    return keys.view(">u8").reshape(-1, 2)


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
        for part in committed_parts(self._store):
            if part not in known:
                self._add(part, self._index(part))

    def _add(self, part: str, index: PartIndex | None) -> None:
        self._parts.append(part)
        if index is not None:
            self._ids.update(index.id_bytes(row) for row in range(index.n_samples))
            self.next_source_index = max(self.next_source_index, int(index.source_index.max()) + 1)

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
