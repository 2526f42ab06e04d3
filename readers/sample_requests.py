"""What is asked of a reader: samples, windows of their tokens, layers, and the memory that takes the states."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt.columns import Column
from hsfmt.dtypes import dtype
from hsfmt.errors import UsageError
from hsfmt.header import Header
from hsfmt.readers.recycled_memory import MEMORY

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some states of a sample, and the memory that takes them.

    Attributes
    ----------
    start, stop
        Tokens of the sample, within the window of the request.
    planes
        Positions on the stored layer axis, in any order.
    out
        [stop - start, plane, hidden], any strides. What is read by one plan must not overlap in memory.
    """

    start: int
    stop: int
    planes: Sequence[int]
    out: Array


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Tokens [start, stop) of a sample, and where their states go.

    Attributes
    ----------
    index
        Number of the sample; negative ones count from the end.
    start, stop
        0 <= start <= stop <= length; None: from the first token, to the last.
    out
        [token, layer, hidden], takes all states of the wanted layers; None: they get memory of their own.
    pieces
        Instead of `out`: which states to read, and into what. No others are read.
    """

    index: int
    start: int | None = None
    stop: int | None = None
    out: Array | None = None
    pieces: Sequence[Piece] | None = None


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


def window(request: SampleRequest, length: int) -> tuple[int, int]:
    """Return the tokens [start, stop) that a request wants of a sample of `length` tokens.

    Raises
    ------
    UsageError
        They are no integers, or not within the sample.
    """
    where, expected = f"tokens of sample {request.index}", f"a window within [0, {length})"
    start = 0 if request.start is None else integer(request.start, where, expected)
    stop = length if request.stop is None else integer(request.stop, where, expected)
    if not 0 <= start <= stop <= length:
        raise UsageError.at(where, expected=expected, got=f"[{start}, {stop})")
    return start, stop


def targets(
    request: SampleRequest, tokens: tuple[int, int], planes: Sequence[int], column: Column
) -> tuple[Array, list[Piece]]:
    """Return the array that the caller gets, and what to read into which memory; nothing is read here.

    Parameters
    ----------
    request
        Whose `out` and `pieces`.
    tokens
        Its window, [start, stop).
    planes
        Positions on the layer axis of what goes to `out`.
    column
        The states.

    Raises
    ------
    UsageError
        An `out` or a piece that does not fit.
    """
    n_tokens = tokens[1] - tokens[0]
    hidden, name = column.shape[2], column.dtype_name
    if request.pieces is None:
        shape = (n_tokens, len(planes), hidden)
        states = _memory(shape, name) if request.out is None else _storage(request.out, shape, name)
        return states, [Piece(*tokens, planes, states)]
    where = f"pieces of sample {request.index}"
    if request.out is not None:
        raise UsageError.at(where, expected="out or pieces", got="both")
    states = np.empty((0, len(planes), hidden), dtype(name).storage)
    return states, [_piece(piece, where, tokens, column) for piece in request.pieces]


def _piece(piece: Piece, where: str, tokens: tuple[int, int], column: Column) -> Piece:
    """Return a piece with plain ints, and `out` in the storage dtype."""
    start, stop = (integer(row, where, "tokens, integers") for row in (piece.start, piece.stop))
    if not tokens[0] <= start <= stop <= tokens[1]:
        expected = f"tokens within [{tokens[0]}, {tokens[1]})"
        raise UsageError.at(where, expected=expected, got=f"[{start}, {stop})")
    expected = f"positions on the layer axis within [0, {column.n_planes})"
    planes = [integer(plane, where, expected, 0) for plane in piece.planes]
    if not planes or max(planes) >= column.n_planes:
        raise UsageError.at(where, expected=expected, got=f"{planes}"[:200])
    shape = (stop - start, len(planes), column.shape[2])
    return Piece(start, stop, planes, _storage(piece.out, shape, column.dtype_name, f"out of {where}"))


def _memory(shape: tuple[int, int, int], name: str) -> Array:
    storage = dtype(name).storage
    return MEMORY.empty(math.prod(shape) * storage.itemsize).view(storage).reshape(shape)


def _storage(out: Array, shape: tuple[int, int, int], name: str, where: str = "out") -> Array:
    """Return `out` in the storage dtype."""
    storage = dtype(name).storage
    expected = f"a writable array {shape} that holds {name}"
    if not isinstance(out, np.ndarray):
        raise UsageError.at(where, expected=expected, got=type(out).__name__)
    fits = out.dtype.kind in "uifV" and out.dtype.itemsize == storage.itemsize and out.dtype.isnative
    if out.shape != shape or not fits or not out.flags.writeable:
        got = f"{out.dtype} {out.shape}{'' if out.flags.writeable else ', read-only'}"
        raise UsageError.at(where, expected=expected, got=got)
    refuse_overlap(out.shape, out.strides, out.dtype.itemsize, where)
    return out.view(storage)


def refuse_overlap(shape: Sequence[int], strides: Sequence[int], itemsize: int, where: str = "out") -> None:
    """Refuse memory in which elements lie over another (an expanded tensor): each would overwrite the last.

    Parameters
    ----------
    shape, strides
        Of the array or tensor.
    itemsize
        Of an element, in the unit of the strides.
    where
        What the memory is, for the error.

    Raises
    ------
    UsageError
        Some overlap, or are interleaved in a way that no slicing and transposing of an array makes.
    """
    span = itemsize
    for stride, n in sorted((abs(stride), n) for stride, n in zip(strides, shape, strict=True) if n > 1):
        if stride < span and 0 not in shape:
            got = f"strides {tuple(strides)} for {tuple(shape)}"
            raise UsageError.at(where, expected="elements that do not overlap in memory", got=got)
        span += stride * (n - 1)
