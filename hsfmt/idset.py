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
from hsfmt.catalog import committed_parts, load_index, load_manifest, load_manifests, superseded_parts
from hsfmt.digests import id_key
from hsfmt.header import Header
from hsfmt.index import PartIndex
from hsfmt.storage import Store
from hsfmt.storage.read_together import read_together

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
        self._replaces: dict[str, frozenset[str]] = {}
        self.next_source_index = 0

    @classmethod
    def _from_iterable(cls, it: Iterable[str]) -> set[str]:  # type: ignore[override]
        return set(it)

    def refresh(self) -> None:
        """Take in what was committed since, by any writer; each index is read once and not kept.

        A replaced part counts as its replacement has it: a sample that a repair lost is a hole there, to be retried.
        """
        names = committed_parts(self._store)
        manifests = load_manifests(self._store, [part for part in names if part not in self._replaces], self._header)
        if manifests:
            # A name that its writer was killed before it had synced is taken for committed: it must not go any more.
            self._store.sync([layout.MANIFESTS])
        superseded_parts(manifests.values())  # refuses one that is not what another one says it replaces
        replaces = {part: self._replaces[part] for part in names if part in self._replaces}
        replaces |= {part: frozenset(manifest.replaces) for part, manifest in manifests.items()}
        superseded = frozenset().union(*replaces.values())
        current = [part for part in names if part not in superseded]
        # Ids can't be taken out of the set: where a part has gone it is made anew.
        anew = not set(self._parts) <= set(current)
        ids = IdSet() if anew else self._ids
        known = set() if anew else set(self._parts)
        batches = []
        new = [part for part in current if part not in known]
        manifests |= load_manifests(self._store, [part for part in new if part not in manifests], self._header)
        with_samples = [manifests[part] for part in new if manifests[part].counts.samples]
        entries = [manifest.index_file for manifest in with_samples]
        files = read_together(self._store, [(entry.path, entry.nbytes) for entry in entries])
        for manifest in with_samples:
            index = load_index(files, manifest)
            batches.append(id_words(index.id_bytes(row) for row in range(index.n_samples)))
            self.next_source_index = max(self.next_source_index, int(index.source_index.max()) + 1)
        if batches:
            ids.merge(batches)
        self._ids, self._parts, self._replaces = ids, current, replaces

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
