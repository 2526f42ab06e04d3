"""Wrote packed_batches.safetensors: samples, and what speculators' own collator makes of them.

Run with speculators 0.9.0, torch 2.13 and safetensors 0.8: python make_packed_batches.py packed_batches.safetensors

Tensors `item/{number}/...` are the samples as stored: hidden_states bfloat16 [token, layer, hidden], input_ids and
loss_mask int64 [token]. They become what ArrowDataset hands out; the shift of the view and the real CollateFn then make
`{case}/{key}` of them. The file's metadata say, for each case in order, how it was called and the keys of its batch.
"""

import json
import sys

import torch
from safetensors.torch import save_file
from speculators.models.eagle3.data import shift_batch
from speculators.models.mtp.data import shift_batch_mtp
from speculators.train.data import CollateFn

LAYERS, HIDDEN = [2, 4, 5, 8], 8
LENGTHS = [5, 1, 17, 12, 40, 3]
SHIFTS = {"eagle3": shift_batch, "peagle": shift_batch, "dflash": None, "mtp": shift_batch_mtp}
# (view, items, n_tokens, dtype)
CASES = {
    "eagle3_padding": ("eagle3", [0, 2, 5], 32, "bfloat16"),
    "eagle3_one_token_each": ("eagle3", [1, 0, 1, 5], 16, "bfloat16"),
    "eagle3_nothing_left": ("eagle3", [1], 8, "bfloat16"),
    "eagle3_last_is_cut": ("eagle3", [2, 3, 4], 32, "bfloat16"),
    "eagle3_first_is_cut": ("eagle3", [4, 0, 2], 32, "bfloat16"),
    "eagle3_full": ("eagle3", [2, 2, 1], 32, "bfloat16"),
    "eagle3_float32": ("eagle3", [3, 0], 20, "float32"),
    "peagle_last_is_cut": ("peagle", [3, 2], 20, "bfloat16"),
    "dflash_padding": ("dflash", [0, 1, 2], 32, "bfloat16"),
    "dflash_last_is_cut": ("dflash", [3, 2, 5], 20, "bfloat16"),
    "dflash_full": ("dflash", [3, 0, 2, 1], 34, "bfloat16"),
    "mtp_padding": ("mtp", [5, 1, 0], 16, "bfloat16"),
    "mtp_last_is_cut": ("mtp", [0, 4], 24, "bfloat16"),
}


def make_item(n_tokens: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "hidden_states": torch.randn(n_tokens, len(LAYERS), HIDDEN, generator=generator).to(torch.bfloat16),
        "input_ids": torch.randint(1, 512, (n_tokens,), generator=generator),
        "loss_mask": torch.randint(0, 2, (n_tokens,), generator=generator),
    }


def as_dataset_item(item: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What ArrowDataset.__getitem__ returns of the sample."""
    n_tokens = len(item["input_ids"])
    return {
        "hidden_states": item["hidden_states"][:, :-1].flatten(1),
        "input_ids": item["input_ids"],
        "verifier_last_hidden_states": item["hidden_states"][:, -1],
        "loss_mask": item["loss_mask"],
        "lengths": torch.tensor([n_tokens], dtype=torch.long),
        "position_ids": torch.arange(n_tokens, dtype=torch.long),
    }


generator = torch.Generator().manual_seed(9)
items = [make_item(n_tokens, generator) for n_tokens in LENGTHS]
tensors = {f"item/{number}/{key}": value for number, item in enumerate(items) for key, value in item.items()}
cases = {}
for name, (view, numbers, n_tokens, dtype) in CASES.items():
    collate = CollateFn(n_tokens, HIDDEN, len(LAYERS) - 1, dtype=getattr(torch, dtype), preprocess=SHIFTS[view])
    batch = collate([as_dataset_item(items[number]) for number in numbers])
    cases[name] = {"view": view, "indices": numbers, "n_tokens": n_tokens, "dtype": dtype, "keys": list(batch)}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            tensors[f"{name}/{key}"] = value.contiguous()
        else:
            cases[name][key] = value
layout = {"layers": LAYERS, "hidden_size": HIDDEN, "lengths": LENGTHS}
save_file(tensors, sys.argv[1], {"layout": json.dumps(layout), "cases": json.dumps(cases)})
