"""Attachments: arrays that belong to a dataset as a whole, as a drafter's vocabulary; the snapshot lists them.

Spec: rules SNAP-10, SEAL-9. A file lies under its digest, so that it is written once and never changed.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import digests, layout
from hsfmt.errors import CorruptionError, UsageError
from hsfmt.storage import Store

MAX_NBYTES = 1 << 30
SUFFIX = ".npy"
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_KINDS = "biuf"
_PREFIX = f"{digests.ALGORITHM}:"
_MAGIC = b"\x93NUMPY"
_LENGTH_NBYTES = {b"\1\0": 2, b"\2\0": 4}  # of the header's length, by version
_MAX_HEADER_NBYTES = 10_000  # as NumPy has it
_MAX_AXES = 32
# The header is a Python dict of these three, in any order.
_FIELD = re.compile(r"'(descr|fortran_order|shape)' *: *('[^'\\]*'|True|False|\([0-9, ]*\))")
_HEADER = re.compile(rf"\{{ *{_FIELD.pattern}(?: *, *{_FIELD.pattern}){{2}} *,? *\}}[ \n]*")
_DESCR = re.compile(r"[<>|=]?[biuf][0-9]{1,2}")
_BOOLS = {"True": True, "False": False}
_LENGTH = r" *(?:0|[1-9][0-9]{0,19}) *"
_SHAPE = re.compile(rf"\( *\)|\((?:{_LENGTH},)+(?:{_LENGTH})?\)")
_INT = re.compile(r"[0-9]+")

Entry = Mapping[str, Any]


def encode(name: str, array: npt.ArrayLike) -> tuple[dict[str, Any], bytes]:
    """Return the entry that a snapshot lists of an array, and the bytes of its file.

    Parameters
    ----------
    name
        Without `.npy`: `d2t`.
    array
        Booleans, integers or floats of any shape.

    Raises
    ------
    UsageError
        No such name, other values, or more than 1 GiB of them.
    """
    file_name = f"{name}{SUFFIX}"
    if _NAME.fullmatch(file_name) is None:
        expected = "a name of a-z, 0-9, '_', '.' and '-', of at most 60 characters"
        raise UsageError.at("attachments", expected=expected, got=repr(name)[:100])
    values = np.asarray(array, order="C")
    if values.dtype.kind not in _KINDS or values.nbytes > MAX_NBYTES - (1 << 16):
        got = f"{values.nbytes} bytes of {values.dtype}"
        raise UsageError.at(f"attachments: {name}", expected="booleans, integers or floats, up to 1 GiB", got=got)
    stream = io.BytesIO()
    # One byte order, so that equal values make one file.
    np.lib.format.write_array(stream, values.astype(values.dtype.newbyteorder("<"), copy=False), version=(1, 0))
    data = stream.getvalue()
    return {"digest": digests.digest(data), "name": file_name, "nbytes": len(data)}, data


def entry_path(entry: Entry, where: str) -> str:
    """Return the path of an entry's file.

    Raises
    ------
    CorruptionError
        It is no entry (rule SNAP-10).
    """
    name, digest, nbytes = entry.get("name"), entry.get("digest"), entry.get("nbytes")
    if (
        not isinstance(name, str)
        or _NAME.fullmatch(name) is None
        or not isinstance(digest, str)
        or not digests.is_digest(digest)
        or type(nbytes) is not int
        or not 0 <= nbytes <= MAX_NBYTES
    ):
        expected = "digest, name and nbytes of an attachment"
        raise CorruptionError.at(f"{where}: attachments", expected=expected, got=repr(entry)[:200])
    return f"{layout.ATTACHMENTS}/{digest.removeprefix(_PREFIX)}/{name}"


def check_entries(entries: Iterable[Entry], where: str) -> tuple[Entry, ...]:
    """Return what a snapshot lists, if all of it are entries, ascending by name.

    Whoever uses them asks: what a snapshot lists wrongly does not keep anyone from its samples.

    Raises
    ------
    CorruptionError
        It is something else (rule SNAP-10).
    """
    entries = tuple(entries)
    for entry in entries:
        entry_path(entry, where)
    names = [entry["name"] for entry in entries]
    if names != sorted(set(names)):
        raise CorruptionError.at(f"{where}: attachments", expected="names that ascend", got=repr(names)[:200])
    return entries


def load(store: Store, entries: Iterable[Entry], where: str) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that a snapshot lists, by name without `.npy`, each checked and read-only.

    Raises
    ------
    CorruptionError, NotFoundError
        One is missing or damaged, or they are no entries.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    for entry in check_entries(entries, where):
        path = entry_path(entry, where)
        data = store.read(path, entry["nbytes"])
        if digests.digest(data) != entry["digest"]:
            raise CorruptionError.at(path, expected=f"a file of {entry['digest']}", got=digests.digest(data))
        arrays[str(entry["name"]).removesuffix(SUFFIX)] = parse_array(data, path)
    return arrays


def parse_array(data: bytes, where: str) -> npt.NDArray[Any]:
    """Return the numbers of a `.npy` file as a read-only view of its bytes; nothing in it is believed or unpickled.

    Raises
    ------
    CorruptionError
        It is no such file, or its size is not what its header says.
    """
    dtype, fortran, shape, start = _npy_header(data, where)
    nbytes = prod(shape) * dtype.itemsize
    # NumPy makes no array with such an axis, not even one without values.
    if nbytes != len(data) - start or len(shape) > _MAX_AXES or prod(filter(None, shape)) > sys.maxsize >> 4:
        got = f"{len(data) - start} bytes for {dtype} of shape {list(shape)}"
        raise CorruptionError.at(where, expected="a .npy file of numbers, whole", got=got[:200])
    return np.frombuffer(data, dtype, offset=start).reshape(shape, order="F" if fortran else "C")


def _npy_header(data: bytes, where: str) -> tuple[np.dtype[Any], bool, tuple[int, ...], int]:
    """Return element type, Fortran order, shape, and where the values start.

    Not by NumPy's own parser, which evaluates the header, and warns or raises whatever Python does about it.
    """
    expected, width = "a .npy file of numbers", _LENGTH_NBYTES.get(data[6:8])
    if data[:6] != _MAGIC or width is None:
        raise CorruptionError.at(where, expected=expected, got=f"a file that begins with {data[:8]!r}")
    start = 8 + width + int.from_bytes(data[8 : 8 + width], "little")
    text = data[8 + width : start].decode("latin-1") if start <= min(len(data), _MAX_HEADER_NBYTES) else ""
    if "'" not in text:
        text = text.replace('"', "'")
    fields = dict(_FIELD.findall(text)) if _HEADER.fullmatch(text) else {}
    descr, shape = fields.get("descr", "")[1:-1], fields.get("shape", "")
    fortran = _BOOLS.get(fields.get("fortran_order", ""))
    got = f"the header {text[:150]!r}"
    if fortran is None or _DESCR.fullmatch(descr) is None or _SHAPE.fullmatch(shape) is None:
        raise CorruptionError.at(where, expected=expected, got=got)
    try:
        dtype = np.dtype(descr)
    except TypeError as error:  # no such width
        raise CorruptionError.at(where, expected=expected, got=got) from error
    return dtype, fortran, tuple(map(int, _INT.findall(shape))), start


def merge(listed: Iterable[Entry], added: Iterable[Entry], dropped: Collection[str], where: str) -> list[Entry]:
    """Return the entries of a new snapshot: those listed so far but for the dropped ones, and the added ones.

    Parameters
    ----------
    dropped
        Names without `.npy`.

    Raises
    ------
    UsageError
        An added one has the name of another one that is listed with other content (rule SEAL-9).
    CorruptionError
        What is listed so far are no entries.
    """
    kept = {str(entry["name"]): entry for entry in check_entries(listed, where)}
    for name in dropped:
        kept.pop(f"{name}{SUFFIX}", None)
    for entry in added:
        name = entry["name"]
        if kept.setdefault(name, entry)["digest"] != entry["digest"]:
            short = name.removesuffix(SUFFIX)
            raise UsageError.at(
                f"{where}: attachment {name}",
                expected="the one that the dataset has",
                got="another one of this name",
                remedy="keep this data in a dataset of its own, or move its file away before converting, or let go of "
                f"the former one first: hsfmt seal --drop-attachment {short}",
            )
    return [kept[name] for name in sorted(kept)]
