"""Make final_norm.safetensors: states before and after the final norm, as transformers computes them on a CPU.

Run with transformers, torch and safetensors installed: `python make_final_norm.py`. `llama.pre` and `llama.post` are
what goes into and comes out of `model.norm` of ../tiny-llama in bfloat16; `gemma.*` are of a GemmaRMSNorm with random
weights.
"""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

HERE = Path(__file__).parent
MODEL = HERE.parent / "tiny-llama"


def llama() -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval()
    seen = {}

    def keep(_module, args, output):
        seen.update(pre=args[0][0].clone(), post=output[0].clone())

    model.model.norm.register_forward_hook(keep)
    ids = torch.arange(1, 257) * 7 % 512
    with torch.no_grad():
        model(ids[None])
    return {"llama.input_ids": ids, "llama.pre": seen["pre"], "llama.post": seen["post"]}


def gemma(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    norm = GemmaRMSNorm(64, eps=1e-6).to(dtype)
    norm.weight.data = (torch.randn(64) * 0.3).to(dtype)
    states = (torch.randn(96, 64) * 3).to(dtype)
    name = str(dtype).removeprefix("torch.")
    with torch.no_grad():
        return {f"{name}.weight": norm.weight.data, f"{name}.pre": states, f"{name}.post": norm(states)}


if __name__ == "__main__":
    tensors = llama()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tensors |= {f"gemma.{name}": tensor for name, tensor in gemma(dtype).items()}
    made_with = {"torch": torch.__version__, "transformers": transformers.__version__}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, HERE / "final_norm.safetensors", {"made_with": json.dumps(made_with)})
