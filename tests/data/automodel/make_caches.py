"""Write the caches in this folder: what NeMo Automodel's precompute_eagle3.py leaves, imitated.

    python make_caches.py

It follows `generate_batch` of components/speculative/eagle/target.py, which shifts token ids, loss mask and logits one
place to the left, `_compute_batch_cache` and the manifest of precompute_eagle3.py, and `write_shard` and
`write_target_embeddings` of components/datasets/llm/eagle3_cache.py. Token ids, states and logits are random.

`dense` has whole distributions, `topk` (layers asked for in another order) their largest values.
`{name}_originals.safetensors` has what the shift was applied to: ids, loss mask and states of each sample before it was
padded, the states in ascending order of layers.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
HIDDEN, VOCAB, DRAFT_VOCAB, LENGTH, SHARD = 16, 64, 8, 24, 2
LENGTHS = (9, 24, 2, 17, 11)


def shift_left(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat((tensor[:, 1:], torch.zeros_like(tensor[:, :1])), dim=1)


def make_batch(layer_ids: list[int], seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """All samples padded to LENGTH, not yet shifted; and the originals."""
    generator = torch.Generator().manual_seed(seed)
    n, originals = len(LENGTHS), {}
    batch = {
        "input_ids": torch.full((n, LENGTH), 3),  # the pad token's id
        "attention_mask": torch.zeros(n, LENGTH, dtype=torch.long),
        "loss_mask": torch.zeros(n, LENGTH, dtype=torch.long),
        "aux_hidden_states": torch.randn(n, LENGTH, len(layer_ids) * HIDDEN, generator=generator).to(torch.bfloat16),
        "logits": torch.randn(n, LENGTH, VOCAB, generator=generator),
    }
    order = sorted(range(len(layer_ids)), key=layer_ids.__getitem__)
    for i, n_tokens in enumerate(LENGTHS):
        batch["input_ids"][i, :n_tokens] = torch.randint(4, VOCAB, (n_tokens,), generator=generator)
        batch["attention_mask"][i, :n_tokens] = 1
        batch["loss_mask"][i, n_tokens // 2 : n_tokens] = 1
        states = batch["aux_hidden_states"][i, :n_tokens].reshape(n_tokens, len(layer_ids), HIDDEN)
        originals[f"{i}.states"] = states[:, order].contiguous()
        originals[f"{i}.input_ids"] = batch["input_ids"][i, :n_tokens].clone()
        originals[f"{i}.loss_mask"] = batch["loss_mask"][i, :n_tokens].clone()
    return batch, originals


def cache_fields(batch: dict[str, torch.Tensor], selected: torch.Tensor, topk: int) -> dict[str, torch.Tensor]:
    logits, loss_mask = shift_left(batch["logits"]), shift_left(batch["loss_mask"])
    in_draft = torch.zeros(VOCAB, dtype=torch.bool)
    in_draft[selected] = True
    probs = torch.softmax(logits.index_select(-1, selected).float(), dim=-1)
    fields = {
        "input_ids": shift_left(batch["input_ids"]),
        "attention_mask": batch["attention_mask"],
        "loss_mask": loss_mask,
        "aux_hidden_states": batch["aux_hidden_states"],
        "position_mask": (in_draft[logits.argmax(-1)] & loss_mask.bool()).unsqueeze(-1),
    }
    if not topk:
        return fields | {"target_probs": probs.to(torch.bfloat16)}
    values, indices = torch.topk(probs, topk, dim=-1)
    values = values / values.sum(-1, keepdim=True)
    return fields | {"target_probs_values": values.to(torch.bfloat16), "target_probs_indices": indices.to(torch.int32)}


def write_cache(name: str, layer_ids: list[int], topk: int) -> None:
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    batch, originals = make_batch(layer_ids, seed=len(name))
    save_file(originals, HERE / f"{name}_originals.safetensors")
    selected = torch.arange(2, 2 + 5 * DRAFT_VOCAB, 5)
    manifest = {
        "format_version": 2,
        "target_model": "example/target",
        "target_vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "seq_length": LENGTH,
        "dtype": "bf16",
        "num_samples": len(LENGTHS),
        "shard_size": SHARD,
        "target_probs_topk": topk,
        "aux_hidden_dim": HIDDEN * len(layer_ids),
        "aux_layer_ids": layer_ids,
        "selected_token_ids": selected.tolist(),
        "input_data": "example/conversations",
        "split": None,
        "shuffle_seed": 42,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True))
    embeddings = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    save_file({"weight": embeddings}, folder / "target_embeddings.safetensors")
    fields = cache_fields(batch, selected, topk)
    for shard, begin in enumerate(range(0, len(LENGTHS), SHARD)):
        tensors = {key: value[begin : begin + SHARD].contiguous() for key, value in fields.items()}
        save_file(tensors, folder / f"shard-{shard:06d}.safetensors")


if __name__ == "__main__":
    write_cache("dense", [1, 3, 4], topk=0)
    write_cache("topk", [4, 1, 3], topk=3)
