"""Batches of a sequence of samples: by a budget of tokens, or by number of samples. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hsfmt.readers.random_keys import RandomKeys
from hsfmt.readers.shuffle import SampleSequence

Int64 = npt.NDArray[np.int64]

# A run is cut each quarter of a budget: twice that packs badly (0.83 to 0.99 full), half of it separates neighbours.
_PIECES_PER_BUDGET = 4


@dataclass(frozen=True, slots=True)
class Packs:
    """Which samples of a sequence are in which batch.

    Attributes
    ----------
    order
        int64 [sample]: positions in the sequence, batch by batch.
    offsets
        int64 [batch + 1]: where each batch begins in `order`; none of them is empty.
    """

    order: Int64
    offsets: Int64


def equal_batches(n: int, n_samples: int, *, drop_last: bool) -> Packs:
    """Cut a sequence of `n` into batches of `n_samples`; the last has what is left, or is dropped."""
    n_batches = n // n_samples if drop_last else -(-n // n_samples)
    return Packs(np.arange(n), np.minimum(np.arange(n_batches + 1) * min(n_samples, max(n, 1)), n))


def pack(
    sequence: SampleSequence, tokens: npt.NDArray[np.int32], n_tokens: int, window: int, keys: RandomKeys | None
) -> Packs:
    """Put a sequence into batches of at most `n_tokens`, nearly full, each of samples that are near each other.

    First-fit decreasing over `window` samples at a time, and never over the end of a group of parts: each batch takes
    the longest sample left that fits, until none does. The batches of a window then come in random order, since they
    were made of the longest samples first.

    Parameters
    ----------
    sequence
        The samples; a run of neighbours is packed as one sample, or as pieces of at most half a budget.
    tokens
        int32 [sample] of the sequence, each from 1 to `n_tokens`.
    n_tokens
        The budget of a batch.
    window
        Samples to choose from.
    keys
        For the order of batches; None: by the first sample in each.
    """
    pieces = _pieces(sequence, tokens, n_tokens)
    sizes = np.add.reduceat(tokens, pieces[:-1], dtype=np.int64) if len(tokens) else np.zeros(0, dtype=np.int64)
    borders = np.searchsorted(pieces, sequence.group_offsets)
    pack_of_piece, window_of_pack = _pack_windows(sizes, n_tokens, window, borders)
    n_packs = len(window_of_pack)
    if keys is None:
        first = np.full(n_packs, len(sizes))
        np.minimum.at(first, pack_of_piece, np.arange(len(sizes)))
        by_place = np.argsort(first, kind="stable")
    else:
        by_key = np.argsort(keys.draw("packs", n_packs), kind="stable")
        by_place = by_key[np.argsort(window_of_pack[by_key], kind="stable")]
    place = np.empty(n_packs, dtype=np.int64)
    place[by_place] = np.arange(n_packs)
    pack_of_sample = np.repeat(place[pack_of_piece], np.diff(pieces))
    order = np.argsort(pack_of_sample, kind="stable")
    return Packs(order, np.concatenate([[0], np.cumsum(np.bincount(pack_of_sample, minlength=n_packs))]))


def _pieces(sequence: SampleSequence, tokens: npt.NDArray[np.int32], n_tokens: int) -> Int64:
    """Return where the sequence is cut into what is packed as one, int64 [piece + 1]."""
    n, runs = len(tokens), sequence.run_offsets
    if len(runs) == n + 1:
        return np.arange(n + 1)
    most = min(max(n_tokens // _PIECES_PER_BUDGET, 1), 1 << 62)
    before = np.cumsum(tokens, dtype=np.int64) - tokens
    in_run = before - np.repeat(before[runs[:-1]], np.diff(runs))
    cut = np.diff(in_run // most, prepend=-1) != 0
    cut |= tokens > most  # a longer one goes alone: what follows it begins in another quarter anyway
    cut[runs[:-1]] = True
    return np.append(np.flatnonzero(cut), n)


def _pack_windows(sizes: Int64, capacity: int, window: int, borders: Int64) -> tuple[Int64, Int64]:
    """Return the number of each piece's pack, int64 [piece], and of each pack's window, int64 [pack]."""
    pack_of_piece = np.empty(len(sizes), dtype=np.int64)
    packs_of_window: list[int] = []
    n_packs = 0
    held = np.zeros(0, dtype=np.int64)
    for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        at = start
        while at < stop or len(held):
            # As many as are held at least: else tiny pieces that never fill a pack would be sorted again and again.
            until = min(at + max(window, len(held)), stop)
            pool = np.concatenate([held, np.arange(at, until)])
            pool = pool[np.argsort(sizes[pool], kind="stable")]
            at = until
            packed, counts = _first_fit_decreasing(sizes[pool].tolist(), pool.tolist(), capacity)
            held = held[:0]
            if at < stop:  # the last pack is what nothing was left to fill up with
                n_held = counts.pop()
                held = np.array(packed[-n_held:])
                del packed[-n_held:]
            pack_of_piece[packed] = np.repeat(np.arange(n_packs, n_packs + len(counts)), counts)
            n_packs += len(counts)
            packs_of_window.append(len(counts))
    return pack_of_piece, np.repeat(np.arange(len(packs_of_window)), packs_of_window)


def _first_fit_decreasing(sizes: list[int], pieces: list[int], capacity: int) -> tuple[list[int], list[int]]:
    """Return the pieces pack by pack, and how many are in each. `sizes` ascend; both lists are used up."""
    packed: list[int] = []
    counts: list[int] = []
    while sizes:
        room = capacity - sizes.pop()
        packed.append(pieces.pop())
        count = 1
        while fits := bisect_right(sizes, room):
            room -= sizes.pop(fits - 1)
            packed.append(pieces.pop(fits - 1))
            count += 1
        counts.append(count)
    return packed, counts
