"""DeepSpec's samples.idx: where each sample lies in its shard, checked in full before any sample is read.

A record is 56 bytes, little-endian: sample id uint64, shard uint32, tokens uint32, and the byte offsets of the five
tensors uint64. A shard holds its samples' tensors and nothing else, so that what the index claims of it has to be
each of its bytes, once: a shard that was swapped, cut or written twice is refused as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hsfmt.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

RECORD = np.dtype([("sample_id", "<u8"), ("shard", "<u4"), ("n_tokens", "<u4"), ("offsets", "<u8", (5,))])
TENSORS = ("input_ids", "attention_mask", "loss_mask", "target_hidden_states", "target_last_hidden_states")
INDEX = "samples.idx"
_COPY = "copy the shard again from where it was written, or prepare the cache again"


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard of the manifest: its name, and its size in bytes, or what is wrong with it."""

    name: str
    nbytes: int
    problem: Problem | None = None


def _key_of(records: NDArray[Any], shards: Sequence[Shard], number: int) -> str:
    """What messages call a sample: `shard-00000.bin:17`."""
    shard = int(records["shard"][number])
    return f"{shards[shard].name if shard < len(shards) else INDEX}:{number}"


def find_problems(records: NDArray[Any], shards: Sequence[Shard], widths: NDArray[np.uint64]) -> dict[int, Problem]:
    """Check all records against the sizes of the shards; reads nothing.

    Parameters
    ----------
    records
        RECORD [sample].
    shards
        By shard number.
    widths
        uint64 [5]: bytes a token of each of TENSORS.

    Returns
    -------
    dict
        Number of a sample to what is wrong with it.
    """
    problems: dict[int, Problem] = {}
    for number in np.flatnonzero(records["shard"] >= len(shards)).tolist():
        expected = f"a shard below {len(shards)}, the number of them in the manifest"
        problems[number] = Problem(f"{INDEX}:{number}", expected, f"shard {records['shard'][number]}")
    order = np.argsort(records["shard"], kind="stable")
    bounds = np.searchsorted(records["shard"][order], np.arange(len(shards) + 1))
    for shard, (begin, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        _check_shard(records, order[begin:end], shards[shard], widths, problems)
    for number in np.flatnonzero(records["sample_id"] != np.arange(len(records), dtype=np.uint64)).tolist():
        expected = f"sample id {number} in record {number}: ids count up from 0"
        problems.setdefault(number, _problem(records, shards, number, expected, f"{records['sample_id'][number]}"))
    return problems


def _problem(records: NDArray[Any], shards: Sequence[Shard], number: int, expected: str, got: str) -> Problem:
    return Problem(_key_of(records, shards, number), expected, got, f"{INDEX} is damaged: prepare the cache again")


def _check_shard(
    records: NDArray[Any],
    numbers: NDArray[np.int64],
    shard: Shard,
    widths: NDArray[np.uint64],
    problems: dict[int, Problem],
) -> None:
    whole = shard.problem
    if whole is None:
        mine = records[numbers]
        single, whole = _check_extents(mine, shard, widths)
        for i, (expected, got) in single.items():
            number = int(numbers[i])
            problems[number] = Problem(f"{shard.name}:{number}", expected, got, _COPY)
    if whole is not None:
        for number in numbers.tolist():
            where = f"{shard.name}:{number}"
            problems.setdefault(number, Problem(where, whole.expected, whole.got, whole.remedy))


def _check_extents(
    mine: NDArray[Any], shard: Shard, widths: NDArray[np.uint64]
) -> tuple[dict[int, tuple[str, str]], Problem | None]:
    """What is wrong with single samples of a shard, and with the shard as a whole."""
    single: dict[int, tuple[str, str]] = {}
    size = np.uint64(shard.nbytes)
    tokens = mine["n_tokens"].astype(np.uint64)
    # A sample larger than its shard, and sums of its bytes that would wrap around, end here.
    fits = (tokens > 0) & (tokens <= size // widths.sum())
    for i in np.flatnonzero(~fits).tolist():
        got = f"{tokens[i]} tokens in a shard of {shard.nbytes} bytes"
        single[i] = (f"1 to {int(size // widths.sum())} tokens of {int(widths.sum())} bytes each", got)
    nbytes = np.where(fits, tokens, np.uint64(0))[:, None] * widths
    outside = mine["offsets"] > size - nbytes
    for i in np.flatnonzero(outside.any(axis=1) & fits).tolist():
        k = int(outside[i].argmax())
        expected = f"{TENSORS[k]} of {nbytes[i, k]} bytes inside the {shard.nbytes} bytes of the shard"
        single[i] = expected, f"offset {mine['offsets'][i, k]}: the shard is truncated, or another one"
    starts = np.where(outside, np.uint64(0), mine["offsets"])
    claimed = int(tokens.sum()) * int(widths.sum())
    if single or claimed != shard.nbytes:
        expected = f"a shard of the {claimed} bytes that {INDEX} claims of it"
        got = f"{shard.nbytes} bytes: truncated, overgrown or another shard"
        return single, Problem(shard.name, expected, got, _COPY)
    return single, _check_tiling(starts.ravel(), nbytes.ravel(), shard.name)


def _check_tiling(starts: NDArray[np.uint64], nbytes: NDArray[np.uint64], name: str) -> Problem | None:
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], (starts + nbytes)[order]
    wrong = np.flatnonzero(starts[1:] != ends[:-1])
    if len(starts) and starts[0] != 0:
        return Problem(name, "a sample at offset 0", f"the first one at {starts[0]}", _COPY)
    if len(wrong):
        i = int(wrong[0])
        kind = "overlaps it" if starts[i + 1] < ends[i] else "leaves a gap"
        got = f"the next one at {starts[i + 1]}, which {kind}"
        return Problem(name, f"a tensor at offset {ends[i]}, where one ends", got, _COPY)
    return None
