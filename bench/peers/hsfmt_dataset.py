"""hsfmt: HiddenStateDataset and PackingCollator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from peers.base import LAYERS, Peer, Request, Source, as_tensor


def write_dataset(folder: Path, source: Source, codec: str) -> None:
    """Write the samples as a sealed dataset."""
    from hsfmt import DatasetWriter

    settings: Any = {"layers": range(LAYERS), "hidden_size": source.hidden, "final_norm": "pre", "codec": codec}
    with DatasetWriter(folder, **settings) as writer:
        for number, length in enumerate(source.lengths):
            writer.write(f"s{number}", np.arange(length), as_tensor(source.sample(number)))


class _Hsfmt(Peer):
    packages = ("torch", "hsfmt")
    preload = ("torch", "hsfmt.readers.packing", "hsfmt.readers.dataset")
    checks = "every byte"
    own_threads = True
    codec = ""
    skip_checks = False

    def make(self, folder: Path, source: Source) -> None:
        write_dataset(folder, source, self.codec)

    def open(self, folder: Path, lengths: Sequence[int], hidden: int, n_threads: int) -> None:
        from hsfmt import HiddenStateDataset

        settings: Any = {"n_threads": n_threads, "unsafe_skip_checks": self.skip_checks}
        self.dataset = HiddenStateDataset(folder, **settings)

    def read(self, request: Request, out: Any = None) -> Any:
        layers = None if request.layer is None else [request.layer]
        item = self.dataset.read(request.sample, request.start, request.stop, layers=layers, out=out)
        return item["hidden_states"]

    def buffers(self, budget: int) -> Any:
        from hsfmt.readers.packing import PackingCollator

        # A view that shifts nothing, so that all peers deliver the same rows.
        self.collator = PackingCollator(self.dataset, budget, view="dflash")
        if not self.reused:
            return None
        batch = self.collator.allocate()
        for tensor in batch.values():
            if hasattr(tensor, "zero_"):
                tensor.zero_()  # touched, as memory that is used again is
        return batch

    def batch(self, requests: Sequence[Request], budget: int, out: Any = None) -> Any:
        batch = self.collator([request.sample for request in requests], out=out)
        return batch["hidden_states"][0], batch["verifier_last_hidden_states"][0]

    def close(self) -> None:
        self.dataset.close()


class NoneReused(_Hsfmt):
    """Uncompressed, into a buffer of the caller's."""

    name, place, files, codec, reused = "hsfmt none, reused buffer", 2, "hsfmt_none", "none", True
    returns = "the given tensor"
    timed_start = False


class NoneUnchecked(_Hsfmt):
    """Uncompressed, without digests: what the checks cost."""

    name, place, files, codec, reused = "hsfmt none, reused, checks off", 3, "hsfmt_none", "none", True
    returns, checks, skip_checks = "the given tensor", "nothing", True
    timed_start = False


class NoneFresh(_Hsfmt):
    """Uncompressed, a new tensor."""

    name, place, files, codec = "hsfmt none, fresh tensor", 4, "hsfmt_none", "none"
    returns = "a new tensor"


class ZstdReused(_Hsfmt):
    """The default codec, into a buffer of the caller's."""

    name, place, files, codec, reused = "hsfmt zstd, reused buffer", 5, "hsfmt_zstd", "zstd", True
    returns = "the given tensor"
    timed_start = False


class ZstdUnchecked(_Hsfmt):
    """The default codec, without digests: what the checks cost."""

    name, place, files, codec, reused = "hsfmt zstd, reused, checks off", 6, "hsfmt_zstd", "zstd", True
    returns, checks, skip_checks = "the given tensor", "nothing", True
    timed_start = False


class ZstdFresh(_Hsfmt):
    """The default codec, a new tensor."""

    name, place, files, codec = "hsfmt zstd, fresh tensor", 7, "hsfmt_zstd", "zstd"
    returns = "a new tensor"
