"""Snapshots: an immutable, content-named, ordered list of (part, row); and the pointer to the current one.

Spec: rules SNAP-1 to SNAP-10. The fingerprint is the digest of index.safetensors, which names everything else by
digest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import canonical, digests, layout, tables
from hsfmt.errors import CorruptionError
from hsfmt.header import Header, parse_header
from hsfmt.index import PartIndex
from hsfmt.manifest import PartManifest, parse_signed
from hsfmt.tables import check_offsets, pack_strings, take
from hsfmt.versions import FORMAT, READABLE_FROM, check_readable

MAX_POINTER_NBYTES = 64 << 10
_POINTER_KIND = "hsfmt.pointer"
_INDEX_KIND = "hsfmt.snapshot"
_IDS_KIND = "hsfmt.snapshot-ids"

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
UInt64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """A committed part as sealing sees it; `index` is None for a part that holds nothing but holes."""

    manifest: PartManifest
    index: PartIndex | None


@dataclass(frozen=True, slots=True)
class PartRef:
    """A part as a snapshot names it: sizes in bytes and digests of its manifest and index (None: only holes)."""

    name: str
    manifest_nbytes: int
    manifest_digest: str
    index_nbytes: int
    index_digest: str | None


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
    """

    fingerprint: str
    header: Header
    counts: Mapping[str, int]
    content_digest: str
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


@dataclass(frozen=True, slots=True)
class _Rows:
    """All rows of all parts, concatenated: part and row numbers, sort keys and content digests."""

    part: Int32
    row: Int32
    source_index: Int64
    n_tokens: Int64
    n_supervised: Int64
    content: UInt8
    ids: list[bytes]
    id_hash: UInt64


def build_snapshot(parts: Sequence[LoadedPart], header: Header, retracted: Collection[str] = ()) -> tuple[bytes, bytes]:
    """Return (index file, ids file) of the snapshot over these parts (rules SNAP-2 to SNAP-6).

    Parameters
    ----------
    parts
        Committed parts, none superseded, in any order.
    header
        The dataset's header.
    retracted
        Ids that are listed but not served.
    """
    parts = sorted(parts, key=lambda part: part.manifest.part)
    rows = _gather(parts)
    first, later = _split_duplicates(rows)
    retracted_keys = {sample_id.encode() for sample_id in retracted}
    keep = (
        np.array([rows.ids[i] not in retracted_keys for i in first], bool)
        if retracted_keys
        else np.ones(len(first), bool)
    )
    gone, served = first[~keep], _ordered(rows, first[keep])
    winners = {rows.ids[i]: i for i in first} if len(later) else {}
    same = [np.array_equal(rows.content[i], rows.content[winners[rows.ids[i]]]) for i in later]
    present = {rows.ids[i] for i in first} if any(part.manifest.holes for part in parts) else set()
    holes = {key for part in parts for key in part.manifest.holes if key.encode() not in present}
    names, name_offsets = pack_strings([part.manifest.part.encode() for part in parts])
    id_data, id_offsets = pack_strings([rows.ids[i] for i in served])
    ids_file = tables.serialize({"ids": id_data, "id_offsets": id_offsets}, {"format": FORMAT, "kind": _IDS_KIND})
    refs = [_ref(part) for part in parts]
    arrays = {
        "part_names": names,
        "part_name_offsets": name_offsets,
        "part_manifest_nbytes": np.array([ref.manifest_nbytes for ref in refs], np.int64),
        "part_manifest_digest": _raw([ref.manifest_digest for ref in refs]),
        "part_index_nbytes": np.array([ref.index_nbytes for ref in refs], np.int64),
        "part_index_digest": _raw([ref.index_digest for ref in refs]),
        "n_tokens": rows.n_tokens[served].astype(np.int32),
        "n_supervised": rows.n_supervised[served].astype(np.int32),
        "part": rows.part[served],
        "row": rows.row[served],
        "id_hash": rows.id_hash[served],
        "shadowed_part": rows.part[later],
        "shadowed_row": rows.row[later],
        "shadowed_same": np.array(same, np.uint8),
        "retracted_part": rows.part[gone],
        "retracted_row": rows.row[gone],
    }
    counts = {
        "holes": len(holes),
        "parts": len(parts),
        "retracted": len(gone),
        "samples": len(served),
        "shadowed": len(later),
        "supervised_tokens": int(rows.n_supervised[served].sum()),
        "tokens": int(rows.n_tokens[served].sum()),
    }
    pairs = ((rows.ids[i], rows.content[i].tobytes()) for i in served)
    metadata = {
        "attachments": [],
        "content_digest": digests.dataset_digest(pairs, len(served)),
        "counts": counts,
        "format": FORMAT,
        "header": header.to_json(),
        "ids": {"digest": digests.digest(ids_file), "nbytes": len(ids_file)},
        "kind": _INDEX_KIND,
        "readable_from": READABLE_FROM,
    }
    return tables.serialize(arrays, metadata), ids_file


