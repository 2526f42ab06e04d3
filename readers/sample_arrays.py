"""What is asked of a reader and what comes back: requests, samples as arrays, and the samples on their way.

Spec: rules READ-1 and READ-5.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import canonical
from hsfmt.columns import CORE_COLUMNS, IDS, MASK, STATES, Column
from hsfmt.dtypes import dtype
from hsfmt.errors import CorruptionError, UsageError
from hsfmt.header import Header
from hsfmt.readers.batch import ReadBatch, Rows
from hsfmt.readers.part_cache import OpenPart

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Tokens [start, stop) of sample `index`, the states into `out` if it is given ([token, layer, hidden])."""

    index: int
    start: int | None = None
    stop: int | None = None
    out: Array | None = None


@dataclass(frozen=True, slots=True)
class SampleArrays:
    """A sample, or a window of its tokens. The arrays belong to the caller.

    Attributes
    ----------
    sample_id
        Its id.
    input_ids
        int64 [token].
    loss_mask
        bool [token].
    hidden_states
        [token, layer, hidden], bit patterns in the storage dtype: uint16 for bfloat16, uint8 for float8_e4m3fn.
    extras
        By column name, in storage dtypes: [token, ...], [...] or [row, ...] by the column's kind; None is a null.
    extra_dtypes
        The element types of the extras by name.
    meta
        The metadata object as stored.
    """

    sample_id: str
    input_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    hidden_states: Array
    extras: Mapping[str, Array | None] = field(default_factory=dict)
    extra_dtypes: Mapping[str, str] = field(default_factory=dict)
    meta: bytes = b"{}"

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata object."""
        document: dict[str, Any] = canonical.loads(self.meta, f"metadata of {self.sample_id}", metadata=True)
        return document


@dataclass(slots=True)
class PendingSample:
    """A sample whose bytes are on the way."""

    sample_id: str
    meta: bytes
    states: Array
    ids: Rows
    mask: Rows
    extras: dict[str, Rows | None]
    extra_dtypes: dict[str, str]

    def arrays(self) -> SampleArrays:
        """Return the sample once its bytes have come.

        Raises
        ------
        CorruptionError
            The loss mask holds something else than 0 and 1.
        """
        mask = self.mask.array()
        if np.any(mask > 1):
            where = f"loss_mask of {self.sample_id}"
            raise CorruptionError.at(where, expected="0 or 1", got=str(int(mask.max())), samples=(self.sample_id,))
        return SampleArrays(
            sample_id=self.sample_id,
            input_ids=self.ids.array().astype(np.int64, copy=False),
            loss_mask=mask.view(np.bool_),
            hidden_states=self.states,
            extras={name: None if rows is None else _value(rows) for name, rows in self.extras.items()},
            extra_dtypes=self.extra_dtypes,
            meta=self.meta,
        )


def layer_ids(layers: Iterable[int]) -> tuple[int, ...]:
    """Return HF layer ids as ints.

    Raises
    ------
    UsageError
        They are no list of integers; nothing is rounded, parsed or taken for a number.
    """
    if isinstance(layers, str | bytes | Mapping) or not isinstance(layers, Iterable):
        remedy = f"say [{layers}]" if isinstance(layers, int) else ""
        raise UsageError.at("layers", expected="a list of HF ids", got=repr(layers)[:60], remedy=remedy)
    return tuple(integer(layer, "layers", "integers, HF ids of layers") for layer in layers)


def integer(value: object, where: str, expected: str, least: int | None = None) -> int:
    """Return a value of any integer type as an int.

    Raises
    ------
    UsageError
        It is of another type, bool for one, or below `least`.
    """
    number = None
    if not isinstance(value, bool):
        with suppress(TypeError):
            number = operator.index(value)  # type: ignore[arg-type]
    if number is None or (least is not None and number < least):
        raise UsageError.at(where, expected=expected, got=repr(value)[:60])
    return number


def layer_planes(header: Header, layers: Iterable[int] | None) -> list[int]:
    """Return the positions on the layer axis of HF layer ids.

    Raises
    ------
    UsageError
        No list of integers, an id that is not stored, or another order than ascending.
    """
    if layers is None:
        return list(range(header.n_layers))
    wanted = list(layer_ids(layers))
    missing = [layer for layer in wanted if layer not in header.layers]
    if missing or not wanted or wanted != sorted(set(wanted)):
        expected = f"HF ids in ascending order out of {list(header.layers)}"
        remedy = "" if missing else "stored states come in the order of the layers: reorder the tensor yourself"
        raise UsageError.at("layers", expected=expected, got=str(wanted)[:200], remedy=remedy)
    return [header.layers.index(layer) for layer in wanted]


def ask(
    batch: ReadBatch,
    number: int,
    place: tuple[OpenPart, int],
    request: SampleRequest,
    planes: Sequence[int],
    extras: Sequence[str] | None,
) -> PendingSample:
    """Add what a request needs to a batch.

    Parameters
    ----------
    batch
        Reads it later, in one go with the rest.
    number
        The sample's number in the batch.
    place
        Its part, and its row there.
    request
        Which of its tokens, and where to.
    planes
        Positions on the layer axis.
    extras
        Names of the extra columns wanted; None: all.

    Raises
    ------
    UsageError
        A window, `out` or extra column that does not fit.
    """
    part, row = place
    index, columns = part.index, part.columns
    first, end = int(index.token_offsets[row]), int(index.token_offsets[row + 1])
    start, stop = _window(request, end - first)
    rows = (first + start, first + stop)
    column = columns[STATES]
    states = _destination(request.out, (stop - start, len(planes), column.shape[2]), column.dtype_name)
    batch.own(batch.into(part, column, rows, planes, states), number)
    asked: dict[str, Rows | None] = {}
    for name in _extra_names(part, extras):
        span = _extra_rows(part, columns[name], row, rows)
        asked[name] = batch.rows(part, columns[name], span, number) if index.valid[name][row] else None
    return PendingSample(
        sample_id=index.sample_id(row),
        meta=index.meta_bytes(row),
        states=states,
        ids=batch.rows(part, columns[IDS], rows, number),
        mask=batch.rows(part, columns[MASK], rows, number),
        extras=asked,
        extra_dtypes={name: columns[name].dtype_name for name in asked},
    )


def _window(request: SampleRequest, length: int) -> tuple[int, int]:
    where, expected = f"tokens of sample {request.index}", f"a window within [0, {length})"
    start = 0 if request.start is None else integer(request.start, where, expected)
    stop = length if request.stop is None else integer(request.stop, where, expected)
    if not 0 <= start <= stop <= length:
        raise UsageError.at(where, expected=expected, got=f"[{start}, {stop})")
    return start, stop


def _destination(out: Array | None, shape: tuple[int, int, int], name: str) -> Array:
    storage = dtype(name).storage
    if out is None:
        return np.empty(shape, storage)
    expected = f"a writable array {shape} that holds {name}"
    if not isinstance(out, np.ndarray):
        raise UsageError.at("out", expected=expected, got=type(out).__name__)
    fits = out.dtype.kind in "uifV" and out.dtype.itemsize == storage.itemsize and out.dtype.isnative
    if out.shape != shape or not fits or not out.flags.writeable:
        got = f"{out.dtype} {out.shape}{'' if out.flags.writeable else ', read-only'}"
        raise UsageError.at("out", expected=expected, got=got)
    refuse_overlap(out.shape, out.strides, out.dtype.itemsize)
    return out.view(storage)


def refuse_overlap(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> None:
    """Refuse memory in which elements lie over another (an expanded tensor): each would overwrite the last.

    Parameters
    ----------
    shape, strides
        Of the array or tensor.
    itemsize
        Of an element, in the unit of the strides.

    Raises
    ------
    UsageError
        Some overlap, or are interleaved in a way that no slicing and transposing of an array makes.
    """
    span = itemsize
    for stride, n in sorted((abs(stride), n) for stride, n in zip(strides, shape, strict=True) if n > 1):
        if stride < span and 0 not in shape:
            got = f"strides {tuple(strides)} for {tuple(shape)}"
            raise UsageError.at("out", expected="elements that do not overlap in memory", got=got)
        span += stride * (n - 1)


def _extra_names(part: OpenPart, wanted: Sequence[str] | None) -> list[str]:
    stored = sorted(name for name in part.columns if name not in CORE_COLUMNS)
    if wanted is None:
        return stored
    missing = [name for name in wanted if name not in stored]
    if missing:
        expected = f"columns of part {part.name}: {', '.join(stored) or 'it has no extra ones'}"
        raise UsageError.at("extras", expected=expected, got=", ".join(missing))
    return list(wanted)


def _extra_rows(part: OpenPart, column: Column, row: int, tokens: tuple[int, int]) -> tuple[int, int]:
    """Return the rows of an extra column that belong to a sample, or to the wanted tokens of it."""
    if column.kind == "token":
        return tokens
    if column.kind == "sample":
        return row, row + 1
    offsets = part.index.offsets[column.name]
    return int(offsets[row]), int(offsets[row + 1])


def _value(rows: Rows) -> Array:
    array = rows.array()
    if rows.column.dtype_name == "bool":
        array = array.view(np.bool_)
    return array.reshape(array.shape[1:]) if rows.column.kind == "sample" else array
