"""Table files: section 11."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .documents import parse_json
from .refusal import Refused, need

Array = npt.NDArray[Any]
TENSOR_TYPES = {"I32": "<i4", "I64": "<i8", "U64": "<u8", "U8": "u1"}
MIB, GIB = 1 << 20, 1 << 30


@dataclass
class Table:
    """A parsed file: its tensors by name and its metadata."""

    what: str
    tensors: dict[str, Array]
    metadata: dict[str, Any]

    def take(self, name: str, kind: str, *shape: int | None) -> Array:
        """Return a tensor of that dtype and shape (None: any length)."""
        array = self.tensors.get(name)
        good = array is not None and array.dtype == np.dtype(TENSOR_TYPES[kind]) and array.ndim == len(shape)
        need(good, "TAB-3", f"{self.what}: {name}")
        assert array is not None
        need(all(n in (None, m) for n, m in zip(shape, array.shape, strict=True)), "TAB-3", f"{self.what}: {name}")
        return array

    def offsets(self, name: str, n: int | None, total: int, *, rule: str = "TAB-4", strict: bool = False) -> list[int]:
        """Return offsets that end at `total`."""
        array = self.take(name, "I64", None if n is None else n + 1)
        need(len(array) and array[0] == 0 and array[-1] == total, "TAB-4", f"{self.what}: ends of {name}")
        steps = np.diff(array)
        need(np.all(steps >= 0), "TAB-4", f"{self.what}: {name} falls")
        need(not strict or np.all(steps > 0), rule, f"{self.what}: {name} has empty entries")
        result: list[int] = array.tolist()
        return result


def parse_table(data: bytes, kind: str, what: str) -> Table:
    need(len(data) <= GIB, "READ-1", f"{what}: size")
    need(len(data) >= 8, "TAB-1", f"{what}: short")
    (size,) = struct.unpack_from("<Q", data)
    need(size <= min(len(data) - 8, MIB), "TAB-1", f"{what}: header of {size} bytes")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(pairs)) == len(pairs), "TAB-1", f"{what}: duplicate name")
        return dict(pairs)

    try:
        header = json.loads(data[8 : 8 + size].decode(), object_pairs_hook=unique)
        inner = header.pop("__metadata__")["hsfmt"].encode()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused("TAB-5", f"{what}: {error!r}") from None
    try:
        metadata = parse_json(inner, what)
    except Refused as error:
        raise Refused("TAB-5", str(error)) from None
    tensors, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        need(entry["dtype"] in TENSOR_TYPES, "TAB-3", f"{what}: {name} {entry['dtype']}")
        item = np.dtype(TENSOR_TYPES[entry["dtype"]])
        need(start == end and stop - start == math.prod(entry["shape"]) * item.itemsize, "TAB-1", f"{what}: {name}")
        need(8 + size + stop <= len(data), "TAB-1", f"{what}: {name} beyond the end")
        tensors[name] = np.frombuffer(data[8 + size + start : 8 + size + stop], item).reshape(entry["shape"])
        end = stop
    need(8 + size + end == len(data), "TAB-1", f"{what}: bytes behind the last tensor")
    good = isinstance(metadata, dict) and isinstance(metadata.get("format"), str)
    need(good, "TAB-5", f"{what}: metadata")
    need(metadata.get("kind") == kind, "IDX-1", f"{what}: kind {metadata.get('kind')}")
    return Table(what, tensors, metadata)