def _ref(part: LoadedPart) -> PartRef:
    manifest = part.manifest
    entry = manifest.index_file if part.index is not None else None
    return PartRef(
        manifest.part,
        len(manifest.to_bytes()),
        manifest.digest(),
        entry.nbytes if entry else 0,
        entry.digest if entry else None,
    )


def _raw(values: list[str] | list[str | None]) -> UInt8:
    raw = b"".join(digests.to_raw(value) if value else bytes(16) for value in values)
    return np.frombuffer(raw, np.uint8).reshape(len(values), 16)


def _gather(parts: Sequence[LoadedPart]) -> _Rows:
    indexes = [(number, part.index) for number, part in enumerate(parts) if part.index is not None]
    ids = [index.id_bytes(row) for _, index in indexes for row in range(index.n_samples)]

    def join(arrays: list[npt.NDArray[Any]], dtype: type, shape: tuple[int, ...] = (0,)) -> npt.NDArray[Any]:
        return np.concatenate([np.empty(shape, dtype), *arrays]).astype(dtype, copy=False)

    return _Rows(
        part=join([np.full(index.n_samples, number) for number, index in indexes], np.int32),
        row=join([np.arange(index.n_samples) for _, index in indexes], np.int32),
        source_index=join([index.source_index for _, index in indexes], np.int64),
        n_tokens=join([index.lengths for _, index in indexes], np.int64),
        n_supervised=join([index.n_supervised for _, index in indexes], np.int64),
        content=join([index.content_digest for _, index in indexes], np.uint8, (0, 16)),
        ids=ids,
        id_hash=np.fromiter(map(digests.id_hash, ids), np.uint64, len(ids)),
    )


def _split_duplicates(rows: _Rows) -> tuple[Int64, Int64]:
    """Return (first of each id, the later ones) as row numbers ascending; rows are in (part name, row) order."""
    _, first, counts = np.unique(rows.id_hash, return_index=True, return_counts=True)
    if len(first) == len(rows.ids):
        return np.arange(len(rows.ids)), np.empty(0, np.int64)
    later = []
    seen: dict[bytes, int] = {}
    # Only hashes that occur twice can be duplicates (or, rarely, collisions): compare those ids themselves.
    repeated = set(rows.id_hash[first[counts > 1]].tolist())
    for i in np.flatnonzero(np.isin(rows.id_hash, list(repeated))):
        if rows.ids[i] in seen:
            later.append(int(i))
        seen.setdefault(rows.ids[i], int(i))
    mask = np.ones(len(rows.ids), bool)
    mask[later] = False
    return np.flatnonzero(mask), np.array(later, np.int64)


def _ordered(rows: _Rows, numbers: Int64) -> Int64:
    """Return the row numbers in the default order: source_index, then id (rule SNAP-4)."""
    ranks = rows.source_index[numbers]
    ordered = numbers[np.argsort(ranks, kind="stable")]
    ranks = rows.source_index[ordered]
    if np.any(ranks[1:] == ranks[:-1]):
        ordered = np.array(sorted(ordered.tolist(), key=lambda i: (int(rows.source_index[i]), rows.ids[i])), np.int64)
    return ordered


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
        remedy = "restore the file, or run `hsfmt seal` to make a new snapshot of the committed parts"
        raise CorruptionError.at(where, expected=f"digest {fingerprint}", got=actual, remedy=remedy)
    table = tables.parse(data, where)
    document = table.metadata
    check_readable(document, where)
    if document.get("kind") != _INDEX_KIND:
        raise CorruptionError.at(where, expected=f"kind {_INDEX_KIND}", got=repr(document.get("kind"))[:60])
    n = len(take(table, "n_tokens", "I32", (None,), where))
    p = len(take(table, "part_index_nbytes", "I64", (None,), where))
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
    totals = {
        "samples": n,
        "parts": p,
        "shadowed": s,
        "retracted": r,
        "tokens": int(columns["n_tokens"].sum(dtype=np.int64)),
    }
    counts = document.get("counts")
    if not isinstance(counts, dict) or any(counts.get(key) != value for key, value in totals.items()):
        raise CorruptionError.at(f"{where}: counts", expected=str(totals), got=repr(counts)[:200])
    try:
        return Snapshot(
            fingerprint=actual,
            header=parse_header(document["header"], f"{where}: header"),
            counts=dict(counts),
            content_digest=digests.check(document["content_digest"], where),
            ids_nbytes=int(document["ids"]["nbytes"]),
            ids_digest=digests.check(document["ids"]["digest"], where),
            parts=_part_refs(table, p, where),
            **columns,
        )
    except (KeyError, TypeError) as error:
        raise CorruptionError.at(where, expected="the members of a snapshot", got=repr(error)[:200]) from None


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
    return tuple(
        PartRef(
            layout.check_part_name(names[offsets[i] : offsets[i + 1]].tobytes().decode("ascii", "replace"), where),
            int(manifest_nbytes[i]),
            digests.from_raw(manifest_digests[i].tobytes()),
            int(index_nbytes[i]),
            digests.from_raw(index_digests[i].tobytes()) if index_nbytes[i] else None,
        )
        for i in range(p)
    )


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
    ids = take(table, "ids", "U8", (None,), where)
    offsets = take(table, "id_offsets", "I64", (snapshot.n_samples + 1,), where)
    check_offsets(offsets.view(np.int64), len(ids), f"{where}: id_offsets", strict=True)
    return SnapshotIds(ids.view(np.uint8), offsets.view(np.int64))


