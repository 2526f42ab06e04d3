"""Which sample holds the states of which row of a trainer's own dataset: found by the token ids, never by a number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hsfmt.columns import IDS
from hsfmt.readers.sample_reader import SampleReader

MISSING = -1
Ids = npt.NDArray[np.int64]


def join_rows(reader: SampleReader, rows: Iterable[Ids]) -> npt.NDArray[np.int64]:
    """Return the number of the sample with each row's token ids, int64 [row]; -1 where there is none.

    All token ids of the snapshot are read once, and no state. Of several samples with the same ids, whose states are
    the same too, the first is taken.

    Parameters
    ----------
    reader
        The snapshot.
    rows
        Token ids, int64 [token] each.

    Raises
    ------
    CorruptionError, NotFoundError, StorageError
        Token ids can't be read as they were committed.
    """
    numbers: dict[bytes, int] = {}
    for number, ids in _samples(reader):
        key = _key(ids)
        numbers[key] = min(number, numbers.get(key, number))
    return np.array([numbers.get(_key(ids), MISSING) for ids in rows], np.int64)


def _samples(reader: SampleReader) -> Iterator[tuple[int, Ids]]:
    """Yield (number, token ids) of the snapshot's samples, part by part."""
    from hsfmt import zarr_dtypes
    from hsfmt.readers.arrays import ZarrDataset

    zarr_dtypes.register()
    snapshot = reader.snapshot
    arrays = ZarrDataset(reader).parts
    for number, ref in enumerate(snapshot.parts):
        served = np.flatnonzero(snapshot.part == number)
        if ref.index_digest is None or not len(served):
            continue
        part = reader.parts.get(number)
        column: Any = arrays[part.name][IDS]
        ids = np.asarray(column[:]).astype(np.int64, copy=False)
        offsets = part.index.token_offsets
        for sample in served.tolist():
            row = int(snapshot.row[sample])
            yield sample, ids[offsets[row] : offsets[row + 1]]


def _key(ids: Ids) -> bytes:
    return xxhash.xxh3_128_digest(np.ascontiguousarray(ids, "<i8").data)
