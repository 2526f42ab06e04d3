"""Data for bench/feed.py: the same samples as datasets and as files, and what people load the files with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from synth import synth_hidden
from torch.utils.data import Dataset

from hsfmt import DatasetWriter

LAYERS = 4
CODECS = ("none", "zstd")
KEYS = ("hidden_states", "verifier_last_hidden_states", "input_ids", "loss_mask")


def make_samples(nbytes: int, hidden: int, longest: int) -> Iterator[torch.Tensor]:
    """Yield states [token, layer, hidden] bf16, `nbytes` in all, each cut out of one block at another place."""
    rng = np.random.default_rng(0)
    block = synth_hidden(1024, LAYERS, hidden)
    done = 0
    while done < nbytes:
        rows = (int(rng.integers(len(block))) + np.arange(rng.integers(longest // 3, longest + 1))) % len(block)
        states = block[rows]
        done += states.nbytes
        yield torch.from_numpy(states.view(np.int16)).view(torch.bfloat16)


def make_files(folder: Path, nbytes: int, hidden: int, longest: int) -> int:
    """Write the samples for every loader; return how many there are."""
    n = 0
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(
                DatasetWriter(folder / codec, layers=range(LAYERS), hidden_size=hidden, final_norm="pre", codec=codec)
            )
            for codec in CODECS
        ]
        for states in make_samples(nbytes, hidden, longest):
            ids = torch.arange(len(states))
            mask = ids % 3 > 0
            for writer in writers:
                writer.write(f"s{n:05}", ids.numpy(), states, mask.numpy(), source_index=n)
            item = {"hidden_states": states, "input_ids": ids, "loss_mask": mask}
            torch.save(item, folder / f"{n}.pt")
            safetensors.torch.save_file(item, folder / f"{n}.safetensors")
            states.view(torch.int16).numpy().tofile(folder / f"{n}.bin")
            n += 1
    return n


class Files(Dataset[dict[str, torch.Tensor]]):
    """Samples as trainers keep them: a file each.

    Parameters
    ----------
    folder
        Where they lie.
    kind
        "pt" or "safetensors".
    n
        How many.
    """

    def __init__(self, folder: Path, kind: str, n: int) -> None:
        self.folder, self.kind, self.n = folder, kind, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        path = self.folder / f"{number}.{self.kind}"
        item: dict[str, torch.Tensor] = (
            torch.load(path, weights_only=True) if self.kind == "pt" else safetensors.torch.load_file(path)
        )
        return item


class Pack:
    """Packs items as the collator of speculators does: shifted by one token, concatenated, padded.

    Parameters
    ----------
    n_tokens
        Length of the batch.
    """

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens

    def __call__(self, items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the tensors of `KEYS`, [1, n_tokens, ...]."""
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in KEYS}
        for item in items:
            states = item["hidden_states"]
            parts["hidden_states"].append(states[:-1, :-1].flatten(1))
            parts["verifier_last_hidden_states"].append(states[1:, -1])
            parts["input_ids"].append(item["input_ids"][1:])
            parts["loss_mask"].append(item["loss_mask"][1:].long())
        return {name: self._padded(tensors) for name, tensors in parts.items()}

    def _padded(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        missing = self.n_tokens - sum(map(len, tensors))
        return torch.cat([*tensors, tensors[0].new_zeros(missing, *tensors[0].shape[1:])])[None]


def fingerprint(batch: dict[str, torch.Tensor]) -> list[int]:
    """Return a number for each tensor of a batch that another content would hardly have."""
    found = []
    for key in KEYS:
        values = batch[key].reshape(-1)
        values = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
        weights = torch.arange(len(values), device=values.device) % 1021
        found.append(int((values.long() * weights).sum()))
    return found
