"""The committed set: creating a dataset, listing its parts, loading manifests and indexes with their checks.

Spec: rules LAY-3, HDR-9, WRITE-8, WRITE-10, WRITE-11, MAN-1, MAN-3, MAN-8, SNAP-9. One listing of
`hsfmt/manifests/` is the whole truth; there is no lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hsfmt import digests, layout, tables
from hsfmt.errors import CorruptionError, FormatError, HeaderMismatchError, NotFoundError, UsageError
from hsfmt.header import Header, check_same_meaning
from hsfmt.index import MAX_ID_NBYTES, PartIndex, parse_index
from hsfmt.manifest import MAX_MANIFEST_NBYTES, PartManifest, parse_manifest
from hsfmt.naming import names_dataset
from hsfmt.pointer import MAX_POINTER_NBYTES, Pointer, parse_pointer
from hsfmt.root import enclosing_dataset, header_of_manifests, read_root, refuse_file, refuse_inner
from hsfmt.snapshot import RETRACT_AGAIN, PartRef, Snapshot, SnapshotIds, parse_snapshot
from hsfmt.snapshot_builder import LoadedPart
from hsfmt.storage import Reads, Store
from hsfmt.storage.read_together import read_together
from hsfmt.versions import check_writable
from hsfmt.zarr_metadata import group_document, root_document

_POINTER_REMEDY = f"restore it from a copy, or run `hsfmt repair`; {RETRACT_AGAIN} if it says so"
# Which of the two was changed can't be told from one part.
_HEADER_REMEDY = (
    f"move the part to a dataset of its own; or, if it was {layout.ROOT_METADATA} that changed, restore that: "
    "`hsfmt verify` says which of the two it is"
)
_OWN_ENTRIES = {"hsfmt", "parts", layout.ROOT_METADATA}


@names_dataset
def read_header(store: Store) -> Header:
    """Return the dataset's header from its root group.

    Raises
    ------
    NotFoundError
        There is no dataset, its root document is gone, or it is a folder within a dataset.
    FormatError, FormatVersionError
        The root document is not one of this format, or needs a newer library.
    """
    try:
        return read_root(store)
    except (NotFoundError, FormatError, CorruptionError) as error:
        refuse_inner(store, error)
        raise


def ensure_dataset(store: Store, wanted: Header) -> Header:
    """Create the dataset, or join it if it exists; any number of writers may do so at once (rules HDR-9, WRITE-8).

    A root document that is gone is written again as the committed parts have it (rule WRITE-10).

    Returns
    -------
    Header
        The dataset's header as stored: that of whoever created it.

    Raises
    ------
    HeaderMismatchError
        The dataset means something else; each member that differs is named.
    CorruptionError
        The root document is gone, and the parts do not agree on what it was.
    UsageError
        The folder holds something else, or lies in another dataset.
    """
    found = find_dataset(store, wanted)
    # Before the root document, which makes it a dataset: one without this counts as damaged.
    store.create(layout.PARTS_METADATA, group_document())
    if store.size(layout.ROOT_METADATA) is None:
        store.create(layout.ROOT_METADATA, root_document(found or wanted))
        found = None  # another creator may have been first
    if found is None:
        found = _joined(store, read_header(store), wanted)
    return found


def find_dataset(store: Store, wanted: Header) -> Header | None:
    """Return the dataset's header as stored, None where there is none yet; writes nothing.

    Raises
    ------
    HeaderMismatchError, CorruptionError, UsageError
        As `ensure_dataset`.
    """
    if store.size(layout.ROOT_METADATA) is not None:
        return _joined(store, read_header(store), wanted)
    refuse_file(store)
    foreign = [name for name in store.list("") if not _may_be_there(name)]
    if foreign:
        got = f"a folder with {len(foreign)} other entries, {foreign[0]!r} among them"
        remedy = "choose another destination"
        raise UsageError.at(store.url, expected="an empty folder or an hsfmt dataset", got=got, remedy=remedy)
    header = header_of_manifests(store, committed_parts(store))
    if header is not None:
        return _joined(store, header, wanted)
    outer = enclosing_dataset(store)
    if outer is not None:
        raise UsageError.at(
            store.url,
            expected="a folder outside of other datasets",
            got=f"one inside the dataset {outer}",
            remedy="choose another destination; what lies in a dataset and is not of it counts as damage there",
        )
    return None


def _may_be_there(name: str) -> bool:
    return name in _OWN_ENTRIES or name.endswith(".tmp") or layout.bystander(name) is not None


def _joined(store: Store, found: Header, wanted: Header) -> Header:
    check_writable(found.to_json(), layout.ROOT_METADATA)
    try:
        check_same_meaning(found, wanted, store.url)
    except HeaderMismatchError as error:
        if committed_parts(store):
            checked = f"`hsfmt verify` says whether {layout.ROOT_METADATA} is as its parts have it"
            remedy = f"use another dataset for these samples; {checked}"
        else:
            none_yet = "it holds no samples yet: if no writer is at work there"
            remedy = f"{none_yet}, remove the folder {store.url} and begin anew"
        raise HeaderMismatchError([replace(problem, remedy=remedy) for problem in error.problems]) from None
    return found


def committed_parts(store: Store) -> list[str]:
    """Return the names of all committed parts, superseded ones included, ascending (rule MAN-1)."""
    names = (layout.part_of_manifest(name) for name in store.list(layout.MANIFESTS))
    return sorted(name for name in names if name is not None)


def _read_named(store: Reads, path: str, max_nbytes: int) -> bytes:
    """Read a file that another document names, or that a listing showed."""
    try:
        return store.read(path, max_nbytes)
    except NotFoundError as error:
        remedy = "restore it from a copy; `hsfmt verify` lists all that is damaged, and what can be done"
        raise NotFoundError([replace(problem, remedy=remedy) for problem in error.problems]) from None


@names_dataset
def load_manifest(store: Reads, part: str, header: Header, digest: str | None = None) -> PartManifest:
    """Return a part's manifest.

    Parameters
    ----------
    store, part
        Where, and which.
    header
        The dataset's; a part under another one is refused by name.
    digest
        The manifest's digest as a snapshot names it, or None.

    Raises
    ------
    NotFoundError
        There is no such part.
    CorruptionError
        Changed bytes, or other ones than the snapshot names.
    HeaderMismatchError
        The part belongs to a dataset of another meaning.
    """
    path = layout.manifest_path(part)
    manifest = parse_manifest(_read_named(store, path, MAX_MANIFEST_NBYTES), part, path)
    if digest is not None and manifest.digest() != digest:
        raise CorruptionError.at(path, expected=f"digest {digest}", got=manifest.digest())
    if manifest.header.digest() != header.digest():
        try:
            check_same_meaning(header, manifest.header, path)
        except HeaderMismatchError as error:
            raise HeaderMismatchError([replace(problem, remedy=_HEADER_REMEDY) for problem in error.problems]) from None
        expected, got = f"header {header.digest()} ({layout.ROOT_METADATA})", manifest.header.digest()
        raise HeaderMismatchError.at(path, expected=expected, got=got, remedy=_HEADER_REMEDY)
    return manifest


def load_manifests(store: Store, parts: Iterable[str], header: Header) -> dict[str, PartManifest]:
    """Return the manifests of committed parts by name, in few round trips; raises as `load_manifest`."""
    names = list(parts)
    files = read_together(store, [(layout.manifest_path(name), None) for name in names])
    return {name: load_manifest(files, name, header) for name in names}


@names_dataset
def load_index(store: Reads, manifest: PartManifest) -> PartIndex:
    """Return a part's index, compared with the digest in its manifest.

    Raises
    ------
    NotFoundError, CorruptionError
        Missing, changed or contradictory.
    """
    entry = manifest.index_file
    if entry.nbytes > tables.MAX_TABLE_NBYTES:
        raise FormatError.at(entry.path, expected=f"at most {tables.MAX_TABLE_NBYTES} bytes", got=f"{entry.nbytes}")
    data = _read_named(store, entry.path, entry.nbytes)
    actual = digests.digest(data)
    if actual != entry.digest:
        raise CorruptionError.at(
            entry.path, expected=f"{entry.nbytes} bytes, {entry.digest}", got=f"{len(data)} bytes, {actual}"
        )
    index = parse_index(data, manifest.part, manifest.columns, entry.path)
    counts = manifest.counts
    found = index.n_samples, int(index.n_supervised.sum())
    if found != (counts.samples, counts.supervised_tokens):
        expected = f"{counts.samples} samples with {counts.supervised_tokens} supervised tokens, as the manifest says"
        raise CorruptionError.at(entry.path, expected=expected, got=f"{found[0]} with {found[1]}")
    return index


def load_part(store: Store, part: str, header: Header) -> LoadedPart:
    """Return manifest and index of a committed part."""
    manifest = load_manifest(store, part, header)
    return LoadedPart(manifest, load_index(store, manifest) if manifest.counts.samples else None)


def without_superseded(parts: Iterable[LoadedPart]) -> list[LoadedPart]:
    """Return the parts that no other one replaces (rule MAN-8).

    Raises
    ------
    CorruptionError
        A part says that it replaces another whose manifest is not the one it names.
    """
    loaded = {part.manifest.part: part for part in parts}
    superseded = superseded_parts(part.manifest for part in loaded.values())
    return [part for name, part in loaded.items() if name not in superseded]


def superseded_parts(manifests: Iterable[PartManifest]) -> set[str]:
    """Return the names of the parts that one of these replaces; raises as `without_superseded`."""
    known = {manifest.part: manifest for manifest in manifests}
    superseded = set()
    for manifest in known.values():
        for name, digest in manifest.replaces.items():
            if name in known and known[name].digest() != digest:
                where = layout.manifest_path(name)
                expected = f"digest {digest}, as {manifest.part} replaces it"
                raise CorruptionError.at(where, expected=expected, got="another manifest")
            superseded.add(name)
    return superseded


def load_current(
    store: Store, names: Iterable[str], header: Header, known: dict[str, LoadedPart]
) -> dict[str, LoadedPart]:
    """Return the parts of this committed set, those that are superseded without their indexes.

    A part that was replaced because it is damaged must not stop anyone.

    Parameters
    ----------
    names
        The committed parts.
    known
        Those that were loaded before; the new ones are added.

    Raises
    ------
    NotFoundError, CorruptionError, HeaderMismatchError
        As `load_manifest` and `load_index`.
    """
    names = list(names)
    new = [name for name in names if name not in known]
    known.update((name, LoadedPart(manifest, None)) for name, manifest in load_manifests(store, new, header).items())
    superseded = superseded_parts(known[name].manifest for name in names)
    current = [known[name] for name in names if name not in superseded and known[name].index is None]
    manifests = [part.manifest for part in current if part.manifest.counts.samples]
    files = read_together(store, [(entry.path, entry.nbytes) for entry in (each.index_file for each in manifests)])
    known.update((manifest.part, LoadedPart(manifest, load_index(files, manifest))) for manifest in manifests)
    return {name: known[name] for name in names}


@names_dataset
def read_pointer(store: Store) -> Pointer | None:
    """Return the pointer to the current snapshot, None when the dataset was never sealed."""
    try:
        data = store.read(layout.POINTER, MAX_POINTER_NBYTES)
    except NotFoundError:
        return None
    try:
        return parse_pointer(data)
    except CorruptionError as error:
        raise CorruptionError([replace(problem, remedy=_POINTER_REMEDY) for problem in error.problems]) from None


@names_dataset
def read_snapshot(store: Store, fingerprint: str, max_nbytes: int = tables.MAX_TABLE_NBYTES) -> tuple[Snapshot, bytes]:
    """Return a snapshot by its fingerprint, and the bytes of its index.

    Raises
    ------
    NotFoundError
        There is no such snapshot.
    CorruptionError
        Its bytes are not those that the fingerprint names.
    """
    path = layout.snapshot_path(digests.check(fingerprint, "snapshot"), "index")
    data = _read_named(store, path, max_nbytes)
    return parse_snapshot(data, path, fingerprint), data


@names_dataset
def load_ref(store: Reads, ref: PartRef, header: Header) -> LoadedPart:
    """Return a part that a snapshot names, each file compared with the snapshot's digest.

    Raises
    ------
    NotFoundError, CorruptionError, HeaderMismatchError
        As `load_manifest` and `load_index`.
    """
    manifest = load_manifest(store, ref.name, header, ref.manifest_digest)
    if (ref.index_digest is None) != (not manifest.counts.samples):
        expected = "a part with samples" if ref.index_digest else "a part without samples"
        got = f"{manifest.counts.samples} samples"
        raise CorruptionError.at(layout.manifest_path(ref.name), expected=f"{expected}, as the snapshot says", got=got)
    if ref.index_digest is None:
        return LoadedPart(manifest, None)
    entry = manifest.index_file
    if (entry.digest, entry.nbytes) != (ref.index_digest, ref.index_nbytes):
        expected = f"an index of {ref.index_nbytes} bytes, {ref.index_digest}, as the snapshot says"
        got = f"{entry.nbytes} bytes, {entry.digest}"
        raise CorruptionError.at(layout.manifest_path(ref.name), expected=expected, got=got)
    return LoadedPart(manifest, load_index(store, manifest))


@names_dataset
def load_listed(store: Reads, snapshot: Snapshot, number: int) -> LoadedPart:
    """Return a part by its place in a snapshot's parts table; it has all rows that the snapshot takes from it.

    Raises
    ------
    NotFoundError, CorruptionError, HeaderMismatchError
        As `load_ref`; or rows that the part has not, or of another length (rule SNAP-7).
    """
    loaded = load_ref(store, snapshot.parts[number], snapshot.header)
    lengths = loaded.index.lengths if loaded.index is not None else np.empty(0, np.int64)
    check_listed(snapshot, number, lengths)
    return loaded


def check_listed(snapshot: Snapshot, number: int, lengths: npt.NDArray[np.int64]) -> None:
    """Refuse a snapshot that takes rows from a part which the part has not, or of another length (rule SNAP-7).

    Parameters
    ----------
    snapshot, number
        The part's place in its parts table.
    lengths
        Tokens of each sample of the part, int64 [sample].

    Raises
    ------
    CorruptionError
        It does.
    """
    served = snapshot.part == number
    rows = [snapshot.row[served], snapshot.shadowed_row[snapshot.shadowed_part == number]]
    rows.append(snapshot.retracted_row[snapshot.retracted_part == number])
    last = max((int(some.max()) for some in rows if len(some)), default=-1)
    if last >= len(lengths) or np.any(lengths[rows[0]] != snapshot.n_tokens[served]):
        got = f"row {last}, or rows of other lengths"
        expected = f"the {len(lengths)} samples of part {snapshot.parts[number].name}"
        raise CorruptionError.at(f"snapshot {snapshot.fingerprint}", expected=expected, got=got)


@names_dataset
def load_ids(store: Store, ref: PartRef) -> SnapshotIds:
    """Return the ids of a part that a snapshot names, out of its index alone: the manifest may be gone.

    Raises
    ------
    NotFoundError, CorruptionError
        The index is missing, or not the one that the snapshot names.
    """
    path = layout.index_path(ref.name)
    data = store.read(path, ref.index_nbytes)
    actual = digests.digest(data)
    if actual != ref.index_digest:
        raise CorruptionError.at(path, expected=f"digest {ref.index_digest}", got=actual)
    table = tables.parse(data, path)
    ids = tables.take(table, "ids", "U8", (None,), path)
    offsets = tables.take(table, "id_offsets", "I64", (None,), path)
    tables.check_offsets(offsets.view(np.int64), len(ids), f"{path}: id_offsets", strict=True)
    tables.check_ids(ids, offsets.view(np.int64), MAX_ID_NBYTES, path)
    return SnapshotIds(ids.view(np.uint8), offsets.view(np.int64))
