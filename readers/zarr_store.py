"""A read-only Zarr store that gives out nothing but checked bytes.

Spec: rules READ-3, READ-4 and ZARR-6. Metadata is made from manifests, shard indexes from chunk tables; a range of a
shard is read in whole chunks, which are compared with their digests. What should exist and does not is an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import xxhash
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from hsfmt import layout
from hsfmt.codecs import CRC_NBYTES, check_blosc_frame, crc32c
from hsfmt.columns import Column
from hsfmt.errors import CorruptionError, NotFoundError
from hsfmt.manifest import implied_documents
from hsfmt.naming import about_dataset
from hsfmt.readers.part_cache import OpenPart
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.zarr_metadata import group_document, root_document, shard_index

_REMEDY = "restore the file from a copy, or run `hsfmt verify --level full` to see all that is damaged"


@dataclass(frozen=True, slots=True)
class _Shard:
    """A shard as the chunk table describes it.

    Attributes
    ----------
    path
        Inside the dataset.
    column
        Whose.
    number
        Which shard of the column.
    table
        The column's chunk table, uint64 [chunk, 3].
    """

    path: str
    column: Column
    number: int
    table: npt.NDArray[np.uint64]

    @property
    def chunks(self) -> npt.NDArray[np.uint64]:
        """The rows of the chunk table that lie in this shard."""
        first, end = self.column.shard_chunks(self.number)
        return self.table[first:end]

    @property
    def chunks_nbytes(self) -> int:
        """Bytes of all chunks with their crc32c: where the index starts."""
        offset, nbytes, _ = self.chunks[-1].tolist()
        return int(offset + nbytes) + CRC_NBYTES


class VerifyingStore(Store):
    """The dataset as zarr-python sees it, read-only.

    Parameters
    ----------
    reader
        Opened on the snapshot.
    parts
        Those whose arrays exist; others do not.
    """

    supports_writes = False
    supports_deletes = False
    supports_partial_writes = False
    supports_listing = True

    def __init__(self, reader: SampleReader, parts: Sequence[OpenPart]) -> None:
        super().__init__(read_only=True)
        self._reader = reader
        self._documents = {layout.ROOT_METADATA: root_document(reader.header), layout.PARTS_METADATA: group_document()}
        self._tables: dict[str, tuple[Column, npt.NDArray[np.uint64]]] = {}
        for part in parts:
            self._documents |= implied_documents(part.name, part.columns)
            for name, column in part.columns.items():
                folder = layout.column_folder(part.name, name)
                self._tables[folder] = (column, part.index.chunks[name])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VerifyingStore) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __str__(self) -> str:
        return f"verifying:{self._reader.store.url}"

    def __repr__(self) -> str:
        return f"VerifyingStore({self._reader.store.url!r}, {self._reader.fingerprint!r})"

    def _identity(self) -> tuple[str, str]:
        return self._reader.store.url, self._reader.fingerprint

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return the bytes of a key that the manifests imply, None for any other.

        Raises
        ------
        CorruptionError
            A shard is missing, short, or not what was committed.
        """
        document = self._documents.get(key)
        if document is not None:
            start, stop = _bounds(byte_range, len(document))
            return prototype.buffer.from_bytes(document[start:stop])
        shard = self._shard(key)
        if shard is None:
            return None
        data = await asyncio.to_thread(self._read_shard, shard, byte_range)
        return prototype.buffer.from_bytes(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return the bytes of many ranges; see `get`."""
        return list(await asyncio.gather(*(self.get(key, prototype, request) for key, request in key_ranges)))

    async def exists(self, key: str) -> bool:
        """Say whether the manifests imply the key."""
        return key in self._documents or self._shard(key) is not None

    async def set(self, key: str, value: Buffer) -> NoReturn:
        """Refuse: committed objects are never changed."""
        del value
        raise PermissionError(f"{key}: this store is read-only; DatasetWriter writes")

    async def delete(self, key: str) -> NoReturn:
        """Refuse: committed objects are never removed."""
        raise PermissionError(f"{key}: this store is read-only")

    async def list(self) -> AsyncIterator[str]:
        """Yield all keys that the manifests imply."""
        for key in self._keys():
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the keys that start with `prefix`."""
        for key in self._keys():
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names directly below `prefix`."""
        stem = f"{prefix.rstrip('/')}/" if prefix else ""
        for name in dict.fromkeys(key[len(stem) :].partition("/")[0] for key in self._keys() if key.startswith(stem)):
            yield name

    def _keys(self) -> Iterable[str]:
        yield from self._documents
        for folder, (column, _) in self._tables.items():
            yield from (f"{folder}/{column.shard_key(shard)}" for shard in range(column.n_shards))

    def _shard(self, key: str) -> _Shard | None:
        folder, separator, tail = key.partition("/c/")
        found = self._tables.get(folder)
        number = tail.partition("/")[0]
        if not separator or found is None or not number.isdecimal():
            return None
        column, table = found
        if int(number) >= column.n_shards or column.shard_key(int(number)) != f"c/{tail}":
            return None
        return _Shard(key, column, int(number), table)

    def _read_shard(self, shard: _Shard, request: ByteRequest | None) -> bytes:
        index = shard_index(shard.column, shard.number, shard.table)
        start, stop = _bounds(request, shard.chunks_nbytes + len(index))
        with about_dataset(self._reader.store.url):
            has_chunks = start < shard.chunks_nbytes
            body = self._read_chunks(shard, start, min(stop, shard.chunks_nbytes)) if has_chunks else b""
        return body + index[max(start - shard.chunks_nbytes, 0) : max(stop - shard.chunks_nbytes, 0)]

    def _read_chunks(self, shard: _Shard, start: int, stop: int) -> bytes:
        offsets = shard.chunks[:, 0]
        first = int(np.searchsorted(offsets, np.uint64(start), "right")) - 1
        end = int(np.searchsorted(offsets, np.uint64(stop), "left"))
        if stop <= start:
            return b""
        low = int(offsets[first])
        high = int(offsets[end]) if end < len(offsets) else shard.chunks_nbytes
        body = self._fetch(shard, low, high)
        if self._damaged(shard, body, first, end) is not None:
            body = self._fetch(shard, low, high)
            problem = self._damaged(shard, body, first, end)
            if problem is not None:
                where, expected, got = problem
                raise CorruptionError.at(where, expected=expected, got=f"{got}, read twice", remedy=_REMEDY)
        return body[start - low : stop - low]

    def _fetch(self, shard: _Shard, low: int, high: int) -> bytes:
        try:
            return self._reader.store.read_ranges([(shard.path, low, high - low)])[0]
        except NotFoundError as error:
            # Not a FileNotFoundError, which zarr could take for an absent shard and fill in zeros.
            expected = "a shard of the part"
            raise CorruptionError.at(shard.path, expected=expected, got="nothing", remedy=_REMEDY) from error

    @staticmethod
    def _damaged(shard: _Shard, body: bytes, first: int, end: int) -> tuple[str, str, str] | None:
        """Return (where, expected, got) of the first chunk that is not what was committed."""
        view = memoryview(body)
        chunks = shard.chunks
        low = int(chunks[first, 0])
        for number in range(first, end):
            offset, nbytes, digest = (int(value) for value in chunks[number])
            payload = view[offset - low : offset - low + nbytes]
            stored_crc = bytes(view[offset - low + nbytes : offset - low + nbytes + CRC_NBYTES])
            where = f"{shard.path}: bytes {offset} to {offset + nbytes + CRC_NBYTES}"
            actual = xxhash.xxh3_64_intdigest(payload)
            if actual != digest:
                return where, f"xxh3_64 {digest:016x}", f"{actual:016x}"
            if stored_crc != crc32c(payload):
                return where, f"crc32c {crc32c(payload).hex()}", stored_crc.hex()
            try:
                # zarr-python allocates by a frame's own word.
                if shard.column.codec != "none":
                    check_blosc_frame(payload, shard.column.chunk_nbytes, where)
            except CorruptionError as error:
                return where, error.problems[0].expected, error.problems[0].got
        return None


def _bounds(request: ByteRequest | None, nbytes: int) -> tuple[int, int]:
    """Return [start, stop) of a request within an object of `nbytes`."""
    if request is None:
        return 0, nbytes
    if isinstance(request, RangeByteRequest):
        return min(request.start, nbytes), min(request.end, nbytes)
    if isinstance(request, OffsetByteRequest):
        return min(request.offset, nbytes), nbytes
    if isinstance(request, SuffixByteRequest):
        return max(nbytes - request.suffix, 0), nbytes
    raise TypeError(f"unknown byte request {request!r}")
