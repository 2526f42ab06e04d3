"""Write the stores in this folder: what verl-SpeCo's `TorchShardFeatureStore` leaves, imitated.

    python make_stores.py

It follows `flush`, `_write_metadata` and `DraftFeatureSample.to_dict` of verl_speco/trainer/feature_store.py, and
`_write_rollout_feature_sample` of its SGLang worker for the metadata of samples; the values are random.

`rollout`: what training.mode=collect_only writes, all states side by side with the last one at the end (layout
eagle3_aux_plus_last), with the log-probabilities of the target. `listed`: states as a list, the last one apart.
"""

import json
from pathlib import Path

import torch

HERE = Path(__file__).parent
HIDDEN, N_AUX, TOP_K = 16, 3, 4
LENGTHS = (7, 12, 3, 19, 5)
PER_SHARD = 2


def make_sample(number: int, n_tokens: int, generator: torch.Generator, *, listed: bool) -> dict:
    """One sample, of tokens that begin at place `number` of a longer sequence."""
    states = torch.randn(n_tokens, (N_AUX + 1) * HIDDEN, generator=generator).to(torch.bfloat16)
    loss_mask = torch.zeros(n_tokens, dtype=torch.float32)
    loss_mask[n_tokens // 2 :] = 1
    sample = {
        "schema_version": 1,
        "algorithm": "EAGLE3",
        "input_ids": torch.randint(0, 500, (n_tokens,), generator=generator),
        "loss_mask": loss_mask,
        "hidden_states": states,
        "metadata": {
            "source": "rl_rollout",
            "global_step": 10 + number // PER_SHARD,
            "target_model_path": "example/target",
            "drafter_model_path": "example/drafter",
            "hidden_states_layout": "eagle3_aux_plus_last",
            "target_layer_ids": [1, 3, 4],
            "use_logits": False,
            "sequence_length": n_tokens,
            "loss_tokens": int(loss_mask.sum()),
            "full_sequence_length": n_tokens + number,
            "feature_start": number,
            "feature_end": number + n_tokens,
            "hidden_positions": torch.arange(number, number + n_tokens),
        },
        "position_ids": torch.arange(number + 1, number + n_tokens + 1),
    }
    if listed:
        parts = states.split(HIDDEN, dim=1)
        sample["hidden_states"] = [part.contiguous() for part in parts[:-1]]
        sample["last_hidden_states"] = parts[-1].contiguous()
        del sample["metadata"]["hidden_states_layout"], sample["metadata"]["hidden_positions"]
    else:
        logprobs = torch.randn(n_tokens - 1, TOP_K, generator=generator).log_softmax(-1)
        ids = torch.randint(0, 500, logprobs.shape, generator=generator).float()
        sample["target_logprobs"] = torch.stack([logprobs, ids], dim=-1)
    return sample


def write_store(folder: Path, prefix: str, *, listed: bool) -> None:
    """Write metadata.json, the shards, and a line a shard."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(5 + listed)
    metadata = {
        "schema_version": 1,
        "format": "torch_shard",
        "created_by": "verl_speco",
        "created_at": 1750000000.25,
        "algorithm": "EAGLE3",
        "target_model_path": "example/target",
        "drafter_model_path": "example/drafter",
        "source": "rl_collect_only",
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, ensure_ascii=True, indent=2, sort_keys=True))
    samples = [make_sample(i, n, generator, listed=listed) for i, n in enumerate(LENGTHS)]
    lines = []
    for shard, begin in enumerate(range(0, len(samples), PER_SHARD)):
        held = samples[begin : begin + PER_SHARD]
        name = f"{prefix}_{shard:06d}.pt"
        torch.save({"samples": held, "metadata": dict(metadata)}, folder / name)
        steps = [sample["metadata"]["global_step"] for sample in held]
        entry = {
            "path": name,
            "num_samples": len(held),
            "num_tokens": int(sum(int(sample["loss_mask"].sum().item()) for sample in held)),
            "min_global_step": min(steps),
            "max_global_step": max(steps),
        }
        lines.append(json.dumps(entry, ensure_ascii=True, sort_keys=True) + "\n")
    (folder / "manifest.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    write_store(HERE / "rollout", "rank00000_pid4711", listed=False)
    write_store(HERE / "listed", "shard", listed=True)
