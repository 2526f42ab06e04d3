# ruff: noqa: E501  a case a line
"""Lies about attachments, and in their files."""

import io
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from cases import case
from dataset_forge import Forge, digest


def _attached(change: Callable[[dict[str, Any]], Any]) -> Callable[[Forge], None]:
    return lambda forge: change(forge.snapshot.metadata["attachments"][0])


for _name, _value in {
    "..": "../../secret.npy",
    "absolute": "/etc/passwd",
    "NUL": "a\0.npy",
    "upper": "D2T.npy",
    "empty": "",
    "url": "file://x",
    "null": None,
    "number": 5,
    "long": "a" * 70,
    "list": ["a"],
    "line end": "d2t.npy\n",
}.items():
    case(f"attachment name: {_name}", "attachment entry", _attached(lambda e, v=_value: e.__setitem__("name", v)))  # type: ignore[misc]
for _name, _value in {"..": "xxh3_128:../../..", "short": "xxh3_128:0", "null": None, "list": [], "number": 5}.items():
    case(f"attachment digest: {_name}", "attachment entry", _attached(lambda e, v=_value: e.__setitem__("digest", v)))  # type: ignore[misc]
for _name, _value in {
    "-1": -1,
    "2^40": 2**40,
    "2^63-1": 2**63 - 1,
    "true": True,
    "text": "9",
    "null": None,
    "float": 9.0,
}.items():
    case(f"attachment nbytes: {_name}", "attachment entry", _attached(lambda e, v=_value: e.__setitem__("nbytes", v)))  # type: ignore[misc]
case("attachment nbytes: 1", "attachment", _attached(lambda e: e.__setitem__("nbytes", 1)))
for _name, _value in {
    "null": None,
    "an object": {},
    "a text": "x",
    "of null": [None],
    "of numbers": [5],
    "of texts": ["x"],
    "of lists": [[]],
}.items():
    case(f"attachments: {_name}", "snapshot", lambda f, v=_value: f.snapshot.metadata.__setitem__("attachments", v))  # type: ignore[misc]
case(
    "attachments: of nothing",
    "attachment entry",
    lambda f: f.snapshot.metadata.__setitem__("attachments", [{}]),
)
case(
    "an attachment twice",
    "attachment entry",
    lambda f: f.snapshot.metadata["attachments"].append(f.snapshot.metadata["attachments"][0]),
)


def _npy(header: str, body: bytes = bytes(16), magic: bytes = b"\x93NUMPY\x01\x00") -> bytes:
    text = header.encode("latin-1")
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return magic + struct.pack("<H", len(text)) + text + body


def _pickled() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}], object), allow_pickle=True)
    return stream.getvalue()


_NPY = "{'descr': '%s', 'fortran_order': False, 'shape': %s, }"
for _name, _data in {
    "pickle": _pickled(), "objects": _npy(_NPY % ("|O", "(2,)")), "2^62": _npy(_NPY % ("<i8", f"({2**62},)")), "2^64": _npy(_NPY % ("<i8", f"({2**64},)")), "negative": _npy(_NPY % ("<i8", "(-2,)")),
    "zero of 2^62": _npy(_NPY % ("<i8", f"(0, {2**62}, {2**62})"), b""), "floats": _npy(_NPY % ("<i8", "(2.0,)")), "code": _npy("{'descr': '<i8', 'fortran_order': False, 'shape': __import__('os').getcwd()}"),
    "structure": _npy("{'descr': [('a', '<i8')], 'fortran_order': False, 'shape': (2,)}"), "40 axes": _npy(_NPY % ("<i8", "(" + "1, " * 40 + "2)")), "unicode": _npy(_NPY % ("<U4", "(1,)")), "complex": _npy(_NPY % ("<c16", "(1,)")),
    "void": _npy(_NPY % ("|V16", "(1,)")), "dates": _npy(_NPY % ("<M8[s]", "(2,)")), "short": _npy(_NPY % ("<i8", "(3,)")), "long": _npy(_NPY % ("<i8", "(1,)")), "header of 60000": b"\x93NUMPY\x01\x00\x60\xea" + b" " * 60000,
    "header of 2^32": b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}", "version 3": _npy(_NPY % ("<i8", "(2,)"), magic=b"\x93NUMPY\x03\x00"), "depth": _npy("(" * 5000), "nothing": b"", "magic": b"\x93NUMPY", "zip": b"PK\x03\x04" + bytes(60), "i99": _npy(_NPY % ("<i99", "(2,)")),
}.items():  # fmt: skip

    def _stored(forge: Forge, data: bytes = _data) -> None:
        (entry,) = forge.snapshot.metadata["attachments"]
        entry |= {"digest": digest(data), "nbytes": len(data)}
        path = forge.path / "hsfmt/attachments" / digest(data).partition(":")[2] / entry["name"]
        path.parent.mkdir(parents=True)
        path.write_bytes(data)

    case(f".npy: {_name}", "attachment", _stored)
