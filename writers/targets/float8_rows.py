"""float8_e4m3fn states with a scale a token, computed as speculators' hs_connectors (0.7 to 0.9) computes them.

scale = max(largest absolute value of the token over all layers / 448, 1e-12) in float32; values = state / scale,
rounded to the nearest. Its readers restore float8.to(bfloat16) * scale.to(bfloat16): the format's rule
`bfloat16_product`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX = np.float32(448)
_SMALLEST_SCALE = np.float32(1e-12)
_BLOCK_NBYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Float8Rows:
    """Quantised states, and what that cost.

    Attributes
    ----------
    states
        float8_e4m3fn [token, layer, hidden].
    scales
        float32 [token].
    max_error
        Largest absolute difference of a restored value from the one that was given; NaN if a NaN was given.
    max_relative_error
        The same, in parts of the largest absolute value of its token.
    """

    states: NDArray[Any]
    scales: NDArray[np.float32]
    max_error: float
    max_relative_error: float


def quantise(states: NDArray[Any]) -> Float8Rows:
    """Quantise the states of a sample.

    Parameters
    ----------
    states
        [token, layer, hidden], bfloat16 (ml_dtypes'), float16 or float32. It is not changed; what is needed beside it
        and the result is a few blocks of 16 MiB.
    """
    values = np.empty(states.shape, ml_dtypes.float8_e4m3fn)
    scales = np.empty(len(states), np.float32)
    errors = np.zeros(2, np.float32)
    step = max(1, _BLOCK_NBYTES // (4 * states[0].size if states.size else 1))
    for start in range(0, len(states), step):
        block = slice(start, start + step)
        wide = states[block].astype(np.float32)
        largest = np.abs(wide).max(axis=(1, 2), initial=0)
        scales[block] = scale = np.maximum(largest / _MAX, _SMALLEST_SCALE)
        with np.errstate(invalid="ignore"):  # infinite by infinite is NaN
            values[block] = wide / scale[:, None, None]
            error = np.abs(dequantise(values[block], scale).astype(np.float32) - wide).max(axis=(1, 2), initial=0)
        relative = np.divide(error, largest, out=np.zeros_like(error), where=largest > 0)
        errors = np.maximum(errors, [error.max(initial=0), relative.max(initial=0)])
    return Float8Rows(values, scales, float(errors[0]), float(errors[1]))


def dequantise(states: NDArray[Any], scales: NDArray[np.float32]) -> NDArray[Any]:
    """Restore states as their readers do, in bfloat16 throughout.

    Parameters
    ----------
    states, scales
        float8_e4m3fn [token, layer, hidden] and float32 [token].
    """
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite comes out as there
        product: NDArray[Any] = states.astype(ml_dtypes.bfloat16) * scales.astype(ml_dtypes.bfloat16)[:, None, None]
    return product
