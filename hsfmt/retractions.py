"""Retractions: what a snapshot takes out stays out, whichever snapshot of the dataset is the current one.

Spec: rules SNAP-11, SEAL-6. A pointer may be an old one (restored from a copy, or put there by a seal that was killed
before it had seen another one's snapshot), so a seal asks every snapshot that is there.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import canonical, digests, layout
from hsfmt.catalog import load_ids, read_snapshot
from hsfmt.errors import CorruptionError, HsfmtError, NotFoundError, StorageError
from hsfmt.snapshot import PartRef, Snapshot, SnapshotIds, parse_snapshot_ids
from hsfmt.storage import Store
from hsfmt.stored_snapshots import stored_snapshots

_log = logging.getLogger("hsfmt")
_MAX_HEADER_NBYTES = 1 << 20
# Up to this size a snapshot is read whole: a flipped bit can't hide what it retracts.
_WHOLE_NBYTES = 1 << 20
_MALFORMED = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError, struct.error)

_Loaded = dict[str, SnapshotIds | None]


def retracted_ids(
    store: Store,
    snapshots: Collection[Snapshot],
    others: Collection[str],
    replaced: Collection[str],
    *,
    skip_missing: bool = False,
) -> set[str]:
    """Return the ids that a dataset has taken out.

    Parameters
    ----------
    snapshots
        Those that must tell: the current one, or all without a pointer.
    others
        Fingerprints of all that are there, which tell what they can (as `retracted_before`).
    replaced
        Names of parts that a committed one replaces.
    skip_missing
        Do without the ids of parts whose index is gone, and log it.

    Raises
    ------
    NotFoundError, CorruptionError
        They can't be told.
    """
    ids: set[str] = set()
    for snapshot in snapshots:
        ids |= retracted_by(store, snapshot, replaced, skip_missing=skip_missing)
    return ids | retracted_before(store, set(others) - {snapshot.fingerprint for snapshot in snapshots}, ids)


def retracted_by(
    store: Store,
    snapshot: Snapshot,
    replaced: Collection[str],
    *,
    skip_missing: bool = False,
    loaded: _Loaded | None = None,
) -> set[str]:
    """Return the ids that one snapshot has taken out; arguments and errors as `retracted_ids` has them.

    Parameters
    ----------
    loaded
        Ids of parts that are known already; others are added.
    """
    loaded = {} if loaded is None else loaded
    ids = {snapshot.absent_ids[i] for i in range(len(snapshot.absent_ids))}
    for number in sorted(set(snapshot.retracted_part.tolist())):
        ref = snapshot.parts[number]
        rows = snapshot.retracted_row[snapshot.retracted_part == number].tolist()
        known = _ids(store, ref, loaded)
        if known is None:
            # Whoever replaced a part has had what could be had of it.
            if not skip_missing and ref.name not in replaced:
                load_ids(store, ref)
            ids |= _ids_elsewhere(store, snapshot, ref, rows)
        elif max(rows) >= len(known):
            where, expected = f"snapshot {snapshot.fingerprint}", f"{len(known)} rows of part {ref.name}"
            raise CorruptionError.at(where, expected=expected, got=f"a retracted row {max(rows)}")
        else:
            ids |= {known[row] for row in rows}
    return ids


def retracted_before(store: Store, fingerprints: Iterable[str], gone: Collection[str]) -> set[str]:
    """Return what any of these snapshots has taken out and is not in `gone`.

    Of large ones a few ranges are read. They are not believed: one that says something new is read whole, and compared
    with its fingerprint. One that is damaged is passed over with a warning: it is not the current one.

    Raises
    ------
    StorageError
        The storage does not work.
    """
    known = set(gone)
    for _, ids in retracting(store, fingerprints, known):
        known |= ids
    return known.difference(gone)


def retracting(store: Store, fingerprints: Iterable[str], gone: Collection[str]) -> Iterator[tuple[str, set[str]]]:
    """Yield (fingerprint, ids not in `gone`) of those of these snapshots that have taken out more; else as above."""
    loaded: _Loaded = {}
    for fingerprint in sorted(fingerprints):
        path = layout.snapshot_path(fingerprint, "index")
        try:
            nbytes = store.size(path)
            if nbytes is None or (nbytes > _WHOLE_NBYTES and not _says_more(store, (path, nbytes), gone, loaded)):
                continue  # without an index it is a seal's that will list after it has written it
            snapshot, _ = read_snapshot(store, fingerprint)
            ids = retracted_by(store, snapshot, (), skip_missing=True, loaded=loaded) - set(gone)
        except NotFoundError:
            continue
        except StorageError:
            raise
        except HsfmtError as error:
            got = error.problems[0].got
            _log.warning("%s: what snapshot %s retracts is not known, it is damaged: %s", store.url, fingerprint, got)
        else:
            if ids:
                yield fingerprint, ids


def _ids_elsewhere(store: Store, snapshot: Snapshot, ref: PartRef, rows: Collection[int]) -> set[str]:
    """Return the ids of retracted samples of a part whose index is lost, as far as other snapshots tell them.

    They tell those that they served. What they do not tell is logged; copies of it that this snapshot hides stay out.
    """
    found: dict[int, str] = {}
    for fingerprint in stored_snapshots(store):
        if fingerprint != snapshot.fingerprint and len(found) < len(rows):
            with suppress(NotFoundError, CorruptionError):
                found |= _served_ids(store, fingerprint, ref, rows)
    if len(found) < len(rows):
        text = "%s: of the missing part %s, %d retracted sample(s) are not known: its index is gone too"
        _log.warning(text, store.url, ref.name, len(rows) - len(found))
    return {*found.values(), *(_hiding_copies(store, snapshot) if len(found) < len(rows) else ())}


def _served_ids(store: Store, fingerprint: str, ref: PartRef, rows: Collection[int]) -> dict[int, str]:
    """Return row to id of those of these rows of a part that a snapshot serves."""
    snapshot, _ = read_snapshot(store, fingerprint)
    wanted = ref.name, ref.index_digest
    numbers = [n for n, each in enumerate(snapshot.parts) if (each.name, each.index_digest) == wanted]
    places = np.flatnonzero(np.isin(snapshot.part, numbers) & np.isin(snapshot.row, list(rows)))
    if not len(places):
        return {}
    path = layout.snapshot_path(fingerprint, "ids")
    ids = parse_snapshot_ids(store.read(path, snapshot.ids_nbytes), snapshot, path)
    return {int(snapshot.row[place]): ids[int(place)] for place in places}


def _hiding_copies(store: Store, snapshot: Snapshot) -> set[str]:
    """Return the ids of samples that are shadowed, but not by a served one: what hides them was taken out.

    A part whose index is lost does not tell which of its samples were; without it their copies would be served.
    """
    ids = set()
    for number in set(snapshot.shadowed_part.tolist()):
        with suppress(NotFoundError, CorruptionError):
            known = load_ids(store, snapshot.parts[number])
            rows = snapshot.shadowed_row[snapshot.shadowed_part == number].tolist()
            copies = [known[row] for row in rows if row < len(known)]
            hashes = np.array([digests.id_hash(sample_id.encode()) for sample_id in copies], np.uint64)
            served = np.isin(hashes, snapshot.id_hash).tolist()
            ids |= {sample_id for sample_id, is_served in zip(copies, served, strict=True) if not is_served}
    return ids


def _says_more(store: Store, file: tuple[str, int], gone: Collection[str], loaded: _Loaded) -> bool:
    """Say whether a snapshot seems to have taken out more than `gone`, or can't be understood."""
    try:
        rows, absent = _retracted_rows(store, *file)
        if not absent <= set(gone):
            return True
        known = [(_ids(store, ref, loaded), row) for ref, row in rows]
        return any(ids is None or ids[row] not in gone for ids, row in known)
    except (NotFoundError, StorageError):
        raise
    except (HsfmtError, *_MALFORMED):
        return True  # reading it whole tells what is wrong with it


