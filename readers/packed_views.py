"""What a packed batch holds for which trainer: its keys in order, and which states of a sample go where.

Each view but "raw" is what the collator of speculators 0.9 makes for the speculator type of that name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from hsfmt.errors import UsageError
from hsfmt.header import Header
from hsfmt.readers.buffers import Spec

AUXILIARY, FINAL = "hidden_states", "verifier_last_hidden_states"


class _Recipe(NamedTuple):
    """A view: its keys in order, and how many tokens it sets the next token's id and final state ahead."""

    keys: tuple[str, ...]
    shift: int


_REST = ("loss_mask", "position_ids", "document_ids")
_EAGLE = _Recipe(("input_ids", AUXILIARY, FINAL, *_REST), 1)
_UNSHIFTED = _Recipe((AUXILIARY, "input_ids", FINAL, *_REST), 0)
_RECIPES = {
    "eagle3": _EAGLE,
    "peagle": _EAGLE,
    "dflash": _UNSHIFTED,
    "dflash2": _UNSHIFTED,
    "dspark": _UNSHIFTED,
    "xpress": _UNSHIFTED,
    "mtp": _Recipe(("input_ids", AUXILIARY, *_REST), 0),
    "raw": _Recipe((AUXILIARY, "input_ids", *_REST), 0),
}
PACKED_VIEWS = tuple(_RECIPES)


@dataclass(frozen=True, slots=True)
class PackedStates:
    """A tensor of states in a batch.

    Attributes
    ----------
    key
        Its key.
    planes
        Positions on the stored layer axis.
    shift
        A sample's token t goes to its row t - shift.
    """

    key: str
    planes: tuple[int, ...]
    shift: int


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The tensors of a batch.

    Attributes
    ----------
    view
        One of `PACKED_VIEWS`.
    keys
        Of the batch, in order.
    shift
        Tokens that a sample loses on its way into the batch.
    states
        Those among the keys that hold states.
    hidden_size
        Elements of a state.
    stored
        Element type of the dataset's states.
    dtype
        That of the batch's.
    scale
        Extra column of the scales of float8 states, or None.
    dequantizes
        Whether the states are multiplied with them.
    """

    view: str
    keys: tuple[str, ...]
    shift: int
    states: tuple[PackedStates, ...]
    hidden_size: int
    stored: str
    dtype: torch.dtype
    scale: str | None
    dequantizes: bool

    @property
    def converts(self) -> bool:
        """Whether the batch holds other bits than the dataset."""
        return self.dequantizes or self.dtype != getattr(torch, self.stored)

    def specs(self, n_tokens: int) -> dict[str, Spec]:
        """Return (shape, dtype) of each tensor of a batch of `n_tokens`."""
        raw = self.view == "raw"
        narrow = {
            "input_ids": torch.int64,
            "loss_mask": torch.bool if raw else torch.int64,
            "position_ids": torch.int64,
            "document_ids": torch.int64,
        }
        specs: dict[str, Spec] = {key: ((1, n_tokens), dtype) for key, dtype in narrow.items()}
        if self.scale is not None:
            specs[self.scale] = (1, n_tokens), torch.float32
        for states in self.states:
            n_layers = len(states.planes)
            tail = (n_layers, self.hidden_size) if raw else (n_layers * self.hidden_size,)
            specs[states.key] = (1, n_tokens, *tail), self.dtype
        return {key: specs[key] for key in self.keys}


def packed_layout(
    view: str, header: Header, layers: tuple[int, ...], dtype: torch.dtype | None, *, dequantize: bool
) -> PackedLayout:
    """Return the layout of a view's batches.

    Parameters
    ----------
    view
        One of `PACKED_VIEWS`.
    header
        The dataset's.
    layers
        HF ids of the layers wanted.
    dtype
        Of the states in the batch; None: as they are stored, bfloat16 where they are dequantised.
    dequantize
        Multiply float8 states with their scales, if they have any.

    Raises
    ------
    UsageError
        There is no such view, or states can't be given in that dtype.
    """
    if view not in PACKED_VIEWS:
        raise UsageError.at("view", expected=f"one of {', '.join(PACKED_VIEWS)}", got=repr(view)[:60])
    scale = header.scaling["column"] if header.scaling else None
    dequantizes = dequantize and scale is not None
    given: torch.dtype = torch.bfloat16 if dequantizes else getattr(torch, header.dtype)
    if dtype is not None and not _is_floating(dtype):
        raise UsageError.at("hidden_states_dtype", expected="a floating point torch.dtype", got=repr(dtype)[:60])
    if scale is not None and not dequantizes and dtype not in (None, given):
        remedy = "open the dataset with dequantize=True"
        expected = f"{given}, of which the scales are"
        raise UsageError.at("hidden_states_dtype", expected=expected, got=str(dtype), remedy=remedy)
    keys, shift = _RECIPES[view]
    if scale is not None and not dequantizes:
        keys = (keys[0], scale, *keys[1:])
    return PackedLayout(
        view=view,
        keys=keys,
        shift=shift,
        states=_states(view, tuple(header.layers.index(layer) for layer in layers), shift),
        hidden_size=header.hidden_size,
        stored=header.dtype,
        dtype=dtype or given,
        scale=scale,
        dequantizes=dequantizes,
    )


def _is_floating(dtype: object) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _states(view: str, planes: tuple[int, ...], shift: int) -> tuple[PackedStates, ...]:
    if view == "raw":
        return (PackedStates(AUXILIARY, planes, 0),)
    if view == "mtp":
        return (PackedStates(AUXILIARY, planes[-1:], 0),)
    return PackedStates(AUXILIARY, planes[:-1], 0), PackedStates(FINAL, planes[-1:], shift)
