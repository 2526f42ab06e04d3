"""Bare decompression of hsfmt's own chunks, held in memory: no reading, no checks, no placing of rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from peers.base import LAYERS, Peer, Request, Source, UInt16
from peers.hsfmt_dataset import write_dataset


def array_folder(folder: Path) -> Path:
    """Return the folder of the states' array in a dataset of one part."""
    (part,) = [entry for entry in (folder / "parts").iterdir() if entry.is_dir()]
    return part / "hidden_states"


class BareBlosc(Peer):
    """Every chunk that a request touches, decompressed into one reused buffer; threads take chunks."""

    name, place = "bare Blosc decompression, reused", 8
    packages = ("numcodecs",)
    files = "hsfmt_zstd"
    returns = "whole chunks"
    own_threads = True
    timed_start = False
    cases = ("samples", "layer", "window")

    def make(self, folder: Path, source: Source) -> None:
        write_dataset(folder, source, "zstd")

    def open(self, folder: Path, lengths: Sequence[int], hidden: int, n_threads: int) -> None:
        array = array_folder(folder)
        document = json.loads((array / "zarr.json").read_text())
        (sharding,) = document["codecs"]
        self.chunk_tokens = sharding["configuration"]["chunk_shape"][0]
        shard_tokens = document["chunk_grid"]["configuration"]["chunk_shape"][0]
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        self.chunks: dict[tuple[int, int], bytes] = {}
        for shard in range(-(-int(self.starts[-1]) // shard_tokens)):
            self._load(array / "c" / str(shard) / "0" / "0", shard * shard_tokens, shard_tokens)
        self.hidden, self.buffer = hidden, np.empty(0, np.uint8)
        self.pool = ThreadPoolExecutor(n_threads) if n_threads > 1 else None

    def _load(self, path: Path, first: int, shard_tokens: int) -> None:
        """Keep the encoded chunks of a shard, by its own index of (offset, nbytes) at the end."""
        body = path.read_bytes()
        count = shard_tokens // self.chunk_tokens * LAYERS
        index = np.frombuffer(body[-(16 * count + 4) : -4], "<u8").reshape(count, 2)
        for number, (offset, nbytes) in enumerate(index.tolist()):
            if offset < 2**64 - 1:
                row, layer = divmod(number, LAYERS)
                self.chunks[first // self.chunk_tokens + row, layer] = body[offset : offset + nbytes - 4]

    def _touched(self, request: Request) -> tuple[range, range]:
        start, stop = (int(self.starts[request.sample]) + row for row in (request.start, request.stop))
        return range(start // self.chunk_tokens, -(-stop // self.chunk_tokens)), range(LAYERS)[request.planes]

    def read(self, request: Request, out: Any = None) -> Any:
        from numcodecs import blosc

        rows, layers = self._touched(request)
        nbytes = self.chunk_tokens * self.hidden * 2
        if len(self.buffer) < len(rows) * len(layers) * nbytes:
            self.buffer = np.zeros(len(rows) * len(layers) * nbytes, np.uint8)
        places = [(self.chunks[row, layer], number * nbytes) for number, (row, layer) in
                  enumerate((row, layer) for row in rows for layer in layers)]  # fmt: skip
        run = self.pool.map if self.pool else map
        for _ in run(lambda place: blosc.decompress(place[0], self.buffer[place[1] : place[1] + nbytes]), places):
            pass
        return self.buffer

    def bits(self, value: Any, request: Request) -> UInt16:
        rows, layers = self._touched(request)
        shape = (len(rows), len(layers), self.chunk_tokens, self.hidden)
        chunks = value[: np.prod(shape) * 2].view(np.uint16).reshape(shape)
        states = chunks.transpose(0, 2, 1, 3).reshape(-1, len(layers), self.hidden)
        first = int(self.starts[request.sample]) + request.start - rows.start * self.chunk_tokens
        return states[first : first + request.stop - request.start]
