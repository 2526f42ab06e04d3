"""Sealing: make a snapshot of all that is committed and point at it.

Spec: rules SEAL-1 to SEAL-10. No lock: whoever replaces the pointer lists again, and repeats if the committed set grew.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import attachments as attached
from hsfmt import layout, tables
from hsfmt.catalog import (
    committed_parts,
    load_current,
    read_header,
    read_pointer,
    without_superseded,
)
from hsfmt.errors import (
    ExpectationError,
    FormatError,
    NotFoundError,
    Problem,
    SampleNotFoundError,
    UsageError,
)
from hsfmt.header import Header
from hsfmt.lost_parts import check_none_lost, snapshots_to_keep
from hsfmt.pointer import make_pointer
from hsfmt.retractions import retracted_by, retracted_ids
from hsfmt.rival_seals import Rivals
from hsfmt.snapshot import Snapshot, parse_snapshot, parse_snapshot_ids
from hsfmt.snapshot_builder import LoadedPart, build_snapshot
from hsfmt.storage import Store, open_store
from hsfmt.stored_snapshots import stored_snapshots
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
    if expect is not None and not isinstance(expect, int):
        expect = frozenset(_collection("expect", expect))
    wishes = Wishes(
        expect=expect,
        retract=frozenset(_collection("retract", retract)),
        drop_missing=drop_missing,
        attachments=attachments or {},
        dropped=frozenset(_collection("drop_attachments", drop_attachments)),
    )
    return seal_as(url if isinstance(url, Store) else open_store(url, storage_options), wishes)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a seal is told; all but the last one as `seal` has it.

    Attributes
    ----------
    gone
        Ids that another dataset has taken out; they need not be those of samples.
    """

    expect: int | Collection[str] | None = None
    retract: frozenset[str] = frozenset()
    drop_missing: bool = False
    attachments: Mapping[str, npt.ArrayLike] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()


def seal_as(store: Store, wishes: Wishes) -> Sealed:
    """Seal a dataset; returns and raises as `seal`."""
    retract, dropped, drop_missing = wishes.retract, wishes.dropped, wishes.drop_missing
    files = [attached.encode(name, array) for name, array in sorted(wishes.attachments.items())]
    header = read_header(store)
    check_writable(header.to_json(), layout.ROOT_METADATA)
    rivals = Rivals(store)
    gone = {*retract, *wishes.gone}
    loaded: dict[str, LoadedPart] = {}
    rounds, changed = 0, False
    # Before the listing: what they name was committed before them.
    kept = snapshots_to_keep(store)
    _check_dropped(dropped, kept)
    listed = _merged(kept, [entry for entry, _ in files], dropped, store.url)
    added = {attached.entry_path(entry, store.url): data for entry, data in files}
    for path, data in added.items():
        if not store.create(path, data):
            store.write(path, data)  # its name is its digest; anew, or a collection takes it for old
    while True:
        rounds += 1
        names = committed_parts(store)
        if not names:
            check_none_lost(kept, names, (), drop=drop_missing)
            remedy = "commit samples first; uncommitted parts of a crashed writer can't be sealed"
            raise NotFoundError.at(store.url, expected="committed parts", got="none", remedy=remedy)
        current = without_superseded(load_current(store, names, header, loaded).values())
        replaced_parts = {name for part in loaded.values() for name in part.manifest.replaces}
        if rounds == 1:
            check_none_lost(kept, names, (part.manifest for part in loaded.values()), drop=drop_missing)
            _check_retracted(retract, current)
            gone |= retracted_ids(store, kept, rivals.seen, replaced_parts, skip_missing=drop_missing)
        contents = build_snapshot(current, header, gone, listed)
        snapshot, replaced, before = _point_at(store, current, contents, wishes.expect)
        changed |= replaced
        _put_back(store, snapshot, contents, added)
        # What a racing seal retracted stays so, and what it attached is kept, whoever replaced the pointer last.
        others = rivals.look(snapshot, before, [one.fingerprint for one in kept])
        theirs = set().union(*(retracted_by(store, other, replaced_parts) for other in others))
        both = _merged(others, listed, dropped, store.url)
        if committed_parts(store) != names or not theirs <= gone or both != listed:
            gone |= theirs
            listed = both
        elif not rivals.answer(others, snapshot, contents[0], replaced_parts):
            _warn_of_conflicts(store, snapshot, loaded, gone)
            return Sealed(snapshot, rounds, changed)


def build_live(store: Store, header: Header) -> tuple[bytes, bytes]:
    """Return (index file, ids file) of a snapshot over all committed parts, without writing anything.

    Raises
    ------
    CorruptionError, HeaderMismatchError
        As `seal`: parts of the current snapshot that are committed no longer are not passed over.
    """
    kept = snapshots_to_keep(store)
    names = committed_parts(store)
    loaded = load_current(store, names, header, {}).values()
    check_none_lost(kept, names, (part.manifest for part in loaded), drop=False)
    parts = without_superseded(loaded)
    listed = _merged(kept, [], (), store.url)
    replaced = {name for part in loaded for name in part.manifest.replaces}
    gone = retracted_ids(store, kept, stored_snapshots(store), replaced)
    return build_snapshot(parts, header, gone, listed)


def _point_at(
    store: Store, parts: list[LoadedPart], contents: tuple[bytes, bytes], expect: int | Collection[str] | None
) -> tuple[Snapshot, bool, str | None]:
    """Return the snapshot, whether the pointer was replaced, and the snapshot that the pointer named just before."""
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
        return snapshot, False, snapshot.fingerprint
    # What a commit made durable on another host may not be on this one's directories yet.
    store.sync(sorted(_directories(parts)))
    store.write(ids_path, ids_file)
    store.write(index_path, index_file)
    store.sync([layout.snapshot_path(snapshot.fingerprint, "x").rpartition("/")[0]])
    before = read_pointer(store)  # as late as can be: another seal may have replaced it since
    now = datetime.now(UTC).isoformat(timespec="seconds")
    store.replace(layout.POINTER, make_pointer(snapshot, len(index_file), now).to_bytes())
    store.sync(["hsfmt"])
    return snapshot, True, before.fingerprint if before is not None else None


def _put_back(store: Store, snapshot: Snapshot, contents: tuple[bytes, bytes], added: Mapping[str, bytes]) -> None:
    """Write again what a collection removed that had looked before the snapshot was there (rule GC-6)."""
    names = (layout.snapshot_path(snapshot.fingerprint, file) for file in ("ids", "index"))
    files = {**added, **dict(zip(names, reversed(contents), strict=True))}
    for path, data in files.items():
        if store.size(path) is None:
            store.write(path, data)


def _merged(
    snapshots: Collection[Snapshot], added: Sequence[Mapping[str, Any]], dropped: Collection[str], where: str
) -> list[Mapping[str, Any]]:
    """Return the attachments to list: those of all these snapshots, and the added ones."""
    listed: list[Mapping[str, Any]] = []
    for snapshot in snapshots:
        listed = attached.merge(snapshot.attachments, listed, dropped, where)
    return attached.merge(listed, added, (), where)


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
