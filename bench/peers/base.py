"""What a peer is: it makes its files, opens them and reads; it imports its library only when it does."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

UInt16 = npt.NDArray[np.uint16]
LAYERS = 4


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be read: rows [start, stop) of a sample, of one layer or of all."""

    sample: int
    start: int
    stop: int
    layer: int | None = None

    @property
    def planes(self) -> slice:
        """The request's part of the layer axis."""
        return slice(0, LAYERS) if self.layer is None else slice(self.layer, self.layer + 1)

    @property
    def n_planes(self) -> int:
        """How many layers."""
        return LAYERS if self.layer is None else 1


@dataclass(frozen=True, slots=True)
class Source:
    """The data that all peers hold: bf16 patterns [token, layer, hidden] of all samples in a row."""

    bits: UInt16
    lengths: tuple[int, ...]

    @property
    def hidden(self) -> int:
        """Channels of a state."""
        return int(self.bits.shape[2])

    @property
    def starts(self) -> list[int]:
        """First row of each sample, and the end."""
        return [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]

    def sample(self, number: int) -> UInt16:
        """Return the states of a sample."""
        start = self.starts[number]
        return self.bits[start : start + self.lengths[number]]

    def asked(self, request: Request) -> UInt16:
        """Return what a request must deliver."""
        return self.sample(request.sample)[request.start : request.stop, request.planes]


class Peer:
    """One way to read.

    Attributes
    ----------
    name
        In the table. Empty: a base class, no peer.
    place
        Where in the table.
    packages
        Modules that it imports; one that is missing makes it "not installed".
    preload
        Modules without threads that its processes may share from a common parent: memory, and time to start.
    files
        Folder of its files; peers of the same one read the same files.
    checks
        What it compares with a digest while it reads.
    returns
        What it hands out.
    reused
        It reads into memory that it is given.
    own_threads
        It has threads of its own. Otherwise two threads read two samples, with an object each.
    keeps_maps
        It has files mapped between two reads, and nobody else has: they leave the page cache when its process ends.
    timed_start
        Take part in "time to the first sample".
    cases
        The cases it takes part in; None: all.
    """

    name: ClassVar[str] = ""
    place: ClassVar[int] = 100
    packages: ClassVar[tuple[str, ...]] = ()
    preload: ClassVar[tuple[str, ...]] = ()
    files: ClassVar[str] = ""
    checks: ClassVar[str] = "nothing"
    returns: ClassVar[str] = ""
    reused: ClassVar[bool] = False
    own_threads: ClassVar[bool] = False
    keeps_maps: ClassVar[bool] = False
    timed_start: ClassVar[bool] = True
    cases: ClassVar[tuple[str, ...] | None] = None

    def make(self, folder: Path, source: Source) -> None:
        """Write the samples into an empty folder."""
        raise NotImplementedError

    def open(self, folder: Path, lengths: Sequence[int], hidden: int, n_threads: int) -> None:
        """Open what `make` wrote."""
        raise NotImplementedError

    def read(self, request: Request, out: Any = None) -> Any:
        """Return [token, layer, hidden], in memory that nothing else holds; `out` is a bf16 tensor, if `reused`."""
        raise NotImplementedError

    def bits(self, value: Any, request: Request) -> UInt16:
        """Return the bf16 patterns of what `read` returned."""
        if hasattr(value, "untyped_storage"):
            import torch

            return value.view(torch.uint16).numpy()
        return np.asarray(value).view(np.uint16)

    def buffers(self, budget: int) -> Any:
        """Return memory for a batch of `budget` tokens; None: `batch` makes it."""
        return None

    def batch(self, requests: Sequence[Request], budget: int, out: Any = None) -> Any:
        """Return (states of all layers but the last [budget, hidden * (layers - 1)], of the last [budget, hidden]).

        As speculators' collator forms it: samples are read, flattened, concatenated, cut or padded with zeros.
        """
        assert out is None
        import torch

        states = [as_tensor(self.read(request)) for request in requests]
        n_tokens = sum(len(sample) for sample in states)
        _, layers, hidden = states[0].shape
        if n_tokens < budget:
            states.append(torch.zeros(budget - n_tokens, layers, hidden, dtype=torch.bfloat16))
        first = torch.cat([sample[:, :-1].flatten(1) for sample in states])[:budget]
        return first, torch.cat([sample[:, -1] for sample in states])[:budget]

    def close(self) -> None:
        """Let go of files and memory."""


def as_tensor(value: Any) -> Any:
    """Return a bf16 tensor of whatever a peer returns, without a copy."""
    import torch

    if isinstance(value, torch.Tensor):
        return value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of memory that is not writable: nothing is written
        return torch.from_numpy(np.asarray(value).view(np.int16)).view(torch.bfloat16)
