"""Extra columns: what a writer declares, and a sample's values for them.

Spec: rules COL-1, COL-2, COL-8 and DIG-4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hsfmt.columns import CORE_COLUMNS, KINDS, NAME_PATTERN
from hsfmt.digests import extras_digest
from hsfmt.dtypes import DType, dtype, n_nonfinite
from hsfmt.errors import SampleError, UsageError
from hsfmt.header import Header
from hsfmt.writers.samples import is_positive, patterns

Array = npt.NDArray[Any]


# write() has these as parameters of its own, so that a column of such a name could never be given.
_RESERVED = ("self", "sample_id", "metadata", "source_index")


@dataclass(frozen=True, slots=True)
class Extra:
    """A declared extra column.

    Attributes
    ----------
    kind
        "token": a row a token; "sample": one row a sample; "ragged": any number of rows a sample.
    dtype
        Zarr data type name of the closed set.
    shape
        Shape of a row, () for a scalar.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def element(self) -> DType:
        """Element type."""
        return dtype(self.dtype)


@dataclass(frozen=True, slots=True)
class ExtraValue:
    """A sample's value of one extra column: rows [row, ...] of patterns, or None rows for null."""

    rows: Array
    valid: bool


def parse_extras(declared: Mapping[str, Extra | Mapping[str, Any]] | None) -> dict[str, Extra]:
    """Return the declared columns by name, ascending.

    Raises
    ------
    UsageError
        A name, kind or shape that the format does not have.
    FormatError
        A dtype outside the closed set.
    """
    result = {}
    for name, value in sorted((declared or {}).items()):
        where = f"extras: {name}"
        if not NAME_PATTERN.fullmatch(name) or name in (*CORE_COLUMNS, *_RESERVED):
            expected = f"a name of {NAME_PATTERN.pattern} that is no core column or parameter of write()"
            raise UsageError.at(where, expected=expected, got=repr(name))
        try:
            extra = (
                value
                if isinstance(value, Extra)
                else Extra(value["kind"], value["dtype"], tuple(value.get("shape", ())))
            )
        except (KeyError, TypeError, AttributeError):
            raise UsageError.at(where, expected="kind, dtype and shape", got=repr(value)[:100]) from None
        if extra.kind not in KINDS or not all(is_positive(n) for n in extra.shape):
            raise UsageError.at(where, expected=f"kind of {', '.join(KINDS)} and positive axes", got=repr(extra))
        dtype(extra.dtype, where)
        result[name] = replace(extra, shape=tuple(extra.shape))
    return result


def with_scale(declared: dict[str, Extra], header: Header) -> dict[str, Extra]:
    """Return the columns with that of the header's scaling among them.

    Raises
    ------
    UsageError
        It was declared as something else than a float32 a token, or its name can't be a column's.
    """
    if header.scaling is None:
        return declared
    column = header.scaling["column"]
    wanted = parse_extras({column: Extra("token", "float32")})
    if declared.get(column, wanted[column]) != wanted[column]:
        got = repr(declared[column])
        raise UsageError.at(f"extras: {column}", expected=f"{wanted[column]}, as the scaling says", got=got)
    return dict(sorted((declared | wanted).items()))


def extra_values(
    declared: Mapping[str, Extra], given: Mapping[str, Any], n_tokens: int, where: str
) -> dict[str, ExtraValue]:
    """Return a value for each declared column; one that was not given, or is None, is null.

    Raises
    ------
    SampleError
        An undeclared column, another dtype, or rows that do not fit.
    """
    unknown = sorted(set(given) - set(declared))
    if unknown:
        remedy = "declare it: DatasetWriter(..., extras={name: Extra(kind, dtype, shape)})"
        raise SampleError.at(where, expected=f"extras among {sorted(declared)}", got=str(unknown), remedy=remedy)
    return {name: _value(name, extra, given.get(name), n_tokens, where) for name, extra in declared.items()}


def _value(name: str, extra: Extra, given: Any, n_tokens: int, where: str) -> ExtraValue:
    expected_rows = {"token": n_tokens, "sample": 1, "ragged": None}[extra.kind]
    if given is None:
        return ExtraValue(np.zeros((expected_rows or 0, *extra.shape), extra.element.storage), valid=False)
    if isinstance(given, int | float | bool | list | tuple):
        rows = _from_python(given, extra, f"{where}: {name}")
    else:
        rows = patterns(given, extra.element, f"{where}: {name}")
    if extra.kind == "sample" and rows.shape == extra.shape:
        rows = rows[None]
    fits = rows.shape[1:] == extra.shape and rows.ndim >= 1 and expected_rows in (None, len(rows))
    if not fits:
        expected = f"[{expected_rows if expected_rows is not None else 'any'} rows, *{extra.shape}]"
        raise SampleError.at(f"{where}: {name}", expected=expected, got=str(rows.shape))
    return ExtraValue(rows, valid=True)


def _from_python(given: Any, extra: Extra, where: str) -> Array:
    """Return the patterns of plain numbers, rounded only where the column is of floats."""
    element = extra.element
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise SampleError.at(where, expected="rows of one length", got=str(error)[:100]) from None
    if not array.size:
        return np.zeros((0, *extra.shape), element.storage)
    native: np.dtype[Any] = getattr(ml_dtypes, element.name, None) or np.dtype(element.name)
    kinds = {"b": "b", "i": "iu", "u": "iu"}.get(np.dtype(native).kind, "iuf")
    with np.errstate(all="ignore"):
        cast = array.astype(native) if array.dtype.kind in kinds else None
    if cast is not None and "f" not in kinds:
        fits = np.array_equal(cast, array)
    else:
        fits = cast is not None and bool(np.all(np.isfinite(cast) == np.isfinite(array)))
    if cast is None or not fits:
        raise SampleError.at(where, expected=f"values of dtype {element.name}", got=repr(given)[:100])
    return cast.view(element.storage)


def check_scale(header: Header, values: Mapping[str, ExtraValue], sample_id: str, *, count_nonfinite: bool) -> int:
    """Return the number of NaN and Inf scales of a sample of scaled states; 0 when they are not counted.

    Raises
    ------
    SampleError
        It has no scales, without which its states mean nothing.
    """
    if header.scaling is None:
        return 0
    value = values[header.scaling["column"]]
    if not value.valid:
        where = f"sample {sample_id!r}: {header.scaling['column']}"
        remedy = "give ones where the states were not scaled"
        raise SampleError.at(where, expected="a scale for each token", got="none", remedy=remedy)
    return n_nonfinite(value.rows, dtype("float32")) if count_nonfinite else 0


def digest_extras(meta: bytes, declared: Mapping[str, Extra], values: Mapping[str, ExtraValue]) -> bytes:
    """Return the digest of metadata and extras (rule DIG-4)."""
    entries: Sequence[tuple[str, str, tuple[int, ...], bytes | None]] = [
        (name, extra.dtype, values[name].rows.shape, values[name].rows.tobytes() if values[name].valid else None)
        for name, extra in sorted(declared.items())
    ]
    return extras_digest(meta, entries)
