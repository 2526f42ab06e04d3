"""Runs in SGLang's environment: the real capture setters of model classes too large to load, and what we read back.

Prints {case: {"model": its layers_to_capture, "ours": what the header would have}}.
"""

import json
from types import MethodType, SimpleNamespace

from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM
from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM

from hsfmt.writers.sglang.meaning import resolved_layers

N_LAYERS = 61
SETTERS = ("set_eagle3_layers_to_capture", "set_dflash_layers_to_capture")


def stub(model_class, **members):
    """What the setters touch of a model, with the class's own setters."""
    model = SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True), **members)
    for name in SETTERS:
        setattr(model, name, MethodType(getattr(model_class, name), model))
    return model


def plain(model_class):
    return stub(model_class, config=SimpleNamespace(num_hidden_layers=N_LAYERS), model=SimpleNamespace())


def kimi():
    return stub(KimiK25ForConditionalGeneration, language_model=plain(DeepseekV2ForCausalLM))


MODELS = {
    "deepseek": lambda: plain(DeepseekV2ForCausalLM),
    "kimi": kimi,
    "llama": lambda: plain(LlamaForCausalLM),
    "qwen3": lambda: plain(Qwen3ForCausalLM),
}
CASES = {
    "eagle3 3,31,59": ("set_eagle3_layers_to_capture", [3, 31, 59]),
    "eagle3 59,3,31": ("set_eagle3_layers_to_capture", [59, 3, 31]),
    "eagle3 1,30,58": ("set_eagle3_layers_to_capture", [1, 30, 58]),
    "eagle3 default": ("set_eagle3_layers_to_capture", None),
    "dflash 3,31,59": ("set_dflash_layers_to_capture", [3, 31, 59]),
}

results = {}
for name, make in MODELS.items():
    for case, (setter, ids) in CASES.items():
        model = make()
        getattr(model, setter)(ids)
        holder = model.language_model if name == "kimi" else model
        ours = list(resolved_layers(model, N_LAYERS))
        results[f"{name} {case}"] = {"model": holder.model.layers_to_capture, "ours": ours}
print(json.dumps(results))  # noqa: T201  for the test
