"""A Hugging Face Arrow dataset as `datasets.Dataset.save_to_disk` leaves it (datasets 4 and later).

Arrow stream files, `dataset_info.json` and `state.json`. The columns are those of speculators' `prepare-data`:
input_ids list<int32>, loss_mask list<int64> (list<bool> before speculators 0.8) and seq_len int64, handed out as torch
tensors. The same rows make the same bytes, under one release of pyarrow.
"""

from __future__ import annotations

import json
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from hsfmt.errors import Problem, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

INFO, STATE = "dataset_info.json", "state.json"
MASK_DTYPES = ("int64", "bool")
MAX_TOKENS = 2**31 - 1  # of a batch: offsets of its lists are int32
_BATCH_ROWS = 1000  # as datasets writes them
_PACKAGE = Problem("pyarrow", "the package, to write an Arrow dataset", "none", "pip install 'hsfmt[convert]'")

Row = tuple["NDArray[np.int32]", "NDArray[np.uint8]"]


def pyarrow_problems() -> list[Problem]:
    """Say whether pyarrow is missing."""
    try:
        _import_pyarrow()
    except UsageError as error:
        return list(error.problems)
    return []


def data_file(number: int, n_files: int) -> str:
    """Name of an Arrow file, in row order.

    >>> data_file(0, 2)
    'data-00000-of-00002.arrow'
    """
    return f"data-{number:05d}-of-{n_files:05d}.arrow"


def write_rows(file: IO[bytes], rows: Sequence[Row], mask_dtype: str) -> None:
    """Write an Arrow stream file.

    Parameters
    ----------
    file
        Open for writing.
    rows
        Token ids int32 [token] and loss mask uint8 [token] of each row; fewer than 2^31 tokens in 1000 rows.
    mask_dtype
        One of MASK_DTYPES.
    """
    pa = _import_pyarrow()
    kinds = [("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.type_for_alias(mask_dtype)))]
    metadata = {"huggingface": json.dumps({"info": {"features": _features(mask_dtype)}})}
    schema = pa.schema([*kinds, ("seq_len", pa.int64())], metadata=metadata)
    with pa.ipc.new_stream(file, schema) as stream:
        for start in range(0, len(rows), _BATCH_ROWS):
            ids, masks = zip(*rows[start : start + _BATCH_ROWS], strict=True)
            lengths = np.array([len(row) for row in ids], np.int64)
            offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
            lists = [np.concatenate(ids), np.concatenate(masks).astype(mask_dtype)]
            columns = [pa.ListArray.from_arrays(offsets, pa.array(values)) for values in lists]
            stream.write_batch(pa.record_batch([*columns, pa.array(lengths)], schema=schema))


def info_document(mask_dtype: str) -> bytes:
    """Return `dataset_info.json`."""
    info = {"citation": "", "description": "", "features": _features(mask_dtype), "homepage": "", "license": ""}
    return json.dumps(info, indent=2).encode()


def state_document(n_files: int, fingerprint: str) -> bytes:
    """Return `state.json`.

    Parameters
    ----------
    n_files
        How many Arrow files there are.
    fingerprint
        What `datasets` names the caches of transformed rows by: other rows must have another.
    """
    state = {
        "_data_files": [{"filename": data_file(number, n_files)} for number in range(n_files)],
        "_fingerprint": fingerprint,
        "_format_columns": ["input_ids", "loss_mask", "seq_len"],
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    return json.dumps(state, indent=2).encode()


def _features(mask_dtype: str) -> dict[str, Any]:
    def values(dtype: str) -> dict[str, str]:
        return {"dtype": dtype, "_type": "Value"}

    return {
        "input_ids": {"feature": values("int32"), "_type": "List"},
        "loss_mask": {"feature": values(mask_dtype), "_type": "List"},
        "seq_len": values("int64"),
    }


def _import_pyarrow() -> Any:
    try:
        import pyarrow as pa
        import pyarrow.ipc
    except ImportError as error:
        raise UsageError([_PACKAGE]) from error
    return pa
