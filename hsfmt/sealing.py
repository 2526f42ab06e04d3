"""Sealing: make a snapshot of all that is committed and point at it.

Spec: rules SEAL-1 to SEAL-9. No lock: whoever replaces the pointer lists again, and repeats if the committed set grew.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import attachments as attached
from hsfmt import digests, layout, tables
from hsfmt.catalog import (
    committed_parts,
    load_ids,
    load_part,
    read_header,
    read_pointer,
    read_snapshot,
    without_superseded,
)
from hsfmt.errors import ExpectationError, FormatError, NotFoundError, Problem, SampleNotFoundError, UsageError
from hsfmt.header import Header
from hsfmt.lost_parts import check_none_lost, snapshots_to_keep
from hsfmt.pointer import make_pointer
from hsfmt.snapshot import Snapshot, parse_snapshot, parse_snapshot_ids
from hsfmt.snapshot_builder import LoadedPart, build_snapshot
from hsfmt.storage import Store, open_store
from hsfmt.versions import check_writable

_log = logging.getLogger("hsfmt")
_SHOWN = 10
_WHAT = {"retract": "ids", "drop_attachments": "names"}
_MISSING_REMEDY = "run the producer again for what is missing; the current snapshot was left as it is"
_UNEXPECTED_REMEDY = (
    "expect them too, or retract them (Python: hsfmt.seal(url, retract=[ids])); the current snapshot was left as it is"
)


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
    drop_missing: bool = False,
    attachments: Mapping[str, npt.ArrayLike] | None = None,
    drop_attachments: Collection[str] = (),
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
    drop_missing
        Leave out parts that the current snapshot names and whose manifests are gone, instead of refusing.
    attachments
        Arrays that belong to the dataset as a whole, by name: booleans, integers or floats of any shape. Those of the
        current snapshot stay without being named.
    drop_attachments
        Names of attachments of the current snapshot to list no longer; their files stay.
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
        A committed part can't be part of a snapshot, or parts of the current snapshot are committed no longer.
    UsageError
        A text where a collection of ids is meant; or an attachment that can't be one, that the current snapshot has
        with other content, or that is to be dropped and not there.
    """
    retract = frozenset(_collection("retract", retract))
    dropped = frozenset(_collection("drop_attachments", drop_attachments))
    files = [attached.encode(name, array) for name, array in sorted((attachments or {}).items())]
    if expect is not None and not isinstance(expect, int):
        expect = frozenset(_collection("expect", expect))
    store = url if isinstance(url, Store) else open_store(url, storage_options)
    header = read_header(store)
    check_writable(header.to_json(), layout.ROOT_METADATA)
    known = {f"{digests.ALGORITHM}:{name}" for name in store.list(layout.SNAPSHOTS)}
    gone = set(retract)
    loaded: dict[str, LoadedPart] = {}
    rounds, changed = 0, False
    # Before the listing: what they name was committed before them.
    kept = snapshots_to_keep(store)
    _check_dropped(dropped, kept)
    listed = _merged(kept, [entry for entry, _ in files], dropped, store.url)
    for entry, data in files:
        path = attached.entry_path(entry, store.url)
        if not store.create(path, data) and not _holds(store, path, data):
            store.write(path, data)  # its name is its digest: only a damaged file is another one
    while True:
        rounds += 1
        names = committed_parts(store)
        if not names:
            check_none_lost(kept, names, (), drop=drop_missing)
            remedy = "commit samples first; uncommitted parts of a crashed writer can't be sealed"
            raise NotFoundError.at(store.url, expected="committed parts", got="none", remedy=remedy)
        for name in names:
            if name not in loaded:
                loaded[name] = load_part(store, name, header)
        if rounds == 1:
            check_none_lost(kept, names, (part.manifest for part in loaded.values()), drop=drop_missing)
            _check_retracted(retract, loaded.values())
            gone |= _retracted(store, skip_missing=drop_missing)
        contents = build_snapshot(without_superseded([loaded[name] for name in names]), header, gone, listed)
        snapshot, replaced = _point_at(store, [loaded[name] for name in names], contents, expect)
        changed |= replaced
        # A snapshot that appeared meanwhile is that of a seal that races with this one: what it retracted stays so, and
        # what it attached is kept, whichever of the two replaced the pointer last.
        found = {f"{digests.ALGORITHM}:{name}" for name in store.list(layout.SNAPSHOTS)}
        rivals = {name for name in found - known - {snapshot.fingerprint} if digests.is_digest(name)}
        known |= rivals
        theirs = set().union(*(_retracted_by(store, name) for name in rivals))
        both = _merged(_readable(store, rivals), listed, dropped, store.url)
        if committed_parts(store) == names and theirs <= gone and both == listed:
            _warn_of_conflicts(store, snapshot, loaded, gone)
            return Sealed(snapshot, rounds, changed)
        gone |= theirs
        listed = both


def build_live(store: Store, header: Header) -> tuple[bytes, bytes]:
    """Return (index file, ids file) of a snapshot over all committed parts, without writing anything."""
    parts = [load_part(store, name, header) for name in committed_parts(store)]
    listed = _merged(snapshots_to_keep(store), [], (), store.url)
    return build_snapshot(without_superseded(parts), header, _retracted(store), listed)


