"""Names of hooks and modules, and which HF `hidden_states` index the state there has."""

from __future__ import annotations

import re

# TransformerLens, and what imitates it: the residual stream around block i.
_RESIDUAL = re.compile(r"blocks\.([0-9]{1,6})\.hook_resid_(pre|post)")
# Modules of transformers models: the output of decoder layer i.
_DECODER_LAYER = re.compile(r"(?:model\.|language_model\.|transformer\.|gpt_neox\.)*(?:layers|h)\.([0-9]{1,6})")
UNKNOWN_HOOK = (
    "blocks.I.hook_resid_post and the module layers.I are the state after layer I: I + 1; blocks.I.hook_resid_pre is "
    "I; outputs of attention or MLP are no states between layers: leave them out with --map ignore=NAME"
)


def layer_of_hook(name: str) -> int | None:
    """The HF index of the state at a hook or module; None where it is no state between layers, or not known.

    >>> layer_of_hook("blocks.5.hook_resid_post"), layer_of_hook("blocks.5.hook_resid_pre")
    (6, 5)
    >>> layer_of_hook("model.layers.5"), layer_of_hook("blocks.5.hook_mlp_out")
    (6, None)
    """
    match = _RESIDUAL.fullmatch(name)
    if match is not None:
        return int(match[1]) + (match[2] == "post")
    match = _DECODER_LAYER.fullmatch(name)
    return None if match is None else int(match[1]) + 1
