"""Write tests/data/saelens with SAELens' own CacheActivationsRunner, on a tiny random model instead of a real one.

Made with sae-lens 6.54.12, transformer-lens 2.18.0, datasets 5.0.1, torch 2.14.1 (CPU):

    python make_saelens.py ../data/saelens
"""

import shutil
import sys
from pathlib import Path

import sae_lens.cache_activations_runner as runner
import torch
from datasets import Dataset
from sae_lens.config import CacheActivationsRunnerConfig
from transformer_lens import HookedTransformer, HookedTransformerConfig

CONTEXT, D_MODEL, ROWS = 12, 16, 16
RUNS = (("post_float32", "blocks.1.hook_resid_post", "float32"), ("pre_float16", "blocks.1.hook_resid_pre", "float16"))


def tiny_model() -> HookedTransformer:
    torch.manual_seed(0)
    config = HookedTransformerConfig(
        n_layers=3, d_model=D_MODEL, n_ctx=32, d_head=8, n_heads=2, d_vocab=64, act_fn="gelu", device="cpu", seed=0
    )
    return HookedTransformer(config)


def main(target: Path) -> None:
    runner.load_model = lambda **_: tiny_model()
    tokens = torch.randint(1, 64, (64, CONTEXT), generator=torch.Generator().manual_seed(1))
    for name, hook, dtype in RUNS:
        shutil.rmtree(target / name, ignore_errors=True)
        config = CacheActivationsRunnerConfig(
            dataset_path="none",
            model_name="tiny",
            model_batch_size=4,
            hook_name=hook,
            d_in=D_MODEL,
            training_tokens=ROWS * CONTEXT,
            context_size=CONTEXT,
            new_cached_activations_path=str(target / name),
            shuffle=False,
            dtype=dtype,
            device="cpu",
            buffer_size_gb=8 * CONTEXT * D_MODEL * 4 / 1e9,
            prepend_bos=False,
        )
        runner.CacheActivationsRunner(config, override_dataset=Dataset.from_dict({"tokens": tokens.tolist()})).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
