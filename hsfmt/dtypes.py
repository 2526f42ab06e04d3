"""The closed set of element types, and the NumPy integers that carry their bit patterns.

Spec: rule DT-1. bfloat16 and float8_e4m3fn have no native NumPy type; inside the package they travel as unsigned
integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hsfmt.errors import FormatError


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Attributes
    ----------
    name
        Zarr v3 data type name.
    storage
        Little-endian NumPy dtype that holds the bit patterns.
    exponent_mask
        A value is not finite when all these bits are set in its pattern; 0 for integers.
    """

    name: str
    storage: np.dtype[np.generic]
    exponent_mask: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return self.storage.itemsize


_ALL = (
    DType("bfloat16", np.dtype("<u2"), 0x7F80),
    DType("float16", np.dtype("<f2"), 0x7C00),
    DType("float32", np.dtype("<f4"), 0x7F80_0000),
    DType("float8_e4m3fn", np.dtype("u1"), 0x7F),
    DType("float64", np.dtype("<f8"), 0x7FF0_0000_0000_0000),
    DType("bool", np.dtype("u1")),
    DType("int8", np.dtype("i1")),
    DType("int16", np.dtype("<i2")),
    DType("int32", np.dtype("<i4")),
    DType("int64", np.dtype("<i8")),
    DType("uint8", np.dtype("u1")),
    DType("uint16", np.dtype("<u2")),
    DType("uint32", np.dtype("<u4")),
    DType("uint64", np.dtype("<u8")),
)
DTYPES: dict[str, DType] = {d.name: d for d in _ALL}
STATE_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")


def dtype(name: str, where: str = "dtype") -> DType:
    """Return the element type of that name.

    Raises
    ------
    FormatError
        The name is not in the closed set.
    """
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise FormatError.at(where, expected=f"one of {', '.join(DTYPES)}", got=repr(name)[:60]) from None


def n_nonfinite(patterns: npt.NDArray[np.generic], of: DType) -> int:
    """Count the NaN and Inf values among bit patterns held as `of.storage`."""
    if not of.exponent_mask:
        return 0
    bits = patterns.view(np.dtype(f"<u{of.itemsize}"))
    mask = bits.dtype.type(of.exponent_mask)
    return int(np.count_nonzero((bits & mask) == mask))
