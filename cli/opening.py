"""Opening a dataset to look at it: the snapshot asked for, else the sealed one, else all that is committed."""

from __future__ import annotations

from dataclasses import dataclass

from hsfmt import layout
from hsfmt.catalog import read_header, read_pointer
from hsfmt.errors import HsfmtError
from hsfmt.pointer import Pointer
from hsfmt.readers.open_snapshot import LIVE, SnapshotChoice, choose_snapshot
from hsfmt.root import read_root, refuse_inner
from hsfmt.snapshot import Snapshot, SnapshotIds
from hsfmt.storage import Store
from hsfmt.stored_snapshots import stored_snapshots


@dataclass(frozen=True, slots=True)
class Opened:
    """A dataset and the snapshot of it that is looked at; `pointer` is None when it was never sealed."""

    store: Store
    pointer: Pointer | None
    choice: SnapshotChoice
    snapshot: Snapshot

    @property
    def is_live(self) -> bool:
        """Whether the snapshot was made just now and is stored nowhere."""
        return self.choice.live is not None

    def ids(self) -> SnapshotIds:
        """Return the ids of the snapshot's samples."""
        return self.choice.load_ids(self.store, self.snapshot)


def check_place(store: Store) -> None:
    """Refuse a folder within a dataset by naming the dataset; all else that may be wrong is left to the command.

    Raises
    ------
    NotFoundError
        It is one.
    """
    if next(store.above(layout.OWN_FOLDERS), None) is None:
        return  # nor is a request made
    try:
        read_root(store)
    except HsfmtError as error:
        refuse_inner(store, error)


def snapshot_to_read(store: Store, which: str | None) -> str | None:
    """Return the snapshot that a reader is asked for: "live" where None was said and nothing was ever sealed.

    Raises
    ------
    NotFoundError, CorruptionError
        There is no dataset, or its header or pointer is damaged.
    """
    check_place(store)
    read_header(store)
    if which is None and store.can_list and read_pointer(store) is None and not stored_snapshots(store):
        return LIVE
    return which


def open_dataset(store: Store, which: str | None) -> Opened:
    """Open a dataset.

    Parameters
    ----------
    store
        The dataset.
    which
        A fingerprint, "live", or None: the sealed snapshot, and a live one where there is none.

    Raises
    ------
    NotFoundError
        No dataset, or no such snapshot.
    CorruptionError
        What is there is not what was written.
    """
    choice, snapshot = choose_snapshot(store, snapshot_to_read(store, which))
    return Opened(store, read_pointer(store), choice, snapshot)
