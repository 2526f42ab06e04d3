"""The part index: which samples a part holds and where every chunk lies.

Spec: rules IDX-1 to IDX-9. A row of a chunk table binds the digest to its place: the table's position implies column,
token chunk and layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import canonical, tables
from hsfmt.codecs import CRC_NBYTES
from hsfmt.columns import Column
from hsfmt.errors import CorruptionError, Problem
from hsfmt.tables import check_ids, check_offsets, take
from hsfmt.versions import FORMAT

Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
UInt64 = npt.NDArray[np.uint64]

MAX_ID_NBYTES = 4096
MAX_META_NBYTES = 1 << 20
MAX_SAMPLE_TOKENS = 2**31 - 1  # a snapshot keeps lengths in 32 bits


@dataclass(frozen=True, slots=True)
class PartIndex:
    """Sample table and chunk tables of one part; arrays are views of the file's bytes.

    Attributes
    ----------
    token_offsets
        int64 [sample + 1]: sample i holds tokens [token_offsets[i], token_offsets[i + 1]).
    n_supervised
        int64 [sample]: tokens whose loss mask is 1.
    loss_mask_given
        uint8 [sample]: 0 where the producer gave no mask and ones are stored.
    source_index
        int64 [sample]: place in the source's order.
    ids, id_offsets
        UTF-8 ids, uint8 [total] and int64 [sample + 1].
    meta, meta_offsets
        A JSON object a sample, likewise.
    content_digest, extra_digest
        uint8 [sample, 16].
    chunks
        Column name to uint64 [chunk, 3]: offset in the shard, payload nbytes without crc32c, xxh3_64 of the payload.
    valid
        Name of an extra column to uint8 [sample]: 0 where the sample has no value.
    offsets
        Name of a ragged column to int64 [sample + 1].
    """

    token_offsets: Int64
    n_supervised: Int64
    loss_mask_given: UInt8
    source_index: Int64
    ids: UInt8
    id_offsets: Int64
    meta: UInt8
    meta_offsets: Int64
    content_digest: UInt8
    extra_digest: UInt8
    chunks: Mapping[str, UInt64]
    valid: Mapping[str, UInt8] = field(default_factory=dict)
    offsets: Mapping[str, Int64] = field(default_factory=dict)

    @property
    def n_samples(self) -> int:
        """Rows of the sample table."""
        return len(self.token_offsets) - 1

    @property
    def lengths(self) -> Int64:
        """Tokens of each sample, int64 [sample]."""
        return np.diff(self.token_offsets)

    def id_bytes(self, row: int) -> bytes:
        """Return the UTF-8 id of a sample."""
        return self.ids[self.id_offsets[row] : self.id_offsets[row + 1]].tobytes()

    def sample_id(self, row: int) -> str:
        """Return the id of a sample."""
        return self.id_bytes(row).decode("utf-8")

    def meta_bytes(self, row: int) -> bytes:
        """Return the metadata object's stored bytes."""
        return self.meta[self.meta_offsets[row] : self.meta_offsets[row + 1]].tobytes()

    def metadata(self, row: int) -> dict[str, Any]:
        """Return the metadata object of a sample.

        Raises
        ------
        FormatError
            The stored bytes are not a JSON object.
        """
        where = f"metadata of {self.sample_id(row)}"
        document: dict[str, Any] = canonical.loads(self.meta_bytes(row), where, metadata=True)
        return document

    def to_bytes(self, part: str) -> bytes:
        """Return the index file of the part (rule IDX-1)."""
        arrays: dict[str, npt.NDArray[Any]] = {name: getattr(self, name) for name in _PLAIN}
        arrays |= {f"chunks.{name}": table for name, table in self.chunks.items()}
        arrays |= {f"valid.{name}": table for name, table in self.valid.items()}
        arrays |= {f"offsets.{name}": table for name, table in self.offsets.items()}
        return tables.serialize(arrays, {"format": FORMAT, "kind": "hsfmt.part-index", "part": part})


_PLAIN = (
    "token_offsets", "n_supervised", "loss_mask_given", "source_index", "ids", "id_offsets", "meta", "meta_offsets",
    "content_digest", "extra_digest",
)  # fmt: skip


