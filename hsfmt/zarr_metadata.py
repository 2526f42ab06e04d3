"""Zarr v3 metadata documents: the one module that knows their form.

Spec: rules ZARR-1 to ZARR-6. The zarr.json files of a part are a function of its manifest; readers of this package take
nothing from them, verify compares them byte for byte.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import canonical
from hsfmt.codecs import CRC_NBYTES, crc32c, zarr_codecs
from hsfmt.columns import STATES, Column
from hsfmt.errors import FormatError
from hsfmt.header import Header, parse_header

ATTRIBUTE = "hsfmt"
_ABSENT = np.uint64(2**64 - 1)


def group_document(attributes: dict[str, Any] | None = None) -> bytes:
    """Return the zarr.json of a group."""
    return canonical.dumps({"attributes": attributes or {}, "node_type": "group", "zarr_format": 3})


def root_document(header: Header) -> bytes:
    """Return the root group's zarr.json, which carries the header (rule ZARR-1)."""
    return group_document({ATTRIBUTE: header.to_json()})


def parse_root(data: bytes, where: str) -> Header:
    """Return the header of a root group's zarr.json.

    Raises
    ------
    FormatError
        It is not exactly the document that its header implies.
    """
    document = canonical.loads(data, where)
    attributes = document.get("attributes") if isinstance(document, dict) else None
    if not isinstance(attributes, dict) or ATTRIBUTE not in attributes:
        raise FormatError.at(
            where, expected=f"a Zarr v3 group with the attribute {ATTRIBUTE}", got=repr(document)[:100]
        )
    header = parse_header(attributes[ATTRIBUTE], f"{where}: {ATTRIBUTE}")
    if root_document(header) != data:
        raise FormatError.at(where, expected="the root group's document as its header implies", got="other members")
    return header


def array_document(column: Column) -> bytes:
    """Return the zarr.json of a column's array (rules ZARR-3 to ZARR-5)."""
    sharding = {
        "chunk_shape": list(column.chunk_shape),
        "codecs": zarr_codecs(column.codec, column.dtype.itemsize),
        "index_codecs": [{"configuration": {"endian": "little"}, "name": "bytes"}, {"name": "crc32c"}],
        "index_location": "end",
    }
    return canonical.dumps({
        "attributes": {},
        "chunk_grid": {"configuration": {"chunk_shape": list(column.shard_shape)}, "name": "regular"},
        "chunk_key_encoding": {"configuration": {"separator": "/"}, "name": "default"},
        "codecs": [{"configuration": sharding, "name": "sharding_indexed"}],
        "data_type": column.dtype_name,
        "dimension_names": _dimension_names(column),
        "fill_value": False if column.dtype_name == "bool" else 0,
        "node_type": "array",
        "shape": list(column.shape),
        "zarr_format": 3,
    })  # fmt: skip


def _dimension_names(column: Column) -> list[str | None]:
    if column.name == STATES:
        return ["token", "layer", "hidden"]
    rows = {"token": "token", "sample": "sample", "ragged": f"{column.name}_row"}[column.kind]
    return [rows, *(None for _ in column.shape[1:])]


def shard_index(column: Column, shard: int, chunks: npt.NDArray[np.uint64]) -> bytes:
    """Return the index that ends a shard: offset and nbytes of each inner chunk, and a crc32c (rule LAY-8).

    Parameters
    ----------
    column
        Its shape and grid.
    shard
        Which shard of the column.
    chunks
        The column's chunk table, uint64 [chunk, 3]: offset, payload nbytes, digest.
    """
    entries = np.full((column.chunk_rows_per_shard * column.n_planes, 2), _ABSENT, "<u8")
    first, end = column.shard_chunks(shard)
    entries[: end - first, 0] = chunks[first:end, 0]
    entries[: end - first, 1] = chunks[first:end, 1] + np.uint64(CRC_NBYTES)
    data = entries.tobytes()
    return data + crc32c(data)


def shard_index_nbytes(column: Column) -> int:
    """Return the bytes of a shard's index with its crc32c."""
    return column.chunk_rows_per_shard * column.n_planes * struct.calcsize("<2Q") + CRC_NBYTES
