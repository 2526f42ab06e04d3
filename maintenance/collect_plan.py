"""What keeps something from a collection: snapshots, committed parts, and what is not old enough.

Spec: rules GC-1 to GC-4.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

from hsfmt import attachments as attached
from hsfmt import layout
from hsfmt.catalog import committed_parts, load_manifests, read_header, read_pointer, read_snapshot, superseded_parts
from hsfmt.errors import CorruptionError, FormatError, NotFoundError
from hsfmt.manifest import PartManifest
from hsfmt.retractions import retracted_by, retracting
from hsfmt.snapshot import Snapshot
from hsfmt.storage import Store
from hsfmt.stored_snapshots import stored_snapshots

_log = logging.getLogger("hsfmt")
_SHOWN = 10
_REMEDY = "run `hsfmt repair` first: this says what must stay, and nothing that it could name was removed"


@dataclass(frozen=True, slots=True)
class Keep:
    """The storage's time and the least age in seconds, and which old snapshots stay (None: all)."""

    now: float
    least_age: float
    n_snapshots: int | None = None
    snapshots_older_than: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Roots:
    """All that keeps something.

    Attributes
    ----------
    current
        Fingerprint of the current snapshot, None without a pointer.
    snapshots
        All by fingerprint, those that are dropped too.
    dropped
        Fingerprints of snapshots that are not kept.
    manifests
        All committed parts.
    named
        Parts that a kept snapshot names.
    attachments
        Paths of files that a kept snapshot lists.
    removable
        Superseded parts that may go, those that others of them replace first.
    sealed
        Parts that the current snapshot names.
    replacers
        Part to the committed parts that replace it.
    damaged
        Fingerprint to what is wrong, of snapshots that can't be read.
    """

    current: str | None
    snapshots: Mapping[str, Snapshot]
    dropped: frozenset[str]
    manifests: Mapping[str, PartManifest]
    named: frozenset[str]
    attachments: frozenset[str]
    removable: tuple[str, ...] = ()
    sealed: frozenset[str] = frozenset()
    replacers: Mapping[str, set[str]] = field(default_factory=dict)
    damaged: Mapping[str, str] = field(default_factory=dict)

    @property
    def stored(self) -> set[str]:
        """Fingerprints of all snapshots that are there, readable or not."""
        return {*self.snapshots, *self.damaged}

    @property
    def unclear(self) -> dict[str, str]:
        """The damaged snapshots that are kept: each could name any part and attachment."""
        return {name: problem for name, problem in self.damaged.items() if name not in self.dropped}

    def successors(self, part: str) -> set[str]:
        """Return the parts of the current snapshot that replace this one, by way of others or not."""
        seen: set[str] = set()
        queue = [part]
        while queue:
            found = self.replacers.get(queue.pop(), set()) - seen
            seen |= found
            queue += found - self.sealed
        return seen & self.sealed

    def frees(self, part: str, gone: Collection[str]) -> set[str]:
        """Return the parts that nothing would supersede any more without this one; `gone` were removed already."""
        there = self.manifests.keys() - set(gone)
        return {
            name
            for name in self.manifests[part].replaces
            if name in there and not self.replacers[name] & there - {part}
        }


def find_roots(store: Store, keep: Keep, known: Roots | None = None) -> Roots:
    """Return what keeps something, read from the storage now.

    Parameters
    ----------
    known
        Roots found before: what is immutable is not read again, and what was dropped then is not dropped anew.

    Raises
    ------
    CorruptionError, NotFoundError
        A manifest, the pointer or the current snapshot can't be read: what it keeps can't be told.
    """
    with damage_needs_repair():
        return _find_roots(store, keep, known)


@contextmanager
def damage_needs_repair() -> Iterator[None]:
    """Say what to do about documents without which it can't be told what is needed."""
    try:
        yield
    except (CorruptionError, FormatError) as error:
        again = type(error)([replace(each, remedy=each.remedy or _REMEDY) for each in error.problems])
        again.dataset = error.dataset
        raise again from error


