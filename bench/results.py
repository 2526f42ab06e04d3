"""What a run found, by peer, case and number of threads."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from cases import Case
from measure import Cost
from peers.base import Peer

Key = tuple[str, int, str]  # peer, threads, case; "cold" is the case "samples" from the disk


@dataclass
class Results:
    """Everything that the table and the ratios are made of.

    Attributes
    ----------
    peers, cases
        What was asked for.
    hidden
        Channels.
    costs
        Of each round.
    cold_bytes
        (peer, case): the cost of one pass with the files dropped from the page cache.
    first
        Peer: seconds to the first sample, of each round.
    problems
        Peer: why it has no figures.
    stored
        Folder of files: bytes.
    resident
        The largest part of a peer's files that was still in the page cache before a cold pass.
    facts
        Further lines about the run.
    """

    peers: dict[str, type[Peer]]
    cases: dict[str, Case]
    hidden: int
    costs: dict[Key, list[Cost]] = field(default_factory=dict)
    cold_bytes: dict[tuple[str, str], Cost] = field(default_factory=dict)
    first: dict[str, list[float]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    resident: dict[str, float] = field(default_factory=dict)
    facts: list[str] = field(default_factory=list)

    def nbytes(self, case: str) -> int:
        """Return the bytes of states that one pass delivers."""
        rows = self.cases["samples" if case == "cold" else case].n_rows()
        return sum(n * planes for n, planes in rows) * self.hidden * 2

    def seconds(self, peer: str, case: str, threads: int = 1) -> float | None:
        """Return the median of the rounds."""
        costs = self.costs.get((peer, threads, case))
        return statistics.median(cost.seconds for cost in costs) if costs else None

    def speed(self, peer: str, case: str, threads: int = 1) -> float | None:
        """Return GB/s of states delivered."""
        seconds = self.seconds(peer, case, threads)
        return None if seconds is None else self.nbytes(case) / seconds / 1e9

    def cpu(self, peer: str, case: str, threads: int = 1) -> float | None:
        """Return CPU seconds for each GB delivered."""
        costs = self.costs.get((peer, threads, case))
        return statistics.median(cost.cpu for cost in costs) / self.nbytes(case) * 1e9 if costs else None

    def bytes_read(self, peer: str, case: str) -> float | None:
        """Return bytes from the disk for each byte delivered."""
        cost = self.cold_bytes.get((peer, case))
        return cost.from_disk / self.nbytes(case) if cost else None

    def as_json(self) -> dict[str, Any]:
        """Return the figures of all rounds."""
        return {
            "problems": self.problems,
            "stored": self.stored,
            "first": self.first,
            "facts": self.facts,
            "nbytes": {case: self.nbytes(case) for case in self.cases},
            "costs": [
                {"peer": peer, "threads": threads, "case": case, "seconds": [cost.seconds for cost in costs],
                 "cpu": [cost.cpu for cost in costs], "asked": costs[0].asked, "from_disk": costs[0].from_disk}
                for (peer, threads, case), costs in self.costs.items()
            ],
        }  # fmt: skip
