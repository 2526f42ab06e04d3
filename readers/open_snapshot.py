"""Which snapshot a reader reads: the one that the pointer names, one by its fingerprint, or a live one.

Spec: rules READ-3 and READ-6. Two reads open a dataset: the pointer and the snapshot index, which both hold the header.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

from hsfmt import layout, tables
from hsfmt.catalog import read_header, read_pointer, read_snapshot
from hsfmt.digests import is_digest
from hsfmt.errors import CorruptionError, NotFoundError, UsageError
from hsfmt.naming import names_dataset
from hsfmt.readers.local_cache import LocalCache
from hsfmt.sealing import build_live
from hsfmt.snapshot import Snapshot, SnapshotIds, parse_snapshot, parse_snapshot_ids
from hsfmt.storage import Store
from hsfmt.stored_snapshots import POINTED_AT, stored_snapshots

LIVE = "live"
_READ_LIVE = 'snapshot="live", or --snapshot live, reads whatever is committed now'


@dataclass(frozen=True, slots=True)
class SnapshotChoice:
    """A snapshot, resolved once: what a reader pickles, so that its copies read the very same samples.

    Attributes
    ----------
    fingerprint
        Which.
    index_nbytes
        Size of its index, or the most that it may have.
    live
        (index file, ids file) of a live snapshot, which is stored nowhere.
    """

    fingerprint: str
    index_nbytes: int
    live: tuple[bytes, bytes] | None = None

    def load(self, store: Store, cache: LocalCache | None = None) -> Snapshot:
        """Return the snapshot, compared with the fingerprint; out of the cache, if it is there.

        Raises
        ------
        NotFoundError, CorruptionError
            It is not there, or other bytes are.
        """
        if self.live is not None:
            return parse_snapshot(self.live[0], "live snapshot", self.fingerprint)
        where = layout.snapshot_path(self.fingerprint, "index")
        try:
            if cache is None:
                return read_snapshot(store, self.fingerprint, self.index_nbytes)[0]
            nbytes = None if self.index_nbytes == tables.MAX_TABLE_NBYTES else self.index_nbytes
            return cache.document(
                ("snapshot index", self.fingerprint),
                nbytes,
                lambda body: parse_snapshot(body, where, self.fingerprint),
                lambda: read_snapshot(store, self.fingerprint, self.index_nbytes)[1],
            )
        except NotFoundError as error:
            remedy = "it belongs to another dataset or was removed; `hsfmt seal` makes one of what is committed"
            raise NotFoundError.at(where, expected="that snapshot", got="nothing", remedy=remedy) from error

    def load_ids(self, store: Store, snapshot: Snapshot, cache: LocalCache | None = None) -> SnapshotIds:
        """Return the ids of the snapshot's samples.

        Raises
        ------
        NotFoundError, CorruptionError
            The file is not there, or not the one that the snapshot names.
        """
        path = layout.snapshot_path(self.fingerprint, "ids")
        if self.live is not None:
            return parse_snapshot_ids(self.live[1], snapshot, path)
        if cache is None:
            return parse_snapshot_ids(store.read(path, snapshot.ids_nbytes), snapshot, path)
        return cache.document(
            ("snapshot ids", snapshot.ids_digest),
            snapshot.ids_nbytes,
            lambda body: parse_snapshot_ids(body, snapshot, path),
            lambda: store.read(path, snapshot.ids_nbytes),
        )


@names_dataset
def choose_snapshot(
    store: Store, which: str | None, cache: LocalCache | None = None, *, sealed_only: bool = False
) -> tuple[SnapshotChoice, Snapshot]:
    """Resolve and load a snapshot: None is the sealed one, "live" all that is committed now, else a fingerprint.

    The pointer is never taken out of a cache. `sealed_only` says that the caller has no use for a live one, so that no
    error may advise it.

    Raises
    ------
    NotFoundError
        No dataset, or none that was sealed, or its pointer is gone, or no such snapshot.
    UsageError
        `which` is none of these.
    CorruptionError
        Pointer or snapshot are not what was written.
    """
    if which == LIVE:
        index_file, ids_file = build_live(store, read_header(store))
        snapshot = parse_snapshot(index_file, "live snapshot")
        return SnapshotChoice(snapshot.fingerprint, len(index_file), (index_file, ids_file)), snapshot
    if which is not None:
        if not is_digest(which):
            expected = 'None, "live", or a fingerprint like xxh3_128:<32 hex digits>'
            raise UsageError.at("snapshot", expected=expected, got=repr(which)[:100])
        choice = SnapshotChoice(which, tables.MAX_TABLE_NBYTES)
        return choice, choice.load(store, cache)
    pointer = read_pointer(store)
    # What lists nothing can neither be sealed nor read live.
    seal = f"run `hsfmt seal {store.url}`" if store.can_list else "run `hsfmt seal` where its files are"
    live = f"; {_READ_LIVE}" if store.can_list and not sealed_only else ""
    if pointer is None:
        read_header(store)
        if store.can_list and (found := stored_snapshots(store)):
            # A first seal writes its snapshot before it points at it, so that it may also be at work right now.
            raise NotFoundError.at(
                layout.POINTER,
                expected=f"a pointer to one of the {len(found)} snapshots that are there",
                got="nothing",
                remedy=f"restore it from a copy, or {seal}{live}",
            )
        raise NotFoundError.at(store.url, expected="a sealed dataset", got="no snapshot", remedy=f"{seal}{live}")
    choice = SnapshotChoice(pointer.fingerprint, pointer.index_nbytes)
    try:
        snapshot = choice.load(store, cache)
    except NotFoundError as error:
        raise NotFoundError([replace(problem, expected=POINTED_AT) for problem in error.problems]) from error
    says = (pointer.header.digest(), pointer.samples, pointer.content_digest)
    if says != (snapshot.header.digest(), snapshot.n_samples, snapshot.content_digest):
        remedy = "run `hsfmt seal` again"
        raise CorruptionError.at(layout.POINTER, expected="what its snapshot says", got=f"{says}", remedy=remedy)
    return choice, snapshot


class SampleIds(Sequence[str]):
    """The ids of a snapshot's samples in order, decoded one by one from flat buffers.

    Parameters
    ----------
    ids
        Bytes and offsets.
    """

    def __init__(self, ids: SnapshotIds) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._ids[i] for i in range(*index.indices(len(self)))]
        return self._ids[sample_number(index, len(self))]

    def __iter__(self) -> Iterator[str]:
        return (self._ids[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"SampleIds({len(self)} ids)"


def sample_number(index: object, n_samples: int) -> int:
    """Return `index` (any integer type) as a number from 0 on; negative ones count from the end.

    Raises
    ------
    TypeError, IndexError
        It is no integer, or there is no such sample.
    """
    number = index.__index__() if hasattr(index, "__index__") else None
    if number is None:
        raise TypeError(f"samples are numbered by integers, not {type(index).__name__}; index_of() takes an id")
    if not -n_samples <= number < n_samples:
        raise IndexError(f"sample {number} of a snapshot of {n_samples}")
    return int(number) + (n_samples if number < 0 else 0)