def _point_at(
    store: Store, parts: list[LoadedPart], contents: tuple[bytes, bytes], expect: int | Collection[str] | None
) -> tuple[Snapshot, bool]:
    pointer = read_pointer(store)
    index_file, ids_file = contents
    snapshot = parse_snapshot(index_file, "snapshot")
    _check_expected(snapshot, ids_file, expect)
    ids_path, index_path = (layout.snapshot_path(snapshot.fingerprint, file) for file in ("ids", "index"))
    for path, data in ((ids_path, ids_file), (index_path, index_file)):
        if len(data) > tables.MAX_TABLE_NBYTES:
            raise FormatError.at(path, expected=f"at most {tables.MAX_TABLE_NBYTES} bytes", got=f"{len(data)}")
    if (
        pointer is not None
        and pointer == make_pointer(snapshot, len(index_file), pointer.sealed)
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


def _merged(
    snapshots: Collection[Snapshot], added: Sequence[Mapping[str, Any]], dropped: Collection[str], where: str
) -> list[Mapping[str, Any]]:
    """Return the attachments to list: those of all these snapshots, and the added ones."""
    listed: list[Mapping[str, Any]] = []
    for snapshot in snapshots:
        listed = attached.merge(snapshot.attachments, listed, dropped, where)
    return attached.merge(listed, added, (), where)


def _readable(store: Store, fingerprints: Collection[str]) -> list[Snapshot]:
    """Return the snapshots that are whole: a seal that has not written its index will list after it has."""
    found = []
    for fingerprint in sorted(fingerprints):
        with suppress(NotFoundError):
            found.append(read_snapshot(store, fingerprint)[0])
    return found


def _check_dropped(dropped: frozenset[str], snapshots: Collection[Snapshot]) -> None:
    """Refuse names of attachments that are not there: a typing error would go unnoticed."""
    known = {str(entry.get("name")) for snapshot in snapshots for entry in snapshot.attachments}
    names = sorted(name.removesuffix(attached.SUFFIX) for name in known)
    if not dropped <= set(names):
        expected = f"names of attachments: {', '.join(names) or 'the dataset has none'}"
        raise UsageError.at("drop_attachments", expected=expected, got=", ".join(sorted(set(dropped) - set(names))))


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


def _retracted(store: Store, *, skip_missing: bool = False) -> set[str]:
    pointer = read_pointer(store)
    if pointer is not None:
        return _retracted_by(store, pointer.fingerprint, skip_missing=skip_missing)
    # The pointer may be lost, and nothing un-retracts: what any snapshot has taken out stays out.
    ids: set[str] = set()
    for snapshot in snapshots_to_keep(store):
        ids |= _retracted_by(store, snapshot.fingerprint, skip_missing=skip_missing)
    return ids


def _retracted_by(store: Store, fingerprint: str, *, skip_missing: bool = False) -> set[str]:
    try:
        snapshot, _ = read_snapshot(store, fingerprint)
    except NotFoundError:
        pointer = read_pointer(store)
        if pointer is not None and pointer.fingerprint == fingerprint:
            raise
        return set()  # a seal that has not written its index: it will list after it has
    ids = set()
    for number in set(snapshot.retracted_part.tolist()):
        rows = snapshot.retracted_row[snapshot.retracted_part == number].tolist()
        try:
            known = load_ids(store, snapshot.parts[number])
        except NotFoundError:
            if not skip_missing:
                raise
            text = "%s: of the missing part %s, %d retracted sample(s) are not known: its index is gone too"
            _log.warning(text, store.url, snapshot.parts[number].name, len(rows))
            continue
        ids |= {known[row] for row in rows if row < len(known)}
    return ids


def _warn_of_conflicts(store: Store, snapshot: Snapshot, loaded: Mapping[str, LoadedPart], gone: set[str]) -> None:
    """Say that ids were committed again with other content: only one of the two is served."""
    ids = set()
    for i in np.flatnonzero(snapshot.shadowed_same == 0):
        index = loaded[snapshot.parts[snapshot.shadowed_part[i]].name].index
        ids |= {index.sample_id(int(snapshot.shadowed_row[i]))} if index else set()
    if ids - gone:
        shown = ", ".join(sorted(ids - gone)[:_SHOWN])
        text = "%s: different content for %d id(s), of which the first part's is served: %s"
        _log.warning(text, store.url, len(ids - gone), shown)


def _collection(name: str, ids: Collection[str]) -> Collection[str]:
    """Refuse a text, whose characters would be taken for ids."""
    if isinstance(ids, str | bytes):
        expected = "a number or a collection of ids" if name == "expect" else f"a collection of {_WHAT[name]}"
        remedy = f"write {name}=[{ids!r}]"
        raise UsageError.at(name, expected=expected, got=f"the text {ids!r}"[:100], remedy=remedy)
    return ids


def _check_expected(snapshot: Snapshot, ids_file: bytes, expect: int | Collection[str] | None) -> None:
    if expect is None:
        return
    if isinstance(expect, int):
        n, holes = snapshot.n_samples, snapshot.counts["holes"]
        if n != expect:
            remedy = _MISSING_REMEDY if n < expect else _UNEXPECTED_REMEDY
            raise ExpectationError.at(
                "snapshot", expected=f"{expect} samples", got=f"{n} ({holes} holes)", remedy=remedy
            )
        return
    ids = parse_snapshot_ids(ids_file, snapshot, "snapshot")
    have, want = {ids[i] for i in range(len(ids))}, set(expect)
    problems = [
        Problem("snapshot", expected, f"{len(found)} {kind}", remedy, tuple(sorted(found)[:_SHOWN]))
        for found, kind, expected, remedy in (
            (want - have, "missing", f"each of the {len(want)} ids asked for", _MISSING_REMEDY),
            (have - want, "unexpected", f"no id but the {len(want)} asked for", _UNEXPECTED_REMEDY),
        )
        if found
    ]
    if problems:
        raise ExpectationError(problems)