def _retracted_rows(store: Store, path: str, nbytes: int) -> tuple[list[tuple[PartRef, int]], set[str]]:
    """Return ((part, row) of what a snapshot's index says is retracted, absent ids); nothing of it is checked."""

    def range_of(offset: int, stop: int) -> bytes:
        if not 0 <= offset <= stop <= nbytes:
            raise ValueError(f"bytes {offset} to {stop} of {nbytes}")
        data = bytearray(stop - offset)
        store.read_into(path, offset, memoryview(data))
        return bytes(data)

    (size,) = struct.unpack("<Q", range_of(0, 8))
    text = range_of(8, 8 + min(size, _MAX_HEADER_NBYTES))
    canonical.check_n_values(text, path)
    header = json.loads(text)

    def array(name: str, dtype: str) -> npt.NDArray[Any]:
        start, stop = header[name]["data_offsets"]
        return np.frombuffer(range_of(8 + size + start, 8 + size + stop), dtype)

    absent = set()
    if "absent_ids" in header:
        ids = SnapshotIds(array("absent_ids", "u1"), array("absent_id_offsets", "<i8"))
        absent = {ids[i] for i in range(len(ids))}
    parts = array("retracted_part", "<i4").tolist()
    if len(parts) != json.loads(header["__metadata__"]["hsfmt"])["counts"]["retracted"]:
        raise ValueError(f"{len(parts)} retracted samples")
    if not parts:
        return [], absent
    names, offsets = array("part_names", "u1").tobytes(), array("part_name_offsets", "<i8")
    sizes, raw = array("part_index_nbytes", "<i8"), array("part_index_digest", "u1").reshape(-1, 16)
    rows = []
    for part, row in zip(parts, array("retracted_row", "<i4").tolist(), strict=True):
        name = layout.check_part_name(names[offsets[part] : offsets[part + 1]].decode("ascii"), path)
        rows.append((PartRef(name, 1, "", int(sizes[part]), digests.from_raw(raw[part].tobytes())), row))
    return rows, absent


def _ids(store: Store, ref: PartRef, loaded: _Loaded) -> SnapshotIds | None:
    """Return the ids of a part, None if its index is not what it was: what was retracted of it can't be told."""
    key = f"{ref.name} {ref.index_nbytes} {ref.index_digest}"
    if key not in loaded:
        loaded[key] = None
        with suppress(NotFoundError, CorruptionError):
            loaded[key] = load_ids(store, ref)
    return loaded[key]
