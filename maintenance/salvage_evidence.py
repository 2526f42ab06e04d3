"""What is known of parts whose own documents are damaged: from snapshots, from indexes, from the Zarr documents.

Nothing here is believed because it parses: an index counts if a snapshot or the rest of its manifest names its digest,
columns count if their documents are the ones that they imply, and the samples' own digests decide in the end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from hsfmt import canonical, digests, layout, tables
from hsfmt.catalog import load_ids, load_index
from hsfmt.columns import CORE_COLUMNS, STATES, Column, parse_column
from hsfmt.errors import CorruptionError, FormatError, FormatVersionError, HsfmtError, NotFoundError, StorageError
from hsfmt.header import Header
from hsfmt.index import PartIndex, parse_index
from hsfmt.manifest import Counts, PartManifest
from hsfmt.snapshot import IDS_KIND, PartRef, Snapshot, SnapshotIds, parse_snapshot_ids
from hsfmt.storage import Store
from hsfmt.versions import FORMAT
from hsfmt.zarr_metadata import array_document

_MAX_DOCUMENT_NBYTES = 64 << 10
_CHUNKS = "chunks."


@dataclass(frozen=True, slots=True)
class Witness:
    """What the snapshots that can be read say of the parts; the current one comes first, if it can be read."""

    snapshots: tuple[Snapshot, ...]
    store: Store
    current: Snapshot | None = None

    def ref(self, part: str) -> PartRef | None:
        """Return how a snapshot names the part."""
        return next((ref for snapshot in self.snapshots for ref in snapshot.parts if ref.name == part), None)

    def ids(self, part: str) -> tuple[list[str], int]:
        """Return (ids of the samples served from the part, how many more of its samples are known without an id)."""
        for snapshot in self.snapshots:
            number = next((i for i, ref in enumerate(snapshot.parts) if ref.name == part), None)
            if number is None:
                continue
            places = np.flatnonzero(snapshot.part == number)
            others = (snapshot.shadowed_part, snapshot.retracted_part)
            n_others = sum(int(np.count_nonzero(parts == number)) for parts in others)
            ids = self.all_ids(snapshot)
            if ids is None:
                return [], len(places) + n_others
            return [ids[int(i)] for i in places], n_others
        return [], 0

    def all_ids(self, snapshot: Snapshot) -> SnapshotIds | None:
        """Return the ids that a snapshot serves, None if its file of them can't be used."""
        path = layout.snapshot_path(snapshot.fingerprint, "ids")
        try:
            return parse_snapshot_ids(self.store.read(path, snapshot.ids_nbytes), snapshot, path)
        except StorageError:
            raise
        except HsfmtError:
            return None


def read_if_there(store: Store, path: str) -> bytes:
    """Return an object whole, whatever its size; b"" where there is none."""
    nbytes = store.size(path)
    if nbytes is None:
        return b""
    try:
        return store.read(path, nbytes)
    except (NotFoundError, CorruptionError):
        return b""


def check_not_newer(data: bytes, where: str, error: HsfmtError) -> None:
    """Raise `error` if it is a whole document that needs a newer library: that one is not damaged.

    Raises
    ------
    FormatVersionError
        As given.
    """
    if not isinstance(error, FormatVersionError):
        return
    document = canonical.loads(data, where)
    claimed = document.pop("digest", None)
    if claimed == digests.digest(canonical.dumps(document)):
        raise error


def proven_part(
    store: Store, part: str, header: Header, raw: bytes, ref: PartRef | None
) -> tuple[PartManifest, PartIndex]:
    """Return columns and index of a part whose manifest is lost or damaged.

    Parameters
    ----------
    header
        The dataset's.
    raw
        What is left of the manifest.
    ref
        How a snapshot names the part.

    Returns
    -------
    manifest, index
        The manifest without files: of it only the columns are known.

    Raises
    ------
    HsfmtError
        The index can't be proven, or the columns can't be known.
    """
    path = layout.index_path(part)
    data = store.read(path, tables.MAX_TABLE_NBYTES)
    actual = digests.digest(data)
    if ref is not None and ref.index_digest is not None:
        named = actual == ref.index_digest
    else:
        # 128 bits that damage left in the manifest and that are those of this file can't be an accident.
        named = all(f'"{digest}"'.encode() in raw for digest in (actual, header.digest()))
    if not named:
        raise CorruptionError.at(path, expected="an index that a snapshot or manifest names", got=actual)
    table = tables.parse(data, path)
    names = sorted(name.removeprefix(_CHUNKS) for name in table.arrays if name.startswith(_CHUNKS))
    columns = {name: _column(store, part, name) for name in names}
    if not set(CORE_COLUMNS) <= set(names):
        raise CorruptionError.at(path, expected="chunk tables of the core columns", got=", ".join(names))
    states = columns[STATES]
    if states.shape[1:] != (header.n_layers, header.hidden_size) or states.dtype_name != header.dtype:
        raise CorruptionError.at(path, expected="states as the header has them", got=str(states.shape))
    index = parse_index(data, part, columns, path)
    counts = Counts(index.n_samples, int(index.token_offsets[-1]), int(index.n_supervised.sum()), 0)
    return PartManifest(part, header, columns, (), counts), index


