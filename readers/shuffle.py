"""The order of an epoch's samples: shuffled, wholly or so that what is stored together is read together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hsfmt.readers.random_keys import RandomKeys
from hsfmt.readers.sample_requests import integer

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Locality:
    """How much of a full shuffle is given up, so that what is stored together is read together.

    Attributes
    ----------
    neighbours
        Samples of a part are cut into runs of so many that lie next to each other, and runs are shuffled instead of
        samples. Short samples share chunks: a batch that holds both reads and decodes such a chunk once. 1: every
        sample goes its own way.
    parts_at_once
        The parts are dealt, like cards, to groups of at most this many. The groups come one after the other, in another
        order each epoch, and what is shuffled is shuffled within a group: so few files are read at a time, and a cache
        of that many parts is enough. None: all parts at once.

    Raises
    ------
    UsageError
        One of them is no integer from 1 on.
    """

    neighbours: int = 1
    parts_at_once: int | None = None

    def __post_init__(self) -> None:
        # Stored as int, whatever integer was given: the state of an order holds them, and is JSON.
        object.__setattr__(self, "neighbours", integer(self.neighbours, "neighbours", "an integer from 1 on", 1))
        if self.parts_at_once is not None:
            at_once = integer(self.parts_at_once, "parts_at_once", "an integer from 1 on, or None", 1)
            object.__setattr__(self, "parts_at_once", at_once)


@dataclass(frozen=True, slots=True)
class StoredOrder:
    """Samples in the order in which they are stored.

    Attributes
    ----------
    samples
        int32 [sample]: their numbers, part by part, each by row.
    part_offsets
        int64 [part + 1]: where each part that has any begins in `samples`.
    """

    samples: Int32
    part_offsets: Int64

    @classmethod
    def of(cls, numbers: Int32, part: Int32, row: Int32) -> StoredOrder:
        """Sort samples, given their numbers and for each its part and row, int32 [sample]."""
        order = np.lexsort((numbers, row, part))
        first = np.flatnonzero(np.diff(part[order], prepend=-1))
        return cls(numbers[order], np.append(first, len(numbers)).astype(np.int64))

    @property
    def n_parts(self) -> int:
        """Parts that have samples."""
        return len(self.part_offsets) - 1

    def runs(self, neighbours: int) -> tuple[Int64, Int64]:
        """Return where each run of neighbours begins in `samples`, int64 [run + 1], and its part, int64 [run]."""
        neighbours = min(neighbours, max(len(self.samples), 1))
        per_part = -(-np.diff(self.part_offsets) // neighbours)
        part = np.repeat(np.arange(self.n_parts), per_part)
        number = np.arange(len(part)) - np.repeat(np.cumsum(per_part) - per_part, per_part)
        starts = self.part_offsets[part] + number * neighbours
        return np.append(starts, len(self.samples)).astype(np.int64), part


@dataclass(frozen=True, slots=True)
class SampleSequence:
    """The samples of an epoch, one after the other.

    Attributes
    ----------
    samples
        int32 [sample]: their numbers.
    run_offsets
        int64 [run + 1]: where each run of neighbours begins.
    group_offsets
        int64 [group + 1]: where each group of parts begins.
    """

    samples: Int32
    run_offsets: Int64
    group_offsets: Int64


def unshuffled(numbers: Int32) -> SampleSequence:
    """Return the samples as they come, each a run of its own."""
    n = len(numbers)
    return SampleSequence(numbers, np.arange(n + 1), np.array([0, n] if n else [0], dtype=np.int64))


def shuffle(stored: StoredOrder, locality: Locality, keys: RandomKeys) -> SampleSequence:
    """Shuffle an epoch's samples as far as `locality` lets them go."""
    run_offsets, run_part = stored.runs(locality.neighbours)
    sizes = np.diff(run_offsets)
    n_groups = _n_groups(stored.n_parts, locality)
    turn = _rank(keys.draw("groups", n_groups))[run_part % n_groups] if n_groups > 1 else np.zeros_like(run_part)
    by_run = _sort_within(turn, keys.draw("runs", len(sizes)))
    groups = np.flatnonzero(np.diff(turn[by_run], prepend=-1))
    offsets = np.concatenate([[0], np.cumsum(sizes[by_run])])
    places = np.arange(len(stored.samples)) + np.repeat(run_offsets[by_run] - offsets[:-1], sizes[by_run])
    return SampleSequence(stored.samples[places], offsets, offsets[np.append(groups, len(sizes))])


def entropy_bits(stored: StoredOrder, locality: Locality) -> float:
    """Return log2 of the number of orders that `shuffle` can give, all of them equally likely.

    That is G! orders of the groups of parts, times M! orders of its runs for each group of M runs.
    """
    run_part = stored.runs(locality.neighbours)[1]
    n_groups = _n_groups(stored.n_parts, locality)
    runs_of_group = np.bincount(run_part % max(n_groups, 1), minlength=n_groups).tolist()
    return log2_factorial(n_groups) + sum(log2_factorial(n_runs) for n_runs in runs_of_group)


def log2_factorial(n: int) -> float:
    """Return log2(n!)."""
    return math.lgamma(n + 1) / math.log(2)


def _n_groups(n_parts: int, locality: Locality) -> int:
    # Dealt, not cut: a writer's parts lie in the order of time, and each group gets some of every time.
    return min(n_parts, 1) if locality.parts_at_once is None else -(-n_parts // locality.parts_at_once)


def _rank(keys: npt.NDArray[np.uint64]) -> Int64:
    rank = np.empty(len(keys), dtype=np.int64)
    rank[np.argsort(keys, kind="stable")] = np.arange(len(keys))
    return rank


def _sort_within(major: Int64, keys: npt.NDArray[np.uint64]) -> Int64:
    """Return what sorts by `major` and, where that is equal, by the keys."""
    by_key = np.argsort(keys, kind="stable")
    return by_key[np.argsort(major[by_key], kind="stable")]
