"""From a checked payload to the callers' arrays: decode, and put every row where it goes.

Spec: rules READ-1 and COD-4.
"""

from __future__ import annotations

import numpy as np

from hsfmt.codecs import blosc_blocks, decode_block, decode_into
from hsfmt.columns import STATES, Column
from hsfmt.errors import CorruptionError
from hsfmt.readers.planner import ChunkRead
from hsfmt.readers.scatter import Bytes, Destinations, Places
from hsfmt.readers.threads import Scratch

# Smaller chunks are read several at a time, and each goes through its thread's cache as a whole.
SMALL_CHUNK_NBYTES = 256 << 10


class Delivery:
    """Takes chunks of one shard to where they go.

    Parameters
    ----------
    column, path
        Whose chunks they are, and the shard inside the dataset.
    targets
        The destinations.
    scratch
        Buffers of this thread.
    coarse
        Few large steps rather than many that stay in cache.

    Attributes
    ----------
    path
        The shard.
    encoded
        Whether there is something to decode.
    small
        Whether the chunks are, as `SMALL_CHUNK_NBYTES` says.
    coarse
        As given.
    """

    def __init__(self, column: Column, path: str, targets: Destinations, scratch: Scratch, *, coarse: bool) -> None:
        self.path = path
        self._targets = targets
        self._scratch = scratch
        self.coarse = coarse
        self._codec = column.codec
        self._nbytes = column.chunk_nbytes
        self._storage = column.dtype.storage
        self._shape = (column.chunk_rows, *column.shape[2 if column.name == STATES else 1 :])
        self.encoded = column.codec != "none"
        self.small = self._nbytes < SMALL_CHUNK_NBYTES

    def places(self, chunk: ChunkRead) -> Places | None:
        """Return where the bytes of a payload go, or None if they can't go there directly.

        Raises
        ------
        CorruptionError
            It is not encoded and has another size than the chunk.
        """
        if self.encoded:
            return None
        self._check_raw(chunk)
        return self._targets.places(chunk.copies)

    def deliver(self, chunk: ChunkRead, payload: memoryview) -> None:
        """Decode a payload that was compared with its digest, into the places that its chunk goes to.

        If the payload is writable, its contents are lost.

        Raises
        ------
        CorruptionError
            It does not decode to a chunk of the column.
        """
        if self.encoded:
            where = chunk.place(self.path)
            goes_to = None if self.small and len(chunk.copies) > 1 else self._targets.places(chunk.copies)
            if goes_to is not None:
                self._decode_to(goes_to, payload, where)
                return
            raw = self._scratch.get("decoded", self._nbytes)
            decode_into(self._codec, payload, raw, where)
        else:
            self._check_raw(chunk)
            raw = np.frombuffer(payload, np.uint8)
        values = raw.view(self._storage).reshape(self._shape)
        arrays = self._targets.arrays
        for target, plane, dst, src, n_rows in chunk.copies:
            arrays[target][dst : dst + n_rows, plane] = values[src : src + n_rows]

    def _check_raw(self, chunk: ChunkRead) -> None:
        if chunk.nbytes != self._nbytes:
            where, got = chunk.place(self.path), f"{chunk.nbytes} bytes"
            raise CorruptionError.at(where, expected=f"{self._nbytes} bytes", got=got)

    def _decode_to(self, goes_to: Places, payload: memoryview, where: str) -> None:
        """Decode at once what takes the whole chunk; else block by block, those that are wanted, while in cache."""
        whole = goes_to.run(0, self._nbytes)
        if whole is not None:
            decode_into(self._codec, payload, np.frombuffer(whole, np.uint8), where)
            return
        at_once = payload.readonly or (self.coarse and 2 * goes_to.nbytes > self._nbytes)
        blocks = None if at_once else blosc_blocks(payload, self._nbytes, where)
        if blocks is None:
            raw = self._scratch.get("decoded", self._nbytes)
            decode_into(self._codec, payload, raw, where)
            goes_to.put(0, raw.data)
            return
        for block in blocks:
            stop = block.at + block.nbytes
            if not goes_to.wanted(block.at, stop):
                continue
            run = goes_to.run(block.at, stop)
            out: Bytes = self._scratch.get("decoded", block.nbytes) if run is None else np.frombuffer(run, np.uint8)
            decode_block(payload, block, out, where)
            if run is None:
                goes_to.put(block.at, out.data)
