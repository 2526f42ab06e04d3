"""Columns, chunks, shards, codecs and zarr.json: sections 7 to 10."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import xxhash
from numcodecs import blosc

from .documents import canonical
from .refusal import need

Array = npt.NDArray[Any]
MIB, GIB = 1 << 20, 1 << 30
ITEM_NBYTES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "bool": 1, "int8": 1, "int16": 2,
    "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip
ABSENT = (1 << 64) - 1


@dataclass
class Column:
    """A column as the manifest describes it."""

    name: str
    kind: str
    dtype: str
    shape: list[int]
    chunk: list[int]
    shard: list[int]
    codec: str

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return ITEM_NBYTES[self.dtype]

    @property
    def planes(self) -> int:
        """Chunks in a chunk row."""
        return self.shape[1] if self.name == "hidden_states" else 1

    @property
    def n_chunks(self) -> int:
        """Chunks that exist."""
        return -(-self.shape[0] // self.chunk[0]) * self.planes

    @property
    def per_shard(self) -> int:
        """Chunks of a full shard."""
        return self.shard[0] // self.chunk[0] * self.planes

    @property
    def n_shards(self) -> int:
        """Shard objects."""
        return -(-self.n_chunks // self.per_shard)

    def shard_path(self, part: str, i: int) -> str:
        """Return the path of a shard."""
        return "/".join([f"parts/{part}/{self.name}/c", str(i), *("0" for _ in self.shape[1:])])

    def zarr_json(self) -> bytes:
        """Return the array's document (ZARR-3 to ZARR-5)."""
        data_bytes: dict[str, Any] = {"name": "bytes"}
        if self.item > 1:
            data_bytes["configuration"] = {"endian": "little"}
        inner = [data_bytes, {"name": "crc32c"}]
        if self.codec == "zstd":
            shuffle = "shuffle" if self.item > 1 else "noshuffle"
            options = {"blocksize": 524288, "clevel": 1, "cname": "zstd", "shuffle": shuffle, "typesize": self.item}
            inner.insert(1, {"name": "blosc", "configuration": options})
        index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        sharding = {"chunk_shape": self.chunk, "codecs": inner, "index_codecs": index, "index_location": "end"}
        first = {"token": "token", "sample": "sample", "ragged": f"{self.name}_row"}[self.kind]
        names = (
            ["token", "layer", "hidden"] if self.name == "hidden_states" else [first, *(None for _ in self.shape[1:])]
        )
        return canonical({
            "attributes": {}, "node_type": "array", "zarr_format": 3, "shape": self.shape, "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": self.shard}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "dimension_names": names, "fill_value": False if self.dtype == "bool" else 0,
        })  # fmt: skip


def parse_column(name: str, entry: Any, what: str) -> Column:
    need(re.fullmatch(r"[a-z][a-z0-9_]{0,63}", name), "COL-1", f"{what}: {name!r}")
    members = {"kind", "dtype", "shape", "chunk_shape", "shard_shape", "codec"}
    need(isinstance(entry, dict) and members <= set(entry), "MAN-5", f"{what}: members")
    need(entry["kind"] in ("token", "sample", "ragged"), "COL-2", f"{what}: kind")
    need(entry["dtype"] in ITEM_NBYTES, "DT-1", f"{what}: dtype")
    need(entry["codec"] in ("none", "zstd"), "COD-1", f"{what}: codec")
    shapes = [entry[key] for key in ("shape", "chunk_shape", "shard_shape")]
    for shape in shapes:
        good = isinstance(shape, list) and len(shape) == len(shapes[0]) and 0 < len(shape) <= 8
        need(good and all(type(n) is int and 0 <= n <= 1 << 40 for n in shape), "COL-2", f"{what}: {shape}")
    c = Column(name, entry["kind"], entry["dtype"], *shapes, entry["codec"])
    need(all(c.shape[1:]) and (c.shape[0] or c.kind == "ragged"), "COL-2", f"{what}: an axis of 0")
    if name == "hidden_states":
        need(len(c.shape) == 3, "COL-3", f"{what}: rank")
    trailing = [1, *c.shape[2:]] if name == "hidden_states" else c.shape[1:]
    small = math.prod(c.chunk) * c.item <= 64 * MIB
    need(c.chunk[0] > 0 and c.chunk[1:] == trailing and small, "COL-6", f"{what}: chunk {c.chunk}")
    rows = c.shard[0] // c.chunk[0]
    whole = c.shard[0] % c.chunk[0] == 0 and 1 <= rows <= 4096 and c.shard[1:] == c.shape[1:]
    need(whole and (rows == 1 or math.prod(c.shard) * c.item <= 4 * GIB), "COL-7", f"{what}: shard {c.shard}")
    return c


