"""How many bytes, files, chunks and shards a sealed dataset takes, before one of them is written.

The layout's own arithmetic (rules LAY-4 to LAY-8, TAB-2, MAN-1, SNAP-2): exact to the byte without a codec, where
the ids, the samples' metadata and the producer are known; a codec enters by the ratios that it is said to reach.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import digests, layout, tables
from hsfmt.codecs import CRC_NBYTES
from hsfmt.column_plan import ColumnKind, GridOptions, plan_columns
from hsfmt.columns import CORE_COLUMNS, STATES, Column
from hsfmt.header import Header
from hsfmt.manifest import Counts, FileEntry, PartManifest, expected_paths, implied_documents
from hsfmt.pointer import Pointer
from hsfmt.snapshot import IDS_KIND
from hsfmt.snapshot_builder import snapshot_metadata
from hsfmt.tables import Shaped
from hsfmt.versions import FORMAT
from hsfmt.zarr_metadata import group_document, root_document, shard_index_nbytes

Int64 = npt.NDArray[np.int64]

_PART = layout.new_part_name()
_DIGEST = digests.digest(b"")
_SEALED = "2000-01-01T00:00:00+00:00"
_I32, _I64, _U64, _U8 = (np.dtype(name) for name in ("<i4", "<i8", "<u8", "u1"))


@dataclass(frozen=True, slots=True)
class SizePlan:
    """What a dataset will be, apart from its samples.

    Attributes
    ----------
    header, codec
        What the data means, and how chunks are stored.
    extras
        Further columns: kind, dtype and shape of a row by name. Ragged ones count as empty.
    grid
        Sizes of chunks and shards, where they are not the preferred ones.
    part_nbytes
        Raw bytes of states at which a part ends.
    ratios
        Raw to stored bytes that the codec reaches, by column; 1 where none is given. Without a codec they do not count.
    producer
        What each part's manifest will say of the run.
    attachments
        Entries of dataset-level files (rule SNAP-10).
    """

    header: Header
    codec: str = "zstd"
    extras: Mapping[str, ColumnKind] = field(default_factory=dict)
    grid: GridOptions = field(default_factory=GridOptions)
    part_nbytes: int = 32 << 30
    ratios: Mapping[str, float] = field(default_factory=dict)
    producer: Mapping[str, Any] = field(default_factory=dict)
    attachments: Sequence[Mapping[str, Any]] = ()


@dataclass(slots=True)
class DatasetSize:
    """What a sealed dataset takes.

    Attributes
    ----------
    samples, tokens
        What is in it.
    raw_nbytes, states_nbytes
        Decoded bytes of all columns, and of the states alone.
    stored_nbytes, states_stored_nbytes
        Bytes of all its files, and of the shards of the states.
    parts, files, chunks, shards
        Objects; chunks and shards of all columns.
    """

    samples: int = 0
    tokens: int = 0
    raw_nbytes: int = 0
    states_nbytes: int = 0
    stored_nbytes: int = 0
    states_stored_nbytes: int = 0
    parts: int = 0
    files: int = 0
    chunks: int = 0
    shards: int = 0


@dataclass(frozen=True, slots=True)
class _Samples:
    """Samples in order, int64 [sample] each: tokens, supervised tokens, bytes of the id and of the metadata."""

    n_tokens: Int64
    n_supervised: Int64
    id_nbytes: Int64
    meta_nbytes: Int64

    def totals(self, rows: slice) -> _Totals:
        columns = (self.n_tokens, self.n_supervised, self.id_nbytes, self.meta_nbytes)
        return _Totals(len(self.n_tokens[rows]), *(int(column[rows].sum()) for column in columns))


@dataclass(frozen=True, slots=True)
class _Totals:
    """All of a part that its size depends on: its samples, and sums of what they have."""

    n_samples: int
    n_tokens: int
    n_supervised: int
    id_nbytes: int
    meta_nbytes: int


def dataset_size(
    plan: SizePlan,
    n_tokens: npt.ArrayLike,
    *,
    n_supervised: npt.ArrayLike | None = None,
    id_nbytes: npt.ArrayLike = 24,
    meta_nbytes: npt.ArrayLike = 64,
) -> DatasetSize:
    """Return what the samples take as one writer would store them, parts ending by size alone, sealed once.

    Parameters
    ----------
    plan
        What the dataset will be.
    n_tokens
        Tokens of each sample, int64 [sample].
    n_supervised
        Those with a loss, likewise; by default all.
    id_nbytes, meta_nbytes
        Bytes of each sample's id, and of its metadata's JSON; a number for all of them, or int64 [sample].

    Raises
    ------
    UsageError, FormatError
        The format has no such columns.
    """
    lengths = np.asarray(n_tokens, np.int64).reshape(-1)
    supervised = lengths if n_supervised is None else np.asarray(n_supervised, np.int64)
    texts = [np.broadcast_to(np.asarray(value, np.int64), lengths.shape) for value in (id_nbytes, meta_nbytes)]
    return _size(plan, Counter(_parts(plan, _Samples(lengths, supervised, *texts))))


def even_dataset_size(
    plan: SizePlan, n_samples: int, n_tokens: int, *, id_nbytes: int = 24, meta_nbytes: int = 64
) -> DatasetSize:
    """Return what `dataset_size` does of samples of even lengths, the longer ones first, however many they are.

    Parameters
    ----------
    plan
        What the dataset will be.
    n_samples, n_tokens
        How many samples, and tokens of all of them: at least one each. Lengths differ by one token at most.
    id_nbytes, meta_nbytes
        Bytes of each sample's id, and of its metadata's JSON.

    Raises
    ------
    UsageError, FormatError
        The format has no such columns.
    """
    short, n_long = divmod(n_tokens, n_samples)
    row_nbytes = _row_nbytes(plan)
    parts: Counter[_Totals] = Counter()
    # Long samples of a part that they do not fill.
    left = 0
    for length, n in ((short + 1, n_long), (short, n_samples - n_long)):
        first = 0
        if left:
            room = plan.part_nbytes - left * (short + 1) * row_nbytes
            first = min(n, -(-room // (length * row_nbytes)))
            tokens = left * (short + 1) + first * length
            parts[_Totals(left + first, tokens, tokens, (left + first) * id_nbytes, (left + first) * meta_nbytes)] += 1
        per_part = max(1, -(-plan.part_nbytes // (length * row_nbytes)))
        n_full, left = divmod(n - first, per_part)
        tokens = per_part * length
        if n_full:
            parts[_Totals(per_part, tokens, tokens, per_part * id_nbytes, per_part * meta_nbytes)] += n_full
    if left:
        parts[_Totals(left, left * short, left * short, left * id_nbytes, left * meta_nbytes)] += 1
    return _size(plan, parts)


def _size(plan: SizePlan, parts: Mapping[_Totals, int]) -> DatasetSize:
    """Return the size of a dataset of so many parts of each kind."""
    size = DatasetSize()
    for part, n_parts in parts.items():
        _add_parts(size, plan, part, n_parts)
    n_supervised, id_nbytes = (
        sum(getattr(p, name) * n for p, n in parts.items()) for name in ("n_supervised", "id_nbytes")
    )
    _add_whole(size, plan, n_supervised, id_nbytes)
    return size


def _row_nbytes(plan: SizePlan) -> int:
    """Return the raw bytes of a token's states."""
    plans = plan_columns(plan.header, plan.codec, plan.extras, plan.grid)
    return next(column.column(1).row_nbytes for column in plans if column.name == STATES)


