"""Tier complete: every listed file is there with its digest, and nothing else is.

Spec: rules VFY-5, VFY-6, VFY-13.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hsfmt import digests, layout, tables
from hsfmt.errors import CorruptionError, FormatError
from hsfmt.index import PartIndex, parse_index
from hsfmt.manifest import FileEntry, PartManifest, implied_documents
from hsfmt.readers.verification.attachments import check_unnamed
from hsfmt.readers.verification.objects import file_digest, read_twice
from hsfmt.readers.verification.part_context import PartContext
from hsfmt.readers.verification.report import Findings
from hsfmt.storage import Store

_SHOWN = 3


def check_documents(context: PartContext) -> None:
    """Compare the part's zarr.json files with what the manifest implies, byte for byte."""
    for path, body in implied_documents(context.manifest.part, context.manifest.columns).items():
        if path in context.unusable:
            continue

        def same(path: str = path, body: bytes = body) -> None:
            data = context.store.read(path, len(body) + (64 << 10))
            if data != body:
                place = next((i for i, (a, b) in enumerate(zip(data, body, strict=False)) if a != b), len(body))
                got = f"{len(data)} bytes that differ from byte {place} on"
                raise CorruptionError.at(path, expected=f"the {len(body)} bytes that the manifest implies", got=got)

        read_twice(context.findings, path, same, corrupt="zarr_json", store=context.store)
        context.advance(len(body))
        context.counts.nbytes += len(body)


def load_index(context: PartContext) -> PartIndex | None:
    """Read, compare and parse the part index, and check its ids."""
    entry = context.manifest.index_file
    if entry.path in context.unusable:
        return None

    def fetch() -> PartIndex:
        if entry.nbytes > tables.MAX_TABLE_NBYTES:
            raise FormatError.at(entry.path, expected=f"at most {tables.MAX_TABLE_NBYTES} bytes", got=str(entry.nbytes))
        data = context.store.read(entry.path, entry.nbytes)
        actual = digests.digest(data)
        if (len(data), actual) != (entry.nbytes, entry.digest):
            expected = f"{entry.nbytes} bytes, {entry.digest}"
            raise CorruptionError.at(entry.path, expected=expected, got=f"{len(data)} bytes, {actual}")
        return parse_index(data, context.manifest.part, context.manifest.columns, entry.path)

    index = read_twice(context.findings, entry.path, fetch, store=context.store)
    context.advance(entry.nbytes)
    if index is not None:
        context.counts.nbytes += entry.nbytes
        context.index = index
        _check_index(context, index)
    return index


def _check_index(context: PartContext, index: PartIndex) -> None:
    counts, path = context.manifest.counts, context.manifest.index_file.path
    found = (index.n_samples, int(index.token_offsets[-1]), int(index.n_supervised.sum()))
    wanted = (counts.samples, counts.tokens, counts.supervised_tokens)
    if found != wanted:
        expected = "{} samples, {} tokens, {} supervised, as the manifest says".format(*wanted)
        context.findings.error("counts", path, expected=expected, got="{}, {}, {}".format(*found))
    seen: set[bytes] = set()
    repeated = []
    for row in range(index.n_samples):
        sample_id = index.id_bytes(row)
        if sample_id in seen:
            repeated.append(row)
        seen.add(sample_id)
    if repeated:
        ids = context.sample_ids(repeated)
        got = f"{ids[0]!r} again in row {repeated[0]} ({len(ids)} ids)"
        context.findings.error("sample_id", f"{path}: ids", expected="each id once in the part", got=got, samples=ids)


def shard_entries(manifest: PartManifest) -> list[FileEntry]:
    """Return the entries of a part's shards: what is neither a document nor its index."""
    index = manifest.index_file.path
    return [entry for entry in manifest.files if entry.path != index and not entry.path.endswith("/zarr.json")]


def check_shard_digests(context: PartContext, paths: Collection[str] | None = None) -> None:
    """Compare the digest of every shard, or of those at `paths`, read in blocks."""
    for entry in shard_entries(context.manifest):
        if entry.path not in context.unusable and (paths is None or entry.path in paths):
            _check_digest(context, entry)


def _check_digest(context: PartContext, entry: FileEntry) -> None:
    def fetch() -> None:
        actual = file_digest(context.store, entry.path, entry.nbytes, context.advance)
        if actual != entry.digest:
            raise CorruptionError.at(entry.path, expected=f"digest {entry.digest}", got=actual)

    read_twice(context.findings, entry.path, fetch, corrupt="digest", store=context.store)
    context.counts.nbytes += entry.nbytes


def check_unexpected(
    store: Store, findings: Findings, listing: Mapping[str, int], named: Collection[str], committed: Collection[str]
) -> None:
    """Report every object that nothing names.

    Parameters
    ----------
    store, findings
        The dataset, and where findings go.
    listing
        Every object below the root: path to nbytes.
    named
        Paths that documents name, or that always belong there.
    committed
        Parts that have a manifest, readable or not.
    """
    known = set(named)
    uncommitted: dict[str, list[str]] = {}
    foreign: dict[str, list[str]] = {}
    unexpected: dict[str, list[str]] = {}
    for path in listing:
        if path in known:
            continue
        part = layout.part_of_path(path)
        if path.endswith(".tmp"):
            findings.add("info", "temporary", shown(path), expected="no temporary file", got=f"{listing[path]} bytes")
        elif bystander := layout.bystander(path):
            foreign.setdefault(bystander, []).append(path)
        elif part is not None and part not in committed:
            uncommitted.setdefault(layout.part_folder(part), []).append(path)
        elif not check_unnamed(store, findings, path, listing[path]):
            top, _, rest = path.partition("/")
            group = path if top in ("hsfmt", "parts") or not rest else top
            unexpected.setdefault(group, []).append(path)
    for folder, paths in uncommitted.items():
        nbytes = sum(listing[path] for path in paths)
        got = f"{len(paths)} files, {nbytes} bytes without one ({', '.join(map(shown, paths[:_SHOWN]))})"
        findings.add("info", "uncommitted", folder, expected="a manifest of this part", got=got)
    for group, paths in foreign.items():
        got = f"{len(paths)} objects, {sum(listing[path] for path in paths)} bytes, of other software"
        findings.add("info", "foreign", shown(group), expected="nothing that is not of the dataset", got=got)
    for group, paths in unexpected.items():
        got = f"{len(paths)} objects, {sum(listing[path] for path in paths)} bytes"
        findings.error("unexpected", shown(group), expected="nothing that no manifest or snapshot names", got=got)


def shown(path: str) -> str:
    """Return a path that can be printed: a stray file may have any name, of control characters or no Unicode at all."""
    return path if path.isprintable() else ascii(path)[1:-1]
