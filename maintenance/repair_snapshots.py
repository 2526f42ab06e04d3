"""Snapshots, the pointer and attachments that are lost or damaged: written again where a digest proves them.

Spec: rules SNAP-1, SNAP-8 to SNAP-10, SEAL-6, SEAL-9. A snapshot is a function of its parts: if the one that is built
again has the digest that names it, it is the one that was lost. Else it is set aside, and a seal makes a new one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hsfmt import attachments, digests, layout, tables
from hsfmt.catalog import committed_parts, load_ids, read_pointer, superseded_parts
from hsfmt.errors import CorruptionError, FormatError, HsfmtError, NotFoundError, StorageError
from hsfmt.header import Header
from hsfmt.maintenance.repair_report import DocumentFate
from hsfmt.maintenance.salvage import set_aside
from hsfmt.maintenance.salvage_evidence import Witness, check_not_newer, read_if_there, rebuilt_ids
from hsfmt.pointer import Pointer, make_pointer
from hsfmt.snapshot import Snapshot, parse_snapshot
from hsfmt.snapshot_builder import LoadedPart, build_snapshot
from hsfmt.storage import Store

_ATTACHMENT = re.compile(rf"{layout.ATTACHMENTS}/([0-9a-f]{{32}})/[a-z0-9][a-z0-9_.-]{{0,63}}")
# Older snapshots name the parts that were there then; each attempt costs as much as a seal.
_MAX_ATTEMPT_SAMPLES = 200_000
_OTHER_COUNTS = "other counts than the snapshot that it names"


@dataclass(slots=True)
class SnapshotPlan:
    """What to do about snapshots, pointer and attachments.

    Attributes
    ----------
    fates
        For the report.
    writes
        Path to the bytes that a digest proves.
    aside
        Paths that go into quarantine, in this order.
    dropped
        Attachments that a new seal lists no longer, without `.npy`.
    warnings
        What to look at.
    must_seal
        Whether readers need a new snapshot.
    """

    fates: list[DocumentFate] = field(default_factory=list)
    writes: dict[str, bytes] = field(default_factory=dict)
    aside: list[str] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)
    must_seal: bool = False

    def carry_out(self, store: Store) -> None:
        """Do it, but for the seal."""
        for path, data in self.writes.items():
            store.write(path, data)
            store.sync([path.rpartition("/")[0]])
        for path in self.aside:
            set_aside(store, path, f"objects/{path}")

    def note(self, path: str, problem: str, fate: str) -> None:
        """Add a fate."""
        self.fates.append(DocumentFate(path, problem, fate))


def readable_snapshots(store: Store) -> tuple[Pointer | None, list[Snapshot], dict[str, str]]:
    """Return (pointer, readable snapshots, the current one first, fingerprint to what is wrong with the others).

    Raises
    ------
    FormatVersionError
        A snapshot is whole and needs a newer library.
    StorageError
        The storage fails.
    """
    pointer = usable_pointer(store)[0]
    found: list[Snapshot] = []
    broken: dict[str, str] = {}
    for name in store.list(layout.SNAPSHOTS):
        fingerprint = f"{digests.ALGORITHM}:{name}"
        path = layout.snapshot_path(fingerprint, "index")
        if not digests.is_digest(fingerprint) or (store.size(path) is None and not _named(pointer, fingerprint)):
            continue
        try:
            found.append(parse_snapshot(store.read(path, tables.MAX_TABLE_NBYTES), path, fingerprint))
        except (CorruptionError, FormatError, NotFoundError) as error:
            if isinstance(error, FormatError) and digests.digest(read_if_there(store, path)) == fingerprint:
                raise  # whole, and of a later version or another library
            broken[fingerprint] = str(error.problems[0])
    found.sort(key=lambda snapshot: not _named(pointer, snapshot.fingerprint))
    if pointer is not None and pointer.fingerprint not in {*broken, *(each.fingerprint for each in found)}:
        broken[pointer.fingerprint] = f"{layout.snapshot_path(pointer.fingerprint, 'index')}: nothing there"
    return pointer, found, broken


def usable_pointer(store: Store) -> tuple[Pointer | None, str]:
    """Return (the pointer, "") or (None, what is wrong with it)."""
    try:
        pointer = read_pointer(store)
    except (CorruptionError, FormatError) as error:
        check_not_newer(read_if_there(store, layout.POINTER), layout.POINTER, error)
        return None, str(error.problems[0])
    return pointer, "" if pointer else "none"


def plan_snapshots(store: Store, header: Header, loaded: Mapping[str, LoadedPart]) -> SnapshotPlan:
    """Plan what to do about snapshots, pointer and attachments.

    Parameters
    ----------
    loaded
        The committed parts whose documents are sound, as they were before the repair.
    """
    plan = SnapshotPlan()
    pointer, found, broken = readable_snapshots(store)
    attached = _whole_attachments(store, plan)
    restored: list[Snapshot] = []
    if broken:
        for fingerprint, problem in broken.items():
            path = layout.snapshot_path(fingerprint, "index")
            data = _rebuilt(store, header, loaded, found, attached, fingerprint)
            if data is not None:
                plan.note(path, problem, "restored")
                plan.writes[layout.snapshot_path(fingerprint, "ids")] = data[1]
                plan.writes[path] = data[0]
                restored.append(parse_snapshot(data[0], path, fingerprint))
                continue
            plan.note(path, problem, "quarantined")
            plan.aside += [layout.snapshot_path(fingerprint, file) for file in ("index", "ids")]
    for snapshot in found:
        _plan_ids(store, plan, snapshot, pointer)
    gone = {f"{digests.ALGORITHM}:{path.split('/')[2]}" for path in plan.aside if path.startswith(layout.SNAPSHOTS)}
    usable = [snapshot for snapshot in [*found, *restored] if snapshot.fingerprint not in gone]
    _plan_pointer(store, plan, pointer, usable)
    current = [each for each in usable if _named(pointer, each.fingerprint)] or usable
    _plan_attachments(store, plan, current, usable)
    return plan


def _plan_ids(store: Store, plan: SnapshotPlan, snapshot: Snapshot, pointer: Pointer | None) -> None:
    path = layout.snapshot_path(snapshot.fingerprint, "ids")
    data = read_if_there(store, path)
    if digests.digest(data) == snapshot.ids_digest:
        return
    problem = f"{path}: expected digest {snapshot.ids_digest}, got {digests.digest(data) if data else 'nothing'}"
    rebuilt = rebuilt_ids(store, snapshot)
    if rebuilt is not None:
        plan.note(path, problem, "restored")
        plan.writes[path] = rebuilt
        return
    plan.note(path, problem, "quarantined")
    # The pointer goes first: without it a reader is told to seal, and is not led to a snapshot that is not there.
    if _named(pointer, snapshot.fingerprint):
        plan.aside.append(layout.POINTER)
        plan.must_seal = True
    plan.aside += [layout.snapshot_path(snapshot.fingerprint, file) for file in ("index", "ids")]


def _plan_pointer(store: Store, plan: SnapshotPlan, pointer: Pointer | None, usable: list[Snapshot]) -> None:
    problem = usable_pointer(store)[1]
    if pointer is not None:
        target = next((each for each in usable if each.fingerprint == pointer.fingerprint), None)
        if target is not None:
            path = layout.snapshot_path(target.fingerprint, "index")
            nbytes = len(plan.writes[path]) if path in plan.writes else store.size(path) or 0
            if make_pointer(target, nbytes, pointer.sealed) == pointer:
                return
            problem = _OTHER_COUNTS
        else:
            problem = f"snapshot {pointer.fingerprint}, which can't be used"
    if store.size(layout.POINTER) is None and not usable and (not was_sealed(store) or not committed_parts(store)):
        return  # never sealed
    plan.note(layout.POINTER, f"{layout.POINTER}: expected a pointer to a snapshot, got {problem}", "sealed anew")
    plan.must_seal = True
    if layout.POINTER not in plan.aside and store.size(layout.POINTER) is not None:
        plan.aside.insert(0, layout.POINTER)
    gone = pointer is not None and problem != _OTHER_COUNTS
    aside = any(path.startswith(layout.SNAPSHOTS) for path in plan.aside)
    if gone or aside or not usable or any(len(each.retracted_row) for each in usable):
        plan.warnings.append(
            "the snapshot that was current is not known: what any that is left retracts stays retracted; retract again "
            "what else was: hsfmt retract URL ID"
        )


def _whole_attachments(store: Store, plan: SnapshotPlan) -> list[dict[str, Any]]:
    """Return the entries of all files that are what their folder is named; the others go into quarantine."""
    entries = []
    for path, nbytes in store.walk(layout.ATTACHMENTS):
        match = _ATTACHMENT.fullmatch(path)
        if match is None or path.endswith(".tmp"):
            continue
        data = read_if_there(store, path)
        digest = f"{digests.ALGORITHM}:{match[1]}"
        if digests.digest(data) == digest:
            entries.append({"digest": digest, "name": path.rpartition("/")[2], "nbytes": nbytes})
            continue
        plan.note(path, f"{path}: expected {digest}, got {digests.digest(data)}", "quarantined")
        plan.aside.append(path)
    return sorted(entries, key=lambda entry: entry["name"])


def _plan_attachments(store: Store, plan: SnapshotPlan, current: list[Snapshot], usable: list[Snapshot]) -> None:
    """Drop what the current snapshot lists and is damaged, and names that stand for different files."""
    known: dict[str, set[str]] = {}
    for snapshot in current:
        for entry in snapshot.attachments:
            name = str(entry.get("name"))
            known.setdefault(name, set()).add(str(entry.get("digest")))
            try:
                path = attachments.entry_path(entry, layout.snapshot_path(snapshot.fingerprint, "index"))
                whole = path not in plan.aside and store.size(path) == entry["nbytes"]
            except HsfmtError:
                path, whole = f"{layout.ATTACHMENTS}: {name}", False
            if not whole:
                known[name].add("")
                plan.note(path, f"{path}: expected the attachment that is listed, got none that is whole", "dropped")
    if not current or (plan.must_seal and len(usable) > 1 and any(len(values) > 1 for values in known.values())):
        plan.warnings.append("of attachments of one name that differ, none is listed: attach the right one again")
    for name, values in known.items():
        if len(values) > 1:
            plan.dropped.add(name.removesuffix(attachments.SUFFIX))
            plan.must_seal = True


def _rebuilt(
    store: Store,
    header: Header,
    loaded: Mapping[str, LoadedPart],
    found: Iterable[Snapshot],
    attached: list[dict[str, Any]],
    fingerprint: str,
) -> tuple[bytes, bytes] | None:
    """Return (index, ids) of a lost snapshot, if one of the likely ones has its fingerprint."""
    found = list(found)
    retracted = set().union(*(retracted_in(store, snapshot) for snapshot in found)) if found else set()
    listed = [list(snapshot.attachments) for snapshot in found] or [[]]
    lists: list[list[Mapping[str, Any]]] = [list(attached), *listed, []]
    for parts in _sets_of_parts(loaded):
        for gone in [retracted, set()] if retracted else [set()]:
            tried: list[Any] = []
            for entries in lists:
                if entries in tried:
                    continue
                tried.append(entries)
                data = build_snapshot(parts, header, gone, entries)
                if digests.digest(data[0]) == fingerprint:
                    return data
    return None


def _sets_of_parts(loaded: Mapping[str, LoadedPart]) -> Iterator[list[LoadedPart]]:
    """Yield the parts as they are, and as they were when only the first of them were there."""
    names = sorted(loaded)
    budget = _MAX_ATTEMPT_SAMPLES
    for n in range(len(names), 0, -1):
        manifests = [loaded[name].manifest for name in names[:n]]
        try:
            superseded = superseded_parts(manifests)
        except CorruptionError:
            continue
        yield [loaded[name] for name in names[:n] if name not in superseded]
        budget -= sum(manifest.counts.samples for manifest in manifests)
        if budget < 0:
            return


def retracted_in(store: Store, snapshot: Snapshot) -> set[str]:
    """Return the ids that a snapshot has taken out, as far as the indexes of their parts tell them."""
    ids = {snapshot.absent_ids[i] for i in range(len(snapshot.absent_ids))}
    for number in set(snapshot.retracted_part.tolist()):
        try:
            known = load_ids(store, snapshot.parts[number])
        except StorageError:
            raise
        except HsfmtError:
            continue
        rows = snapshot.retracted_row[snapshot.retracted_part == number].tolist()
        ids |= {known[row] for row in rows if row < len(known)}
    return ids


def _named(pointer: Pointer | None, fingerprint: str) -> bool:
    return pointer is not None and pointer.fingerprint == fingerprint


def witness_of(store: Store) -> Witness:
    """Return what the readable snapshots say."""
    pointer, found, _ = readable_snapshots(store)
    current = next((snapshot for snapshot in found if _named(pointer, snapshot.fingerprint)), None)
    return Witness(tuple(found), store, current)


def was_sealed(store: Store) -> bool:
    """Say whether there is, or was before a repair set it aside, a snapshot or a pointer."""
    aside = f"{layout.QUARANTINE}/objects/hsfmt"
    return store.size(layout.POINTER) is not None or bool(
        store.list(layout.SNAPSHOTS) or {"manifest.json", "snapshots"} & set(store.list(aside))
    )
