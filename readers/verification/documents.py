"""Tier quick, the dataset: root and group documents, the pointer and the snapshot that it names.

Spec: rules VFY-4, VFY-15, HDR-9, SNAP-7 to SNAP-9.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hsfmt import layout, tables
from hsfmt.digests import ALGORITHM
from hsfmt.errors import CorruptionError, NotFoundError
from hsfmt.header import MAX_HEADER_NBYTES, Header
from hsfmt.manifest import FileEntry
from hsfmt.pointer import MAX_POINTER_NBYTES, Pointer, parse_pointer
from hsfmt.readers.verification.attachments import parse_attachments
from hsfmt.readers.verification.objects import read_twice
from hsfmt.readers.verification.report import Findings
from hsfmt.snapshot import Snapshot, SnapshotIds, parse_snapshot, parse_snapshot_ids
from hsfmt.storage import Store
from hsfmt.zarr_metadata import group_document, parse_root

_SEAL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class LoadedSnapshot:
    """A snapshot with its ids (None where that file can't be used) and the attachments that it names."""

    snapshot: Snapshot
    index_nbytes: int
    ids: SnapshotIds | None
    attachments: tuple[FileEntry, ...]

    @property
    def paths(self) -> list[str]:
        """Its files, and those that it names beside the parts."""
        own = [layout.snapshot_path(self.snapshot.fingerprint, file) for file in ("ids", "index")]
        return own + [entry.path for entry in self.attachments]

    @property
    def path(self) -> str:
        """Its index."""
        return layout.snapshot_path(self.snapshot.fingerprint, "index")


def load_header(store: Store, findings: Findings) -> Header | None:
    """Return the header of the root group, None where it can't be used; and compare the group document of `parts`."""
    header = read_twice(
        findings,
        layout.ROOT_METADATA,
        lambda: parse_root(store.read(layout.ROOT_METADATA, MAX_HEADER_NBYTES), layout.ROOT_METADATA),
    )

    def same() -> None:
        data = store.read(layout.PARTS_METADATA, MAX_HEADER_NBYTES)
        if data != group_document():
            expected = "an empty Zarr v3 group, in canonical form"
            raise CorruptionError.at(layout.PARTS_METADATA, expected=expected, got=repr(data)[:200])

    read_twice(findings, layout.PARTS_METADATA, same, corrupt="zarr_json")
    return header


def load_pointer(store: Store, findings: Findings) -> Pointer | None:
    """Return the pointer, None where it can't be used, or is not there.

    That is a warning (rule VFY-15): a first seal that was cut leaves a snapshot without one, and readers refuse it.
    """

    def fetch() -> Pointer | None:
        try:
            return parse_pointer(store.read(layout.POINTER, MAX_POINTER_NBYTES))
        except NotFoundError:
            return None

    own = Findings()
    pointer = read_twice(own, layout.POINTER, fetch)
    if pointer is None and not own.items and (n_snapshots := _n_snapshots(store)):
        time.sleep(_SEAL_SECONDS)  # a first seal writes its snapshot, makes it durable, and then points at it
        pointer = read_twice(own, layout.POINTER, fetch)
        if pointer is None and not own.items:
            got = f"none, and {n_snapshots} snapshots: a first seal was cut, or the pointer is lost"
            own.add("warning", "no_pointer", layout.POINTER, expected="a pointer to a snapshot", got=got)
    elif pointer is None and not own.items:
        own.add("warning", "never_sealed", layout.POINTER, expected="a pointer to a snapshot", got="none")
    findings.items += own.items
    return pointer


def _n_snapshots(store: Store) -> int:
    paths = (f"{layout.SNAPSHOTS}/{name}/index.safetensors" for name in store.list(layout.SNAPSHOTS))
    return sum(store.size(path) is not None for path in paths)


def load_snapshot(store: Store, findings: Findings, fingerprint: str) -> LoadedSnapshot | None:
    """Return a snapshot, both files compared with the digests that name them; None where its index can't be used."""
    path, ids_path = (layout.snapshot_path(fingerprint, file) for file in ("index", "ids"))

    def fetch() -> tuple[Snapshot, int, Any]:
        data = store.read(path, tables.MAX_TABLE_NBYTES)
        snapshot = parse_snapshot(data, path, fingerprint)
        return snapshot, len(data), tables.parse(data, path).metadata.get("attachments")

    loaded = read_twice(findings, path, fetch, store=store)
    if loaded is None:
        return None
    snapshot, nbytes, listed = loaded

    def fetch_ids() -> SnapshotIds:
        data = store.read(ids_path, tables.MAX_TABLE_NBYTES)
        ids = parse_snapshot_ids(data, snapshot, ids_path)
        if len(data) != snapshot.ids_nbytes:
            raise CorruptionError.at(ids_path, expected=f"{snapshot.ids_nbytes} bytes", got=f"{len(data)} bytes")
        return ids

    ids = read_twice(findings, ids_path, fetch_ids, store=store)
    return LoadedSnapshot(snapshot, nbytes, ids, parse_attachments(listed, findings, path))


def check_pointer(findings: Findings, pointer: Pointer, loaded: LoadedSnapshot) -> None:
    """Compare what the pointer repeats with its snapshot."""
    snapshot = loaded.snapshot
    pairs = {
        "index": (loaded.index_nbytes, pointer.index_nbytes),
        "samples": (snapshot.n_samples, pointer.samples),
        "tokens": (snapshot.counts.get("tokens"), pointer.tokens),
        "content_digest": (snapshot.content_digest, pointer.content_digest),
        "header": (snapshot.header.digest(), pointer.header.digest()),
    }
    for member, (wanted, got) in pairs.items():
        if wanted != got:
            where = f"{layout.POINTER}: {member}"
            findings.error("counts", where, expected=f"{wanted}, as the snapshot has", got=str(got))


def check_headers(findings: Findings, root: Header | None, others: Mapping[str, Header], *, sealed: bool) -> None:
    """Compare the header of the root with those that pointer, snapshot and manifests repeat.

    Parameters
    ----------
    findings
        Where findings go.
    root
        The root's header, None where it can't be used.
    others
        Path to the header that it repeats.
    sealed
        Whether a pointer or snapshot is among them.
    """
    digests = {path: header.digest() for path, header in others.items()}
    distinct = set(digests.values())
    if root is None or distinct <= {root.digest()}:
        if root is None and len(distinct) > 1:
            got = f"{len(distinct)} different ones in {len(others)} documents"
            findings.error("header", layout.ROOT_METADATA, expected="one header in all documents", got=got)
        return
    wanted = root.digest()
    if len(distinct) == 1 and wanted not in distinct:
        # The root's copy alone has no digest of its own: where all others agree, it is the one that changed.
        expected = f"header {next(iter(distinct))}, as {len(others)} other documents have"
        got = f"{wanted}: {_differences(root, next(iter(others.values())))}"
        findings.error("header", layout.ROOT_METADATA, expected=expected, got=got)
        if sealed:
            return
    for path, digest in digests.items():
        if digest != wanted:
            expected = f"header {wanted.removeprefix(ALGORITHM + ':')}, as the dataset's root has"
            got = f"{digest.removeprefix(ALGORITHM + ':')}: {_differences(others[path], root)}"
            findings.error("header", path, expected=expected, got=got)


def _differences(found: Header, wanted: Header) -> str:
    have, want = found.to_json(), wanted.to_json()
    keys = [key for key in sorted({*have, *want}) if have.get(key) != want.get(key)]
    return ", ".join(f"{key} {have.get(key)!r} instead of {want.get(key)!r}" for key in keys)