def parse_index(data: bytes, part: str, columns: Mapping[str, Column], where: str) -> PartIndex:
    """Parse and check a part index against the part's columns.

    Parameters
    ----------
    data
        The file; the caller has compared its digest.
    part
        The part that it must belong to.
    columns
        The manifest's columns.
    where
        Path of the file.

    Raises
    ------
    CorruptionError
        Any table is missing, of another shape, or contradicts the columns (rules IDX-2 to IDX-9).
    """
    table = tables.parse(data, where)
    if table.metadata.get("kind") != "hsfmt.part-index" or table.metadata.get("part") != part:
        raise CorruptionError.at(where, expected=f"the index of part {part}", got=repr(table.metadata)[:200])
    token_offsets = take(table, "token_offsets", "I64", (None,), where)
    n = len(token_offsets) - 1
    if n < 1:
        raise CorruptionError.at(where, expected="at least one sample", got=f"{len(token_offsets)} token offsets")
    index = PartIndex(
        token_offsets=token_offsets,
        n_supervised=take(table, "n_supervised", "I64", (n,), where),
        loss_mask_given=take(table, "loss_mask_given", "U8", (n,), where),
        source_index=take(table, "source_index", "I64", (n,), where),
        ids=take(table, "ids", "U8", (None,), where),
        id_offsets=take(table, "id_offsets", "I64", (n + 1,), where),
        meta=take(table, "meta", "U8", (None,), where),
        meta_offsets=take(table, "meta_offsets", "I64", (n + 1,), where),
        content_digest=take(table, "content_digest", "U8", (n, 16), where),
        extra_digest=take(table, "extra_digest", "U8", (n, 16), where),
        chunks={c.name: take(table, f"chunks.{c.name}", "U64", (c.n_chunks, 3), where) for c in columns.values()},
        valid={c.name: take(table, f"valid.{c.name}", "U8", (n,), where) for c in _extras(columns)},
        offsets={
            c.name: take(table, f"offsets.{c.name}", "I64", (n + 1,), where)
            for c in columns.values()
            if c.kind == "ragged"
        },
    )  # fmt: skip
    _check(index, columns, where)
    return index


def _extras(columns: Mapping[str, Column]) -> list[Column]:
    return [c for c in columns.values() if c.name not in ("hidden_states", "input_ids", "loss_mask")]


def _check(index: PartIndex, columns: Mapping[str, Column], where: str) -> None:
    check_offsets(index.token_offsets, columns["hidden_states"].n_rows, f"{where}: token_offsets", strict=True)
    check_offsets(index.id_offsets, len(index.ids), f"{where}: id_offsets", strict=True)
    check_offsets(index.meta_offsets, len(index.meta), f"{where}: meta_offsets")
    for name, offsets in index.offsets.items():
        check_offsets(offsets, columns[name].n_rows, f"{where}: offsets.{name}")
    problems: list[Problem] = []
    try:
        check_ids(index.ids, index.id_offsets, MAX_ID_NBYTES, where)
    except CorruptionError as error:
        problems += error.problems
    if int(np.diff(index.meta_offsets).max()) > MAX_META_NBYTES:
        problems.append(Problem(f"{where}: meta_offsets", f"at most {MAX_META_NBYTES} bytes a sample", "more"))
    if int(index.lengths.max()) > MAX_SAMPLE_TOKENS:
        problems.append(Problem(f"{where}: token_offsets", f"at most {MAX_SAMPLE_TOKENS} tokens a sample", "more"))
    if np.any(index.n_supervised < 0) or np.any(index.n_supervised > index.lengths):
        problems.append(Problem(f"{where}: n_supervised", "0 to the sample's tokens", "other"))
    for name, flags in (("loss_mask_given", index.loss_mask_given), *index.valid.items()):
        if np.any(flags > 1):
            problems.append(Problem(f"{where}: {name}", "0 or 1", str(int(flags.max()))))
    for column in columns.values():
        problems += _chunk_problems(column, index.chunks[column.name], f"{where}: chunks.{column.name}")
    if problems:
        raise CorruptionError(problems)


def _chunk_problems(column: Column, chunks: UInt64, where: str) -> list[Problem]:
    """Payloads lie dense and in order in each shard, each within its cap (rules IDX-7, IDX-8)."""
    sizes = chunks[:, 1]
    cap = column.max_payload_nbytes
    least = cap if column.codec == "none" else 1
    if np.any(sizes < np.uint64(least)) or np.any(sizes > np.uint64(cap)):
        return [Problem(where, f"payloads of {least} to {cap} bytes", f"{sizes.min()} to {sizes.max()}")]
    for shard in range(column.n_shards):
        first, end = column.shard_chunks(shard)
        ends = np.cumsum(sizes[first:end] + np.uint64(CRC_NBYTES))
        if chunks[first, 0] != 0 or np.any(chunks[first + 1 : end, 0] != ends[:-1]):
            return [Problem(where, f"chunks dense and in order in shard {shard}", "gaps, overlaps or another order")]
    return []