def crc32c(data: bytes) -> bytes:
    return struct.pack("<I", google_crc32c.value(data))


def decode(column: Column, payload: bytes, what: str) -> bytes:
    nbytes = math.prod(column.chunk) * column.item
    if column.codec == "none":
        return payload
    need(len(payload) >= 16, "COD-4", f"{what}: no frame")
    said, block, size = struct.unpack_from("<III", payload, 4)
    need(said == nbytes and size == len(payload) and block <= said, "COD-4", f"{what}: frame header")
    data: bytes = blosc.decompress(payload)
    return data


def load_column(root: Path, part: str, column: Column, table: Array) -> Array:
    """Return the rows of a column as unsigned patterns [row, ...], after comparing every byte of its shards."""
    chunk_nbytes = math.prod(column.chunk) * column.item
    low, high = (chunk_nbytes, chunk_nbytes) if column.codec == "none" else (1, chunk_nbytes + 16)
    need(np.all(table[:, 1] >= 1), "IDX-8", f"{column.name}: empty payload")
    need(np.all(table[:, 1] >= low) and np.all(table[:, 1] <= high), "COD-5", f"{column.name}: payload length")
    item = np.dtype(f"<u{column.item}")
    grid = np.zeros((-(-column.shape[0] // column.chunk[0]), column.planes, *column.chunk), item)
    for shard in range(column.n_shards):
        path = column.shard_path(part, shard)
        need((root / path).is_file(), "READ-4", f"{path}: missing")
        data = (root / path).read_bytes()
        end = 0
        for k in range(shard * column.per_shard, min((shard + 1) * column.per_shard, column.n_chunks)):
            offset, nbytes, expected = (int(n) for n in table[k])
            need(offset == end, "IDX-7", f"{path}: chunk {k} at {offset}, not {end}")
            payload, check = data[offset : offset + nbytes], data[offset + nbytes : offset + nbytes + 4]
            need(len(check) == 4, "READ-4", f"{path}: short")
            need(xxhash.xxh3_64_intdigest(payload) == expected, "READ-3", f"{path}: digest of chunk {k}")
            need(crc32c(payload) == check, "LAY-7", f"{path}: crc32c of chunk {k}")
            plane = np.frombuffer(decode(column, payload, f"{path}: chunk {k}"), item).reshape(column.chunk)
            grid[k // column.planes, k % column.planes] = plane
            end = offset + nbytes + 4
        first = shard * column.per_shard
        rows = [(int(o), int(n) + 4) for o, n, _ in table[first : first + column.per_shard]]
        rows += [(ABSENT, ABSENT)] * (column.per_shard - len(rows))
        index = b"".join(struct.pack("<QQ", *row) for row in rows)
        need(data[end:] == index + crc32c(index), "LAY-8", f"{path}: shard index")
    if column.name == "hidden_states":
        stacked = grid[:, :, :, 0].swapaxes(1, 2)
        stacked = stacked.reshape(-1, *stacked.shape[2:])
    else:
        stacked = grid[:, 0].reshape(-1, *column.chunk[1:])
    need(not stacked[column.shape[0] :].any(), "LAY-7", f"{column.name}: padding is not zero")
    return stacked[: column.shape[0]]
