"""litdata: an optimized dataset in a local folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from peers.base import Peer, Request, Source


class Litdata(Peer):
    """Uncompressed chunks of up to 1 GB, mapped as its own iteration maps them.

    Indexing alone reads the whole chunk for each item; from `iter` on chunks are mapped. Tensors are views of the map,
    so they are copied out. It refuses bfloat16.
    """

    name, place = "litdata, as int16, copied out", 31
    packages = ("litdata", "torch")
    files = "litdata"
    returns = "a new tensor"
    keeps_maps = True

    def make(self, folder: Path, source: Source) -> None:
        import torch
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(str(folder), chunk_bytes="1GB")
        for number in range(len(source.lengths)):
            writer[number] = {"hidden_states": torch.from_numpy(source.sample(number).view(np.int16).copy())}
        writer.done()
        writer.merge()

    def open(self, folder: Path, lengths: Sequence[int], hidden: int, n_threads: int) -> None:
        import litdata

        self.dataset = litdata.StreamingDataset(str(folder))
        iter(self.dataset)

    def read(self, request: Request, out: Any = None) -> Any:
        import torch

        states = self.dataset[request.sample]["hidden_states"]
        return states[request.start : request.stop, request.planes].clone().view(torch.bfloat16)
