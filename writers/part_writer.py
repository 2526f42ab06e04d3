"""One part: samples in, a committed part out.

Spec: rules WRITE-2 to WRITE-7: data under temporary names, synced, renamed; directories synced; every file's existence
and size checked again; the manifest last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import digests, layout
from hsfmt.column_plan import ColumnPlan, GridOptions, plan_column, plan_columns
from hsfmt.columns import IDS, MASK, STATES, Column
from hsfmt.errors import CorruptionError, FormatError, HsfmtError, StorageError
from hsfmt.header import Header
from hsfmt.index import PartIndex
from hsfmt.manifest import MAX_MANIFEST_NBYTES, Counts, FileEntry, PartManifest, implied_documents, parse_manifest
from hsfmt.storage import Store
from hsfmt.tables import MAX_TABLE_NBYTES, pack_strings
from hsfmt.writers.column_writer import ColumnWriter
from hsfmt.writers.extras import Extra, ExtraValue, digest_extras
from hsfmt.writers.pipeline import OutputThread, Pipeline
from hsfmt.writers.samples import Sample

_TABLE_ROW_NBYTES = 128
Check = Callable[[PartManifest], None]


@dataclass(frozen=True, slots=True)
class PartSettings:
    """What all parts of one writer share; `wide_ids` keeps token ids as int64, as a part that is rewritten has them."""

    header: Header
    codec: str
    extras: Mapping[str, Extra]
    grid: GridOptions
    producer: Mapping[str, Any]
    wide_ids: bool = False

    def plans(self) -> list[ColumnPlan]:
        """Return what the columns will be.

        Raises
        ------
        UsageError, FormatError
            The format has no such column.
        """
        extras = {name: (extra.kind, extra.dtype, extra.shape) for name, extra in self.extras.items()}
        plans = plan_columns(self.header, self.codec, extras, self.grid)
        if not self.wide_ids:
            return plans
        wide = plan_column(IDS, "token", "int64", (), self.codec, self.grid)
        return [wide if plan.name == IDS else plan for plan in plans]


@dataclass(slots=True)
class _Rows:
    """The sample table while it grows: bytes and numbers, no object a token."""

    ids: list[bytes] = field(default_factory=list)
    meta: list[bytes] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    n_supervised: list[int] = field(default_factory=list)
    loss_mask_given: list[int] = field(default_factory=list)
    source_index: list[int] = field(default_factory=list)
    content: list[bytes] = field(default_factory=list)
    extra: list[bytes] = field(default_factory=list)
    valid: dict[str, list[int]] = field(default_factory=dict)
    ragged: dict[str, list[int]] = field(default_factory=dict)


class PartWriter:
    """An open part. `add` and `add_hole` from one thread at a time; `finish` once, from any thread.

    `nbytes` are the raw bytes of its states, `table_nbytes` about those of its sample table and holes.
    """

    def __init__(self, store: Store, part: str, settings: PartSettings, pipeline: Pipeline) -> None:
        self.part = part
        self.started = time.monotonic()
        self.holes: dict[str, str] = {}
        self.nbytes = 0
        self.table_nbytes = 0
        self._store = store
        self._settings = settings
        self._written: list[str] = []
        self._committing = False
        self._output = OutputThread()
        self._rows = _Rows(valid={name: [] for name in settings.extras}, ragged=_ragged(settings.extras))
        self._columns = {
            plan.name: ColumnWriter(plan, store, part, pipeline, self._output) for plan in settings.plans()
        }

    @property
    def n_samples(self) -> int:
        """Samples added."""
        return len(self._rows.ids)

    @property
    def ids(self) -> list[bytes]:
        """UTF-8 ids of the samples added, in order."""
        return self._rows.ids

    def check(self) -> None:
        """Raise what the output thread failed with, if it did."""
        self._output.check()

    def add(self, sample: Sample, content: bytes, source_index: int, extras: Mapping[str, ExtraValue]) -> None:
        """Copy a sample into the part; returns before disk I/O, blocks only while the queue is full.

        Raises
        ------
        StorageError
            An earlier write failed.
        """
        self._output.check()
        self._columns[STATES].append(sample.layers)
        self._columns[IDS].append([sample.input_ids])
        self._columns[MASK].append([sample.loss_mask])
        for name, value in extras.items():
            self._columns[name].append([value.rows])
            self._rows.valid[name].append(value.valid)
            if name in self._rows.ragged:
                self._rows.ragged[name].append(len(value.rows))
        rows = self._rows
        rows.ids.append(sample.sample_id.encode())
        rows.meta.append(sample.meta)
        rows.lengths.append(sample.n_tokens)
        rows.n_supervised.append(int(sample.loss_mask.sum()))
        rows.loss_mask_given.append(sample.loss_mask_given)
        rows.source_index.append(source_index)
        rows.content.append(content)
        rows.extra.append(digest_extras(sample.meta, self._settings.extras, extras))
        self.nbytes += sum(layer.nbytes for layer in sample.layers)
        self.table_nbytes += len(rows.ids[-1]) + len(sample.meta) + _TABLE_ROW_NBYTES

    def add_hole(self, sample_id: str, reason: str) -> None:
        """Record a sample that failed."""
        self.holes[sample_id] = reason
        # Manifests have a lower cap than indexes, one of values too, and JSON takes up to six bytes a character.
        self.table_nbytes += 128 * (len(sample_id.encode()) + len(reason.encode()) + _TABLE_ROW_NBYTES)

    def flush(self) -> None:
        """Hand over all rows that were added; `finish` then starts no thread, which it may not do at exit."""
        for column in self._columns.values():
            column.flush()

    def finish(self, replaces: Mapping[str, str] | None = None, check: Check | None = None) -> PartManifest:
        """Make the part durable and commit it.

        Parameters
        ----------
        replaces
            Name to manifest digest of the parts that this one supersedes.
        check
            Called with the manifest once all its files are durable; nothing is committed if it raises.

        Returns
        -------
        PartManifest
            As committed.

        Raises
        ------
        StorageError
            Something could not be written; nothing of the part is committed.
        """
        try:
            return self._commit(replaces or {}, check)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Commit nothing, and remove what was written as far as the storage lets us.

        Once the manifest may be there nothing is removed: a failure at that point does not say whether it is.
        """
        with suppress(BaseException):
            self._output.finish()
        for column in self._columns.values():
            with suppress(HsfmtError):
                column.abort()
        if self._committing or self._may_be_committed():
            return
        shards = [entry.path for column in self._columns.values() for entry in column.files]
        for path in [*shards, *self._written]:
            with suppress(HsfmtError):
                self._store.remove(path)

    def _may_be_committed(self) -> bool:
        """Say whether the files may be another attempt's that was first: a part that is rewritten has a given name."""
        try:
            return self._store.size(layout.manifest_path(self.part)) is not None
        except HsfmtError:
            return True

    def _commit(self, replaces: Mapping[str, str], check: Check | None) -> PartManifest:
        manifest = self._write_files(replaces) if self.n_samples else self._manifest({}, [], replaces)
        for entry in manifest.files:
            size = self._store.size(entry.path)
            if size != entry.nbytes:
                raise StorageError.at(entry.path, expected=f"{entry.nbytes} bytes before the commit", got=f"{size}")
        path = layout.manifest_path(self.part)
        data = manifest.to_bytes()
        # What this library could not read back must never count as committed.
        parse_manifest(data, self.part, path)
        if len(data) > MAX_MANIFEST_NBYTES:
            raise FormatError.at(path, expected=f"at most {MAX_MANIFEST_NBYTES} bytes", got=f"{len(data)}")
        if check is not None:
            check(manifest)
        self._committing = True
        if not self._store.create(path, data):
            raise CorruptionError.at(path, expected="no such part", got="a manifest of that name")
        self._store.sync([layout.MANIFESTS])
        return manifest

    def _write_files(self, replaces: Mapping[str, str]) -> PartManifest:
        self.flush()
        self._output.finish()
        columns: dict[str, Column] = {}
        tables: dict[str, npt.NDArray[np.uint64]] = {}
        files: list[FileEntry] = []
        for name, writer in self._columns.items():
            columns[name], tables[name] = writer.finish()
            files += writer.files
        index = self._index(tables).to_bytes(self.part)
        if len(index) > MAX_TABLE_NBYTES:
            where = layout.index_path(self.part)
            raise FormatError.at(where, expected=f"at most {MAX_TABLE_NBYTES} bytes", got=f"{len(index)}")
        for path, data in (*implied_documents(self.part, columns).items(), (layout.index_path(self.part), index)):
            self._written.append(path)
            with self._store.open_object(path) as file:
                file.write(data)
                file.commit()
            files.append(FileEntry(path, len(data), digests.digest(data)))
        self._store.sync(sorted({entry.path.rpartition("/")[0] for entry in files}))
        return self._manifest(columns, files, replaces)

    def _manifest(
        self, columns: dict[str, Column], files: list[FileEntry], replaces: Mapping[str, str]
    ) -> PartManifest:
        rows = self._rows
        return PartManifest(
            part=self.part,
            header=self._settings.header,
            columns=columns,
            files=tuple(sorted(files, key=lambda entry: entry.path)),
            counts=Counts(len(rows.ids), sum(rows.lengths), sum(rows.n_supervised), len(self.holes)),
            holes=self.holes,
            replaces=replaces,
            producer=self._settings.producer,
        )

    def _index(self, tables: dict[str, npt.NDArray[np.uint64]]) -> PartIndex:
        rows = self._rows
        ids, id_offsets = pack_strings(rows.ids)
        meta, meta_offsets = pack_strings(rows.meta)
        return PartIndex(
            token_offsets=_offsets(rows.lengths),
            n_supervised=np.array(rows.n_supervised, np.int64),
            loss_mask_given=np.array(rows.loss_mask_given, np.uint8),
            source_index=np.array(rows.source_index, np.int64),
            ids=ids,
            id_offsets=id_offsets,
            meta=meta,
            meta_offsets=meta_offsets,
            content_digest=_digests(rows.content),
            extra_digest=_digests(rows.extra),
            chunks=tables,
            valid={name: np.array(flags, np.uint8) for name, flags in rows.valid.items()},
            offsets={name: _offsets(lengths) for name, lengths in rows.ragged.items()},
        )


def _ragged(extras: Mapping[str, Extra]) -> dict[str, list[int]]:
    return {name: [] for name, extra in extras.items() if extra.kind == "ragged"}


def _offsets(lengths: list[int]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _digests(values: list[bytes]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(values), np.uint8).reshape(len(values), 16)


def iter_ids(packed: tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]) -> Iterator[str]:
    """Yield the ids of packed byte strings."""
    data, offsets = packed
    for start, stop in pairwise(offsets):
        yield data[start:stop].tobytes().decode()
