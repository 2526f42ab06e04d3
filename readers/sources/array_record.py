"""Numpy arrays of one sample as a `Record` of tensors, which share their memory, and what hsfmt itself notes in files.

Where bit patterns stand for a type that NumPy lacks, `NAME.dtype` beside them says which, or `--map ROLE=NAME:TYPE`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from hsfmt.errors import SourceError
from hsfmt.readers.sources.file_stamp import FileStamp

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hsfmt.readers.sources.options import KeyMap
    from hsfmt.readers.sources.torch_record import Record

# Where a file that hsfmt wrote says what else it knows of the sample.
ATTRIBUTES = "hsfmt"
DTYPE_SUFFIX = ".dtype"
_PATTERNS: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
_STATE_ROLES = ("hidden_states", "aux", "last")


@dataclass(frozen=True, slots=True)
class ArrayFile:
    """What a file of arrays holds: the arrays, its other strings, and what hsfmt noted in it, if it wrote it."""

    stamp: FileStamp
    arrays: dict[str, NDArray[Any]]
    strings: dict[str, str]
    attributes: dict[str, Any] | None


def parse_attributes(text: str, where: str) -> dict[str, Any]:
    """Parse what hsfmt notes in a file.

    Raises
    ------
    SourceError
        It is no JSON object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError.at(where, expected="a JSON object, as hsfmt writes it", got=str(error)[:200]) from error
    if not isinstance(value, dict):
        raise SourceError.at(where, expected="a JSON object, as hsfmt writes it", got=type(value).__name__)
    return value


def typed(array: NDArray[Any], name: str, where: str) -> NDArray[Any]:
    """View bit patterns as the type of a name.

    Raises
    ------
    SourceError
        No such type, or of another width.
    """
    if array.dtype.name == name:
        return array
    dtype = _PATTERNS.get(name)
    if dtype is None or array.dtype.itemsize != dtype.itemsize or array.dtype.kind not in "iuV":
        known = ", ".join(f"uint{8 * known.itemsize} patterns of {name}" for name, known in _PATTERNS.items())
        raise SourceError.at(where, expected=known, got=f"{array.dtype} said to be {name[:40]!r}")
    return array.view(dtype)


def split_map(key_map: KeyMap) -> tuple[KeyMap, dict[str, str]]:
    """Take the types out of a map whose states are given as `NAME:TYPE`; return the map and name to type."""
    types: dict[str, str] = {}
    for role in _STATE_ROLES:
        name, colon, dtype = (getattr(key_map, role) or "").rpartition(":")
        if colon and dtype in _PATTERNS:
            change: dict[str, Any] = {role: name}
            key_map = replace(key_map, **change)
            types[name] = dtype
    return key_map, types


def make_record(file: ArrayFile, types: dict[str, str], key_map: KeyMap) -> Record:
    """Make the record that the `pt` source would have loaded, of the same memory.

    Raises
    ------
    SourceError
        Values that may be bit patterns of any type, where nothing says of which, or that no tensor can hold.
    """
    from hsfmt.readers.sources.torch_record import Record

    entries: dict[str, Any] = dict(file.strings)
    states = {getattr(key_map, role) for role in _STATE_ROLES} if key_map.states else set(_STATE_ROLES)
    for name, array in file.arrays.items():
        if name in key_map.ignore:
            continue
        where = f"{file.stamp.where}[{name}]"
        value = typed(array, types[name], where) if name in types else array
        if value.dtype.kind == "V" and value.dtype not in _PATTERNS.values():
            raise _untyped(value, name, where)
        if value.dtype.kind in "iu" and value.ndim > 1 and (name in states or name.endswith("hidden_states")):
            raise _untyped(value, name, where)
        entries[name] = _tensor(value, where)
    return Record(file.stamp, entries, (), sum(array.nbytes for array in file.arrays.values()))


def _untyped(array: NDArray[Any], name: str, where: str) -> SourceError:
    return SourceError.at(
        where,
        expected="bfloat16, float16 or float32 states",
        got=f"{array.dtype.name} of shape {list(array.shape)}, which may be the bit patterns of another type",
        remedy=f"name the type: --map hidden_states={name}:bfloat16 (or aux=, last=), if they are patterns of bfloat16",
    )


def _tensor(array: NDArray[Any], where: str) -> Any:
    import torch

    dtype = array.dtype
    try:
        if dtype == _PATTERNS["bfloat16"]:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if dtype == _PATTERNS["float8_e4m3fn"]:
            return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
        return torch.from_numpy(array)
    except TypeError as error:
        raise SourceError.at(where, expected="numbers that a tensor can hold", got=f"dtype {dtype}") from error
