"""The snapshots that lie in a dataset: the one that the pointer names, and all of them, whatever it names.

Spec: rules SNAP-9 and VFY-15.
"""

from __future__ import annotations

from dataclasses import replace

from hsfmt import digests, layout
from hsfmt.catalog import read_snapshot
from hsfmt.errors import NotFoundError
from hsfmt.naming import names_dataset
from hsfmt.pointer import Pointer
from hsfmt.snapshot import Snapshot
from hsfmt.storage import Store

POINTED_AT = f"the snapshot that {layout.POINTER} names"


@names_dataset
def read_current(store: Store, pointer: Pointer) -> Snapshot:
    """Return the snapshot that the pointer names.

    Raises
    ------
    NotFoundError
        It is not there. That may be the pointer's fault, so that the error names both.
    CorruptionError
        As `read_snapshot`.
    """
    try:
        return read_snapshot(store, pointer.fingerprint)[0]
    except NotFoundError as error:
        raise NotFoundError([replace(problem, expected=POINTED_AT) for problem in error.problems]) from None


def stored_snapshots(store: Store) -> list[str]:
    """Return the fingerprints of the snapshots that are there, whichever the pointer names, ascending."""
    names = (f"{digests.ALGORITHM}:{name}" for name in store.list(layout.SNAPSHOTS))
    found = (name for name in names if digests.is_digest(name))
    return sorted(name for name in found if store.size(layout.snapshot_path(name, "index")) is not None)
