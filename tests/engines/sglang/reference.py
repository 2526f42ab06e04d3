"""Runs in SGLang's environment: makes tiny checkpoints, and what transformers computes for the prompts of the tests.

reference.py FOLDER PROMPTS.json: FOLDER gets a checkpoint for each of MODELS, and <model>-<dtype>.npz with float32
arrays [layer, token, hidden] by prompt number: `hidden_states`, whose last entry is after the final norm.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def main(folder, prompts):
    torch.manual_seed(0)
    for name, (config, model_class) in MODELS.items():
        model_class(config(**SHAPE)).to(torch.float32).save_pretrained(folder / name)
        for dtype in ("float32", "bfloat16"):
            model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=getattr(torch, dtype)).eval()
            states = {}
            for number, prompt in enumerate(prompts):
                with torch.no_grad():
                    output = model.model(torch.tensor([prompt]), output_hidden_states=True)
                states[str(number)] = np.stack([layer[0].float().numpy() for layer in output.hidden_states])
            np.savez(folder / f"{name}-{dtype}.npz", **states)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