def _parts(plan: SizePlan, samples: _Samples) -> Iterator[_Totals]:
    """Cut the samples as a writer does: a part ends with the sample that fills it."""
    ends = np.cumsum(samples.n_tokens) * _row_nbytes(plan)
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = min(int(np.searchsorted(ends, before + plan.part_nbytes)) + 1, len(ends))
        yield samples.totals(slice(start, stop))
        start = stop


def _add_parts(size: DatasetSize, plan: SizePlan, part: _Totals, n_parts: int) -> None:
    """Add parts that are alike."""
    rows = {"token": part.n_tokens, "sample": part.n_samples, "ragged": 0}
    plans = plan_columns(plan.header, plan.codec, plan.extras, plan.grid)
    columns = {column.name: column.column(rows[column.kind]) for column in plans}
    nbytes = {path: len(data) for path, data in implied_documents(_PART, columns).items()}
    nbytes[layout.index_path(_PART)] = _index_nbytes(columns, part)
    for name, column in columns.items():
        shards = list(_shard_nbytes(column, plan.ratios.get(name, 1.0)))
        folder = layout.column_folder(_PART, name)
        nbytes |= {f"{folder}/{column.shard_key(number)}": n for number, n in enumerate(shards)}
        raw = column.n_rows * column.row_nbytes
        size.raw_nbytes += n_parts * raw
        size.chunks += n_parts * column.n_chunks
        size.shards += n_parts * len(shards)
        if name == STATES:
            size.states_nbytes += n_parts * raw
            size.states_stored_nbytes += n_parts * sum(shards)
    files = tuple(FileEntry(path, nbytes[path], _DIGEST) for path in expected_paths(_PART, columns))
    counts = Counts(part.n_samples, part.n_tokens, part.n_supervised, 0)
    manifest = PartManifest(_PART, plan.header, columns, files, counts, producer=plan.producer)
    size.stored_nbytes += n_parts * (sum(nbytes.values()) + len(manifest.to_bytes()))
    size.files += n_parts * (len(files) + 1)
    size.samples += n_parts * part.n_samples
    size.tokens += n_parts * part.n_tokens
    size.parts += n_parts


