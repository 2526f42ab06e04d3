"""Which samples and layers of a snapshot are exported."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hsfmt.cli import units
from hsfmt.errors import NotFoundError, SampleNotFoundError, UsageError
from hsfmt.readers.sample_reader import SampleReader

_RANGE = re.compile(r"([0-9]*):([0-9]*)")
_SHOWN = 5


def select(reader: SampleReader, ids: str | None, span: str | None) -> npt.NDArray[np.int64]:
    """Return the numbers of the samples that were asked for, int64 [sample], in the snapshot's order.

    Parameters
    ----------
    reader
        The snapshot.
    ids
        A file with an id a line, or None for all samples.
    span
        A:B of the snapshot's order, or None; with `ids`, those of them that lie within it.

    Raises
    ------
    UsageError
        No such range, an id twice, or nothing selected.
    SampleNotFoundError
        Ids that the snapshot does not have; all at once.
    NotFoundError
        No such file.
    """
    first, stop = _span(span, len(reader))
    numbers = np.arange(first, stop, dtype=np.int64)
    if ids is not None:
        named = np.array(_numbers(reader, ids), np.int64)
        numbers = np.intersect1d(named, numbers)
    if not len(numbers):
        what = " ".join(filter(None, (f"--ids {ids}" if ids else "", f"--range {span}" if span else "")))
        got = f"none of {units.counted(len(reader), 'sample')}"
        raise UsageError.at(what or reader.store.url, expected="samples to export", got=got)
    return numbers


def _span(span: str | None, n: int) -> tuple[int, int]:
    if span is None:
        return 0, n
    match = _RANGE.fullmatch(span.strip())
    if match is None:
        expected = "A:B, numbers of the snapshot's order from 0, either left out for the start or the end"
        raise UsageError.at("--range", expected=expected, got=repr(span))
    first, stop = int(match[1] or 0), int(match[2] or n)
    if not first <= stop <= n:
        raise UsageError.at("--range", expected=f"A:B with 0 <= A <= B <= {n}, the samples that there are", got=span)
    return first, stop


def _numbers(reader: SampleReader, path: str) -> list[int]:
    where = f"--ids {path}"
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise NotFoundError.at(where, expected="a file of ids", got=error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise UsageError.at(where, expected="UTF-8 text, an id a line", got=str(error)) from error
    ids = [line.removesuffix("\r") for line in text.split("\n")]
    ids = [line for line in ids if line]
    twice = [key for key, n in Counter(ids).items() if n > 1]
    if twice:
        got = f"{units.counted(len(twice), 'id')} more than once: {', '.join(map(repr, twice[:_SHOWN]))}"
        raise UsageError.at(where, expected="each id once", got=got)
    numbers, missing = [], []
    for key in ids:
        try:
            numbers.append(reader.index_of(key))
        except SampleNotFoundError:
            missing.append(key)
    if missing:
        more = " …" if len(missing) > _SHOWN else ""
        got = f"{len(missing):,} that it does not have: {', '.join(map(repr, missing[:_SHOWN]))}{more}"
        remedy = "`hsfmt ls` lists the ids; retracted samples and holes are not served"
        raise SampleNotFoundError.at(
            where, expected=f"ids of snapshot {reader.fingerprint}", got=got, remedy=remedy, samples=tuple(missing)
        )
    return numbers


def select_layers(reader: SampleReader, layers: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the layers to export, HF ids in ascending order.

    Raises
    ------
    UsageError
        The dataset does not hold them, or they do not ascend.
    """
    stored = reader.header.layers
    if layers is None:
        return stored
    if not layers or list(layers) != sorted(set(layers)) or not set(layers) <= set(stored):
        expected = f"some of {','.join(map(str, stored))}, in ascending order"
        raise UsageError.at("--layers", expected=expected, got=",".join(map(str, layers)))
    return layers
