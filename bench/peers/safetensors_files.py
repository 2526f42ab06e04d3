"""safetensors: a file a sample, as vLLM's connector writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.base import Peer, Request, Source, as_tensor


class _Files(Peer):
    packages = ("safetensors", "torch")
    files = "safetensors"
    returns = "a new tensor"

    def make(self, folder: Path, source: Source) -> None:
        import torch
        from safetensors.torch import save_file

        for number, length in enumerate(source.lengths):
            tensors = {"hidden_states": as_tensor(source.sample(number).copy()), "token_ids": torch.arange(length)}
            save_file(tensors, folder / f"{number}.safetensors")

    def open(self, folder: Path, lengths: Sequence[int], hidden: int, n_threads: int) -> None:
        self.folder = folder


class LoadFile(_Files):
    """load_file maps; the copy is when the bytes are read."""

    name, place = "safetensors load_file, copied out", 11

    def read(self, request: Request, out: Any = None) -> Any:
        from safetensors.torch import load_file

        states = load_file(self.folder / f"{request.sample}.safetensors")["hidden_states"]
        return states[request.start : request.stop, request.planes].clone()


class GetSlice(_Files):
    """safe_open and get_slice: the slice is copied out of the map."""

    name, place = "safetensors safe_open, get_slice", 12

    def read(self, request: Request, out: Any = None) -> Any:
        from safetensors import safe_open

        with safe_open(self.folder / f"{request.sample}.safetensors", "pt") as file:
            states = file.get_slice("hidden_states")[request.start : request.stop, request.planes]
        return states.clone()