def claimed_samples(store: Store, part: str) -> int:
    """Return how many samples a part seems to hold of which nothing is proven: what is lost must not go unsaid."""
    path = layout.index_path(part)
    try:
        return max(1, len(tables.parse(store.read(path, tables.MAX_TABLE_NBYTES), path).arrays["token_offsets"]) - 1)
    except StorageError:
        raise
    except (HsfmtError, KeyError, TypeError):
        there = store.size(path) is not None or any(True for _ in store.walk(layout.part_folder(part)))
        return int(there)  # a part of nothing but holes has neither


def superseded_by_lost(
    source: tuple[PartManifest, PartIndex],
    raw: bytes,
    witness: Witness,
    others: Mapping[str, PartManifest],
    newer: Collection[str],
) -> dict[str, str]:
    """Return name to manifest digest of the parts that a part replaces whose own manifest is lost.

    Without it they would be served again, perhaps with what the lost part corrected.

    Parameters
    ----------
    source
        The lost part as `proven_part` returned it.
    raw
        What is left of its manifest.
    witness
        Snapshots: the current one has the lost part and not the other. Then that one was replaced if a former snapshot
        has it and they share ids; and if all its ids are those of the lost part, nothing of it is missed. What a
        snapshot has beside the lost part was not replaced by it.
    others
        The sound manifests that are committed, and that none of them replaces.
    newer
        Names of parts that were committed after the current snapshot was made.
    """
    part, index = source[0].part, source[1]
    former = {ref.name: ref.manifest_digest for snapshot in witness.snapshots for ref in snapshot.parts}
    current = _part_names(witness.current) if witness.current is not None else set()
    beside = {name for names in map(_part_names, witness.snapshots) if part in names for name in names}.union(newer)
    ids = {index.sample_id(row) for row in range(index.n_samples)}
    found = {}
    for name, manifest in others.items():
        digest = manifest.digest()
        gone = part in current and name not in beside
        if f'"{digest}"'.encode() in raw or (gone and _covered(witness.store, manifest, ids, former.get(name))):
            found[name] = digest
    return found


def _part_names(snapshot: Snapshot) -> set[str]:
    return {ref.name for ref in snapshot.parts}


def _covered(store: Store, manifest: PartManifest, ids: set[str], former: str | None) -> bool:
    if not manifest.columns:
        return False
    try:
        index = load_index(store, manifest)
    except StorageError:
        raise
    except HsfmtError:
        return former == manifest.digest()
    theirs = {index.sample_id(row) for row in range(index.n_samples)}
    return theirs <= ids or (former == manifest.digest() and not ids.isdisjoint(theirs))


def _column(store: Store, part: str, name: str) -> Column:
    """Return what the zarr.json of an array says, if it is exactly the document of such a column."""
    path = f"{layout.column_folder(part, name)}/zarr.json"
    data = store.read(path, _MAX_DOCUMENT_NBYTES)
    document = canonical.loads(data, path)
    try:
        inner = document["codecs"][0]["configuration"]
        rows = document["dimension_names"][0]
        entry = {
            "chunk_shape": inner["chunk_shape"],
            "codec": "zstd" if "blosc" in [codec["name"] for codec in inner["codecs"]] else "none",
            "dtype": document["data_type"],
            "kind": {f"{name}_row": "ragged"}.get(rows, rows),
            "shape": document["shape"],
            "shard_shape": document["chunk_grid"]["configuration"]["chunk_shape"],
        }
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise FormatError.at(path, expected="the document of an array", got=repr(error)[:100]) from None
    column = parse_column(name, entry, path)
    if array_document(column) != data:
        raise CorruptionError.at(path, expected="the document that its own column implies", got="another one")
    return column


def rebuilt_ids(store: Store, snapshot: Snapshot) -> bytes | None:
    """Return the ids file of a snapshot out of the part indexes, if it is the one that the snapshot names."""
    ids: list[bytes] = [b""] * snapshot.n_samples
    try:
        for number, ref in enumerate(snapshot.parts):
            places = np.flatnonzero(snapshot.part == number)
            if len(places):
                known = load_ids(store, ref)
                for place in places:
                    ids[place] = known[int(snapshot.row[place])].encode()
    except StorageError:
        raise
    except (HsfmtError, IndexError):
        return None
    packed, offsets = tables.pack_strings(ids)
    data = tables.serialize({"ids": packed, "id_offsets": offsets}, {"format": FORMAT, "kind": IDS_KIND})
    return data if digests.digest(data) == snapshot.ids_digest else None
