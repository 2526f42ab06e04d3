"""What is done to the states of a sample on their way out: float8 dequantised, the final norm applied, a cast.

All of it is the user's explicit wish; nothing else changes a value. A cast to float8 loses so much that what it lost is
measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hsfmt.cli.exporting.norm import FinalNorm
from hsfmt.errors import SampleError
from hsfmt.header import Header
from hsfmt.readers.sample_arrays import SampleArrays
from hsfmt.writers.targets.float8_rows import quantise

Array = npt.NDArray[Any]

FLOAT8 = "float8_e4m3fn"
CASTS = ("bfloat16", "float16", "float32", FLOAT8)
FLOAT8_SCALING = {"column": "hidden_states_scale", "rule": "bfloat16_product"}
_LARGEST = {"bfloat16": 3.38953139e38, "float16": 65504.0}
_BLOCK_NBYTES = 32 << 20
_NATIVE: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    FLOAT8: np.dtype(ml_dtypes.float8_e4m3fn),
}


def native(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of an element type: that of ml_dtypes where NumPy has none."""
    return _NATIVE.get(name) or np.dtype(name)


@dataclass(slots=True)
class Float8Loss:
    """How far off the values are that are restored from float8: the largest of the samples seen, 0 without any.

    Attributes
    ----------
    max_error
        The difference; NaN where a value was none.
    max_relative_error
        The same, in parts of the largest absolute value of its token.
    """

    max_error: float = 0.0
    max_relative_error: float = 0.0

    def add(self, other: Float8Loss) -> None:
        """Take the larger figures; NaN is larger than all."""
        self.max_error = float(np.maximum(self.max_error, other.max_error))
        self.max_relative_error = float(np.maximum(self.max_relative_error, other.max_relative_error))


@dataclass(frozen=True, slots=True)
class WrittenStates:
    """The states of a sample as they are to be written.

    Attributes
    ----------
    states
        [token, layer, hidden], C-contiguous.
    scales
        float32 [token] where this export made them float8, else None.
    loss
        What that cost.
    """

    states: Array
    scales: npt.NDArray[np.float32] | None = None
    loss: Float8Loss = field(default_factory=Float8Loss)


@dataclass(frozen=True, slots=True)
class StateChange:
    """From the states that a dataset holds to those that are written.

    Attributes
    ----------
    stored
        What the dataset's states mean.
    norm
        Applied to the last of the layers that are read; None for no norm.
    dtype
        Of the states that are written.
    """

    stored: Header
    norm: FinalNorm | None
    dtype: str

    @property
    def dequantizes(self) -> bool:
        """Whether float8 becomes another type, so that its scales are used up."""
        return self.stored.scaling is not None and self.dtype != self.stored.dtype

    @property
    def quantizes(self) -> bool:
        """Whether another type becomes float8, with scales of its own."""
        return self.dtype == FLOAT8 != self.stored.dtype

    def apply(self, sample: SampleArrays) -> WrittenStates:
        """Return the states of a sample as they are to be written; those of `sample` may be changed.

        Raises
        ------
        SampleError
            A value that the dtype can't hold, or states that the norm can't have been meant for.
        """
        states = np.ascontiguousarray(sample.hidden_states).view(native(self.stored.dtype))
        if self.dequantizes:
            states = self._dequantized(states, sample)
        if self.norm is not None:
            states[:, -1] = self.norm.apply(states[:, -1], sample.sample_id)
        if self.quantizes:
            rows = quantise(states)
            return WrittenStates(rows.states, rows.scales, Float8Loss(rows.max_error, rows.max_relative_error))
        same = states.dtype == native(self.dtype)
        return WrittenStates(states if same else self._cast(states, sample.sample_id))

    def _dequantized(self, states: Array, sample: SampleArrays) -> Array:
        assert self.stored.scaling is not None
        column = self.stored.scaling["column"]
        scale = sample.extras[column]
        if scale is None:
            where = f"{column} of sample {sample.sample_id!r}"
            raise SampleError.at(where, expected="scales to dequantise with", got="null", samples=(sample.sample_id,))
        # Both factors in bfloat16, as speculators does it and our own reader: float32 would round differently.
        factors = scale.astype(ml_dtypes.bfloat16).reshape(-1, 1, 1)
        out = np.empty(states.shape, ml_dtypes.bfloat16)
        for block in _blocks(states):
            np.multiply(states[block].astype(ml_dtypes.bfloat16), factors[block], out=out[block])
        return out

    def _cast(self, states: Array, sample_id: str) -> Array:
        out = np.empty(states.shape, native(self.dtype))
        for block in _blocks(states):
            with np.errstate(over="ignore", invalid="ignore"):
                out[block] = states[block].astype(out.dtype)
            if self.dtype == "float32":  # holds whatever the others do
                continue
            lost = np.isinf(out[block]) & np.isfinite(states[block])
            if lost.any():
                largest = float(np.abs(states[block][lost].astype(np.float32)).max())
                raise SampleError.at(
                    f"hidden_states of sample {sample_id!r}",
                    expected=f"values that {self.dtype} can hold, up to {_LARGEST[self.dtype]:g}",
                    got=f"{np.count_nonzero(lost)} beyond that in tokens {block.start} to {block.stop - 1}, "
                    f"as {largest:g}",
                    remedy="choose a dtype with a wider range: --cast bfloat16 or float32",
                    samples=(sample_id,),
                )
        return out


def _blocks(states: Array) -> list[slice]:
    """Return runs of tokens whose states are some MiB, so that what is computed on the way stays small."""
    n = max(1, _BLOCK_NBYTES // max(1, states[:1].nbytes))
    return [slice(at, min(at + n, len(states))) for at in range(0, len(states), n)]
