"""Views: what a sample looks like to who trains on it, as torch tensors.

The arrays of a read become tensors without a copy. "raw" is the sample as stored; "speculators" is what the datasets of
speculators 0.8 and later give (keys, order, shapes and dtypes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hsfmt.dtypes import dtype
from hsfmt.errors import UsageError
from hsfmt.header import Header
from hsfmt.readers.sample_arrays import SampleArrays

Item = dict[str, Any]
Array = npt.NDArray[Any]

# torch has no NumPy counterpart of these: their bits travel as integers of the same width.
_BIT_PATTERNS = {"bfloat16": np.dtype(np.int16), "float8_e4m3fn": np.dtype(np.uint8)}


@dataclass(frozen=True, slots=True)
class View:
    """How items are made of arrays.

    Attributes
    ----------
    header
        The dataset's.
    dequantize
        Turn scaled float8 into bfloat16.
    extras
        Names of the extra columns that items carry; the scales of float8 come by themselves.
    """

    header: Header
    dequantize: bool = False
    extras: tuple[str, ...] = ()

    @property
    def scale_column(self) -> str | None:
        """The extra column that holds the scales, or None."""
        return self.header.scaling["column"] if self.header.scaling else None

    @property
    def dequantizes(self) -> bool:
        """Whether items hold other states than the dataset."""
        return self.dequantize and self.scale_column is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """The extra columns to read."""
        scale = self.scale_column
        return self.extras if scale is None or scale in self.extras else (*self.extras, scale)

    @property
    def hidden_states_dtype(self) -> torch.dtype:
        """Data type of the states in items."""
        name = "bfloat16" if self.dequantizes else self.header.dtype
        found: torch.dtype = getattr(torch, name)
        return found

    def raw(self, sample: SampleArrays, states: torch.Tensor | None = None) -> Item:
        """Return the item of view "raw".

        `states` is the tensor that the item is to hold: over the very memory of the sample's states, or for dequantised
        ones to take them.

        Its keys: `hidden_states` [token, layer, hidden]; for float8 that is not dequantised `hidden_states_scale`
        float32 [token]; `input_ids` int64 [token]; `loss_mask` bool [token]; `sample_id`; and the extra columns.
        """
        scale = self.scale_column
        item: Item = {"hidden_states": self._states(sample, states)}
        if scale is not None and not self.dequantize:
            item[scale] = _extra(sample, scale)
        item["input_ids"] = torch.from_numpy(sample.input_ids)
        item["loss_mask"] = torch.from_numpy(sample.loss_mask)
        item["sample_id"] = sample.sample_id
        for name in self.extras:
            item.setdefault(name, _extra(sample, name))
        return item

    def speculators(self, sample: SampleArrays, states: torch.Tensor | None = None) -> Item:
        """Return the item of view "speculators"; `states` as in `raw`.

        In this order: `hidden_states` [token, (layer - 1) * hidden], `input_ids` int64 [token],
        `verifier_last_hidden_states` [token, hidden], `loss_mask` int64 [token], `lengths` int64 [1], `position_ids`
        int64 [token]. Both states are views of one buffer, as in speculators.
        """
        states = self._states(sample, states)
        n_tokens = states.shape[0]
        return {
            "hidden_states": states[:, :-1].flatten(1),
            "input_ids": torch.from_numpy(sample.input_ids),
            "verifier_last_hidden_states": states[:, -1],
            "loss_mask": torch.from_numpy(sample.loss_mask).to(torch.int64),
            "lengths": torch.tensor([n_tokens], dtype=torch.int64),
            "position_ids": torch.arange(n_tokens, dtype=torch.int64),
        }

    def maker(self, name: str) -> Callable[[SampleArrays, torch.Tensor | None], Item]:
        """Return the function of the view of that name."""
        return {"raw": self.raw, "speculators": self.speculators}[name]

    def _states(self, sample: SampleArrays, out: torch.Tensor | None) -> torch.Tensor:
        if not self.dequantize or self.scale_column is None:
            return as_tensor(sample.hidden_states, self.header.dtype) if out is None else out
        scale = sample.extras[self.scale_column]
        if scale is None:
            where = f"{self.scale_column} of {sample.sample_id}"
            raise UsageError.at(where, expected="scales to dequantise with", got="null", remedy="use dequantize=False")
        # Both factors in bfloat16, as hs_connectors does it: the product in float32 would round differently.
        factors = torch.from_numpy(scale).to(torch.bfloat16)
        values = as_tensor(sample.hidden_states, self.header.dtype).to(torch.bfloat16)
        return torch.mul(values, factors.reshape(-1, 1, 1), out=out)


def as_tensor(array: Array, dtype_name: str) -> torch.Tensor:
    """Return a tensor of the element type over the memory of an array of its bit patterns."""
    if dtype_name in _BIT_PATTERNS:
        found: torch.dtype = getattr(torch, dtype_name)
        return torch.from_numpy(array.view(_BIT_PATTERNS[dtype_name])).view(found)
    return torch.from_numpy(array)


def as_array(tensor: torch.Tensor, dtype_name: str) -> Array:
    """Return the array of bit patterns over the memory of a tensor on the CPU.

    Raises
    ------
    UsageError
        It has another data type or lies elsewhere.
    """
    if tensor.device.type != "cpu" or tensor.dtype != getattr(torch, dtype_name):
        got = f"{tensor.dtype} on {tensor.device}"
        raise UsageError.at("out", expected=f"a CPU tensor of torch.{dtype_name}", got=got)
    if dtype_name in _BIT_PATTERNS:
        tensor = tensor.view(torch.int16 if dtype_name == "bfloat16" else torch.uint8)
    array: Array = tensor.detach().numpy()
    return array.view(dtype(dtype_name).storage)


def check_trainable(
    header: Header, layers: Sequence[int] | None, allow_final_norm: str | None, view: str = "speculators"
) -> None:
    """Refuse a dataset whose last layer is not what trainers of speculators >= 0.4 normalise themselves.

    Parameters
    ----------
    header
        The dataset's.
    layers
        HF ids of the layers wanted; None: all.
    allow_final_norm
        A norm that is taken all the same: "post" or "unknown".
    view
        What the trainer gets; "mtp" has no auxiliary layers.

    Raises
    ------
    UsageError
        Says which state the last layer holds, and how to have it all the same.
    """
    last = header.layers[-1] if layers is None or not len(layers) else int(layers[-1])
    if last != header.layers[-1]:
        expected = f"the final layer {header.layers[-1]} among the layers: it is verifier_last_hidden_states"
        raise UsageError.at("layers", expected=expected, got=f"{list(layers or ())}")
    if view != "mtp" and len(header.layers if layers is None else layers) < 2:
        expected = "at least one auxiliary layer beside the final one"
        raise UsageError.at(f'view="{view}"', expected=expected, got=f"layer {last} alone")
    if header.final_norm in ("pre", allow_final_norm):
        return
    expected = "a final state before the final norm, which speculators >= 0.4 applies itself"
    choice = f'allow_final_norm="{header.final_norm}"'
    remedy = f"for a trainer that takes the state as it is (speculators 0.1 and 0.2) say {choice}"
    raise UsageError.at(f'view="{view}"', expected=expected, got=f"final_norm {header.final_norm}", remedy=remedy)


def _extra(sample: SampleArrays, name: str) -> torch.Tensor | None:
    array = sample.extras[name]
    return None if array is None else as_tensor(array, sample.extra_dtypes[name])
