"""Samples of committed parts written into new ones, each compared with its digests on the way.

Spec: rules READ-3, DIG-3, DIG-4, MAN-8. Repair and compaction are this and nothing else: no byte gets into a new part
that the old one's index does not prove.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import canonical, digests, layout
from hsfmt.catalog import load_manifest
from hsfmt.column_plan import GridOptions
from hsfmt.columns import CORE_COLUMNS, IDS, STATES, Column, state_chunk_rows
from hsfmt.errors import CorruptionError, FormatError, HsfmtError, NotFoundError, StorageError, UsageError
from hsfmt.header import Header
from hsfmt.index import PartIndex
from hsfmt.maintenance.plain_rows import read_plain
from hsfmt.manifest import PartManifest
from hsfmt.readers.batch import ReadBatch
from hsfmt.readers.chunk_cache import ChunkCache
from hsfmt.readers.fetch import Fetcher
from hsfmt.readers.part_cache import OpenPart
from hsfmt.readers.sample_arrays import SampleArrays, ask
from hsfmt.readers.sample_requests import SampleRequest
from hsfmt.readers.verification.complete import check_documents, load_index
from hsfmt.readers.verification.full import PartDecoder
from hsfmt.readers.verification.part_context import PartContext
from hsfmt.readers.verification.report import Counts, Findings
from hsfmt.storage import Store
from hsfmt.writers.extras import Extra, ExtraValue, digest_extras
from hsfmt.writers.part_writer import PartSettings, PartWriter
from hsfmt.writers.pipeline import Pipeline
from hsfmt.writers.samples import Sample, scan

_CACHE_NBYTES = 32 << 20
_QUEUE_NBYTES = 256 << 20
_DERIVED = re.compile(r"(?:-[cr][0-9a-f]{16})+$")
_MAX_NAME = 64


@dataclass(frozen=True, slots=True)
class ProvenSample:
    """A sample whose content and extras have the digests of its part's index."""

    sample: Sample
    content: bytes
    source_index: int
    extras: Mapping[str, ExtraValue]


class PartSamples:
    """Reads the samples of one part, one at a time; no more than one is in memory.

    Parameters
    ----------
    store, header
        The dataset, and what it means.
    manifest
        The part's; of one whose manifest is lost, the columns alone.
    index
        Its index, proven by whoever calls.
    """

    def __init__(self, store: Store, header: Header, manifest: PartManifest, index: PartIndex) -> None:
        self.part = OpenPart(0, manifest, index)
        self.header = header
        self.extras = declared_extras(manifest.columns)
        self._store = store
        self._fetcher, self._cache = Fetcher(store, check=True, named=False), ChunkCache(_CACHE_NBYTES)
        # A frame that is not what was written is decoded by no one: only bytes that are not encoded may be looked at.
        self._plain = all(column.codec == "none" for column in manifest.columns.values())

    def read(self, row: int) -> ProvenSample:
        """Return a sample.

        A chunk of another digest may hold this sample whole and damage elsewhere: where chunks are not encoded, the
        sample's own digests decide.

        Raises
        ------
        CorruptionError, FormatError
            It is not what was committed.
        StorageError
            The storage fails, which proves nothing.
        """
        try:
            return self._prove(row, self._arrays(row))
        except (CorruptionError, FormatError, NotFoundError):
            if not self._plain:
                raise
            return self._prove(row, read_plain(self._store, self.part, row))

    def close(self) -> None:
        """Close the files."""
        self._fetcher.close()

    def _arrays(self, row: int) -> SampleArrays:
        batch = ReadBatch(self._fetcher, self._cache)
        pending = ask(batch, 0, (self.part, row), SampleRequest(0), range(self.header.n_layers), None)
        batch.execute(lambda _: (pending.sample_id,))
        return pending.arrays()

    def _prove(self, row: int, arrays: SampleArrays) -> ProvenSample:
        index, states = self.part.index, arrays.hidden_states
        where = f"{layout.index_path(self.part.name)}: row {row}"
        given = bool(index.loss_mask_given[row])
        sample = Sample(
            sample_id=arrays.sample_id,
            input_ids=arrays.input_ids,
            loss_mask=arrays.loss_mask.view(np.uint8),
            loss_mask_given=given,
            layers=[states[:, plane] for plane in range(states.shape[1])],
            dense=states,
            meta=arrays.meta,
        )
        values = {name: self._value(name, arrays, row) for name in self.extras}
        content, _ = scan(sample, self.header, count_nonfinite=False)
        found = {
            "content_digest": (content, index.content_digest[row].tobytes()),
            "extra_digest": (digest_extras(arrays.meta, self.extras, values), index.extra_digest[row].tobytes()),
        }
        for name, (actual, stored) in found.items():
            if actual != stored:
                raise CorruptionError.at(f"{where}: {name}", expected=stored.hex(), got=actual.hex())
        if not given and not sample.loss_mask.all():
            raise CorruptionError.at(f"{where}: loss_mask_given", expected="a mask of ones", got="another one")
        if not isinstance(canonical.loads(arrays.meta, where, metadata=True), dict):
            raise CorruptionError.at(f"{where}: meta", expected="a JSON object", got="another value")
        return ProvenSample(sample, content, int(index.source_index[row]), values)

    def _value(self, name: str, arrays: SampleArrays, row: int) -> ExtraValue:
        extra, value = self.extras[name], arrays.extras[name]
        storage = extra.element.storage
        if value is None:
            if extra.kind == "ragged" and self.part.index.offsets[name][row] < self.part.index.offsets[name][row + 1]:
                raise CorruptionError.at(name, expected="no rows of a null value", got="some")
            rows = {"token": len(arrays.input_ids), "sample": 1, "ragged": 0}[extra.kind]
            return ExtraValue(np.zeros((rows, *extra.shape), storage), valid=False)
        patterns: npt.NDArray[Any] = np.ascontiguousarray(value)
        patterns = patterns.reshape(-1 if extra.kind != "sample" else 1, *extra.shape).view(storage)
        if extra.dtype == "bool" and np.any(patterns.view(np.uint8) > 1):
            raise CorruptionError.at(name, expected="0 or 1", got="other values")
        return ExtraValue(patterns, valid=True)


