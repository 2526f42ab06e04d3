"""Parts that a snapshot names and that are committed no longer: a seal never passes them over unasked.

Spec: rule SEAL-8.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from hsfmt import layout
from hsfmt.catalog import read_pointer, read_snapshot
from hsfmt.errors import CorruptionError, HsfmtError, Problem, StorageError
from hsfmt.manifest import PartManifest
from hsfmt.snapshot import Snapshot
from hsfmt.storage import Store
from hsfmt.stored_snapshots import read_current, stored_snapshots

_log = logging.getLogger("hsfmt")
_SHOWN = 10
_FOREIGN = "restore the part's files from a copy; or move them out of the dataset and run `hsfmt seal --drop-missing`"
_REMEDY = (
    f"restore {layout.MANIFESTS}/<part>.json of each from a copy, or run `hsfmt seal --drop-missing` to do without "
    "these samples; nothing was replaced, and what is committed stays committed"
)


def snapshots_to_keep(store: Store) -> list[Snapshot]:
    """Return the snapshots whose parts a seal must find.

    It is the current one; without a pointer, which may be lost too, all that can be read.

    Raises
    ------
    NotFoundError, CorruptionError
        The pointer, or the snapshot that it names, can't be used.
    StorageError
        The storage fails: what can't be read now may well be whole.
    """
    pointer = read_pointer(store)
    if pointer is not None:
        return [read_current(store, pointer)]
    found = []
    for fingerprint in stored_snapshots(store):
        try:
            found.append(read_snapshot(store, fingerprint)[0])
        except StorageError:
            raise
        except HsfmtError:
            continue  # of no use to readers either; verification reports it
    return found


def check_none_lost(
    snapshots: Iterable[Snapshot], names: Collection[str], manifests: Iterable[PartManifest], *, drop: bool
) -> None:
    """Refuse if a part of these snapshots is neither committed nor replaced by one that is; `drop` only logs it.

    Parameters
    ----------
    snapshots
        As `snapshots_to_keep` returned them, before `names` was listed.
    names
        The committed parts.
    manifests
        Theirs.
    drop
        The caller agreed to lose them.

    Raises
    ------
    CorruptionError
        Names the lost parts and says how many samples they hold; or a part has another manifest than the one that a
        snapshot names, which `drop` does not excuse: manifests never change, so other samples would be served.
    """
    manifests = list(manifests)
    replaced = {name for manifest in manifests for name in manifest.replaces}
    snapshots = list(snapshots)
    _check_unchanged(snapshots, {one.part: one.digest() for one in manifests if one.part not in replaced})
    there = {*names, *replaced}
    lost: dict[str, int] = {}
    n_parts = n_samples = 0
    for snapshot in snapshots:
        n_parts, n_samples = max(n_parts, len(snapshot.parts)), max(n_samples, snapshot.n_samples)
        for number, ref in enumerate(snapshot.parts):
            if ref.name not in there:
                lost[ref.name] = int(np.count_nonzero(snapshot.part == number))
    if not lost:
        return
    shown = ", ".join(sorted(lost)[:_SHOWN]) + (", …" if len(lost) > _SHOWN else "")
    got = f"{len(lost)} without one, with {sum(lost.values())} of its {n_samples} sample(s): {shown}"
    if drop:
        _log.warning("%s: parts left out: %s", layout.MANIFESTS, got)
        return
    expected = f"a manifest of all {n_parts} part(s) that the snapshot names"
    raise CorruptionError.at(layout.MANIFESTS, expected=expected, got=got, remedy=_REMEDY)


def _check_unchanged(snapshots: Iterable[Snapshot], committed: Mapping[str, str]) -> None:
    """Compare the manifests' digests, by part, with those that the snapshots name."""
    changed = {
        ref.name: ref.manifest_digest
        for snapshot in snapshots
        for ref in snapshot.parts
        if committed.get(ref.name, ref.manifest_digest) != ref.manifest_digest
    }
    if changed:
        raise CorruptionError(
            Problem(layout.manifest_path(name), f"digest {digest}, as a snapshot names it", committed[name], _FOREIGN)
            for name, digest in sorted(changed.items())
        )
