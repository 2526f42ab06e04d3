"""The container of index and snapshot files: safetensors, written one way and parsed strictly without copies.

Spec: rules TAB-1 to TAB-5. Our own few lines, since the library gives no access to the metadata of bytes in memory,
copies every tensor, and does not promise the same bytes for the same content.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import canonical
from hsfmt.errors import CorruptionError, HsfmtError

MAX_TABLE_NBYTES = 1 << 30
_MAX_HEADER_NBYTES = 1 << 20
_MAX_RANK = 8
_METADATA = "__metadata__"
_KEY = "hsfmt"
_DTYPES: dict[str, np.dtype[Any]] = {
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
    "U8": np.dtype("u1"),
}
_NAMES = {value: key for key, value in _DTYPES.items()}

Array = npt.NDArray[Any]
Shaped = tuple[np.dtype[Any], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Table:
    """Named arrays and one JSON document.

    Attributes
    ----------
    arrays
        Read-only views of the file's bytes.
    metadata
        The document under `__metadata__.hsfmt`.
    """

    arrays: Mapping[str, Array]
    metadata: dict[str, Any]


def serialize(arrays: Mapping[str, Array], metadata: dict[str, Any]) -> bytes:
    """Return the file: tensors in name order, dense, header padded with spaces to a multiple of 8 (rule TAB-2)."""
    text, order = _header({name: (array.dtype, array.shape) for name, array in arrays.items()}, metadata)
    blobs = [np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data for name in order]
    return b"".join([struct.pack("<Q", len(text)), text, *blobs])


def serialized_nbytes(shapes: Mapping[str, Shaped], metadata: dict[str, Any]) -> int:
    """Return the bytes of the file of arrays of these dtypes and shapes, as `serialize` would write it."""
    text, _ = _header(shapes, metadata)
    return 8 + len(text) + sum(map(_nbytes, shapes.values()))


def _header(shapes: Mapping[str, Shaped], metadata: dict[str, Any]) -> tuple[bytes, list[str]]:
    """Return the header and the names in the order of the tensors."""
    header: dict[str, Any] = {_METADATA: {_KEY: canonical.dumps(metadata).decode()}}
    # Wide types first keeps every tensor aligned to its item size without gaps.
    order = sorted(shapes, key=lambda key: (-shapes[key][0].itemsize, key))
    offset = 0
    for name in order:
        dtype, shape = shapes[name]
        end = offset + _nbytes(shapes[name])
        header[name] = {
            "dtype": _NAMES[dtype.newbyteorder("<") if dtype.itemsize > 1 else dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 8), order


def _nbytes(shaped: Shaped) -> int:
    dtype, shape = shaped
    return dtype.itemsize * math.prod(shape)


def parse(data: bytes, where: str) -> Table:
    """Parse a file whose digest the caller has compared.

    Raises
    ------
    CorruptionError
        Sizes, offsets, dtypes or shapes are not exactly those of a dense safetensors file (rules TAB-1, TAB-3).
    """
    try:
        return _parse(data, where)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, OverflowError, struct.error) as error:
        if isinstance(error, HsfmtError):
            raise CorruptionError(error.problems) from None
        got = f"{type(error).__name__}: {error}"[:200]
        raise CorruptionError.at(where, expected="a dense safetensors file of the format", got=got) from None


def _parse(data: bytes, where: str) -> Table:
    if len(data) < 8:
        raise ValueError(f"{len(data)} bytes")
    (size,) = struct.unpack_from("<Q", data)
    if size > min(len(data) - 8, _MAX_HEADER_NBYTES):
        raise ValueError(f"header of {size} bytes in a file of {len(data)}")
    text = data[8 : 8 + size]
    canonical.check_n_values(text, where)
    header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    document = canonical.loads(header.pop(_METADATA)[_KEY].encode(), f"{where}: __metadata__")
    if not isinstance(document, dict):
        raise TypeError(f"metadata of type {type(document).__name__}")
    arrays: dict[str, Array] = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        kind = _DTYPES[entry["dtype"]]
        shape = entry["shape"]
        # Bounded before they are multiplied: the product of a million large numbers would take hours.
        if not isinstance(shape, list) or len(shape) > _MAX_RANK:
            raise ValueError(f"{name} has more than {_MAX_RANK} axes")
        if start != end or any(type(n) is not int or not 0 <= n < 2**63 for n in (start, stop, *shape)):
            raise ValueError(f"{name} lies at {start}, not {end}")
        if stop - start != math.prod(shape) * kind.itemsize or 8 + size + stop > len(data):
            raise ValueError(f"{name} has {stop - start} bytes for {shape} {entry['dtype']}")
        arrays[name] = np.frombuffer(data, kind, math.prod(shape), 8 + size + start).reshape(shape)
        end = stop
    if 8 + size + end != len(data):
        raise ValueError(f"{len(data) - 8 - size - end} bytes behind the last tensor")
    return Table(arrays, document)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    return result


def take(table: Table, name: str, dtype: str, shape: tuple[int | None, ...], where: str) -> Array:
    """Return a tensor that must be there with that dtype ("I64", …) and shape (None: any length).

    Raises
    ------
    CorruptionError
        It is missing or other.
    """
    array = table.arrays.get(name)
    good = array is not None and array.dtype == _DTYPES[dtype] and array.ndim == len(shape)
    if array is None or not good or any(n not in (None, m) for n, m in zip(shape, array.shape, strict=True)):
        got = "nothing" if array is None else f"{array.dtype} {array.shape}"
        raise CorruptionError.at(f"{where}: {name}", expected=f"{dtype} {shape}", got=got)
    return array


def pack_strings(values: list[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return (bytes uint8 [total], offsets int64 [n + 1]) of byte strings."""
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    return np.frombuffer(b"".join(values), np.uint8), offsets


def check_ids(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], max_nbytes: int, where: str) -> None:
    """Refuse ids that are not UTF-8, or longer than `max_nbytes`; the offsets are those that `check_offsets` took.

    Raises
    ------
    CorruptionError
        They are.
    """
    try:
        data.tobytes().decode("utf-8")
        # All of it is text: a slice is, too, unless it starts within a character.
        good = not np.any((data[offsets[:-1]] & 0xC0) == 0x80)
    except UnicodeDecodeError:
        good = False
    if not good:
        raise CorruptionError.at(f"{where}: ids", expected="ids of UTF-8", got="other bytes")
    if len(offsets) > 1 and int(np.diff(offsets).max()) > max_nbytes:
        raise CorruptionError.at(f"{where}: id_offsets", expected=f"at most {max_nbytes} bytes a sample", got="more")


def check_offsets(offsets: npt.NDArray[np.int64], total: int, where: str, *, strict: bool = False) -> None:
    """Refuse offsets that do not rise from 0 to `total` (strictly, where empty entries are not allowed; rule TAB-4).

    Raises
    ------
    CorruptionError
        They do not.
    """
    if not len(offsets):
        raise CorruptionError.at(where, expected=f"offsets rising from 0 to {total}", got="none")
    # Compared, not subtracted: a difference can wrap around to a positive one.
    falls = offsets[1:] <= offsets[:-1] if strict else offsets[1:] < offsets[:-1]
    if offsets[0] != 0 or offsets[-1] != total or np.any(falls):
        got = f"from {offsets[0]} to {offsets[-1]}, falling {int(np.count_nonzero(falls))} times"
        raise CorruptionError.at(where, expected=f"offsets rising from 0 to {total}", got=got)
