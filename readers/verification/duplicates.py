"""Ids that were committed more than once with different content: one is served, and someone should know.

Spec: rules VFY-16, SNAP-3.
"""

from __future__ import annotations

import numpy as np
import xxhash

from hsfmt.catalog import load_ids
from hsfmt.errors import AccessError, HsfmtError
from hsfmt.readers.verification.documents import LoadedSnapshot
from hsfmt.readers.verification.report import Findings
from hsfmt.storage import Store


def check_conflicts(store: Store, findings: Findings, loaded: LoadedSnapshot) -> None:
    """Warn of samples served under an id that a shadowed sample of another content has too."""
    snapshot = loaded.snapshot
    differing = np.flatnonzero(snapshot.shadowed_same == 0)
    ids: set[str] = set()
    for number in np.unique(snapshot.shadowed_part[differing]).tolist():
        try:
            known = load_ids(store, snapshot.parts[number])
        except AccessError:
            raise
        except HsfmtError:
            continue  # the check of that part reports it
        rows = snapshot.shadowed_row[differing[snapshot.shadowed_part[differing] == number]]
        ids |= {known[row] for row in rows.tolist() if row < len(known)}
    keys = np.array([xxhash.xxh3_64_intdigest(sample_id.encode()) for sample_id in ids], np.uint64)
    served = np.isin(keys, snapshot.id_hash)  # a retracted one is settled
    found = sorted(sample_id for sample_id, there in zip(ids, served, strict=True) if there)
    if found:
        expected = "the same content wherever an id was committed more than once"
        got = f"{len(found)} ids with different content"
        where = f"{loaded.path}: shadowed_same"
        findings.add("warning", "shadowed_different", where, expected=expected, got=got, samples=found)
