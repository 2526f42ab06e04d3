"""The Zarr v3 extension data types `bfloat16` and `float8_e4m3fn` for zarr-python, as NumPy arrays of ml_dtypes.

zarr-python finds the classes through the entry point group `zarr.data_type`; a bare checkout calls `register()`.
Names, fill values and byte orders follow https://github.com/zarr-developers/zarr-extensions (`data-types/bfloat16`) and
what tensorstore writes for `float8_e4m3fn`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self, SupportsFloat, TypeGuard, overload

import ml_dtypes
import numpy as np
import zarr.dtype
import zarr.errors
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.dtype import ZDType

if TYPE_CHECKING:
    from zarr.core.common import JSON, ZarrFormat
    from zarr.core.dtype.common import DTypeConfig_V2, DTypeJSON

# zarr-python moved it from `dtype` to `errors` in 3.2; the old place warns since.
_NotThisType: type[ValueError] = (
    getattr(zarr.errors, "DataTypeValidationError", None) or zarr.dtype.DataTypeValidationError
)


@dataclass(frozen=True, kw_only=True)
class _ExtensionFloat(ZDType[np.dtype[np.generic], np.generic], HasItemSize):
    """What the float types of ml_dtypes have in common; fill values keep their bits, NaN payloads included."""

    _native: ClassVar[np.dtype[np.generic]]
    _bits: ClassVar[type[np.unsignedinteger]]
    _named: ClassVar[dict[str, int]]
    """Bit patterns of the constants that the JSON form of a fill value may name."""

    @property
    def item_size(self) -> int:
        """Bytes of a scalar."""
        return self._native.itemsize

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[np.generic]) -> Self:
        """Return the type that wraps `dtype`.

        Raises
        ------
        DataTypeValidationError
            If it is another type's.
        """
        if cls._check_native_dtype(dtype):
            return cls()
        raise _NotThisType(f"Invalid data type: {dtype}. Expected {cls._native}")

    def to_native_dtype(self) -> np.dtype[np.generic]:
        """Return the NumPy data type."""
        return self._native

    @classmethod
    def _from_json_v2(cls, data: DTypeJSON) -> Self:
        raise _NotThisType(f"{cls._zarr_v3_name} does not exist in Zarr format 2, got {data!r}")

    @classmethod
    def _from_json_v3(cls, data: DTypeJSON) -> Self:
        if cls._check_json_v3(data):
            return cls()
        raise _NotThisType(f"Invalid JSON representation of {cls.__name__}. Got {data!r}, expected {cls._zarr_v3_name}")

    @classmethod
    def _check_json_v3(cls, data: DTypeJSON) -> TypeGuard[str]:
        return data == cls._zarr_v3_name

    @overload
    def to_json(self, zarr_format: Literal[2]) -> DTypeConfig_V2[str, None]: ...

    @overload
    def to_json(self, zarr_format: Literal[3]) -> str: ...

    def to_json(self, zarr_format: ZarrFormat) -> DTypeConfig_V2[str, None] | str:
        """Return the name in array metadata.

        Raises
        ------
        ValueError
            For Zarr format 2, which has no such type.
        """
        if zarr_format == 3:
            return self._zarr_v3_name
        raise ValueError(f"{self._zarr_v3_name} exists in Zarr format 3 only")

    def _check_scalar(self, data: object) -> TypeGuard[SupportsFloat]:
        return isinstance(data, SupportsFloat)

    def cast_scalar(self, data: object) -> np.generic:
        """Return `data` as a scalar of this type; a scalar of this type keeps its bits.

        Raises
        ------
        TypeError
            If it is no number.
        """
        if isinstance(data, self._native.type):
            return data
        if self._check_scalar(data):
            with np.errstate(over="ignore"):
                return np.array([float(data)]).astype(self._native)[0]  # type: ignore[no-any-return]
        raise TypeError(f"Cannot convert {data!r} of type {type(data)} to {self._zarr_v3_name}")

    def default_scalar(self) -> np.generic:
        """Return 0."""
        return self.cast_scalar(0)

    def from_json_scalar(self, data: JSON, *, zarr_format: ZarrFormat) -> np.generic:
        """Return the scalar of a fill value: a number, "NaN", "Infinity", "-Infinity", or the bits as "0x…".

        Raises
        ------
        TypeError
            If it is neither a number nor a string.
        ValueError
            If the string is none of these, or the number is beyond the type's range.
        """
        del zarr_format  # only format 3 has these types
        if isinstance(data, str):
            return self._from_bits(self._parse_bits(data))
        if isinstance(data, bool) or not isinstance(data, int | float):
            raise TypeError(f"Invalid fill value of {self._zarr_v3_name}: {data!r}")
        scalar = self.cast_scalar(data)
        if not _is_finite(scalar):
            raise ValueError(f"Fill value {data!r} is beyond the range of {self._zarr_v3_name}")
        return scalar

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> float | str:
        """Return the JSON form of a fill value, as tensorstore writes it; a NaN of other bits than "NaN" is "0x…"."""
        del zarr_format
        scalar = self.cast_scalar(data)
        if _is_finite(scalar):
            return float(scalar)
        bits = int(np.asarray(scalar).view(self._bits))
        for name, named in self._named.items():
            if named == bits:
                return name
        return f"0x{bits:0{2 * self.item_size}x}"

    @classmethod
    def _parse_bits(cls, text: str) -> int:
        if text in cls._named:
            return cls._named[text]
        if not re.fullmatch(rf"0x[0-9a-fA-F]{{{2 * cls._native.itemsize}}}", text):
            raise ValueError(f"Invalid fill value of {cls._zarr_v3_name}: {text!r}")
        return int(text, 16)

    @classmethod
    def _from_bits(cls, bits: int) -> np.generic:
        return np.array([bits], cls._bits).view(cls._native)[0]  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class BFloat16(_ExtensionFloat, HasEndianness):
    """The upper half of a float32: 1 sign, 8 exponent and 7 mantissa bits."""

    dtype_cls = type(np.dtype(ml_dtypes.bfloat16))
    _zarr_v3_name = "bfloat16"
    _native = np.dtype(ml_dtypes.bfloat16)
    _bits = np.uint16
    _named: ClassVar = {"NaN": 0x7FC0, "Infinity": 0x7F80, "-Infinity": 0xFF80}

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[np.generic]) -> Self:
        """Return the type that wraps `dtype`, in its byte order.

        Raises
        ------
        DataTypeValidationError
            If it is another type's.
        """
        super().from_native_dtype(dtype)
        return cls(endianness="little" if dtype == dtype.newbyteorder("<") else "big")

    def to_native_dtype(self) -> np.dtype[np.generic]:
        """Return the NumPy data type in this byte order."""
        order: Literal["<", ">"] = "<" if self.endianness == "little" else ">"
        ordered: np.dtype[np.generic] = self._native.newbyteorder(order)
        return ordered


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FN(_ExtensionFloat):
    """1 sign, 4 exponent (bias 7) and 3 mantissa bits; no infinities, NaN is 0x7f and 0xff."""

    dtype_cls = type(np.dtype(ml_dtypes.float8_e4m3fn))
    _zarr_v3_name = "float8_e4m3fn"
    _native = np.dtype(ml_dtypes.float8_e4m3fn)
    _bits = np.uint8
    _named: ClassVar = {"NaN": 0x7F}


def _is_finite(scalar: np.generic) -> bool:
    with np.errstate(invalid="ignore"):  # a signalling NaN is as good a NaN as any
        return bool(np.isfinite(scalar))


def register() -> None:
    """Make the data types known to zarr-python where the entry points are not installed; harmless where they are."""
    for data_type in (BFloat16, Float8E4M3FN):
        zarr.dtype.data_type_registry.register(data_type._zarr_v3_name, data_type)  # noqa: SLF001 - zarr's own key
