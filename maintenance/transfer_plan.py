"""What a transfer has to bring, and what stands against it; nothing is written here.

Spec: rule TRN-1. A transfer makes the destination the same dataset as the source's snapshot: whatever the
destination would lose by that (samples, retractions, attachments) is a reason to refuse.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

import numpy as np

from hsfmt import attachments as attached
from hsfmt import digests, layout
from hsfmt.catalog import (
    committed_parts,
    find_dataset,
    load_manifest,
    read_header,
    read_pointer,
    read_snapshot,
    superseded_parts,
)
from hsfmt.errors import CorruptionError, NotFoundError, UsageError
from hsfmt.header import Header, check_same_header
from hsfmt.manifest import FileEntry, PartManifest
from hsfmt.pointer import Pointer, make_pointer
from hsfmt.readers.open_snapshot import LIVE, choose_snapshot
from hsfmt.retractions import retracted_ids
from hsfmt.snapshot import PartRef, Snapshot
from hsfmt.storage import Store
from hsfmt.storage.local import LocalStore
from hsfmt.stored_snapshots import stored_snapshots

_SHOWN = 10
_APART = "`hsfmt merge {} {}` puts both together; or choose another destination"

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What a transfer does.

    Attributes
    ----------
    header, snapshot, pointer
        What the destination is to be.
    parts
        All parts of the snapshot, and superseded ones that only say what is superseded in their turn, in the order in
        which they are committed.
    present
        Those that are committed in the destination already.
    documents
        Files of the snapshot: its attachments, ids and index, in this order.
    before
        The fingerprint that the destination's pointer names now, None without one.
    sizes
        Path to bytes of what lies below parts/ and the indexes in the destination, and of the snapshot's files if it
        is the current one there.
    """

    header: Header
    snapshot: Snapshot
    pointer: Pointer
    parts: tuple[PartManifest, ...]
    present: frozenset[str]
    documents: tuple[FileEntry, ...]
    before: str | None
    sizes: Mapping[str, int]

    def missing(self, manifest: PartManifest) -> list[FileEntry]:
        """Return the files of a part that are not in the destination, or are of another size."""
        return [entry for entry in manifest.files if self.sizes.get(entry.path) != entry.nbytes]

    @property
    def missing_documents(self) -> list[FileEntry]:
        """Files of the snapshot to copy: all, unless the destination has it; a collection may take old ones for lost.

        So they are written anew until the pointer names it.
        """
        return [entry for entry in self.documents if self.sizes.get(entry.path) != entry.nbytes]

    @property
    def missing_nbytes(self) -> int:
        """Bytes to copy."""
        entries = [entry for manifest in self.parts for entry in self.missing(manifest)] + self.missing_documents
        return sum(entry.nbytes for entry in entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is copied to an empty destination."""
        entries = [entry for manifest in self.parts for entry in manifest.files] + list(self.documents)
        return sum(entry.nbytes for entry in entries)

    def paths(self) -> set[str]:
        """Return the path of every object that the destination will have at least."""
        paths = {layout.ROOT_METADATA, layout.PARTS_METADATA, layout.POINTER, *self.sizes}
        paths |= {entry.path for entry in self.documents}
        for manifest in self.parts:
            paths |= {layout.manifest_path(manifest.part), *(entry.path for entry in manifest.files)}
        return paths


def plan_transfer(source: Store, destination: Store, which: str | None, connections: int) -> TransferPlan:
    """Return what to do.

    Parameters
    ----------
    source, destination
        Datasets; the destination may be new.
    which
        Fingerprint of the source's snapshot, None for the sealed one.
    connections
        Documents that are read at a time.

    Raises
    ------
    NotFoundError, CorruptionError
        The source is not sealed, or damaged.
    HeaderMismatchError, UsageError
        The destination is another dataset, or has what the source has not.
    """
    if which == LIVE:
        remedy = f"run `hsfmt seal {source.url}`, or name a snapshot's fingerprint"
        raise UsageError.at("snapshot", expected="a sealed snapshot", got="live", remedy=remedy)
    check_apart(source, destination)
    snapshot = choose_snapshot(source, which, sealed_only=True)[1]
    header = read_header(source)
    if header.digest() != snapshot.header.digest():
        got = f"header {header.digest()}"
        where = f"{source.url}: {layout.ROOT_METADATA}"
        raise CorruptionError.at(where, expected=f"header {snapshot.header.digest()} of the snapshot", got=got)
    _check_writable(destination)
    found = find_dataset(destination, header)
    if found is not None:
        check_same_header(found, header, source.url)
    with ThreadPoolExecutor(connections, "hsfmt-transfer") as pool:
        mine = dict(_each(pool, lambda ref: (ref.name, _manifest(source, ref, header)), snapshot.parts))
        there = committed_parts(destination) if found is not None else []
        theirs = dict(_each(pool, lambda name: (name, load_manifest(destination, name, header)), there))
    _check_same_parts(mine, theirs, source, destination)
    mine |= _links(source, header, mine, _foreign(mine, theirs))
    before = read_pointer(destination) if found is not None else None
    replaced = superseded_parts(theirs.values())
    _check_nothing_lost((source, destination), snapshot, _foreign(mine, theirs), replaced, before)
    sizes = dict(destination.walk("parts")) | dict(destination.walk(layout.INDEXES))
    documents = _documents(source, snapshot)
    if before is not None and before.fingerprint == snapshot.fingerprint:
        stored = ((entry.path, destination.size(entry.path)) for entry in documents)
        sizes |= {path: nbytes for path, nbytes in stored if nbytes is not None}
    return TransferPlan(
        header=header,
        snapshot=snapshot,
        pointer=_pointer(source, snapshot),
        parts=tuple(_in_order(mine)),
        present=frozenset(mine.keys() & theirs.keys()),
        documents=documents,
        before=before.fingerprint if before else None,
        sizes=sizes,
    )


def check_apart(source: Store, destination: Store) -> None:
    """Refuse a source and a destination that are one, or of which one lies in the other."""

    def place(store: Store) -> str:
        return (os.path.realpath(store.url) if isinstance(store, LocalStore) else store.url).rstrip("/") + "/"

    first, second = place(source), place(destination)
    local = isinstance(source, LocalStore), isinstance(destination, LocalStore)
    # Of two object stores of one kind, buckets of the same name are different ones behind different endpoints.
    together = all(local) or destination.shares_storage(source)
    if together and (first.startswith(second) or second.startswith(first)):
        got = "the source itself, or one inside the other"
        raise UsageError.at(destination.url, expected="a destination beside the source", got=got)


def _check_writable(destination: Store) -> None:
    if destination.url.startswith(("http://", "https://")):
        remedy = "write to a folder or a bucket, and serve that"
        raise UsageError.at(destination.url, expected="a storage to write to", got="a web server", remedy=remedy)
    if not destination.can_list:
        destination.list("")  # says what is missing


def _each(pool: ThreadPoolExecutor, action: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    return list(pool.map(action, items))


def _manifest(source: Store, ref: PartRef, header: Header) -> PartManifest:
    manifest = load_manifest(source, ref.name, header, ref.manifest_digest)
    if ref.index_digest is not None:
        entry = manifest.index_file
        if (entry.digest, entry.nbytes) != (ref.index_digest, ref.index_nbytes):
            expected = f"an index of {ref.index_nbytes} bytes, {ref.index_digest}, as the snapshot says"
            got = f"{entry.nbytes} bytes, {entry.digest}"
            raise CorruptionError.at(layout.manifest_path(ref.name), expected=expected, got=got)
    return manifest


def _check_same_parts(
    mine: Mapping[str, PartManifest], theirs: Mapping[str, PartManifest], source: Store, destination: Store
) -> None:
    different = sorted(name for name in mine.keys() & theirs.keys() if mine[name].digest() != theirs[name].digest())
    if different:
        raise UsageError.at(
            destination.url,
            expected=f"parts as in {source.url}, or none of their names",
            got=f"{len(different)} with another content: {', '.join(different[:_SHOWN])}",
            remedy="choose another destination",
        )


def _foreign(mine: Mapping[str, PartManifest], theirs: Mapping[str, PartManifest]) -> set[str]:
    """Return the parts that count in the destination now, and that neither are the source's nor are replaced by it."""
    return theirs.keys() - mine.keys() - superseded_parts([*mine.values(), *theirs.values()])


def _links(
    source: Store, header: Header, mine: Mapping[str, PartManifest], foreign: set[str]
) -> dict[str, PartManifest]:
    """Return superseded parts of the source that are needed because they replace what the destination still has."""
    if not foreign or not source.can_list:
        return {}
    others = {}
    for name in committed_parts(source):
        if name not in mine:
            others[name] = load_manifest(source, name, header)
    found: dict[str, PartManifest] = {}
    needed = set(foreign)
    while True:
        replaced = superseded_parts([*mine.values(), *others.values()])
        new = {
            name: manifest
            for name, manifest in others.items()
            if name not in found and name in replaced and manifest.replaces.keys() & needed
        }
        if not new:
            break
        found |= new
        needed |= new.keys()  # and what replaces these
    complete = {
        name: manifest
        for name, manifest in found.items()
        if all(source.size(entry.path) == entry.nbytes for entry in manifest.files)
    }
    # One that nothing replaces here would be served.
    while loose := complete.keys() - superseded_parts([*mine.values(), *complete.values()]):
        complete = {name: manifest for name, manifest in complete.items() if name not in loose}
    return complete


def _check_nothing_lost(
    stores: tuple[Store, Store], snapshot: Snapshot, foreign: set[str], replaced: set[str], before: Pointer | None
) -> None:
    """Refuse if the destination has samples, retractions or attachments that it would lose."""
    source, destination = stores
    remedy = _APART.format(destination.url, source.url)
    where = destination.url
    if foreign:
        got = f"{len(foreign)} parts that it lacks: {', '.join(sorted(foreign)[:_SHOWN])}"
        expected = f"nothing but what the snapshot {snapshot.fingerprint} of {source.url} has"
        raise UsageError.at(where, expected=expected, got=got, remedy=remedy)
    if before is None or before.fingerprint == snapshot.fingerprint:
        return
    now = read_snapshot(destination, before.fingerprint)[0]
    gone = retracted_ids(destination, [now], stored_snapshots(destination), replaced, skip_missing=True)
    if gone:
        hashes = {digests.id_hash(sample_id.encode()): sample_id for sample_id in gone}
        back = np.isin(np.fromiter(hashes, np.uint64, len(hashes)), snapshot.id_hash)
        served = sorted(sample_id for sample_id, is_back in zip(hashes.values(), back.tolist(), strict=True) if is_back)
        if served:
            got = f"{len(served)} that the source serves"
            raise UsageError.at(
                where,
                expected="samples retracted in the source too",
                got=got,
                remedy=f"retract them in the source, or {remedy}",
                samples=tuple(served[:_SHOWN]),
            )
    listed = {(entry["name"], entry["digest"]) for entry in snapshot.attachments}
    others = sorted(str(entry["name"]) for entry in now.attachments if (entry["name"], entry["digest"]) not in listed)
    if others:
        got = ", ".join(others[:_SHOWN])
        raise UsageError.at(where, expected="attachments that the source has too", got=got, remedy=remedy)


def _pointer(source: Store, snapshot: Snapshot) -> Pointer:
    pointer = read_pointer(source)
    if pointer is not None and pointer.fingerprint == snapshot.fingerprint:
        return pointer
    nbytes = source.size(layout.snapshot_path(snapshot.fingerprint, "index"))
    return make_pointer(snapshot, nbytes or 0, datetime.now(UTC).isoformat(timespec="seconds"))


def _documents(source: Store, snapshot: Snapshot) -> tuple[FileEntry, ...]:
    entries = [
        FileEntry(attached.entry_path(entry, source.url), int(entry["nbytes"]), str(entry["digest"]))
        for entry in snapshot.attachments
    ]
    index = layout.snapshot_path(snapshot.fingerprint, "index")
    nbytes = source.size(index)
    if nbytes is None:
        raise NotFoundError.at(index, expected="the snapshot's index", got="nothing")
    ids = layout.snapshot_path(snapshot.fingerprint, "ids")
    entries.append(FileEntry(ids, snapshot.ids_nbytes, snapshot.ids_digest))
    return (*entries, FileEntry(index, nbytes, snapshot.fingerprint))


def _in_order(parts: Mapping[str, PartManifest]) -> Sequence[PartManifest]:
    """Return the parts, those that others of them replace first: what is replaced is never served anew on the way."""
    order: list[PartManifest] = []
    left = dict(parts)
    while left:
        ready = sorted(name for name, manifest in left.items() if not manifest.replaces.keys() & left.keys())
        if not ready:
            got = f"a circle: {', '.join(sorted(left)[:_SHOWN])}"
            raise CorruptionError.at(layout.MANIFESTS, expected="parts that replace older ones", got=got)
        order += [left.pop(name) for name in ready]
    return order
