"""The unit of work: one committed part, verified by a pure function that runs in any process.

Spec: rule VFY-2.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from hsfmt.index import PartIndex
from hsfmt.manifest import PartManifest
from hsfmt.readers.verification.complete import check_documents, check_shard_digests, load_index
from hsfmt.readers.verification.full import PartDecoder, SampleFaults
from hsfmt.readers.verification.part_context import Advance, PartContext
from hsfmt.readers.verification.quick import check_sizes, load_manifest
from hsfmt.readers.verification.report import Counts, Findings
from hsfmt.storage import Store

_PAIR_TAG = b"hsfmt:pair:1\0"


@dataclass(frozen=True, slots=True)
class PartTask:
    """What to verify.

    Attributes
    ----------
    store, part, level
        The dataset, a committed part and the tier.
    sizes
        Path to nbytes of the part's objects, from a listing made after the part was committed.
    """

    store: Store
    part: str
    level: str
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PartRows:
    """What a snapshot must agree with: one entry a sample of the part.

    Attributes
    ----------
    n_tokens, n_supervised, source_index
        int64 [sample].
    id_hash
        uint64 [sample], xxh3_64 of the id.
    id_key, pair_key
        uint8 [sample, 16]: xxh3_128 of the id, and of id and content digest together (rule DIG-6).
    """

    n_tokens: npt.NDArray[np.int64]
    n_supervised: npt.NDArray[np.int64]
    source_index: npt.NDArray[np.int64]
    id_hash: npt.NDArray[np.uint64]
    id_key: npt.NDArray[np.uint8]
    pair_key: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PartOutcome:
    """What verifying a part found.

    Attributes
    ----------
    part
        Its name.
    findings, counts
        Of this part alone.
    manifest, manifest_nbytes
        As parsed; None where it can't be used.
    rows
        From the part index; None at tier quick, and where it can't be used.
    """

    part: str
    findings: Findings
    counts: Counts
    manifest: PartManifest | None = None
    manifest_nbytes: int = 0
    rows: PartRows | None = field(default=None, repr=False)
    unusable: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DataTask:
    """Shards of a part to verify.

    Attributes
    ----------
    store, manifest, level
        The dataset, the part's manifest as parsed, and the tier.
    paths
        Shards to read, of those that are there.
    unusable
        Files that are known to be missing.
    number, n_slices
        Tier full: which slice of the part it is, of `paths` and the samples that begin in it (see `PartDecoder`).
    """

    store: Store
    manifest: PartManifest
    level: str
    paths: frozenset[str]
    unusable: frozenset[str]
    number: int = 0
    n_slices: int = 1


@dataclass(frozen=True, slots=True)
class DataResult:
    """What verifying shards found.

    Attributes
    ----------
    findings, counts
        Of these shards.
    elsewhere
        Findings about shards that others verify, and that were read for samples which reach into them.
    faults
        Of samples.
    """

    findings: Findings
    counts: Counts
    elsewhere: Findings
    faults: SampleFaults

    @property
    def is_fine(self) -> bool:
        """Whether all was read, at the first try, and found to be right."""
        items = [*self.findings.items, *self.elsewhere.items]
        severities = {item.severity for item in items} | {severity for severity, *_ in self.faults.kinds}
        return "error" not in severities and not {item.code for item in items} & {"unstable_read", "not_checked"}


def check_part(task: PartTask, advance: Advance = lambda _: None) -> PartOutcome:
    """Verify one part as far as the tier says.

    Parameters
    ----------
    task
        The part.
    advance
        Told the bytes of files as they are read.
    """
    findings, counts = Findings(), Counts(parts=1)
    manifest, nbytes = load_manifest(task.store, findings, task.part)
    if manifest is None:
        return PartOutcome(task.part, findings, counts)
    counts.files, counts.samples, counts.tokens = (
        len(manifest.files) + 1,
        manifest.counts.samples,
        manifest.counts.tokens,
    )
    context = PartContext(task.store, manifest, findings, counts, advance)
    check_sizes(context, task.sizes)
    if task.level == "documents" and manifest.columns:
        check_documents(context)
        index = load_index(context)
        rows = _rows(index) if index is not None else None
        _name_samples(context)
        return PartOutcome(task.part, findings, counts, manifest, nbytes, rows, frozenset(context.unusable))
    if task.level == "quick" or not manifest.columns:
        return PartOutcome(task.part, findings, counts, manifest, nbytes)
    check_documents(context)
    index = load_index(context)
    if task.level == "complete":
        check_shard_digests(context)
    elif index is not None:
        PartDecoder(context).check()
    else:
        got = "an index that can't be used: its shards were compared as whole files only"
        findings.add("info", "not_checked", manifest.index_file.path, expected="every chunk decoded", got=got)
        check_shard_digests(context)
    if index is None:
        return PartOutcome(task.part, findings, counts, manifest, nbytes)
    _name_samples(context)
    return PartOutcome(task.part, findings, counts, manifest, nbytes, _rows(index))


def check_data(task: DataTask, advance: Advance = lambda _: None) -> DataResult:
    """Verify shards of one part, whose documents and sizes `check_part` has judged at level "documents"."""
    known = PartContext(task.store, task.manifest, Findings(), Counts(), lambda _: None, set(task.unusable))
    context = PartContext(task.store, task.manifest, Findings(), Counts(), advance, set(task.unusable))
    if task.level == "full":
        context.index = load_index(known)
    elsewhere, faults = Findings(), SampleFaults()
    if context.index is None:
        if task.level == "full":
            where = task.manifest.index_file.path
            got = "an index that can't be used: its shards were compared as whole files only"
            context.findings.add("info", "not_checked", where, expected="every chunk decoded", got=got)
        check_shard_digests(context, task.paths)
    else:
        decoder = PartDecoder(context, task.number, task.n_slices)
        decoder.check_samples()
        elsewhere, faults = decoder.elsewhere.findings, decoder.faults
    if any(item.severity == "error" for item in context.findings.items):
        context.index = context.index or load_index(known)
        _name_samples(context)
    return DataResult(context.findings, context.counts, elsewhere, faults)


def _name_samples(context: PartContext) -> None:
    """Give findings about whole shards the samples that lie in them."""
    part = context.manifest.part
    for name, column in context.manifest.columns.items():
        for shard in range(column.n_shards):
            path = f"parts/{part}/{name}/{column.shard_key(shard)}"
            if context.findings.has_error(path):
                first, end = shard * column.shard_rows, min((shard + 1) * column.shard_rows, column.n_rows)
                context.findings.fill_samples(path, context.sample_ids(context.samples_at(column, first, end)))


def _rows(index: PartIndex) -> PartRows:
    ids = [index.id_bytes(row) for row in range(index.n_samples)]
    pairs = (
        _PAIR_TAG + struct.pack("<Q", len(sample_id)) + sample_id + index.content_digest[row].tobytes()
        for row, sample_id in enumerate(ids)
    )
    return PartRows(
        n_tokens=index.lengths,
        n_supervised=np.array(index.n_supervised),
        source_index=np.array(index.source_index),
        id_hash=np.fromiter(map(xxhash.xxh3_64_intdigest, ids), np.uint64, len(ids)),
        id_key=_keys(map(xxhash.xxh3_128_digest, ids), len(ids)),
        pair_key=_keys(map(xxhash.xxh3_128_digest, pairs), len(ids)),
    )


def _keys(digests: map[bytes], n: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(n, 16)
