"""Samples of chunks that are not encoded, read row by row: damage beside a sample costs nothing of it.

No chunk digest is compared here, since a row has none of its own: who reads compares the digests of the sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import layout
from hsfmt.columns import CORE_COLUMNS, IDS, MASK, STATES, Column
from hsfmt.errors import CorruptionError
from hsfmt.readers.part_cache import OpenPart
from hsfmt.readers.sample_arrays import SampleArrays
from hsfmt.storage import Store


def read_plain(store: Store, part: OpenPart, row: int) -> SampleArrays:
    """Return a sample of a part without codecs; nothing of it is proven.

    Raises
    ------
    CorruptionError, NotFoundError
        A shard is missing, or shorter than the sample needs.
    StorageError
        The storage fails.
    """
    index, columns = part.index, part.columns
    tokens = int(index.token_offsets[row]), int(index.token_offsets[row + 1])

    def read(name: str, rows: tuple[int, int]) -> npt.NDArray[Any]:
        return _rows(store, part, columns[name], rows)

    mask = read(MASK, tokens)[:, 0]
    if np.any(mask > 1):
        raise CorruptionError.at(f"loss_mask of {index.sample_id(row)}", expected="0 or 1", got=str(int(mask.max())))
    extras: dict[str, npt.NDArray[Any] | None] = {}
    for name in sorted(columns.keys() - set(CORE_COLUMNS)):
        if not index.valid[name][row]:
            extras[name] = None
            continue
        offsets = index.offsets.get(name)
        spans = {"token": tokens, "sample": (row, row + 1)}
        span = spans.get(columns[name].kind) or (int(offsets[row]), int(offsets[row + 1]))  # type: ignore[index]
        extras[name] = read(name, span)[:, 0]
    return SampleArrays(
        sample_id=index.sample_id(row),
        input_ids=read(IDS, tokens)[:, 0].astype(np.int64),
        loss_mask=mask.view(np.bool_),
        hidden_states=read(STATES, tokens),
        extras=extras,
        meta=index.meta_bytes(row),
    )


def _rows(store: Store, part: OpenPart, column: Column, rows: tuple[int, int]) -> npt.NDArray[Any]:
    """Return rows [start, stop) as [row, plane, ...]."""
    start, stop = rows
    trailing = column.chunk_shape[1:] if column.name != STATES else column.shape[2:]
    out = np.empty((stop - start, column.n_planes, *trailing), column.dtype.storage)
    at = start
    while at < stop:
        chunk_row, first = divmod(at, column.chunk_rows)
        n = min(column.chunk_rows - first, stop - at)
        shard = chunk_row // column.chunk_rows_per_shard
        path = f"{layout.column_folder(part.name, column.name)}/{column.shard_key(shard)}"
        for plane in range(column.n_planes):
            chunk = int(part.index.chunks[column.name][chunk_row * column.n_planes + plane, 0])
            piece = np.empty((n, *trailing), column.dtype.storage)
            store.read_into(path, chunk + first * column.chunk_row_nbytes, piece.reshape(-1).view(np.uint8).data)
            out[at - start : at - start + n, plane] = piece
        at += n
    return out
