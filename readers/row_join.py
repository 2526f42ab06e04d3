"""Which sample holds the states of which row of a trainer's own dataset: found by the token ids, never by a number."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

from hsfmt.columns import IDS
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.token_columns import token_columns

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
    for number, columns in token_columns(reader, [IDS]):
        key = _key(columns[IDS])
        numbers[key] = min(number, numbers.get(key, number))
    return np.array([numbers.get(_key(ids), MISSING) for ids in rows], np.int64)


def _key(ids: Ids) -> bytes:
    return xxhash.xxh3_128_digest(np.ascontiguousarray(ids, "<i8").data)
