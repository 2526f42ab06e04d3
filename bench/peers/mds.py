"""mosaicml-streaming: MDS shards in a local folder."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from peers.base import LAYERS, Peer, Request, Source


def import_streaming() -> Any:
    """Import it where torchvision does not fit torch's build: its image datasets are all that needs it."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        names = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional")
        for name in names:
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.VisionDataset, module.to_tensor = object, None  # type: ignore[attr-defined]
            sys.modules[name] = module
    import streaming

    return streaming


class Mds(Peer):
    """Uncompressed; the column is `bytes`, which is one copy less than `ndarray`."""

    name, place = "mosaicml-streaming, MDS", 30
    packages = ("streaming", "torch")
    files = "mds"
    returns = "an array over new bytes"

    def make(self, folder: Path, source: Source) -> None:
        streaming = import_streaming()
        with streaming.MDSWriter(out=str(folder), columns={"states": "bytes"}, size_limit=1 << 30) as writer:
            for number in range(len(source.lengths)):
                writer.write({"states": source.sample(number).tobytes()})

    def open(self, folder: Path, lengths: Sequence[int], hidden: int, n_threads: int) -> None:
        self.dataset = import_streaming().LocalDataset(str(folder))
        self.hidden = hidden

    def read(self, request: Request, out: Any = None) -> Any:
        body = self.dataset[request.sample]["states"]
        states = np.frombuffer(body, np.uint16).reshape(-1, LAYERS, self.hidden)
        part = states[request.start : request.stop, request.planes]
        return part if part.shape == states.shape else part.copy()
