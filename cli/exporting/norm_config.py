"""What a model's config says of its final norm, and what a weight's name says: the choice of a norm is held to both.

Types of models are those of transformers; one that is not listed here and has an `rms_norm_eps` is taken at its word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsfmt.errors import Problem
from hsfmt.readers.sources.options import read_config

CONFIG = "config.json"

# RMSNorms that multiply by 1 + weight.
_GEMMA = frozenset({
    "gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "t5_gemma_module", "t5gemma", "t5gemma2",
    "t5gemma2_decoder", "t5gemma2_text", "vaultgemma",
    "minimax_m3_vl", "minimax_m3_vl_text", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
    "step3p5", "step3p7",
})  # fmt: skip
# Gemmas that multiply by the weight alone.
_PLAIN_GEMMA = frozenset({"gemma3n", "gemma3n_text", "gemma4", "gemma4_text"})
# Whose product with the weight is in float32, rounded after it.
_WIDE = _PLAIN_GEMMA | {"afmoe", "flex_olmo", "gpt_oss", "moshi", "olmo2", "olmo3", "olmo_hybrid"}
# The final norm is a LayerNorm, even where a config names an epsilon for RMSNorms.
_LAYER_NORM = frozenset({
    "biogpt", "bloom", "codegen", "cohere", "cohere2", "dbrx", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox",
    "gpt_neox_japanese", "gptj", "jais2", "modernbert-decoder", "mpt", "nemotron", "olmo", "opt", "persimmon", "phi",
    "phimoe", "rwkv", "stablelm", "starcoder2", "xglm",
})  # fmt: skip
# RMSNorms whose epsilon has a name that LayerNorms have elsewhere.
_EPS_NAMES = {
    "chatglm": "layernorm_epsilon",
    "exaone": "layer_norm_epsilon",
    "falcon_mamba": "layer_norm_epsilon",
    "lfm2": "norm_eps",
    "lfm2_moe": "norm_eps",
    "mamba": "layer_norm_epsilon",
    "mamba2": "layer_norm_epsilon",
    "nemotron_h": "layer_norm_epsilon",
    "qwen": "layer_norm_epsilon",
    "xlstm": "norm_eps",
}
_RMS_EPS = "rms_norm_eps"
_LAYER_NORM_EPS = ("layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_epsilon")

# Of tensors that no layer owns; `ln_f` and `norm_f` are older names.
_FINAL_NAMES = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f", "embedding_norm",
                "output_norm")  # fmt: skip
_LAYER_NAMES = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                "post_feedforward_layernorm", "attention_norm", "ffn_norm", "operator_norm")  # fmt: skip
_OTHER_PARTS = frozenset({"audio_tower", "draft", "mtp", "vision_model", "vision_tower", "visual"})


@dataclass(frozen=True, slots=True)
class NormFacts:
    """What a config says of the final norm.

    Attributes
    ----------
    where
        The config.
    model_type
        Its type of model, "" where it names none.
    style
        "rms" or "gemma"; None where it is not known.
    eps, eps_name
        The epsilon and what the config calls it; None where it has none.
    is_layer_norm
        Whether the model has no RMSNorm at its end.
    is_wide
        Whether it rounds after the product with the weight, where style "rms" does so before it.
    """

    where: str
    model_type: str
    style: str | None
    eps: float | None
    eps_name: str
    is_layer_norm: bool
    is_wide: bool

    def problems(self, eps: float | None, style: str | None) -> list[Problem]:
        """Say what of --norm-eps and --norm-style is not the model's; None is what the user did not say."""
        kind = f"model_type {self.model_type!r}" if self.model_type else "no model_type"
        if self.is_layer_norm:
            got = f"{kind}, whose final norm is a LayerNorm"
            remedy = "capture the data anew after the norm, or choose a format whose readers take states before it"
            return [Problem(self.where, "a model whose final norm is an RMSNorm", got, remedy)]
        problems = []
        if self.eps is not None and eps is not None and eps != self.eps:
            remedy = f"--norm-eps {self.eps!r}"
            problems.append(Problem("--norm-eps", f"{self.eps!r}, {self.eps_name} in {self.where}", f"{eps!r}", remedy))
        if self.style is not None and (style or "rms") != self.style:
            factor = "1 + weight" if self.style == "gemma" else "the weight"
            expected = f"{self.style}: {kind} in {self.where} multiplies by {factor}"
            problems.append(Problem("--norm-style", expected, style or "rms", f"--norm-style {self.style}"))
        if self.style is None and style is None and "gemma" in self.model_type:
            expected = f"rms or gemma: whether {kind} in {self.where} multiplies by the weight or by 1 + weight"
            problems.append(Problem("--norm-style", expected, "none", "look it up in the model's code"))
        return problems

    def settles(self) -> bool:
        """Whether style and epsilon are both known."""
        return self.style is not None and self.eps is not None


def norm_facts(path: Path, where: str) -> NormFacts:
    """Return what a model's config says of its final norm.

    Raises
    ------
    NotFoundError, UsageError
        No config is there.
    """
    config = read_config(path, where)
    text = config.get("text_config")
    # In a model of several parts, the norm is the language model's.
    parts = [part for part in (text, config) if isinstance(part, dict)]
    kind = next((part["model_type"] for part in parts if isinstance(part.get("model_type"), str)), "")
    name = _EPS_NAMES.get(kind, _RMS_EPS)
    eps = _number(parts, name)
    known = kind in _EPS_NAMES or eps is not None
    is_layer_norm = kind in _LAYER_NORM or (
        not known and kind not in _GEMMA and any(_number(parts, other) is not None for other in _LAYER_NORM_EPS)
    )
    style: str | None = "gemma" if kind in _GEMMA else "rms" if kind and known else None
    if "gemma" in kind and kind not in _GEMMA | _PLAIN_GEMMA:
        style = None
    return NormFacts(str(path), kind, style, eps, name, is_layer_norm, kind in _WIDE)


def config_beside(weight: str) -> Path | None:
    """Return the config beside the file of FILE:KEY, None where there is none."""
    path = Path(weight.rpartition(":")[0] or weight).parent / CONFIG
    return path if path.is_file() else None


def key_problem(key: str, where: str, fitting: Iterable[str]) -> Problem | None:
    """Say that a tensor's name is one of a layer's own norm, or of another part's.

    Parameters
    ----------
    key
        The tensor that was named.
    where
        The option, for the message.
    fitting
        Tensors of that size in its file.
    """
    finals = [name for name in fitting if is_final(name)]
    if not _is_owned(key) or (not finals and not any(word in _LAYER_NAMES for word in key.split("."))):
        return None
    remedy = f"in this file: {', '.join(finals)}" if finals else (
        "it is in another file of the model: model.safetensors.index.json says which"
    )  # fmt: skip
    return Problem(where, "the final norm, as model.norm.weight", f"{key}, a norm inside the model", remedy)


def is_final(key: str) -> bool:
    """Whether a tensor is named as final norms are."""
    words = key.removesuffix(".weight").split(".")
    return words[-1] in _FINAL_NAMES and not _is_owned(key)


def _is_owned(key: str) -> bool:
    words = key.split(".")
    return any(word.isdigit() or word in _OTHER_PARTS or word in _LAYER_NAMES for word in words)


def _number(parts: Iterable[Mapping[str, Any]], name: str) -> float | None:
    for part in parts:
        value = part.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None
