"""The narrow columns of all samples of a snapshot, part by part: what is known of samples before a state is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt.columns import IDS
from hsfmt.readers.sample_reader import SampleReader

Array = npt.NDArray[Any]


def token_columns(reader: SampleReader, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Array]]]:
    """Yield (number, columns) of every sample: in the order of the parts, and no state is read.

    Parameters
    ----------
    reader
        The snapshot.
    names
        Columns with a row a token that every part has: `input_ids`, `loss_mask`.

    Yields
    ------
    int
        Number of the sample.
    dict
        [token] each, views of the part's whole column; `input_ids` as int64.

    Raises
    ------
    CorruptionError, NotFoundError, StorageError
        They can't be read as they were committed.
    """
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
        columns = {name: _whole(arrays[part.name][name], name) for name in names}
        offsets = part.index.token_offsets
        for sample in served.tolist():
            row = int(snapshot.row[sample])
            tokens = slice(int(offsets[row]), int(offsets[row + 1]))
            yield sample, {name: column[tokens] for name, column in columns.items()}


def _whole(column: Any, name: str) -> Array:
    values = np.asarray(column[:])
    return values.astype(np.int64, copy=False) if name == IDS else values
