"""What is read: whole samples, one layer, windows, packed batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from peers.base import Request

WINDOW = 256


@dataclass(frozen=True, slots=True)
class Case:
    """A list of reads, each of some requests; `packed`: each is one batch of `budget` tokens.

    Attributes
    ----------
    name
        In results.
    title
        In the table.
    reads
        In the order of the source; every round shuffles them.
    threads
        Numbers of threads it is measured with.
    """

    name: str
    title: str
    reads: tuple[tuple[Request, ...], ...]
    threads: tuple[int, ...]
    budget: int = 0

    def n_rows(self) -> list[tuple[int, int]]:
        """Return (rows, layers of each) that each read delivers; padding does not count."""
        return [(sum(r.stop - r.start for r in read), read[0].n_planes) for read in self.reads]


def make_cases(lengths: Sequence[int], budget: int) -> list[Case]:
    """Return the cases for samples of these lengths; the windows are of the longest."""
    whole = [Request(i, 0, n) for i, n in enumerate(lengths)]
    chosen = random.Random(0)
    longest = max(range(len(lengths)), key=lambda i: lengths[i])
    # No two touch the same rows, so that bytes read can be counted; at an even place they rarely begin.
    window = min(WINDOW, lengths[longest])
    places = range(0, lengths[longest] - 2 * window + 1, 2 * window) or (0,)
    starts = [min(place + chosen.randrange(window), lengths[longest] - window) for place in places]
    return [
        Case("samples", "whole samples", tuple((read,) for read in whole), (1, 2)),
        Case("batches", "packed batches", _packed(whole, budget), (1, 2), budget),
        Case("layer", "one layer of 4", tuple((Request(r.sample, 0, r.stop, r.sample % 4),) for r in whole), (1,)),
        Case("window", f"{window} tokens", tuple((Request(longest, s, s + window),) for s in starts), (1,)),
    ]


def _packed(whole: Sequence[Request], budget: int) -> tuple[tuple[Request, ...], ...]:
    """Fill batches up to the budget, the longest samples first."""
    batches: list[list[Request]] = []
    for read in sorted(whole, key=lambda read: -read.stop):
        for batch in batches:
            if sum(other.stop for other in batch) + read.stop <= budget:
                batch.append(read)
                break
        else:
            batches.append([read])
    return tuple(tuple(batch) for batch in batches)
