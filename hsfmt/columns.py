"""Columns: the arrays of a part, their chunk grids and where each chunk lies.

Spec: rules COL-1 to COL-8 and LAY-4 to LAY-8. Pure arithmetic on shapes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from hsfmt.codecs import check_codec, max_payload_nbytes
from hsfmt.dtypes import DType, dtype
from hsfmt.errors import FormatError, Problem

KINDS = ("token", "sample", "ragged")
STATES, IDS, MASK = "hidden_states", "input_ids", "loss_mask"
CORE_COLUMNS = (STATES, IDS, MASK)
NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,63}")

MAX_ROWS = 1 << 40
MAX_RANK = 8
MAX_CHUNK_NBYTES = 64 << 20
MAX_SHARD_NBYTES = 4 << 30
MAX_SHARD_CHUNK_ROWS = 4096
_MIB = 1 << 20
_BLOCK = 512 << 10


@dataclass(frozen=True, slots=True)
class Column:
    """One array of a part.

    Attributes
    ----------
    name, kind
        Kind "token": a row a token; "sample": a row a sample; "ragged": rows by own offsets.
    dtype_name
        Zarr data type.
    shape
        [rows, ...]; `hidden_states` is [token, layer, hidden].
    chunk_rows, shard_rows
        Rows of an inner chunk and of a shard; a shard is a whole number of chunks.
    codec
        Name in the closed set.
    """

    name: str
    kind: str
    dtype_name: str
    shape: tuple[int, ...]
    chunk_rows: int
    shard_rows: int
    codec: str

    @property
    def dtype(self) -> DType:
        """Element type."""
        return dtype(self.dtype_name)

    @property
    def n_rows(self) -> int:
        """Length of the first axis."""
        return self.shape[0]

    def declaration(self) -> dict[str, Any]:
        """Return `kind`, `dtype` and `shape` of a row, as a writer declares an extra column."""
        return {"dtype": self.dtype_name, "kind": self.kind, "shape": list(self.shape[1:])}

    @property
    def n_planes(self) -> int:
        """Chunks side by side in one chunk row: the layers for `hidden_states`, else 1."""
        return self.shape[1] if self.name == STATES else 1

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of an inner chunk."""
        trailing = (1, *self.shape[2:]) if self.name == STATES else self.shape[1:]
        return (self.chunk_rows, *trailing)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of a shard."""
        return (self.shard_rows, *self.shape[1:])

    @property
    def chunk_nbytes(self) -> int:
        """Decoded bytes of a chunk; the last chunk of a part is padded to it with zeros."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    @property
    def chunk_row_nbytes(self) -> int:
        """Decoded bytes that one row takes within one chunk."""
        return self.chunk_nbytes // self.chunk_rows

    @property
    def row_nbytes(self) -> int:
        """Decoded bytes of one row over all planes."""
        return self.chunk_row_nbytes * self.n_planes

    @property
    def n_chunk_rows(self) -> int:
        """Chunk rows that hold data."""
        return -(-self.n_rows // self.chunk_rows)

    @property
    def n_chunks(self) -> int:
        """Chunks that exist: the length of the column's chunk table."""
        return self.n_chunk_rows * self.n_planes

    @property
    def chunk_rows_per_shard(self) -> int:
        """Chunk rows of a full shard."""
        return self.shard_rows // self.chunk_rows

    @property
    def n_shards(self) -> int:
        """Shard objects."""
        return -(-self.n_chunk_rows // self.chunk_rows_per_shard)

    @property
    def max_payload_nbytes(self) -> int:
        """Most bytes that an encoded chunk can take."""
        return max_payload_nbytes(self.codec, self.chunk_nbytes)

    def shard_chunks(self, shard: int) -> tuple[int, int]:
        """Return the range [first, end) of chunk-table rows that lie in a shard."""
        per_shard = self.chunk_rows_per_shard * self.n_planes
        return shard * per_shard, min((shard + 1) * per_shard, self.n_chunks)

    def shard_key(self, shard: int) -> str:
        """Return the key of a shard below the array's folder."""
        return "c/" + "/".join([str(shard), *("0" for _ in self.shape[1:])])

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's entry of the column."""
        return {
            "chunk_shape": list(self.chunk_shape),
            "codec": self.codec,
            "dtype": self.dtype_name,
            "kind": self.kind,
            "shape": list(self.shape),
            "shard_shape": list(self.shard_shape),
        }


def parse_column(name: str, document: Any, where: str) -> Column:
    """Return the column of a manifest's entry, with every size within its cap.

    Raises
    ------
    FormatError
        All problems at once.
    """
    if not isinstance(document, dict):
        raise FormatError.at(where, expected="an object", got=type(document).__name__)
    shapes = [_shape(document.get(key)) for key in ("shape", "chunk_shape", "shard_shape")]
    shape, chunk, shard = shapes
    if not NAME_PATTERN.fullmatch(name) or document.get("kind") not in KINDS:
        got = f"{name!r}, {document.get('kind')!r}"[:100]
        raise FormatError.at(where, expected=f"a name of {NAME_PATTERN.pattern} and a kind of {KINDS}", got=got)
    element = dtype(document.get("dtype", ""), f"{where}: dtype")
    codec = check_codec(document.get("codec"), f"{where}: codec")
    if shape is None or chunk is None or shard is None or not len(shape) == len(chunk) == len(shard):
        raise FormatError.at(where, expected="shape, chunk_shape and shard_shape of one rank", got=repr(document)[:200])
    problems = [
        Problem(where, expected, f"shape {shape}, chunk {chunk}, shard {shard}")
        for expected in _faults((name, document["kind"]), shape, chunk, shard, element)
    ]
    if problems:
        raise FormatError(problems)
    return Column(name, document["kind"], element.name, shape, chunk[0], shard[0], codec)


def _faults(
    column: tuple[str, str], shape: tuple[int, ...], chunk: tuple[int, ...], shard: tuple[int, ...], element: DType
) -> list[str]:
    faults = []
    name, kind = column
    trailing = (1, *shape[2:]) if name == STATES else shape[1:]
    if name == STATES and len(shape) != 3:
        return ["[token, layer, hidden]"]
    # A part whose samples all have null or no rows in a ragged column keeps the column, without any row.
    if any(n < 1 for n in shape[1:]) or (shape[0] < 1 and kind != "ragged"):
        faults.append(f"axes of 1 to {MAX_ROWS}")
    if chunk[1:] != trailing or chunk[0] < 1:
        faults.append(f"chunks of [rows, {', '.join(map(str, trailing))}]")
    elif math.prod(chunk) * element.itemsize > MAX_CHUNK_NBYTES:
        faults.append(f"chunks of at most {MAX_CHUNK_NBYTES} bytes")
    if shard[1:] != shape[1:] or shard[0] < 1 or (chunk[0] > 0 and shard[0] % chunk[0]):
        faults.append("shards of a whole number of chunks over all trailing axes")
    elif chunk[0] > 0 and shard[0] // chunk[0] > MAX_SHARD_CHUNK_ROWS:
        faults.append(f"shards of at most {MAX_SHARD_CHUNK_ROWS} chunk rows")
    elif math.prod(shard) * element.itemsize > MAX_SHARD_NBYTES and shard[0] != chunk[0]:
        faults.append(f"shards of at most {MAX_SHARD_NBYTES} bytes raw")
    return faults


def _shape(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_RANK:
        return None
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= MAX_ROWS for n in value):
        return None
    return tuple(value)


def state_chunk_rows(hidden_size: int, itemsize: int) -> int:
    """Return the tokens that a writer puts into a chunk of `hidden_states` (rule LAY-5).

    A whole number of 512 KiB blocks between 1 and 4 MiB, of those the token count nearest 256; where there is none, the
    power of two nearest 3 MiB.
    """
    row = hidden_size * itemsize
    step = math.lcm(row, _BLOCK) // row
    whole = range(step * -(-_MIB // (step * row)), 4 * _MIB // row + 1, step)
    if whole:
        return min(whole, key=lambda rows: (abs(rows - 256), rows))
    powers = [1 << k for k in range(23) if (1 << k) * row <= MAX_CHUNK_NBYTES] or [1]
    return min(powers, key=lambda rows: abs(rows * row - 3 * _MIB))


def column_chunk_rows(row_nbytes: int) -> int:
    """Return the rows of a chunk of any other column: the power of two that fills 64 KiB (narrow rows) or 1 MiB."""
    target = (64 << 10) if row_nbytes <= 64 else _MIB
    return 1 << max(0, (target // max(row_nbytes, 1)).bit_length() - 1)


def max_shard_rows(chunk_rows: int, row_nbytes: int) -> int:
    """Return the most rows of a shard: 4 GiB raw, and no more chunk rows than keep its index small (rule LAY-6)."""
    by_size = MAX_SHARD_NBYTES // (chunk_rows * row_nbytes)
    return chunk_rows * max(1, min(by_size, MAX_SHARD_CHUNK_ROWS))


def fitted_shard_rows(n_rows: int, chunk_rows: int, row_nbytes: int) -> int:
    """Return the rows of a shard for a column of `n_rows`: no larger than a column of one shard needs (rule LAY-6)."""
    needed = max(1, -(-n_rows // chunk_rows)) * chunk_rows
    return min(needed, max_shard_rows(chunk_rows, row_nbytes))
