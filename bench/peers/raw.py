"""Plain files and the operating system: what the machine can do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from peers.base import Peer, Request, Source, UInt16


class _Plain(Peer):
    """One file of bf16 patterns a sample."""

    files = "plain"

    def make(self, folder: Path, source: Source) -> None:
        for number in range(len(source.lengths)):
            source.sample(number).tofile(folder / f"{number}.bin")

    def open(self, folder: Path, lengths: Sequence[int], hidden: int, n_threads: int) -> None:
        self.folder, self.lengths, self.hidden = folder, lengths, hidden

    def path(self, request: Request) -> Path:
        """Return the sample's file."""
        return self.folder / f"{request.sample}.bin"


class _Raw(_Plain):
    def read(self, request: Request, out: Any = None) -> Any:
        import torch

        shape = (request.stop - request.start, request.n_planes, self.hidden)
        out = torch.empty(shape, dtype=torch.bfloat16) if out is None else out
        array = out.view(torch.uint16).numpy()
        descriptor = os.open(self.path(request), os.O_RDONLY)
        try:
            if request.layer is None:
                row_nbytes = array.shape[1] * self.hidden * 2
                _fill(descriptor, memoryview(array.reshape(-1)).cast("B"), request.start * row_nbytes)
            else:
                self._read_layer(descriptor, request, array)
        finally:
            os.close(descriptor)
        return out

    def _read_layer(self, descriptor: int, request: Request, array: UInt16) -> None:
        """Read every row's piece by itself: the layers lie interleaved."""
        n_planes, nbytes = 4, self.hidden * 2
        rows = memoryview(array.reshape(len(array), self.hidden)).cast("B")
        for row in range(len(array)):
            offset = ((request.start + row) * n_planes + int(request.layer or 0)) * nbytes
            _fill(descriptor, rows[row * nbytes : (row + 1) * nbytes], offset)


def _fill(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            raise EOFError(offset + done)
        done += count


class RawReused(_Raw):
    """The limit of this machine for whole samples."""

    name, place, reused, timed_start = "raw preadv, reused buffer", 0, True, False
    returns = "the given tensor"


class RawFresh(_Raw):
    """What memory that is new each time costs."""

    name, place = "raw preadv, fresh tensor", 1
    returns = "a new tensor"


class Memmap(_Plain):
    """numpy.memmap of the same files."""

    name, place = "numpy memmap, copied out", 10
    returns = "a new array"

    def read(self, request: Request, out: Any = None) -> Any:
        shape = (self.lengths[request.sample], 4, self.hidden)
        mapped = np.memmap(self.path(request), np.uint16, "r", shape=shape)
        return np.array(mapped[request.start : request.stop, request.planes])
