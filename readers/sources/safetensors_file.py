"""Reading foreign safetensors files: the header is checked in full before any tensor is read.

The bytes are read straight into arrays of their own, not mapped: a file cut short while it is mapped ends the process
with SIGBUS, and a mapping would outlive the call.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from hsfmt.errors import SourceError
from hsfmt.readers.sources.folder import HEAD_NBYTES, describe_foreign

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_HEADER_NBYTES = 16 << 20
_RANK = 8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of the file: dtype, shape, and its offset in the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int


def read_entries(path: Path, where: str) -> dict[str, TensorEntry]:
    """Read and check the header: the tensors must fill the file exactly, without gaps or overlaps.

    Raises
    ------
    SourceError
        The file is empty, truncated, longer than it says, something else, or its header is malformed.
    OSError
        The file can't be read.
    """
    return read_header(path, where)[0]


def read_header(path: Path, where: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Read and check the header, as `read_entries`, and return the strings of its `__metadata__` too.

    Raises
    ------
    SourceError
        The file is empty, truncated, longer than it says, something else, or its header is malformed.
    OSError
        The file can't be read.
    """
    with path.open("rb") as file:
        nbytes = file.seek(0, 2)
        file.seek(0)
        head = file.read(HEAD_NBYTES)
        foreign = describe_foreign(head, nbytes)
        if foreign is not None:
            raise SourceError.at(where, expected="a safetensors file", got=foreign)
        header_nbytes = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else nbytes
        if header_nbytes > min(_HEADER_NBYTES, nbytes - 8):
            raise SourceError.at(
                where,
                expected="a safetensors file",
                got=f"{nbytes} bytes that claim a header of {header_nbytes}: truncated or no safetensors file",
            )
        file.seek(8)
        header = file.read(header_nbytes)
    tensors = _parse_header(header, where)
    metadata = tensors.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise SourceError.at(f"{where}[__metadata__]", expected="an object of strings", got=repr(metadata)[:100])
    return _entries(tensors, 8 + header_nbytes, nbytes, where), metadata


def _parse_header(data: bytes, where: str) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) != len(pairs):
            raise ValueError("a name twice")
        return dict(pairs)

    try:
        header = json.loads(data.decode(), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise SourceError.at(where, expected="a safetensors header in JSON", got=f"{error}") from error
    if not isinstance(header, dict):
        raise SourceError.at(where, expected="a safetensors header: an object", got=type(header).__name__)
    return header


def _entries(header: dict[str, Any], start: int, nbytes: int, where: str) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    extents: list[tuple[int, int]] = []
    for name, value in header.items():
        entry, begin, end = _entry(name, value, start, where)
        entries[name] = entry
        extents.append((begin, end))
    at = 0
    for begin, end in sorted(extents):
        if begin != at:
            raise SourceError.at(where, expected=f"a tensor at data offset {at}", got=f"the next one at {begin}")
        at = end
    if start + at != nbytes:
        got = f"{nbytes}: truncated" if nbytes < start + at else f"{nbytes}: longer than its tensors"
        raise SourceError.at(
            where, expected=f"{start + at} bytes, as the safetensors header says", got=got, remedy="write it again"
        )
    return entries


def _entry(name: str, value: Any, start: int, where: str) -> tuple[TensorEntry, int, int]:
    try:
        dtype, shape, (begin, end) = DTYPES[value["dtype"]], value["shape"], value["data_offsets"]
        numbers = [*shape, begin, end]
        if len(shape) > _RANK or any(type(n) is not int or not 0 <= n < 2**62 for n in numbers):
            raise ValueError(f"shape {shape}, offsets {[begin, end]}")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{end - begin} bytes for {dtype.name} {shape}")
    except (KeyError, TypeError, ValueError) as error:
        got = f"{error!r}" if isinstance(error, KeyError) else str(error)
        raise SourceError.at(
            f"{where}[{name}]", expected="a dtype, shape and data_offsets that agree", got=got
        ) from error
    return TensorEntry(dtype, tuple(shape), start + begin), begin, end


def read_tensor(path: Path, entry: TensorEntry, where: str) -> NDArray[Any]:
    """Read one tensor into an array of its own, C-contiguous.

    Raises
    ------
    SourceError
        The file became shorter since its header was checked.
    OSError
        The file can't be read.
    """
    array = np.empty(entry.shape, dtype=entry.dtype)
    buffer = array.reshape(-1).view(np.uint8).data
    with path.open("rb", buffering=0) as file:
        file.seek(entry.offset)
        done = 0
        while done < len(buffer):
            count = file.readinto(buffer[done:])
            if not count:
                raise SourceError.at(where, expected=f"{len(buffer)} bytes of a tensor", got=f"{done}: truncated")
            done += count
    return array