@dataclass(frozen=True, slots=True)
class Pointer:
    """The pointer `hsfmt/manifest.json`: which snapshot is current (rule SNAP-9).

    Attributes
    ----------
    fingerprint, index_nbytes
        The snapshot, and its index's size in bytes.
    sealed
        When, as ISO 8601 in UTC.
    header
        The dataset's header, repeated.
    samples, tokens
        Counts, for people who look at the file.
    content_digest
        The snapshot's.
    """

    fingerprint: str
    index_nbytes: int
    sealed: str
    header: Header
    samples: int
    tokens: int
    content_digest: str

    def to_bytes(self) -> bytes:
        """Return the pointer file."""
        body = {
            "content_digest": self.content_digest,
            "fingerprint": self.fingerprint,
            "format": FORMAT,
            "header": self.header.to_json(),
            "index": {"nbytes": self.index_nbytes, "path": layout.snapshot_path(self.fingerprint, "index")},
            "kind": _POINTER_KIND,
            "readable_from": READABLE_FROM,
            "samples": self.samples,
            "sealed": self.sealed,
            "tokens": self.tokens,
        }
        return canonical.dumps({**body, "digest": digests.digest(canonical.dumps(body))})


def make_pointer(snapshot: Snapshot, index_nbytes: int, sealed: str) -> Pointer:
    """Return the pointer to a snapshot."""
    return Pointer(
        fingerprint=snapshot.fingerprint,
        index_nbytes=index_nbytes,
        sealed=sealed,
        header=snapshot.header,
        samples=snapshot.n_samples,
        tokens=int(snapshot.counts["tokens"]),
        content_digest=snapshot.content_digest,
    )


def parse_pointer(data: bytes, where: str = layout.POINTER) -> Pointer:
    """Parse and check the pointer.

    Raises
    ------
    CorruptionError
        Changed bytes.
    FormatError, FormatVersionError
        Another document, or one that needs a newer library.
    """
    document = parse_signed(data, where, _POINTER_KIND)
    try:
        pointer = Pointer(
            fingerprint=digests.check(document["fingerprint"], f"{where}: fingerprint"),
            index_nbytes=document["index"]["nbytes"],
            sealed=document["sealed"],
            header=parse_header(document["header"], f"{where}: header"),
            samples=document["samples"],
            tokens=document["tokens"],
            content_digest=digests.check(document["content_digest"], f"{where}: content_digest"),
        )
    except (KeyError, TypeError) as error:
        raise CorruptionError.at(where, expected="the members of a pointer", got=repr(error)[:200]) from None
    sizes = (pointer.index_nbytes, pointer.samples, pointer.tokens)
    if any(type(n) is not int or n < 0 for n in sizes) or not 0 < pointer.index_nbytes <= tables.MAX_TABLE_NBYTES:
        raise CorruptionError.at(where, expected="sizes within the caps", got=repr(sizes)[:100])
    path = layout.snapshot_path(pointer.fingerprint, "index")
    if document["index"].get("path") != path or not isinstance(pointer.sealed, str):
        got = repr((document["index"].get("path"), pointer.sealed))[:200]
        raise CorruptionError.at(where, expected=f"the path {path} and a time", got=got)
    return pointer