def _shard_nbytes(column: Column, ratio: float) -> Iterator[int]:
    """Yield the bytes of each shard: payloads, their checksums, and the index (rule LAY-8)."""
    index = shard_index_nbytes(column)
    for shard in range(column.n_shards):
        first, end = column.shard_chunks(shard)
        payload = (end - first) * column.chunk_nbytes
        if column.codec != "none":
            # Zeros that pad the last chunk take next to nothing.
            n_rows = min(column.shard_rows, column.n_rows - shard * column.shard_rows)
            payload = min(math.ceil(n_rows * column.row_nbytes / ratio), (end - first) * column.max_payload_nbytes)
        yield payload + (end - first) * CRC_NBYTES + index


def _index_nbytes(columns: Mapping[str, Column], part: _Totals) -> int:
    """Return the bytes of a part's index (rule IDX-1)."""
    n = part.n_samples
    shapes: dict[str, Shaped] = {
        "token_offsets": (_I64, (n + 1,)),
        "n_supervised": (_I64, (n,)),
        "loss_mask_given": (_U8, (n,)),
        "source_index": (_I64, (n,)),
        "ids": (_U8, (part.id_nbytes,)),
        "id_offsets": (_I64, (n + 1,)),
        "meta": (_U8, (part.meta_nbytes,)),
        "meta_offsets": (_I64, (n + 1,)),
        "content_digest": (_U8, (n, 16)),
        "extra_digest": (_U8, (n, 16)),
        **{f"chunks.{column.name}": (_U64, (column.n_chunks, 3)) for column in columns.values()},
        **{f"valid.{name}": (_U8, (n,)) for name in columns if name not in CORE_COLUMNS},
        **{f"offsets.{name}": (_I64, (n + 1,)) for name, column in columns.items() if column.kind == "ragged"},
    }
    return tables.serialized_nbytes(shapes, {"format": FORMAT, "kind": "hsfmt.part-index", "part": _PART})


def _add_whole(size: DatasetSize, plan: SizePlan, n_supervised: int, id_nbytes: int) -> None:
    """Add what a dataset has once: the root, and a snapshot of all samples with the pointer to it."""
    n, n_parts = size.samples, size.parts
    ids_shapes: dict[str, Shaped] = {"ids": (_U8, (id_nbytes,)), "id_offsets": (_I64, (n + 1,))}
    ids = tables.serialized_nbytes(ids_shapes, {"format": FORMAT, "kind": IDS_KIND})
    per_sample = dict.fromkeys(("n_tokens", "n_supervised", "part", "row"), (_I32, (n,)))
    none = dict.fromkeys(("shadowed_part", "shadowed_row", "retracted_part", "retracted_row"), (_I32, (0,)))
    shapes: dict[str, Shaped] = {
        "part_names": (_U8, (n_parts * len(_PART),)),
        "part_name_offsets": (_I64, (n_parts + 1,)),
        "part_manifest_nbytes": (_I64, (n_parts,)),
        "part_manifest_digest": (_U8, (n_parts, 16)),
        "part_index_nbytes": (_I64, (n_parts,)),
        "part_index_digest": (_U8, (n_parts, 16)),
        **per_sample,
        "id_hash": (_U64, (n,)),
        **none,
        "shadowed_same": (_U8, (0,)),
    }
    counts = {
        **dict.fromkeys(("holes", "retracted", "shadowed"), 0),
        "parts": n_parts,
        "samples": n,
        "supervised_tokens": n_supervised,
        "tokens": size.tokens,
    }
    metadata = snapshot_metadata(
        plan.header, counts, content_digest=_DIGEST, ids_digest=_DIGEST, ids_nbytes=ids, attachments=plan.attachments
    )
    index = tables.serialized_nbytes(shapes, metadata)
    pointer = Pointer(_DIGEST, index, _SEALED, plan.header, n, size.tokens, _DIGEST)
    documents = (root_document(plan.header), group_document(), pointer.to_bytes())
    attached = [entry["nbytes"] for entry in plan.attachments]
    size.stored_nbytes += ids + index + sum(map(len, documents)) + sum(attached)
    size.files += 2 + len(documents) + len(attached)
