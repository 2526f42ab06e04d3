"""torch.load: a .pt file a sample, as SpecForge and DeepSpec write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.base import Peer, Request, Source, as_tensor


class _Files(Peer):
    packages = ("torch",)
    files = "pt"
    returns = "a new tensor"
    mapped = False

    def make(self, folder: Path, source: Source) -> None:
        import torch

        for number, length in enumerate(source.lengths):
            tensors = {"hidden_states": as_tensor(source.sample(number).copy()), "input_ids": torch.arange(length)}
            torch.save(tensors, folder / f"{number}.pt")

    def open(self, folder: Path, lengths: Sequence[int], hidden: int, n_threads: int) -> None:
        self.folder = folder

    def read(self, request: Request, out: Any = None) -> Any:
        import torch

        path = self.folder / f"{request.sample}.pt"
        states = torch.load(path, weights_only=True, mmap=self.mapped)["hidden_states"]
        part = states[request.start : request.stop, request.planes]
        return part.clone() if self.mapped or part.shape != states.shape else part


class Load(_Files):
    """The whole file, whatever is wanted of it."""

    name, place = "torch.load", 13


class LoadMapped(_Files):
    """mmap=True, and the wanted part copied out."""

    name, place, mapped = "torch.load mmap=True, copied out", 14, True