def declared_extras(columns: Mapping[str, Column]) -> dict[str, Extra]:
    """Return the extra columns of a part as a writer would declare them."""
    return {
        name: Extra(column.kind, column.dtype_name, column.shape[1:])
        for name, column in sorted(columns.items())
        if name not in CORE_COLUMNS
    }


def settings_like(columns: Mapping[str, Column], header: Header, producer: Mapping[str, Any]) -> PartSettings:
    """Return the settings that make a part of such columns: codec, extras, and the grid where it was asked for."""
    states = columns[STATES]
    preferred = state_chunk_rows(header.hidden_size, states.dtype.itemsize)
    chosen = states.chunk_rows != preferred and states.n_rows > states.chunk_rows
    grid = GridOptions(states.chunk_rows, states.shard_rows if states.n_shards > 1 else None)
    return PartSettings(
        header=header,
        codec=states.codec,
        extras=declared_extras(columns),
        grid=grid if chosen else GridOptions(),
        producer=producer,
        wide_ids=columns[IDS].dtype_name == "int64",
    )


def bare_settings(header: Header, producer: Mapping[str, Any]) -> PartSettings:
    """Return the settings of a part that holds nothing but holes."""
    return PartSettings(header=header, codec="none", extras={}, grid=GridOptions(), producer=producer)


def write_part(
    store: Store,
    part: str,
    settings: PartSettings,
    samples: Iterable[ProvenSample],
    *,
    holes: Mapping[str, str],
    replaces: Mapping[str, str],
) -> PartManifest:
    """Write a part, decode it again from the storage, and only then commit it.

    Whatever stops it, nothing is committed, and what was written is removed as far as the storage lets us.

    Raises
    ------
    HsfmtError
        A sample can't be read now, the storage fails, or what was written is not what comes back.
    """
    pipeline = Pipeline(None, _QUEUE_NBYTES)
    try:
        writer = PartWriter(store, part, settings, pipeline)
        try:
            for proven in samples:
                writer.add(proven.sample, proven.content, proven.source_index, proven.extras)
            for sample_id, reason in holes.items():
                writer.add_hole(sample_id, reason)
        except BaseException:
            writer.abort()
            raise
        try:
            return writer.finish(replaces, lambda manifest: check_written(store, manifest))
        except HsfmtError:
            theirs = _finished_by_another(store, part, settings.header, replaces)
            if theirs is None:
                raise
            return theirs
    finally:
        pipeline.close()


def _finished_by_another(store: Store, part: str, header: Header, replaces: Mapping[str, str]) -> PartManifest | None:
    """Return the manifest if the same work was committed by who did it at the same time."""
    with suppress(HsfmtError):
        manifest = load_manifest(store, part, header)
        check_written(store, manifest)
        return manifest if manifest.replaces == replaces else None
    return None


def check_written(store: Store, manifest: PartManifest) -> None:
    """Verify a part of tier full whose manifest is not there yet.

    Raises
    ------
    StorageError
        The first thing that is wrong with it.
    """
    if not manifest.columns:
        return
    context = PartContext(store, manifest, Findings(), Counts(), lambda _: None)
    check_documents(context)
    if load_index(context) is not None:
        PartDecoder(context).check()
    for finding in context.findings.items:
        if finding.severity == "error":
            raise StorageError.at(finding.where, expected=finding.expected, got=f"{finding.got}, just after writing")


def derived_name(part: str, mark: str, *contents: object, others: Collection[str] = ()) -> str:
    """Return the name of a part that is made of others: beside the first of them, and the same in every attempt.

    Who is killed and starts again finds the part there if it was committed. Of an id that is there twice the smallest
    part name wins (rule SNAP-3), so that no other part may come between the old name and the new one.

    Parameters
    ----------
    part
        The first of the old ones by name.
    mark
        One letter for the kind of work.
    contents
        What determines the new part.
    others
        Names of the parts that must stay on the side of the new one on which they are of the old one.

    Raises
    ------
    UsageError
        There is no such name.
    """
    digest = digests.digest(repr(contents).encode()).rpartition(":")[2][:16]
    tail = f"{mark}{digest}"
    stem = part[: -len(match[0])] if (match := _DERIVED.search(part)) else part
    room = _MAX_NAME - len(tail) - 1
    for base in (stem, part, f"{part}-", stem[:room], part[: room - 1]):
        new = f"{base}-{tail}"
        low, high = min(part, new), max(part, new)
        if len(new) <= _MAX_NAME and not any(low < name <= high for name in others if name not in (part, new)):
            return new
    between = sorted(name for name in others if name > part[:room])[:1]
    expected, got = f"a free name beside part {part}", f"part {between[0] if between else part} in the way"
    remedy = "its samples would take the place of others with their ids: copy the samples that are whole elsewhere"
    raise UsageError.at(layout.manifest_path(part), expected=expected, got=got, remedy=remedy)


def total_nbytes(manifest: PartManifest) -> int:
    """Return the bytes of a part's files."""
    return sum(entry.nbytes for entry in manifest.files)
