"""Further columns of a torch dict with a row a token: attention masks, positions, embeddings, loss weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hsfmt.errors import SourceError
from hsfmt.readers.sources import columns
from hsfmt.readers.sources.torch_states import batched, check_tensor, row_values, stack_layers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hsfmt.readers.sources.options import KeyMap

LOSS_WEIGHT = "loss_weight"
ATTENTION_MASK = "attention_mask"
POSITION_IDS = "position_ids"


@dataclass(frozen=True, slots=True)
class FurtherColumns:
    """What is read beside ids, states and mask: keys of columns, and whether the mask may hold weights."""

    keys: tuple[str, ...] = ()
    weights: bool = False


NOTHING_FURTHER = FurtherColumns()


def token_column(value: Any, n_tokens: int, key: str, where: str, file_nbytes: int) -> NDArray[Any]:
    """Copy a column out of an entry.

    Returns
    -------
    NDArray
        `attention_mask` as uint8 [token]; `position_ids` as int64 [token], or [token, axis] from [axis, 1, token];
        anything else is of states' dtype, [token, width] from [1, token, width].

    Raises
    ------
    SourceError
        Another shape, length or dtype.
    """
    if key == ATTENTION_MASK:
        return columns.loss_mask(row_values(value, where, file_nbytes), n_tokens, where)
    if key == POSITION_IDS:
        return _positions(row_values(value, where, file_nbytes), n_tokens, where)
    tensor = batched(check_tensor(value, where, file_nbytes), n_tokens)
    if tensor.ndim != 2 or tensor.shape[0] != n_tokens:
        expected, got = f"shape [1, {n_tokens}, width]", f"shape {list(value.shape)}"
        raise SourceError.at(where, expected=expected, got=got)
    rows: NDArray[Any] = stack_layers([tensor[:, None]], where)[:, 0]
    return rows


def _positions(values: NDArray[Any], n_tokens: int, where: str) -> NDArray[np.int64]:
    rows = values[:, 0] if values.ndim == 3 and values.shape[1] == 1 else values
    rows = rows[0] if rows.ndim == 2 and rows.shape[0] == 1 else rows
    if rows.ndim not in (1, 2) or rows.shape[-1] != n_tokens or rows.dtype.kind not in "iu":
        expected, got = f"integers [axis, 1, {n_tokens}]", f"{rows.dtype.name}, shape {list(values.shape)}"
        raise SourceError.at(where, expected=expected, got=got)
    return np.ascontiguousarray(rows.T, np.int64)


def declared(column: NDArray[Any]) -> dict[str, Any]:
    """How a writer declares a column such as this sample's."""
    return {"kind": "token", "dtype": column.dtype.name, "shape": list(column.shape[1:])}


def weight_column(roles: KeyMap, *, weights: bool) -> dict[str, dict[str, Any]]:
    """How a writer declares the loss weights, if there are any."""
    if roles.loss_mask is None or not weights:
        return {}
    return {LOSS_WEIGHT: {"kind": "token", "dtype": "float32", "shape": []}}
