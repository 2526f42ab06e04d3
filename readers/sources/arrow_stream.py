"""An Arrow IPC stream file of which single rows are read: only their bytes, from where the headers of batches say.

A batch of a Hugging Face dataset holds up to 1000 rows, of hidden states gigabytes: Arrow's own reader, which reads
whole batches, won't do. The headers are flatbuffers, as https://arrow.apache.org/docs/format/Columnar.html has them:
Message{1: type, 2: header, 3: body length}, RecordBatch{0: rows, 1: nodes, 2: buffers, 3: compression} and
Schema{0: endianness}. Every offset is checked before it is used.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hsfmt.errors import SourceError, UsageError
from hsfmt.readers.sources.folder import HEAD_NBYTES, describe_foreign

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

_CONTINUATION = b"\xff\xff\xff\xff"
_END = _CONTINUATION + bytes(4)
_HEADER_NBYTES = 16 << 20
_SCHEMA, _RECORD_BATCH = 1, 3
_TRUNCATED = "copy the dataset again, whole"


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes of a batch: their offset in the file, and their number."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A record batch: its rows, length and null count of each node, and its buffers, both in the schema's order."""

    n_rows: int
    nodes: tuple[tuple[int, int], ...]
    buffers: tuple[Buffer, ...]


def scan_stream(path: Path, where: str) -> tuple[Any, list[Batch]]:
    """Read the schema, and the header of every batch up to the mark that ends the stream; no bodies.

    Raises
    ------
    SourceError
        It is no such stream, truncated, or has compressed batches or other messages.
    UsageError
        There is no pyarrow here, which reads the schema.
    OSError
        The file can't be read.
    """
    with path.open("rb") as file:
        nbytes = file.seek(0, 2)
        file.seek(0)
        foreign = describe_foreign(file.read(HEAD_NBYTES), nbytes)
        if foreign is not None:
            raise SourceError.at(where, expected="an Arrow stream file", got=foreign)
        file.seek(0)
        try:
            return _scan(file, nbytes, where)
        except (struct.error, IndexError, OverflowError) as error:
            got = f"a header that is malformed: {error}"
            raise SourceError.at(where, expected="an Arrow stream file", got=got) from error


def _scan(file: BinaryIO, nbytes: int, where: str) -> tuple[Any, list[Batch]]:
    schema, batches = None, []
    while True:
        start = file.tell()
        mark = file.read(8)
        if mark == _END:
            break
        if len(mark) < 8:
            raise SourceError.at(
                where, expected="the mark that ends an Arrow stream", got="none: truncated", remedy=_TRUNCATED
            )
        (header_nbytes,) = struct.unpack("<i", mark[4:])
        if mark[:4] != _CONTINUATION or not 0 < header_nbytes <= min(_HEADER_NBYTES, nbytes - start - 8):
            got = f"{mark!r} at byte {start}: truncated or no such file"
            raise SourceError.at(where, expected="an Arrow message", got=got, remedy=_TRUNCATED)
        header = file.read(header_nbytes)
        message = _table(header, 0)
        kind, body_nbytes = _scalar(header, message, 1, "B"), _scalar(header, message, 3, "q")
        body = file.tell()
        if not 0 <= body_nbytes <= nbytes - body:
            got = f"{nbytes}: truncated"
            raise SourceError.at(where, expected=f"{body + body_nbytes} bytes", got=got, remedy=_TRUNCATED)
        if schema is None and kind == _SCHEMA:
            if _scalar(header, _reference(header, message, 2), 0, "h"):
                raise SourceError.at(where, expected="little-endian data", got="big-endian data")
            schema = _parse_schema(mark + header, where)
        elif schema is not None and kind == _RECORD_BATCH:
            batches.append(_batch(header, _reference(header, message, 2), body, body_nbytes, where))
        else:
            got = f"a message of type {kind} at byte {start}"
            raise SourceError.at(where, expected="a schema, then record batches", got=got)
        file.seek(body + body_nbytes)
    if schema is None:
        raise SourceError.at(where, expected="a schema, then record batches", got="neither")
    return schema, batches


def _parse_schema(data: bytes, where: str) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.ipc
    except ImportError as error:
        raise UsageError.at(
            "pyarrow", expected="the package, to read Arrow datasets", got="none", remedy="pip install pyarrow"
        ) from error
    try:
        return pa.ipc.read_schema(pa.ipc.read_message(pa.py_buffer(data)))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SourceError.at(where, expected="a sound Arrow schema", got=str(error)[:200]) from error


def _batch(header: bytes, table: int, body: int, body_nbytes: int, where: str) -> Batch:
    if _field(header, table, 3):
        raise SourceError.at(
            where,
            expected="batches that are not compressed, as save_to_disk writes them",
            got="compressed ones",
            remedy="load the dataset and save it again",
        )
    n_rows = _scalar(header, table, 0, "q")
    nodes = tuple(_pairs(header, table, 1))
    buffers = []
    for offset, nbytes in _pairs(header, table, 2):
        if offset < 0 or nbytes < 0 or offset + nbytes > body_nbytes:
            got = f"{nbytes} bytes at {offset}"
            raise SourceError.at(where, expected=f"buffers within a body of {body_nbytes} bytes", got=got)
        buffers.append(Buffer(body + offset, nbytes))
    if n_rows < 0 or any(length < 0 or not 0 <= nulls <= length for length, nulls in nodes):
        raise SourceError.at(where, expected="lengths and null counts from 0 on", got="others")
    return Batch(n_rows, nodes, tuple(buffers))


def _read(data: bytes, at: int, kind: str) -> int:
    if not 0 <= at <= len(data) - struct.calcsize(kind):
        raise IndexError(f"an offset of {at} in {len(data)} bytes")
    value: int = struct.unpack_from(f"<{kind}", data, at)[0]
    return value


def _table(data: bytes, at: int) -> int:
    """Follow the reference at a place."""
    return at + _read(data, at, "I")


def _field(data: bytes, table: int, number: int) -> int:
    """Where a field of a table is; 0 where it is absent."""
    vtable = table - _read(data, table, "i")
    entry = 4 + 2 * number
    if entry + 2 > _read(data, vtable, "H"):
        return 0
    offset = _read(data, vtable + entry, "H")
    return table + offset if offset else 0


def _scalar(data: bytes, table: int, number: int, kind: str) -> int:
    at = _field(data, table, number)
    return _read(data, at, kind) if at else 0


def _reference(data: bytes, table: int, number: int) -> int:
    at = _field(data, table, number)
    if not at:
        raise IndexError(f"no field {number}")
    return _table(data, at)


def _pairs(data: bytes, table: int, number: int) -> list[tuple[int, int]]:
    """A vector of structs of two 64-bit integers."""
    at = _field(data, table, number)
    if not at:
        return []
    start = _table(data, at)
    count = _read(data, start, "I")
    if start + 4 + 16 * count > len(data):
        raise IndexError(f"a vector of {count} in {len(data)} bytes")
    return [(_read(data, start + 4 + 16 * i, "q"), _read(data, start + 12 + 16 * i, "q")) for i in range(count)]
