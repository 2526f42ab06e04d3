"""Which of the data a verification reads: named parts, a share of the bytes, one of n disjoint subsets.

A unit is a file, or at tier full a slice of a part: it is read whole or not at all, so that what is reported as read
was judged by its digest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import xxhash

from hsfmt.errors import UsageError

_SAMPLE = re.compile(
    r"(?:(?P<percent>\d+(?:\.\d+)?)%|(?P<nbytes>\d+(?:\.\d+)?)(?P<unit>[KMGT])i?B?|(?P<n>\d+)/(?P<t>\d+))"
)
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class Unit:
    """What is read whole or not at all.

    Attributes
    ----------
    part
        The part that it belongs to.
    paths
        Its files.
    nbytes
        Their size, as the manifest says.
    digest
        Digest of the file, or of the part's manifest.
    number, n_slices
        Tier full: which slice of the part it is; its samples are verified with it. n_slices 0: a file.
    """

    part: str
    paths: tuple[str, ...]
    nbytes: int
    digest: str
    number: int = 0
    n_slices: int = 0

    @property
    def name(self) -> str:
        """What tells it from all others of the dataset."""
        return f"{self.part} {self.number + 1}/{self.n_slices}" if self.n_slices else self.paths[0]


@dataclass(frozen=True, slots=True)
class Sample:
    """A share of the data.

    Attributes
    ----------
    text
        As it was asked for.
    fraction, nbytes
        At most this share, or that many bytes; None where the other is meant.
    subset
        (n, t): the n-th, from 1, of t subsets that together hold every unit once.
    """

    text: str
    fraction: float | None = None
    nbytes: int | None = None
    subset: tuple[int, int] | None = None

    @classmethod
    def parse(cls, text: str) -> Sample:
        """Return what a text like 5%, 5G or 3/10 says; raises UsageError for others."""
        match = _SAMPLE.fullmatch(text.strip())
        if match and match["percent"] and 0 < float(match["percent"]) <= 100:
            return cls(text, fraction=float(match["percent"]) / 100)
        if match and match["nbytes"] and float(match["nbytes"]) > 0:
            return cls(text, nbytes=int(float(match["nbytes"]) * _UNITS[match["unit"]]))
        if match and match["n"] and 1 <= int(match["n"]) <= int(match["t"]):
            return cls(text, subset=(int(match["n"]), int(match["t"])))
        raise UsageError.at("sample", expected="a share like 5%, an amount like 5G, a subset like 3/10", got=repr(text))

    def choose(self, units: Sequence[Unit], seed: int) -> list[Unit]:
        """Return the units to read, in their order; the same for the same units and seed."""
        shuffled = sorted(units, key=lambda unit: (_rank(unit, seed), unit.part, unit.name))
        total = sum(unit.nbytes for unit in units)
        chosen = self._subset(shuffled, total) if self.subset else self._within(shuffled, self._limit(units))
        return [unit for unit in units if unit in chosen]

    def is_too_large(self, unit: Unit, units: Sequence[Unit]) -> bool:
        """Say whether a unit can be in no choice from `units`, whatever the seed: it alone is more than the share."""
        return self.subset is None and unit.nbytes > self._limit(units)

    def _limit(self, units: Sequence[Unit]) -> int:
        return self.nbytes if self.nbytes is not None else int((self.fraction or 0) * sum(u.nbytes for u in units))

    def _subset(self, shuffled: Sequence[Unit], total: int) -> Collection[Unit]:
        assert self.subset is not None
        n, t = self.subset
        chosen, before = set(), 0
        for unit in shuffled:
            # By its middle, in integers: each unit is in just one subset.
            if min(t - 1, (2 * before + unit.nbytes) * t // max(1, 2 * total)) == n - 1:
                chosen.add(unit)
            before += unit.nbytes
        return chosen

    @staticmethod
    def _within(shuffled: Sequence[Unit], limit: int) -> Collection[Unit]:
        chosen, taken = set(), 0
        for unit in shuffled:
            if taken + unit.nbytes <= limit:
                chosen.add(unit)
                taken += unit.nbytes
        return chosen or set(sorted(shuffled, key=lambda unit: unit.nbytes)[:1])


def _rank(unit: Unit, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{unit.part}\0{unit.name}".encode(), seed)
