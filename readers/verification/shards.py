"""Decoding shards for verification: the footer index, every chunk's checksums, its decoding and its padding.

Spec: rules VFY-7 to VFY-9, LAY-8, COD-4. Written against the spec alone: nothing of the writer's or the reader's decode
path is used, only numcodecs, xxhash and crc32c.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import xxhash
from numcodecs import blosc

from hsfmt.columns import Column
from hsfmt.errors import AccessError, CorruptionError, HsfmtError, NotFoundError, StorageError
from hsfmt.layout import column_folder
from hsfmt.readers.verification.objects import BLOCK_NBYTES, file_digest, forget_cached, unstable
from hsfmt.readers.verification.part_context import PartContext

MAX_BLOCK_NBYTES = 4 << 30
_ABSENT = 2**64 - 1
_CRC_NBYTES = 4
_BLOSC_HEADER = struct.Struct("<4B3I")

Block = npt.NDArray[Any]


class ColumnReader:
    """Rows of a column in ascending order, decoded chunk row by chunk row; every fault on the way becomes a finding.

    Parameters
    ----------
    context
        The part; its index has been parsed.
    column
        Which column.
    owned
        The shards that are checked whole: every chunk, the index and the digest. Of the others only those chunks are
        read that are asked for.
    elsewhere
        Where what is wrong with the others goes.
    """

    def __init__(self, context: PartContext, column: Column, owned: range, elsewhere: PartContext) -> None:
        assert context.index is not None
        self._context = context
        self._elsewhere = elsewhere
        self._owned = owned
        per_shard = column.chunk_rows_per_shard
        self._owned_rows = range(owned.start * per_shard, min(owned.stop * per_shard, column.n_chunk_rows))
        self._column = column
        self._table = context.index.chunks[column.name]
        elements = column.chunk_row_nbytes // column.dtype.itemsize
        self._shape = (column.chunk_rows, column.n_planes, elements)
        self._buffer: Block | None = None
        self._scratch = np.empty(0, np.uint8)
        self._row = -1
        self._block: Block | None = None
        self._shard: _Shard | None = None

    def blocks(self, start: int, stop: int) -> Iterator[Block | None]:
        """Yield rows [start, stop) as unsigned patterns [row, plane, element], None where a chunk is damaged.

        A block is valid until the next one is asked for.
        """
        step = self._column.chunk_rows
        while start < stop:
            row = start // step
            self._load(row)
            end = min(stop, (row + 1) * step)
            yield None if self._block is None else self._block[start - row * step : end - row * step]
            start = end

    def finish(self) -> None:
        """Check what lies behind the last row that was asked for."""
        self._load(self._owned_rows.stop - 1 if self._owned_rows else -1)
        self._end_shard()

    def _load(self, row: int) -> None:
        """Decode on to a chunk row: all of the owned shards on the way, of the others none but this."""
        while self._row < row:
            following, owned = self._row + 1, self._owned_rows
            if following not in owned:
                following = min(row, owned.start) if owned and following < owned.start else row
            self._row = following
            self._block = self._decoded(following)

    def _end_shard(self) -> None:
        if self._shard is not None:
            if self._shard.number in self._owned:
                self._shard.finish()
            self._shard.report()
            self._shard = None

    def _decoded(self, row: int) -> Block | None:
        column = self._column
        number = row // column.chunk_rows_per_shard
        if self._shard is None or self._shard.number != number:
            self._end_shard()
            owned = number in self._owned
            self._shard = _Shard(self._context if owned else self._elsewhere, column, number, ahead=owned)
        if column.chunk_nbytes * column.n_planes > MAX_BLOCK_NBYTES:
            got = f"chunk rows of {column.chunk_nbytes * column.n_planes} bytes"
            self._shard.note("too_large", f"at most {MAX_BLOCK_NBYTES} bytes", got, row * column.n_planes)
            return None
        if self._buffer is None:
            self._buffer = np.empty(self._shape, f"<u{column.dtype.itemsize}")
            self._scratch = np.empty(column.chunk_nbytes, np.uint8)
        whole = True
        for plane in range(column.n_planes):
            if self._shard.decode(row * column.n_planes + plane, self._scratch):
                self._buffer[:, plane] = self._scratch.view(self._buffer.dtype).reshape(self._shape[0], self._shape[2])
            else:
                whole = False
        return self._buffer if whole else None


class _Shard:
    """One stored object, read front to back once; several chunks at a time if `ahead`, else a chunk row."""

    def __init__(self, context: PartContext, column: Column, number: int, *, ahead: bool) -> None:
        assert context.index is not None
        self.number = number
        self.path = f"{column_folder(context.manifest.part, column.name)}/{column.shard_key(number)}"
        self._context = context
        self._column = column
        self._table = context.index.chunks[column.name]
        self._ahead = ahead
        self._first, self._end = column.shard_chunks(number)
        self._hasher = xxhash.xxh3_128()
        self._faults: dict[str, list[tuple[str, str, int]]] = {}
        self._window = memoryview(b"")
        self._window_chunks = range(0)

    def note(self, code: str, expected: str, got: str, chunk: int) -> None:
        """Keep a fault of a chunk until the shard ends."""
        self._faults.setdefault(code, []).append((expected, got, chunk))

    def decode(self, chunk: int, out: npt.NDArray[np.uint8]) -> bool:
        """Check a chunk and decode it into `out` uint8 [chunk nbytes]; say whether it is usable."""
        if self.path in self._context.unusable:
            return False
        stored = self._fetch(chunk)
        if stored is None:
            return False
        fault = self._judge(chunk, stored)
        if fault is not None:
            forget_cached(self._context.store, self.path)
            again = self._read(chunk, chunk + 1)
            if again is None:
                return False
            second = self._judge(chunk, again)
            if second is None:
                unstable(self._context.findings, self.path, f"{self._place(chunk)}: {fault[2]}")
            else:
                self.note(*second, chunk)
            stored, fault = again, second
        self._hasher.update(stored)
        if fault is not None and fault[0] == "chunk_digest":
            return False
        problem = _decode(self._column, stored[:-_CRC_NBYTES], out)
        if problem:
            self.note("chunk_decode", f"a chunk of {out.nbytes} bytes", problem, chunk)
            return False
        self._context.counts.chunks += 1
        self._check_padding(chunk, out)
        return True

    def finish(self) -> None:
        """Check the footer and the digest of the whole object."""
        context = self._context
        if self.path not in context.unusable:
            self._check_footer()
        if self.path not in context.unusable and not self._faults:
            self._check_digest()

    def report(self) -> None:
        """Make findings of what was noted."""
        context, findings = self._context, self._context.findings
        for code, faults in self._faults.items():
            expected, got, first = faults[0]
            more = f"; {len(faults) - 1} more chunks of this file likewise" if len(faults) > 1 else ""
            ids = context.sample_ids(sorted({row for *_, chunk in faults for row in self._samples(chunk)}))
            findings.error(code, self.path, expected=expected, got=f"{self._place(first)}: {got}{more}", samples=ids)

    def _place(self, chunk: int) -> str:
        if chunk >= self._end:
            return "index at the end of the shard"
        row, plane = divmod(chunk, self._column.n_planes)
        layer = f", layer axis {plane}" if self._column.n_planes > 1 else ""
        return f"chunk {row}{layer} at byte {int(self._table[chunk, 0])}"

    def _samples(self, chunk: int) -> range:
        step, planes = self._column.chunk_rows, self._column.n_planes
        first, end = (self._first, self._end) if chunk >= self._end else (chunk, chunk + 1)
        return self._context.samples_at(self._column, first // planes * step, ((end - 1) // planes + 1) * step)

    def _fetch(self, chunk: int) -> memoryview | None:
        """Return a chunk's stored bytes, crc32c included, from a window of several chunks read at once."""
        if chunk not in self._window_chunks:
            stop = chunk + 1
            start = int(self._table[chunk, 0])
            end = self._end if self._ahead else (chunk // self._column.n_planes + 1) * self._column.n_planes
            while stop < end and self._stop_offset(stop) - start <= BLOCK_NBYTES:
                stop += 1
            window = self._read(chunk, stop, quiet=stop > chunk + 1)
            if window is None:
                # The file may end inside the window: each chunk alone then tells which are lost.
                return None if stop == chunk + 1 else self._read(chunk, chunk + 1)
            self._window, self._window_chunks = window, range(chunk, stop)
        base = int(self._table[self._window_chunks.start, 0])
        return self._window[int(self._table[chunk, 0]) - base : self._stop_offset(chunk) - base]

    def _stop_offset(self, chunk: int) -> int:
        return int(self._table[chunk, 0]) + int(self._table[chunk, 1]) + _CRC_NBYTES

    def _read(self, first: int, stop: int, *, quiet: bool = False) -> memoryview | None:
        start, end = int(self._table[first, 0]), self._stop_offset(stop - 1)
        return self._read_bytes(start, end - start, first, quiet=quiet)

    def _read_bytes(self, offset: int, nbytes: int, chunk: int, *, quiet: bool = False) -> memoryview | None:
        """Return bytes of the object; None, and a fault of `chunk` unless `quiet`, where they can't be had."""
        buffer = memoryview(bytearray(nbytes))
        try:
            try:
                self._context.store.read_into(self.path, offset, buffer)
            except CorruptionError as error:
                if quiet:
                    return None
                forget_cached(self._context.store, self.path)
                self._context.store.read_into(self.path, offset, buffer)
                unstable(self._context.findings, self.path, f"{self._place(chunk)}: {error.problems[0].got}")
        except CorruptionError as error:
            if not quiet:
                self.note("size", f"{nbytes} bytes", error.problems[0].got, chunk)
            return None
        except AccessError:
            raise
        except HsfmtError as error:
            code = "missing" if isinstance(error, NotFoundError) else "unreadable"
            if quiet and isinstance(error, StorageError):
                return None
            self._context.unusable.add(self.path)
            self.note(code, error.problems[0].expected, error.problems[0].got, chunk)
            return None
        self._context.advance(nbytes)
        return buffer

    def _judge(self, chunk: int, stored: memoryview) -> tuple[str, str, str] | None:
        payload = stored[:-_CRC_NBYTES]
        wanted, actual = int(self._table[chunk, 2]), xxhash.xxh3_64_intdigest(payload)
        if actual != wanted:
            return "chunk_digest", f"a chunk of xxh3_64 {wanted:016x}, as the part index says", f"{actual:016x}"
        crc = google_crc32c.value(np.frombuffer(payload, np.uint8))
        if bytes(stored[-_CRC_NBYTES:]) != struct.pack("<I", crc):
            return "chunk_crc", f"crc32c {crc:08x} behind the chunk", bytes(stored[-_CRC_NBYTES:])[::-1].hex()
        return None

    def _check_padding(self, chunk: int, out: npt.NDArray[np.uint8]) -> None:
        column = self._column
        inside = column.n_rows - chunk // column.n_planes * column.chunk_rows
        if inside < column.chunk_rows and out[inside * column.chunk_row_nbytes :].any():
            self.note("padding", f"zeros behind row {column.n_rows}", "other bytes", chunk)

    def _check_footer(self) -> None:
        offset = self._stop_offset(self._end - 1)
        slots = self._column.chunk_rows_per_shard * self._column.n_planes
        nbytes = 16 * slots + _CRC_NBYTES
        entry = self._context.entry(self.path)
        if offset + nbytes != entry.nbytes:
            expected = f"{offset} bytes of chunks and an index of {nbytes}"
            self.note("shard_index", expected, f"a file of {entry.nbytes} bytes in the manifest", self._end)
            return
        for second in (False, True):
            stored = self._read_bytes(offset, nbytes, self._end)
            if stored is None:
                return
            fault = self._judge_footer(stored, slots)
            if fault is not None and not second:
                forget_cached(self._context.store, self.path)
            if fault is None:
                self._hasher.update(stored)
                if second:
                    unstable(self._context.findings, self.path, "other bytes in the shard's index at first")
                return
        assert fault is not None
        self.note("shard_index", *fault, self._end)

    def _judge_footer(self, stored: memoryview, slots: int) -> tuple[str, str] | None:
        crc = struct.pack("<I", google_crc32c.value(np.frombuffer(stored[:-_CRC_NBYTES], np.uint8)))
        if bytes(stored[-_CRC_NBYTES:]) != crc:
            return f"crc32c {crc[::-1].hex()}", bytes(stored[-_CRC_NBYTES:])[::-1].hex()
        entries = np.frombuffer(stored[:-_CRC_NBYTES], "<u8").reshape(slots, 2)
        table = self._table[self._first : self._end]
        present = len(table)
        wrong = np.flatnonzero(
            (entries[:present, 0] != table[:, 0]) | (entries[:present, 1] != table[:, 1] + np.uint64(_CRC_NBYTES))
        )
        if len(wrong):
            i = int(wrong[0])
            expected = (
                f"chunk {i} at byte {table[i, 0]}, {int(table[i, 1]) + _CRC_NBYTES} bytes, as the part index says"
            )
            return expected, f"byte {entries[i, 0]}, {entries[i, 1]} bytes ({len(wrong)} entries differ)"
        if np.any(entries[present:] != np.uint64(_ABSENT)):
            return "absent entries (2^64-1) for chunks beyond the shape", "other entries"
        return None

    def _check_digest(self) -> None:
        entry = self._context.entry(self.path)
        actual = f"xxh3_128:{self._hasher.hexdigest()}"
        if actual == entry.digest:
            self._context.counts.nbytes += entry.nbytes
            return
        forget_cached(self._context.store, self.path)
        actual = file_digest(self._context.store, self.path, entry.nbytes, lambda _: None)
        if actual == entry.digest:
            unstable(self._context.findings, self.path, "another digest at first")
        else:
            self.note("digest", f"digest {entry.digest}", actual, self._end)


def _decode(column: Column, payload: memoryview, out: npt.NDArray[np.uint8]) -> str:
    """Decode into `out`; return what is wrong, or ""."""
    if column.codec == "none":
        if len(payload) != out.nbytes:
            return f"{len(payload)} bytes"
        out[:] = np.frombuffer(payload, np.uint8)
        return ""
    if len(payload) < _BLOSC_HEADER.size:
        return f"{len(payload)} bytes, less than a Blosc header"
    *_, typesize, nbytes, blocksize, cbytes = _BLOSC_HEADER.unpack_from(payload)
    if nbytes != out.nbytes or cbytes != len(payload) or blocksize > nbytes:
        return f"a Blosc frame of {cbytes} bytes for {nbytes}, blocks of {blocksize}, in {len(payload)} stored bytes"
    if typesize != column.dtype.itemsize:
        return f"a Blosc frame of {typesize}-byte elements"
    try:
        blosc.decompress(payload, out)
    except (RuntimeError, ValueError) as error:
        return f"a Blosc frame that does not decode: {error}"
    return ""