def _find_roots(store: Store, keep: Keep, known: Roots | None) -> Roots:
    header = read_header(store)
    manifests = dict(known.manifests) if known else {}
    names = committed_parts(store)
    new = load_manifests(store, [name for name in names if name not in manifests], header)
    manifests = {name: new[name] if name in new else manifests[name] for name in names}
    snapshots, damaged = _stored_snapshots(store, known)
    # After the snapshots: a pointer names one that was there before it.
    pointer = read_pointer(store)
    current = pointer.fingerprint if pointer else None
    if current is not None and current not in snapshots:
        snapshots[current] = read_snapshot(store, current)[0]
        damaged.pop(current, None)
    dropped = known.dropped - {current} if known else _dropped(store, {*snapshots, *damaged}, current, keep)
    if dropped and not known and current is not None:
        dropped -= _retracting_more(store, snapshots[current], dropped)
    kept = [snapshot for fingerprint, snapshot in snapshots.items() if fingerprint not in dropped]
    named = frozenset(ref.name for snapshot in kept for ref in snapshot.parts)
    files = frozenset(attached.entry_path(entry, store.url) for snapshot in kept for entry in snapshot.attachments)
    sealed = frozenset(ref.name for ref in snapshots[current].parts) if current else frozenset()
    replacers: dict[str, set[str]] = {}
    for manifest in manifests.values():
        for name in manifest.replaces:
            replacers.setdefault(name, set()).add(manifest.part)
    roots = Roots(current, snapshots, frozenset(dropped), manifests, named, files, (), sealed, replacers, damaged)
    return replace(roots, removable=_removable(roots))


def _stored_snapshots(store: Store, known: Roots | None) -> tuple[dict[str, Snapshot], dict[str, str]]:
    """Return the snapshots that can be read, and what is wrong with the others."""
    snapshots: dict[str, Snapshot] = {}
    damaged: dict[str, str] = {}
    for fingerprint in stored_snapshots(store):
        try:
            old = known.snapshots.get(fingerprint) if known else None
            snapshots[fingerprint] = old or read_snapshot(store, fingerprint)[0]
        except NotFoundError:
            continue  # another collection was faster
        except (CorruptionError, FormatError) as error:
            damaged[fingerprint] = str(error.problems[0])
    return snapshots, damaged


def _retracting_more(store: Store, current: Snapshot, dropped: Collection[str]) -> set[str]:
    """Return snapshots that alone know of a retraction, of a seal that was killed or before an old pointer came back.

    The next seal takes it over; without them the samples would be served again, and nobody would say so.
    """
    found = dict(retracting(store, dropped, retracted_by(store, current, (), skip_missing=True)))
    for fingerprint, ids in found.items():
        text = "%s: snapshot %s is kept until `hsfmt seal`: of what it retracts the current one lacks %d sample(s)"
        _log.warning(text, store.url, fingerprint, len(ids))
    return set(found)


def _dropped(store: Store, snapshots: Collection[str], current: str | None, keep: Keep) -> frozenset[str]:
    if current is None or (keep.n_snapshots is None and keep.snapshots_older_than is None):
        return frozenset()  # without a pointer any of them may be the one
    made = {name: store.modified(layout.snapshot_path(name, "index")) or keep.now for name in snapshots}
    newest = sorted(snapshots, key=lambda name: (name != current, -made[name], name))
    gone = set(newest[keep.n_snapshots :]) if keep.n_snapshots is not None else set()
    if keep.snapshots_older_than is not None:
        oldest = keep.now - keep.snapshots_older_than.total_seconds()
        gone |= {name for name, at in made.items() if at <= oldest}
    # Whoever opened one reads its parts until the end: what counts is since when it is not the current one.
    until = sorted([*made.values(), store.modified(layout.POINTER) or keep.now])
    last = {name: until[min(bisect_right(until, at), len(until) - 1)] for name, at in made.items()}
    return frozenset(name for name in gone if name != current and keep.now - last[name] >= keep.least_age)


def _removable(roots: Roots) -> tuple[str, ...]:
    """Return superseded parts that may go, in this order.

    One that is superseded may itself be what keeps another from being served again: it goes after that one, or stays.
    """
    manifests = roots.manifests
    superseded = superseded_parts(manifests.values()) & manifests.keys()
    going = {name for name in superseded - roots.named if roots.successors(name)}
    while needed := {name for name in going if roots.frees(name, going - {name})}:
        going -= needed
    order: list[str] = []
    while left := going - set(order):
        ready = sorted(name for name in left if not manifests[name].replaces.keys() & left)
        if not ready:
            names = ", ".join(sorted(left)[:_SHOWN])
            raise CorruptionError.at(
                layout.MANIFESTS, expected="parts that replace older ones", got=f"a circle: {names}"
            )
        order += ready
    return tuple(order)
