"""A drafter head in the manner of EAGLE-3, small enough for a laptop: the training that the data is for.

It fuses the auxiliary states, adds the next token's embedding, runs one attention layer, and learns to give the logits
that the verifier gives, through the verifier's own frozen head.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

Batch = Mapping[str, Tensor]


class Verifier:
    """What a trainer needs of the verifier: embeddings, final norm and head; the states come from the dataset."""

    def __init__(self, weights: Path, eps: float = 1e-5) -> None:
        tensors = load_file(weights)
        self.embeddings = tensors["model.embed_tokens.weight"].float()
        self.norm = tensors["model.norm.weight"].float()
        self.head = tensors["lm_head.weight"].float()
        self.eps = eps

    def logits(self, last_hidden: Tensor) -> Tensor:
        """Return logits [token, vocab] of final states that are before the norm."""
        return functional.rms_norm(last_hidden.float(), self.norm.shape, self.norm, self.eps) @ self.head.T


class DrafterHead(nn.Module):
    """Predicts the verifier's next distribution from auxiliary states and the token that came next."""

    def __init__(self, verifier: Verifier, n_aux: int) -> None:
        super().__init__()
        hidden = verifier.head.shape[1]
        self.verifier = verifier
        self.fuse = nn.Linear(n_aux * hidden, hidden, bias=False)
        self.mix = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = nn.TransformerEncoderLayer(hidden, 4, 2 * hidden, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.RMSNorm(hidden)

    def forward(self, batch: Batch) -> Tensor:
        """Return logits [token, vocab] for a packed batch; attention stays inside each document and is causal."""
        fused = self.fuse(batch["hidden_states"].float())
        states = self.mix(
            torch.cat([functional.rms_norm(fused, fused.shape[-1:]), self.verifier.embeddings[batch["input_ids"]]], -1)
        )
        place = torch.arange(len(states))
        blocked = (batch["document_ids"][:, None] != batch["document_ids"]) | (place[:, None] < place)
        return self.out(self.layer(states[None], src_mask=blocked)[0]) @ self.verifier.head.T


def pack(items: list[Batch]) -> dict[str, Tensor]:
    """Pack samples into one sequence, each shifted as EAGLE-3 wants: states at t, token and target at t + 1."""
    return {
        "hidden_states": torch.cat([item["hidden_states"][:-1] for item in items]),
        "input_ids": torch.cat([item["input_ids"][1:] for item in items]),
        "verifier_last_hidden_states": torch.cat([item["verifier_last_hidden_states"][1:] for item in items]),
        "loss_mask": torch.cat([item["loss_mask"][1:] for item in items]),
        "document_ids": torch.cat([torch.full((len(item["input_ids"]) - 1,), i) for i, item in enumerate(items)]),
    }


def train(
    drafter: DrafterHead, verifier: Verifier, loader: Iterable[Batch], steps: int
) -> tuple[list[float], int, float]:
    """Run optimizer steps; return (losses, tokens seen, seconds)."""
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3)
    losses: list[float] = []
    tokens, started = 0, time.perf_counter()
    while True:
        for batch in loader:
            if len(losses) == steps:
                return losses, tokens, time.perf_counter() - started
            target = verifier.logits(batch["verifier_last_hidden_states"]).softmax(-1)
            loss_of_token = functional.cross_entropy(drafter(batch), target, reduction="none")
            mask = batch["loss_mask"].float()
            loss = (loss_of_token * mask).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            tokens += len(mask)


def agreement(drafter: DrafterHead, verifier: Verifier, batch: Batch) -> float:
    """Return how often the drafter's first choice is the verifier's, on supervised tokens."""
    with torch.no_grad():
        same = drafter(batch).argmax(-1) == verifier.logits(batch["verifier_last_hidden_states"]).argmax(-1)
    return float(same[batch["loss_mask"].bool()].float().mean())
