"""Which servers can be captured from: checked once, when a scheduler has started, and refused loudly."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from inspect import signature
from pkgutil import resolve_name
from typing import Any

from hsfmt.errors import Problem, UsageError

FLOOR = (0, 5, 23)
FLAGS = (
    "--enable-return-aux-hidden-states --speculative-algorithm EAGLE3 --return-aux-hidden-state-layer-ids … "
    "(with this flag the algorithm only names the convention of the ids; no draft is run)"
)
# Resolved server argument -> why it can't be, and what to do.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "speculative_algorithm": (
        bool, "no speculative decoding: it captures truncated and misplaced states", "serve without a draft",
    ),
    "pp_size": (lambda size: size not in (None, 1), "1: other ranks have no states", "use tensor parallelism"),
    "enable_two_batch_overlap": (bool, "off: half of each batch is not captured", "drop --enable-two-batch-overlap"),
    "enable_pdmux": (bool, "off: its prefill takes another path", "drop --enable-pdmux"),
    "dllm_algorithm": (bool, "none: prompts of diffusion models have no single state", ""),
    "enable_encoder_swa_bounded_replay": (bool, "off: it computes a part of the rows", ""),
    "enable_decoder_swa_bounded_replay": (
        bool, "off: it computes a part of the rows", "pass --no-enable-decoder-swa-bounded-replay",
    ),
    "disaggregation_mode": (lambda mode: mode == "decode", "null or prefill", "capture on the prefill server"),
}  # fmt: skip


def check_version(version: str) -> None:
    """Refuse an SGLang that lacks what the capture is made of.

    Raises
    ------
    UsageError
        It is older than 0.5.23. A version that says nothing (a build from source) is taken: the hooks' targets are
        checked in any case.
    """
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    found = tuple(map(int, match.groups())) if match else (0, 0, 0)
    if (0, 0, 0) < found < FLOOR:
        remedy = "upgrade SGLang: older ones lose the states of all but the last prefill chunk, and have no final state"
        raise UsageError.at("sglang", expected="0.5.23 or newer", got=version, remedy=remedy)


def check_targets(targets: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse an SGLang that does not have the functions to hook, with the parameters that the hooks rely on.

    Raises
    ------
    UsageError
        Names each that is missing: SGLang itself would only log it.
    """
    problems = []
    for target, parameters in targets.items():
        try:
            function = resolve_name(target)
        except (ImportError, AttributeError) as error:
            problems.append(Problem(target, "a function", str(error)[:200]))
            continue
        missing = [name for name in parameters if name not in signature(function).parameters]
        if missing:
            problems.append(Problem(target, f"parameters {', '.join(parameters)}", f"none named {', '.join(missing)}"))
    if problems:
        remedy = "this version of hsfmt does not know this version of SGLang"
        raise UsageError([*problems[:-1], Problem(problems[-1].where, problems[-1].expected, problems[-1].got, remedy)])


def check_applied(targets: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse to run where a hook was registered and not applied.

    Raises
    ------
    UsageError
        Names each.
    """
    bare = [target for target in targets if not hasattr(resolve_name(target), "__wrapped__")]
    if bare:
        raise UsageError(Problem(target, "a hook", "the bare function: see SGLang's log") for target in bare)


def check_server(arguments: Mapping[str, Any], *, is_generation: bool) -> None:
    """Refuse a server whose states would be missing, misplaced or of another meaning.

    Parameters
    ----------
    arguments
        SGLang's resolved arguments by name.
    is_generation
        Whether the model generates (and does not embed).

    Raises
    ------
    UsageError
        All that is in the way, with what to do.
    """
    problems = []
    if not is_generation:
        problems.append(Problem("model", "one that generates", "an embedding or reward model"))
    if not arguments.get("enable_return_aux_hidden_states"):
        problems.append(Problem("server arguments", FLAGS, "no capture of auxiliary hidden states"))
    for name, (is_refused, expected, remedy) in _REFUSED.items():
        if is_refused(arguments.get(name)):
            problems.append(Problem(f"server argument {name}", expected, repr(arguments.get(name)), remedy))
    if problems:
        raise UsageError(problems)
