# ruff: noqa: E501  a case a line
"""Lies in the headers of tables: shapes, offsets, dtypes, sizes."""

import struct
from collections.abc import Callable
from typing import Any

from cases import MIB, PART, case
from dataset_forge import Forge


def _entry(kind: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Forge], None]:
    def plant(forge: Forge) -> None:
        (forge.indexes[PART] if kind == "index" else forge.snapshot).edit_header = change

    return plant


def _shaped(name: str, shape: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].__setitem__("shape", shape)


def _placed(name: str, offsets: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].__setitem__("data_offsets", offsets)


for _kind, _tensor in (("index", "token_offsets"), ("snapshot", "n_tokens")):
    for _name, _value in {
        "2^40": [2**40], "2^63": [2**63], "2^61": [2**61 + 4], "negative": [-4], "two negative": [-2, -2], "floats": [4.0], "bools": [True], "text": "4",
        "nested": [[4]], "null": None, "100 axes": [1] * 100 + [4], "a million of 2^62": [2**62] * 200_000 + [0], "a million of 1": [1] * MIB, "zero": [0],
        "zero of 2^62": [0, 2**62, 2**62], "4000 digits": [10**4000],
    }.items():  # fmt: skip
        case(f"{_kind} shape: {_name}", _kind, _entry(_kind, _shaped(_tensor, _value)), allowance=64 * MIB)
    for _name, _value in {
        "negative": [-8, 24], "swapped": [32, 0], "2^63": [0, 2**63], "2^64": [2**64, 2**64 + 32], "three": [0, 8, 32], "one": [0], "none": [], "floats": [0.0, 32.0],
        "texts": ["0", "32"], "null": None, "overlapping": [0, 32], "an object": {}, "nested": [[0], [32]],
    }.items():  # fmt: skip
        case(f"{_kind} data_offsets: {_name}", _kind, _entry(_kind, _placed(_tensor, _value)))
    for _name, _value in {
        "F64": "F64",
        "BF16": "BF16",
        "null": None,
        "list": [],
        "object": {},
        "another": "U8",
        "number": 8,
    }.items():
        case(
            f"{_kind} dtype: {_name}", _kind, _entry(_kind, lambda h, t=_tensor, v=_value: h[t].__setitem__("dtype", v))
        )  # type: ignore[misc]
    for _name, _edit in {
        "no metadata": lambda h: h.pop("__metadata__"), "metadata of null": lambda h: h.__setitem__("__metadata__", None), "metadata of a list": lambda h: h.__setitem__("__metadata__", [1]),
        "metadata of numbers": lambda h: h.__setitem__("__metadata__", {"hsfmt": 5}), "an entry of null": lambda h: h.__setitem__("ids", None), "an entry of text": lambda h: h.__setitem__("x", "y"),
        "a tensor less": lambda h, t=_tensor: h.pop(t), "a list": lambda h: [h], "a text": lambda h: "x",
    }.items():  # fmt: skip
        case(f"{_kind} header: {_name}", _kind, _entry(_kind, _edit))
    for _name, _edit2 in {
        "size 2^64-1": lambda d: b"\xff" * 8 + d[8:], "size 2^63": lambda d: struct.pack("<Q", 2**63) + d[8:], "size 0": lambda d: bytes(8) + d[8:], "size of the file": lambda d: struct.pack("<Q", len(d)) + d[8:],
        "7 bytes": lambda d: d[:7], "nothing": lambda d: b"", "a byte more": lambda d: d + b"\0", "a byte less": lambda d: d[:-1], "a gap": lambda d: d[: 8 + int.from_bytes(d[:8], "little")] + bytes(8) + d[8 + int.from_bytes(d[:8], "little") :],
    }.items():  # fmt: skip

        def _bytes(forge: Forge, kind: str = _kind, edit: Callable[[bytes], bytes] = _edit2) -> None:
            (forge.indexes[PART] if kind == "index" else forge.snapshot).edit_bytes = edit

        case(f"{_kind} file: {_name}", _kind, _bytes)
