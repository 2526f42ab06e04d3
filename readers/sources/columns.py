"""The columns of a sample, from what other programs store: token ids and loss masks, checked and in one shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hsfmt.errors import SourceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_INT64_MAX = 2**63 - 1
CACHED_TOKENS = "seen with prefix caching, where cached tokens have no states: extract this sample again"


def token_ids(values: NDArray[Any], where: str) -> NDArray[np.int64]:
    """Token ids as int64 [token] of their own memory; a leading axis of 1 is dropped.

    Raises
    ------
    SourceError
        Not integers, not one row, or no token at all.
    """
    row = _one_row(values, where)
    if row.dtype.kind not in "iu":
        raise SourceError.at(where, expected="integer token ids", got=f"dtype {row.dtype.name}")
    if row.dtype.kind == "u" and row.size and int(row.max()) > _INT64_MAX:
        raise SourceError.at(where, expected="token ids below 2**63", got=str(row.max()))
    if not row.size:
        raise SourceError.at(where, expected="at least one token", got="none")
    return np.array(row, dtype=np.int64)


def loss_mask(values: NDArray[Any], n_tokens: int, where: str) -> NDArray[np.uint8]:
    """A loss mask as uint8 [token] of 0 and 1; bool, any integer and any float dtype are taken.

    Raises
    ------
    SourceError
        Of another length than the token ids, or with a value that is neither 0 nor 1.
    """
    row = _mask_row(values, n_tokens, where)
    wrong = (row != 0) & (row != 1)
    if wrong.any():
        first = int(wrong.argmax())
        raise SourceError.at(
            where,
            expected="a mask of 0 and 1",
            got=f"{row[first]} at token {first} ({int(wrong.sum())} such values)",
            remedy="weights are no mask: --loss-weights keeps them as a column, --map ignore=KEY leaves them out",
        )
    mask: NDArray[np.uint8] = (row != 0).astype(np.uint8)
    return mask


def loss_weights(values: NDArray[Any], n_tokens: int, where: str) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """A mask uint8 [token] of the tokens that weigh something, and the weights as float32 [token], rounded to it.

    Raises
    ------
    SourceError
        Of another length than the token ids, or with a weight that is negative or not finite in float32.
    """
    row = _mask_row(values, n_tokens, where)
    with np.errstate(over="ignore"):
        weights = row.astype(np.float32)
    wrong = ~np.isfinite(weights) | (weights < 0)
    if wrong.any():
        first = int(wrong.argmax())
        raise SourceError.at(where, expected="finite weights from 0 on", got=f"{row[first]} at token {first}")
    mask: NDArray[np.uint8] = (weights != 0).astype(np.uint8)
    return mask, weights


def _mask_row(values: NDArray[Any], n_tokens: int, where: str) -> NDArray[Any]:
    row = _one_row(values, where)
    if row.dtype.kind not in "biuf":
        raise SourceError.at(where, expected="a mask of 0 and 1", got=f"dtype {row.dtype.name}")
    if row.size != n_tokens:
        raise SourceError.at(where, expected=f"a mask of {n_tokens} tokens", got=f"{row.size}")
    return row


def _one_row(values: NDArray[Any], where: str) -> NDArray[Any]:
    row = values[0] if values.ndim == 2 and values.shape[0] == 1 else values
    if row.ndim != 1:
        raise SourceError.at(where, expected="shape [token]", got=f"shape {list(values.shape)}")
    return row


def check_n_tokens(n_states: int, n_tokens: int, where: str, remedy: str = CACHED_TOKENS) -> None:
    """Refuse states and token ids of different lengths: which of them belong together is not known.

    Raises
    ------
    SourceError
        They differ.
    """
    if n_states != n_tokens:
        raise SourceError.at(
            where,
            expected=f"a state for each of the {n_tokens} token ids",
            got=f"states of {n_states} tokens",
            remedy=remedy,
        )
