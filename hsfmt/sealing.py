"""Sealing: make a snapshot of all that is committed and point at it.

Spec: rules SEAL-1 to SEAL-7. No lock: whoever replaces the pointer lists again, and repeats if the committed set grew.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from hsfmt import digests, layout, tables
from hsfmt.catalog import (
    committed_parts,
    load_part,
    load_ref,
    read_header,
    read_pointer,
    read_snapshot,
    without_superseded,
)
from hsfmt.errors import ExpectationError, FormatError, NotFoundError, Problem, SampleNotFoundError
from hsfmt.header import Header
from hsfmt.pointer import make_pointer
from hsfmt.snapshot import Snapshot, parse_snapshot, parse_snapshot_ids
from hsfmt.snapshot_builder import LoadedPart, build_snapshot
from hsfmt.storage import Store, open_store
from hsfmt.versions import check_writable

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Sealed:
    """What a seal made.

    Attributes
    ----------
    snapshot
        The snapshot that the pointer now names.
    rounds
        How often the committed set was listed until it had stopped growing.
    changed
        False when the pointer named this very snapshot already.
    """

    snapshot: Snapshot
    rounds: int
    changed: bool


def seal(
    url: str | os.PathLike[str] | Store,
    *,
    expect: int | Collection[str] | None = None,
    retract: Collection[str] = (),
    storage_options: Mapping[str, Any] | None = None,
) -> Sealed:
    """Make a snapshot of all committed parts and point at it.

    Parameters
    ----------
    url
        The dataset.
    expect
        A number of samples, or the very ids, that the snapshot must hold; otherwise nothing is replaced.
    retract
        Ids to list but no longer serve; ids retracted by the current snapshot stay so.
    storage_options
        For fsspec URLs.

    Returns
    -------
    Sealed
        The snapshot and whether it is new.

    Raises
    ------
    NotFoundError
        There is no dataset, or nothing committed in it.
    SampleNotFoundError
        An id to retract is that of no committed sample.
    ExpectationError
        The committed samples are not the expected ones; the missing and the unexpected ids are named.
    CorruptionError, HeaderMismatchError
        A committed part can't be part of a snapshot.
    """
    store = url if isinstance(url, Store) else open_store(url, storage_options)
    header = read_header(store)
    check_writable(header.to_json(), layout.ROOT_METADATA)
    known = {f"{digests.ALGORITHM}:{name}" for name in store.list(layout.SNAPSHOTS)}
    gone = set(retract) | _retracted(store, header)
    loaded: dict[str, LoadedPart] = {}
    rounds, changed = 0, False
    while True:
        rounds += 1
        names = committed_parts(store)
        if not names:
            remedy = "commit samples first; uncommitted parts of a crashed writer can't be sealed"
            raise NotFoundError.at(store.url, expected="committed parts", got="none", remedy=remedy)
        for name in names:
            if name not in loaded:
                loaded[name] = load_part(store, name, header)
        if rounds == 1:
            _check_retracted(retract, loaded.values())
        snapshot, replaced = _point_at(store, [loaded[name] for name in names], header, gone, expect)
        changed |= replaced
        # A snapshot that appeared meanwhile is that of a seal that races with this one: what it retracted stays so too,
        # whichever of the two replaced the pointer last.
        found = {f"{digests.ALGORITHM}:{name}" for name in store.list(layout.SNAPSHOTS)}
        rivals = {name for name in found - known - {snapshot.fingerprint} if digests.is_digest(name)}
        known |= rivals
        theirs = set().union(*(_retracted_by(store, header, name) for name in rivals))
        if committed_parts(store) == names and theirs <= gone:
            return Sealed(snapshot, rounds, changed)
        gone |= theirs


def build_live(store: Store, header: Header) -> tuple[bytes, bytes]:
    """Return (index file, ids file) of a snapshot over all committed parts, without writing anything."""
    parts = [load_part(store, name, header) for name in committed_parts(store)]
    return build_snapshot(without_superseded(parts), header, _retracted(store, header))


def _point_at(
    store: Store, parts: list[LoadedPart], header: Header, gone: set[str], expect: int | Collection[str] | None
) -> tuple[Snapshot, bool]:
    pointer = read_pointer(store)
    attachments = read_snapshot(store, pointer.fingerprint)[0].attachments if pointer else ()
    index_file, ids_file = build_snapshot(without_superseded(parts), header, gone, attachments)
    snapshot = parse_snapshot(index_file, "snapshot")
    _check_expected(snapshot, ids_file, expect)
    ids_path, index_path = (layout.snapshot_path(snapshot.fingerprint, file) for file in ("ids", "index"))
    for path, data in ((ids_path, ids_file), (index_path, index_file)):
        if len(data) > tables.MAX_TABLE_NBYTES:
            raise FormatError.at(path, expected=f"at most {tables.MAX_TABLE_NBYTES} bytes", got=f"{len(data)}")
    if (
        pointer is not None
        and pointer.fingerprint == snapshot.fingerprint
        and _holds(store, index_path, index_file)
        and _holds(store, ids_path, ids_file)
    ):
        return snapshot, False
    # What a commit made durable on another host may not be on this one's directories yet.
    store.sync(sorted(_directories(parts)))
    store.write(ids_path, ids_file)
    store.write(index_path, index_file)
    store.sync([layout.snapshot_path(snapshot.fingerprint, "x").rpartition("/")[0]])
    now = datetime.now(UTC).isoformat(timespec="seconds")
    store.replace(layout.POINTER, make_pointer(snapshot, len(index_file), now).to_bytes())
    store.sync(["hsfmt"])
    return snapshot, True


def _holds(store: Store, path: str, data: bytes) -> bool:
    return store.size(path) == len(data) and store.read(path, len(data)) == data


def _check_retracted(retract: Collection[str], parts: Collection[LoadedPart]) -> None:
    """Refuse ids that are nowhere: they could not be listed, and a typing error would go unnoticed."""
    missing = set(retract)
    for part in parts:
        if missing and part.index is not None:
            missing -= {part.index.sample_id(row) for row in range(part.index.n_samples)}
    if missing:
        shown = tuple(sorted(missing)[:_SHOWN])
        raise SampleNotFoundError.at("retract", expected="ids of samples", got=f"{len(missing)} unknown", samples=shown)


def _directories(parts: list[LoadedPart]) -> set[str]:
    files = (entry.path for part in parts for entry in part.manifest.files)
    return {layout.MANIFESTS, *(path.rpartition("/")[0] for path in files)}


def _retracted(store: Store, header: Header) -> set[str]:
    pointer = read_pointer(store)
    return set() if pointer is None else _retracted_by(store, header, pointer.fingerprint)


def _retracted_by(store: Store, header: Header, fingerprint: str) -> set[str]:
    try:
        snapshot, _ = read_snapshot(store, fingerprint)
    except NotFoundError:
        pointer = read_pointer(store)
        if pointer is not None and pointer.fingerprint == fingerprint:
            raise
        return set()  # a seal that has not written its index: it will list after it has
    ids = set()
    for number in set(snapshot.retracted_part.tolist()):
        index = load_ref(store, snapshot.parts[number], header).index
        rows = snapshot.retracted_row[snapshot.retracted_part == number]
        ids |= {index.sample_id(int(row)) for row in rows} if index else set()
    return ids


def _check_expected(snapshot: Snapshot, ids_file: bytes, expect: int | Collection[str] | None) -> None:
    if expect is None:
        return
    remedy = "run the producer again for what is missing; the current snapshot was left as it is"
    if isinstance(expect, int):
        if snapshot.n_samples != expect:
            got = f"{snapshot.n_samples} ({snapshot.counts['holes']} holes)"
            raise ExpectationError.at("snapshot", expected=f"{expect} samples", got=got, remedy=remedy)
        return
    ids = parse_snapshot_ids(ids_file, snapshot, "snapshot")
    have, want = {ids[i] for i in range(len(ids))}, set(expect)
    problems = [
        Problem("snapshot", expected, f"{len(found)} {kind}", remedy, tuple(sorted(found)[:_SHOWN]))
        for found, kind, expected in (
            (want - have, "missing", "all expected ids"),
            (have - want, "unexpected", "no other ids"),
        )
        if found
    ]
    if problems:
        raise ExpectationError(problems)
