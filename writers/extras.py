"""Extra columns: what a writer declares, and a sample's values for them.

Spec: rules COL-3, COL-4, COL-6 and DIG-4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt.columns import CORE_COLUMNS, KINDS, NAME_PATTERN
from hsfmt.digests import extras_digest
from hsfmt.dtypes import DType, dtype
from hsfmt.errors import SampleError, UsageError
from hsfmt.writers.samples import patterns

Array = npt.NDArray[Any]


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
        extra = (
            value if isinstance(value, Extra) else Extra(value["kind"], value["dtype"], tuple(value.get("shape", ())))
        )
        where = f"extras: {name}"
        if not NAME_PATTERN.fullmatch(name) or name in CORE_COLUMNS:
            raise UsageError.at(where, expected=f"a name of {NAME_PATTERN.pattern}, not a core column", got=repr(name))
        if extra.kind not in KINDS or any(n < 1 for n in extra.shape):
            raise UsageError.at(where, expected=f"kind of {', '.join(KINDS)} and positive axes", got=repr(extra))
        dtype(extra.dtype, where)
        result[name] = extra
    return result


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
        given = np.asarray(given, extra.element.storage)
    rows = patterns(given, extra.element, f"{where}: {name}")
    if extra.kind == "sample" and rows.shape == extra.shape:
        rows = rows[None]
    fits = rows.shape[1:] == extra.shape and rows.ndim >= 1 and expected_rows in (None, len(rows))
    if not fits:
        expected = f"[{expected_rows if expected_rows is not None else 'any'} rows, *{extra.shape}]"
        raise SampleError.at(f"{where}: {name}", expected=expected, got=str(rows.shape))
    return ExtraValue(rows, valid=True)


def digest_extras(meta: bytes, declared: Mapping[str, Extra], values: Mapping[str, ExtraValue]) -> bytes:
    """Return the digest of metadata and extras (rule DIG-4)."""
    entries: Sequence[tuple[str, str, tuple[int, ...], bytes | None]] = [
        (name, extra.dtype, values[name].rows.shape, values[name].rows.tobytes() if values[name].valid else None)
        for name, extra in sorted(declared.items())
    ]
    return extras_digest(meta, entries)
