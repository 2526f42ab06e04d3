"""Columns of an Arrow stream whose rows are arrays of one shape: lists of lists of numbers, or of numbers.

They may be lists with offsets or of fixed size. The offsets are held to the shape, so that a row's values lie together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hsfmt.errors import SourceError
from hsfmt.readers.sources.file_stamp import FileStamp

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from hsfmt.readers.sources.arrow_stream import Batch, Buffer

_FIXED = -1
_MOST_NBYTES = 1 << 34


@dataclass(frozen=True, slots=True)
class ArrayColumn:
    """A column of arrays.

    Attributes
    ----------
    name
        Of the column.
    node, buffer
        Numbers of its first node and buffer in a batch.
    lists
        For each axis the bytes of an offset, or `_FIXED`.
    dtype
        Of the numbers.
    """

    name: str
    node: int
    buffer: int
    lists: tuple[int, ...]
    dtype: np.dtype[Any]


def array_columns(schema: Any, where: str) -> dict[str, ArrayColumn | None]:
    """The columns by name; None for those that hold something else.

    Raises
    ------
    SourceError
        A type whose buffers can't be counted, so that nothing after it is found; or a name twice.
    """
    try:
        return _columns(schema, where)
    except (UnicodeDecodeError, RecursionError, NotImplementedError) as error:
        raise SourceError.at(where, expected="a sound Arrow schema", got=str(error)[:200]) from error


def _columns(schema: Any, where: str) -> dict[str, ArrayColumn | None]:
    columns: dict[str, ArrayColumn | None] = {}
    node = buffer = 0
    for field in schema:
        if field.name in columns:
            raise SourceError.at(where, expected="columns of different names", got=f"{field.name!r} twice")
        columns[field.name] = _column(field, node, buffer)
        n_nodes, n_buffers = _count(_storage(field.type), where)
        node, buffer = node + n_nodes, buffer + n_buffers
    return columns


def _storage(kind: Any) -> Any:
    """The type below an extension type, which `datasets` registers where it is imported."""
    return getattr(kind, "storage_type", kind)


def _column(field: Any, node: int, buffer: int) -> ArrayColumn | None:
    from pyarrow import types

    kind, lists = _storage(field.type), []
    while types.is_nested(kind):
        if types.is_fixed_size_list(kind):
            lists.append(_FIXED)
        elif types.is_list(kind) or types.is_large_list(kind):
            lists.append(8 if types.is_large_list(kind) else 4)
        else:
            return None
        kind = kind.value_type
    if not (types.is_integer(kind) or types.is_floating(kind)) or not 1 <= len(lists) <= 2:
        return None
    return ArrayColumn(field.name, node, buffer, tuple(lists), np.dtype(kind.to_pandas_dtype()))


def _count(kind: Any, where: str) -> tuple[int, int]:
    """Nodes and buffers of a type."""
    from pyarrow import types

    if types.is_null(kind):
        return 1, 0
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        nodes, buffers = _count(_storage(kind.value_type), where)
        return nodes + 1, buffers + (1 if types.is_fixed_size_list(kind) else 2)
    if types.is_struct(kind):
        counts = [_count(_storage(kind.field(i).type), where) for i in range(kind.num_fields)]
        return 1 + sum(nodes for nodes, _ in counts), 1 + sum(buffers for _, buffers in counts)
    names = types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind)
    if names:
        return 1, 3
    if types.is_primitive(kind):
        return 1, 2
    raise SourceError.at(where, expected="columns of lists, numbers and texts", got=f"one of {kind}"[:200])


def read_row(path: Path, where: str, batch: Batch, column: ArrayColumn, row: int) -> NDArray[Any]:
    """Read a row of a column, [outer] or [outer, inner], into memory of its own.

    Raises
    ------
    SourceError
        Nulls, offsets that lead out of the buffers or make inner lists of different lengths, or the file has changed.
    OSError
        The file can't be read.
    """
    reader = _RowReader(path, f"{where}[{column.name}][{row}]", batch, column)
    with path.open("rb", buffering=0) as file:
        stamp = FileStamp.take(path, where, file.fileno())
        reader.file = file
        array = reader.read(row)
        stamp.check_unchanged()
    return array


class _RowReader:
    file: Any

    def __init__(self, path: Path, where: str, batch: Batch, column: ArrayColumn) -> None:
        self.path, self.where, self.batch, self.column = path, where, batch, column
        n_nodes = len(column.lists) + 1
        self.nodes = batch.nodes[column.node : column.node + n_nodes]
        # A list's buffers are its validity and its offsets, one of fixed size has no offsets.
        self.offsets: list[Buffer | None] = []
        at = column.buffer
        for kind in column.lists:
            self.offsets.append(None if kind == _FIXED else self._buffer(at + 1))
            at += 1 if kind == _FIXED else 2
        self.values = self._buffer(at + 1)
        if len(self.nodes) < n_nodes:
            raise self._refuse("a node for each list and its numbers", f"{len(self.nodes)} nodes")
        if any(nulls for _, nulls in self.nodes):
            raise self._refuse("values", "nulls in this column")
        if self.nodes[0][0] != batch.n_rows:
            raise self._refuse(f"{batch.n_rows} rows in the batch", str(self.nodes[0][0]))

    def read(self, row: int) -> NDArray[Any]:
        """Read the row."""
        start, stop, shape = row, row + 1, []
        for axis, kind in enumerate(self.column.lists):
            start, stop, length = self._children(axis, kind, start, stop)
            shape.append(length)
        itemsize = self.column.dtype.itemsize
        n_values = stop - start
        if n_values * itemsize > _MOST_NBYTES or stop > self.nodes[-1][0]:
            raise self._refuse(f"at most {self.nodes[-1][0]} numbers", f"numbers {start} to {stop}")
        array = np.frombuffer(self._bytes(self.values, start * itemsize, n_values * itemsize), self.column.dtype)
        return array.reshape(shape)

    def _children(self, axis: int, kind: int, start: int, stop: int) -> tuple[int, int, int]:
        """Where the entries of the lists `start` to `stop` begin and end, and how many there are in each."""
        total, children = self.nodes[axis][0], self.nodes[axis + 1][0]
        if stop > total:
            raise self._refuse(f"lists up to {stop}", f"{total}")
        if kind == _FIXED:
            length = children // total if total else 0
            if length * total != children:
                raise self._refuse(f"lists of one size, {total} of them", f"{children} entries")
            return start * length, stop * length, length
        buffer = self.offsets[axis]
        assert buffer is not None
        data = self._bytes(buffer, start * kind, (stop - start + 1) * kind)
        offsets = np.frombuffer(data, f"<i{kind}").astype(np.int64)
        lengths = np.diff(offsets)
        if not len(lengths) or (lengths < 0).any() or offsets[0] < 0 or offsets[-1] > children:
            raise self._refuse(f"offsets within {children} entries, ascending", f"{offsets[:4].tolist()} …")
        if (lengths != lengths[0]).any():
            got = f"lists of {int(lengths.min())} to {int(lengths.max())}"
            raise self._refuse("inner lists of one length", got)
        return int(offsets[0]), int(offsets[-1]), int(lengths[0])

    def _buffer(self, number: int) -> Buffer:
        if number >= len(self.batch.buffers):
            raise self._refuse("a buffer for each list and its numbers", f"{len(self.batch.buffers)} buffers")
        return self.batch.buffers[number]

    def _bytes(self, buffer: Buffer, offset: int, nbytes: int) -> bytearray:
        if offset + nbytes > buffer.nbytes:
            raise self._refuse(f"{nbytes} bytes at {offset} of a buffer", f"a buffer of {buffer.nbytes}")
        data = bytearray(nbytes)
        self.file.seek(buffer.offset + offset)
        view, done = memoryview(data), 0
        while done < nbytes:
            count = self.file.readinto(view[done:])
            if not count:
                raise self._refuse(f"{nbytes} bytes", f"{done}: truncated")
            done += count
        return data

    def _refuse(self, expected: str, got: str) -> SourceError:
        return SourceError.at(self.where, expected=expected, got=got)
