"""Which layers of a dataset a drafter of SpecForge is trained on, and whether they are what it takes them for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hsfmt.errors import Problem, UsageError
from hsfmt.header import Header

# Targets whose class in SGLang, which captures for the training and for the drafter, takes id k for the output of layer
# k, counted from 0, whatever the algorithm (0.5.17 and 0.5.23). DeepSeek's and Kimi's do so for some lists of ids only.
PLAIN_TARGETS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class Target:
    """What counts about the model whose states are trained on.

    Attributes
    ----------
    n_layers
        Decoder layers.
    hidden_size
        Elements of a state.
    """

    n_layers: int
    hidden_size: int


def hf_layers(outputs: Sequence[int], model_type: str) -> list[int]:
    """Return the HF ids of a drafter's layers, which its configuration counts from 0 for the first layer's output.

    Raises
    ------
    UsageError
        What they mean on this target has to be said.
    """
    if model_type not in PLAIN_TARGETS:
        expected = f"the HF ids of the drafter's layers: what {list(outputs)} are on {model_type} is SGLang's to say"
        remedy = "say --hsfmt-layers with those that SGLang resolves them to; `hsfmt info` shows what a capture stored"
        raise UsageError.at("layers", expected=expected, got="none", remedy=remedy)
    return [int(output) + 1 for output in outputs]


def captured_layers(header: Header, target: Target, auxiliary: Sequence[int], *, with_final: bool) -> tuple[int, ...]:
    """Return the HF ids to read: the drafter's layers in ascending order, as they are captured, and the final layer.

    Parameters
    ----------
    header
        What the dataset holds.
    target
        The model.
    auxiliary
        The drafter's layers, HF ids in any order.
    with_final
        Records hold the final state too.

    Raises
    ------
    UsageError
        A layer is not stored, the width is another, or the final state is not after the final norm, which the trainer
        takes for done; all problems at once.
    """
    problems: list[Problem] = []
    if header.hidden_size != target.hidden_size:
        problems.append(Problem("hidden_size", f"{target.hidden_size}, the target's", str(header.hidden_size)))
    auxiliary = sorted({int(layer) for layer in auxiliary})
    final = [target.n_layers] if with_final else []
    if not {*auxiliary, *final} <= set(header.layers):
        ids = f"SpecForge's {[layer - 1 for layer in auxiliary]}"
        expected = f"layers {[*auxiliary, *final]} (HF ids; {ids}{', and the final one' if final else ''})"
        stored = [layer - 1 for layer in header.layers if 0 < layer < target.n_layers]
        problems.append(Problem("layers", expected, str(list(header.layers)), f"stored are SpecForge's {stored}"))
    if target.n_layers in auxiliary and header.final_norm != "pre":
        expected = f"layer {target.n_layers} before the norm, since the drafter takes it for an auxiliary one"
        problems.append(Problem("final_norm", expected, header.final_norm, "train on another layer"))
    if with_final and header.final_norm != "post":
        expected = "post: SpecForge takes the final state as the head gets it, and applies no norm"
        remedy = "capture with SGLang, or train with speculators, which applies the norm"
        problems.append(Problem("final_norm", expected, header.final_norm, remedy))
    if problems:
        raise UsageError(problems)
    return (*auxiliary, *final)
