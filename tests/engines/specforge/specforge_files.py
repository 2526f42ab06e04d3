"""The folders of SpecForge in tests/data, as datasets, and what a tiny training run on them needs."""

import json
from pathlib import Path

from program import environment, python_of, run

import hsfmt

VENV = ".venv-specforge"
# Folder, key of the auxiliary states, key of the final one, HF ids of all of them.
FOLDERS = {
    "eagle3": ("v020_eagle3_bs1", "aux_hidden_state", "hidden_state", [2, 4, 5, 8]),
    "dflash": ("v020_dflash", "hidden_states", None, [2, 3, 4, 5, 6]),
    "dspark": ("v020_dspark", "hidden_states", "target_last_hidden_states", [2, 3, 4, 5, 6, 8]),
}
HIDDEN_SIZE, VOCABULARY = 64, 261
# A target as wide and deep as the one behind the files, its head in an indexed checkpoint as SpecForge wants it.
MAKE_TARGET = f"""
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size={VOCABULARY}, hidden_size={HIDDEN_SIZE}, intermediate_size=128, num_hidden_layers=8,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1], max_shard_size="200KB")
"""
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
_SIZES = {"hidden_size": HIDDEN_SIZE, "intermediate_size": 128, "vocab_size": VOCABULARY, "num_hidden_layers": 1}
_PLAIN = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02}
_BLOCKS = {"model_type": "qwen3", "block_size": 4, "num_target_layers": 8, "layer_types": ["full_attention"]}
_BLOCKS |= {"rope_theta": 10000, "attention_bias": False, "attention_dropout": 0.0}
_IDS = {"mask_token_id": 3, "target_layer_ids": [1, 2, 3, 4, 5]}
_HEADS = {"markov_rank": 8, "markov_head_type": "vanilla", "confidence_head_with_markov": True}
_HEADS |= {"projector_type": "dspark", "confidence_head_alpha": 1.0, "enable_confidence_head": True}
DRAFTS = {
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 200},
    "dflash": {"architectures": ["DFlashDraftModel"], **_BLOCKS, "dflash_config": _IDS},
    "dspark": {
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        **_BLOCKS,
        "dflash_config": {**_IDS, **_HEADS},
    },
}


def write_dataset(data_dir: Path, algorithm: str, url: Path, *, final_norm: str = "post") -> Path:
    """Write the states of a folder, file by file in the order of their names, and seal."""
    import torch

    name, auxiliary, final, layers = FOLDERS[algorithm]
    with hsfmt.DatasetWriter(url, layers=layers, hidden_size=HIDDEN_SIZE, final_norm=final_norm) as writer:
        for path in sorted((data_dir / "specforge" / name).glob("rows_*/*.ckpt")):
            record = torch.load(path, weights_only=True)
            n_tokens = len(record["input_ids"])
            states = [record[auxiliary].view(n_tokens, -1, HIDDEN_SIZE)]
            states += [record[final].view(n_tokens, 1, HIDDEN_SIZE)] if final else []
            writer.write(path.stem, record["input_ids"], torch.cat(states, 1), record["loss_mask"])
    hsfmt.seal(url)
    return url


def write_config(folder: Path, algorithm: str, source: Path, **training: object) -> Path:
    """Write SpecForge's configuration of a few steps on the CPU; the target lies beside it as `target`."""
    draft, config = folder / f"{algorithm}-draft.json", folder / f"{algorithm}.json"
    draft.write_text(json.dumps({**_SIZES, **_ATTENTION, **_PLAIN, **DRAFTS[algorithm]}))
    # NO_SHARD is DDP: FSDP wants an accelerator.
    plain = {"strategy": algorithm, "fsdp_sharding": "NO_SHARD", "attention_backend": "sdpa", "log_interval": 1}
    plain |= {"ttt_length": 2, "num_epochs": 2, "max_steps": 4, "learning_rate": 0.001, "seed": 1}
    settings = {
        "run_id": "tiny",
        "output_dir": str(folder / "out"),
        "model": {"target_model_path": str(folder / "target"), "draft_model_config": str(draft)},
        "data": {"hidden_states_path": str(source), "max_length": 128, "dataloader_num_workers": 0},
        "training": {**plain, **training},
    }
    config.write_text(json.dumps(settings))
    return config


def make_target(folder: Path) -> None:
    run([python_of(VENV), "-c", MAKE_TARGET, folder / "target"], folder / "target.log", environment())
