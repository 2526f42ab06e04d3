"""Snapshots: an immutable, content-named, ordered list of (part, row).

Spec: rules SNAP-1 to SNAP-8. The fingerprint is the digest of index.safetensors, which names everything else by
digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import digests, layout, tables
from hsfmt.errors import CorruptionError
from hsfmt.header import Header, parse_header
from hsfmt.index import MAX_ID_NBYTES
from hsfmt.tables import check_offsets, take
from hsfmt.versions import check_readable

INDEX_KIND = "hsfmt.snapshot"
IDS_KIND = "hsfmt.snapshot-ids"
RETRACT_AGAIN = "retract again what was retracted (hsfmt retract URL ID)"

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
UInt64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class PartRef:
    """A part as a snapshot names it: sizes in bytes and digests of its manifest and index (None: only holes)."""

    name: str
    manifest_nbytes: int
    manifest_digest: str
    index_nbytes: int
    index_digest: str | None

    @property
    def documents(self) -> list[tuple[str, int]]:
        """Path and size of the manifest, and of the index if there is one."""
        found = [(layout.manifest_path(self.name), self.manifest_nbytes)]
        return found if self.index_digest is None else [*found, (layout.index_path(self.name), self.index_nbytes)]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The parsed index of a snapshot; arrays are views of its bytes.

    Attributes
    ----------
    fingerprint
        Digest of the index file.
    header
        The dataset's header.
    counts
        samples, tokens, supervised_tokens, holes, shadowed, retracted, parts.
    content_digest
        Digest over the (id, content digest) pairs of the samples served.
    complete
        Whether every row of the parts is served, shadowed or retracted; false for a subset.
    attachments
        Entries of dataset-level files (rule SNAP-10).
    ids_nbytes, ids_digest
        The ids file.
    parts
        Parts table.
    n_tokens, n_supervised, part, row
        int32 [sample].
    id_hash
        uint64 [sample], xxh3_64 of the id.
    shadowed_part, shadowed_row, shadowed_same
        Later copies of an id, never served: int32 [k], int32 [k], uint8 [k] (1: the same content).
    retracted_part, retracted_row
        Samples taken out, int32 [k].
    absent_ids
        Ids taken out that are those of no sample of the parts (rule SNAP-11).
    """

    fingerprint: str
    header: Header
    counts: Mapping[str, int]
    content_digest: str
    complete: bool
    attachments: tuple[Mapping[str, Any], ...]
    ids_nbytes: int
    ids_digest: str
    parts: tuple[PartRef, ...]
    n_tokens: Int32
    n_supervised: Int32
    part: Int32
    row: Int32
    id_hash: UInt64
    shadowed_part: Int32
    shadowed_row: Int32
    shadowed_same: UInt8
    retracted_part: Int32
    retracted_row: Int32
    absent_ids: SnapshotIds

    @property
    def n_samples(self) -> int:
        """Samples served."""
        return len(self.n_tokens)


@dataclass(frozen=True, slots=True)
class SnapshotIds:
    """The ids of a snapshot, uint8 [total] and int64 [sample + 1]."""

    ids: UInt8
    offsets: Int64

    def __getitem__(self, i: int) -> str:
        return self.ids[self.offsets[i] : self.offsets[i + 1]].tobytes().decode("utf-8")

    def __len__(self) -> int:
        return len(self.offsets) - 1


