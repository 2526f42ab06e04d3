"""Write tests/data/transformers: what a tiny random Llama of transformers gives, saved as people save it.

Made with transformers 5.24.0 and torch 2.14.1 (CPU):

    python make_transformers.py ../data/transformers
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main(target: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=64,
        vocab_size=100,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    ids = torch.randint(1, 100, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        model.model.norm.weight.mul_(1.7)
        outputs = model(ids, attention_mask=mask, output_hidden_states=True)
    for name in ("dict", "output"):
        (target / name).mkdir(parents=True, exist_ok=True)
    record = {"input_ids": ids, "attention_mask": mask, "hidden_states": outputs.hidden_states}
    torch.save(record, target / "dict" / "batch_0.pt")
    torch.save(outputs, target / "output" / "batch_0.pt")
    config.save_pretrained(target / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
