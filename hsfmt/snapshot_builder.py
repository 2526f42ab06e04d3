"""Building a snapshot out of committed parts: order, duplicates, retracted ids, counts, content digest.

Spec: rules SNAP-2 to SNAP-6, SNAP-11.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import digests, tables
from hsfmt.header import Header
from hsfmt.index import PartIndex
from hsfmt.manifest import PartManifest
from hsfmt.snapshot import IDS_KIND, INDEX_KIND, Int32, Int64, PartRef, UInt8, UInt64
from hsfmt.tables import pack_strings
from hsfmt.versions import FORMAT, READABLE_FROM


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """A committed part as sealing sees it; `index` is None for a part that holds nothing but holes."""

    manifest: PartManifest
    index: PartIndex | None


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


def build_snapshot(
    parts: Sequence[LoadedPart],
    header: Header,
    retracted: Collection[str] = (),
    attachments: Sequence[Mapping[str, Any]] = (),
) -> tuple[bytes, bytes]:
    """Return (index file, ids file) of the snapshot over these parts (rules SNAP-2 to SNAP-6).

    Parameters
    ----------
    parts
        Committed parts, none superseded, in any order.
    header
        The dataset's header.
    retracted
        Ids that are listed but not served, those of no sample too.
    attachments
        Entries of dataset-level files, taken over from the snapshot before.
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
    ids_file = tables.serialize({"ids": id_data, "id_offsets": id_offsets}, {"format": FORMAT, "kind": IDS_KIND})
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
    absent = sorted(retracted_keys.difference(rows.ids))
    if absent:
        arrays["absent_ids"], arrays["absent_id_offsets"] = pack_strings(absent)
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
    metadata = snapshot_metadata(
        header,
        counts,
        content_digest=digests.dataset_digest(pairs, len(served)),
        ids_digest=digests.digest(ids_file),
        ids_nbytes=len(ids_file),
        attachments=attachments,
    )
    return tables.serialize(arrays, metadata), ids_file


def snapshot_metadata(
    header: Header,
    counts: Mapping[str, int],
    *,
    content_digest: str,
    ids_digest: str,
    ids_nbytes: int,
    attachments: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the document in a snapshot's index (rule SNAP-2)."""
    return {
        "attachments": [dict(entry) for entry in attachments],
        "complete": True,
        "content_digest": content_digest,
        "counts": dict(counts),
        "format": FORMAT,
        "header": header.to_json(),
        "ids": {"digest": ids_digest, "nbytes": ids_nbytes},
        "kind": INDEX_KIND,
        "readable_from": READABLE_FROM,
    }


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