def parse_snapshot(data: bytes, where: str, fingerprint: str | None = None) -> Snapshot:
    """Parse and check a snapshot's index.

    Parameters
    ----------
    data
        The file.
    where
        Its path.
    fingerprint
        What it must be; None takes what it is (a live snapshot, just built).

    Raises
    ------
    CorruptionError
        Other bytes than the fingerprint names, or tables that contradict each other (rules SNAP-1, SNAP-7).
    FormatVersionError
        It needs a newer library.
    """
    actual = digests.digest(data)
    if fingerprint is not None and actual != fingerprint:
        remedy = f"restore the file from a copy, or run `hsfmt repair`; {RETRACT_AGAIN} if it says so"
        raise CorruptionError.at(where, expected=f"digest {fingerprint}", got=actual, remedy=remedy)
    table = tables.parse(data, where)
    document = table.metadata
    check_readable(document, where)
    if document.get("kind") != INDEX_KIND:
        raise CorruptionError.at(where, expected=f"kind {INDEX_KIND}", got=repr(document.get("kind"))[:60])
    n = len(take(table, "n_tokens", "I32", (None,), where))
    index_nbytes = take(table, "part_index_nbytes", "I64", (None,), where)
    p = len(index_nbytes)
    s = len(take(table, "shadowed_part", "I32", (None,), where))
    r = len(take(table, "retracted_part", "I32", (None,), where))
    columns: dict[str, Any] = {
        name: take(table, name, kind, (length,), where)
        for names, length in ((_PER_SAMPLE, n), (_PER_SHADOWED, s), (_PER_RETRACTED, r))
        for name, kind in names.items()
    }
    for name in ("part", "shadowed_part", "retracted_part"):
        if np.any(columns[name] < 0) or np.any(columns[name] >= p):
            raise CorruptionError.at(f"{where}: {name}", expected=f"0 to {p - 1}", got="a part that is not listed")
        if not np.all(index_nbytes[columns[name]]):
            raise CorruptionError.at(f"{where}: {name}", expected="parts of samples", got="one without an index")
    for name in ("row", "shadowed_row", "retracted_row"):
        if np.any(columns[name] < 0):
            raise CorruptionError.at(f"{where}: {name}", expected="rows from 0 on", got=f"{columns[name].min()}")
    n_tokens, n_supervised = columns["n_tokens"], columns["n_supervised"]
    if np.any(n_tokens < 1) or np.any(n_supervised < 0) or np.any(n_supervised > n_tokens):
        raise CorruptionError.at(where, expected="0 <= n_supervised <= n_tokens, and a token", got="other lengths")
    if np.any(columns["shadowed_same"] > 1):
        got = str(int(columns["shadowed_same"].max()))
        raise CorruptionError.at(f"{where}: shadowed_same", expected="0 or 1", got=got)
    totals = {
        "samples": n,
        "parts": p,
        "shadowed": s,
        "retracted": r,
        "tokens": int(n_tokens.sum(dtype=np.int64)),
        "supervised_tokens": int(n_supervised.sum(dtype=np.int64)),
    }
    counts, attached = document.get("counts"), document.get("attachments")
    if (
        not isinstance(counts, dict)
        or {**counts, **totals} != counts
        or not all(_is_count(counts.get(key)) for key in (*totals, "holes"))
    ):
        raise CorruptionError.at(f"{where}: counts", expected=str(totals), got=repr(counts)[:200])
    if not isinstance(attached, list) or not all(isinstance(entry, dict) for entry in attached):
        raise CorruptionError.at(f"{where}: attachments", expected="a list of objects", got=repr(attached)[:200])
    try:
        return Snapshot(
            fingerprint=actual,
            header=parse_header(document["header"], f"{where}: header"),
            counts=dict(counts),
            content_digest=digests.check(document["content_digest"], where),
            complete=_flag(document["complete"]),
            attachments=tuple(attached),
            ids_nbytes=_size(document["ids"]["nbytes"]),
            ids_digest=digests.check(document["ids"]["digest"], where),
            parts=_part_refs(table, p, where),
            absent_ids=_absent_ids(table, where),
            **columns,
        )
    except (KeyError, TypeError) as error:
        raise CorruptionError.at(where, expected="the members of a snapshot", got=repr(error)[:200]) from None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _size(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= tables.MAX_TABLE_NBYTES:
        raise TypeError(f"{value!r} is no size")
    return value


_PER_SAMPLE = {"n_tokens": "I32", "n_supervised": "I32", "part": "I32", "row": "I32", "id_hash": "U64"}
_PER_SHADOWED = {"shadowed_part": "I32", "shadowed_row": "I32", "shadowed_same": "U8"}
_PER_RETRACTED = {"retracted_part": "I32", "retracted_row": "I32"}


def _part_refs(table: tables.Table, p: int, where: str) -> tuple[PartRef, ...]:
    names = take(table, "part_names", "U8", (None,), where)
    offsets = take(table, "part_name_offsets", "I64", (p + 1,), where)
    check_offsets(offsets.view(np.int64), len(names), f"{where}: part_name_offsets", strict=True)
    manifest_nbytes = take(table, "part_manifest_nbytes", "I64", (p,), where)
    manifest_digests = take(table, "part_manifest_digest", "U8", (p, 16), where)
    index_nbytes = take(table, "part_index_nbytes", "I64", (p,), where)
    index_digests = take(table, "part_index_digest", "U8", (p, 16), where)
    if np.any(manifest_nbytes < 1) or np.any(index_nbytes < 0):
        raise CorruptionError.at(where, expected="sizes of manifests and indexes", got="negative ones")
    refs = tuple(
        PartRef(
            layout.check_part_name(names[offsets[i] : offsets[i + 1]].tobytes().decode("ascii", "replace"), where),
            int(manifest_nbytes[i]),
            digests.from_raw(manifest_digests[i].tobytes()),
            int(index_nbytes[i]),
            digests.from_raw(index_digests[i].tobytes()) if index_nbytes[i] else None,
        )
        for i in range(p)
    )
    if any(b.name <= a.name for a, b in pairwise(refs)):
        raise CorruptionError.at(f"{where}: part_names", expected="names ascending, each once", got="another order")
    return refs


def _absent_ids(table: tables.Table, where: str) -> SnapshotIds:
    if "absent_ids" not in table.arrays:
        return SnapshotIds(np.zeros(0, np.uint8), np.zeros(1, np.int64))
    ids = take(table, "absent_ids", "U8", (None,), where)
    offsets = take(table, "absent_id_offsets", "I64", (None,), where)
    check_offsets(offsets.view(np.int64), len(ids), f"{where}: absent_id_offsets", strict=True)
    tables.check_ids(ids, offsets.view(np.int64), MAX_ID_NBYTES, f"{where}: absent")
    return SnapshotIds(ids.view(np.uint8), offsets.view(np.int64))


def parse_snapshot_ids(data: bytes, snapshot: Snapshot, where: str) -> SnapshotIds:
    """Parse the ids file of a snapshot.

    Raises
    ------
    CorruptionError
        Its digest is not the one that the snapshot names, or it has another number of ids (rule SNAP-8).
    """
    actual = digests.digest(data)
    if actual != snapshot.ids_digest:
        raise CorruptionError.at(where, expected=f"digest {snapshot.ids_digest}", got=actual)
    table = tables.parse(data, where)
    if table.metadata.get("kind") != IDS_KIND:
        raise CorruptionError.at(where, expected=f"kind {IDS_KIND}", got=repr(table.metadata.get("kind"))[:60])
    ids = take(table, "ids", "U8", (None,), where)
    offsets = take(table, "id_offsets", "I64", (snapshot.n_samples + 1,), where)
    check_offsets(offsets.view(np.int64), len(ids), f"{where}: id_offsets", strict=True)
    tables.check_ids(ids, offsets.view(np.int64), MAX_ID_NBYTES, where)
    return SnapshotIds(ids.view(np.uint8), offsets.view(np.int64))
