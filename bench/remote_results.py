"""What a run of the remote bench found."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from remote_flows import Written
from remote_peers import RemotePeer
from remote_worker import Cost


@dataclass
class Results:
    """Everything that the tables are made of.

    Attributes
    ----------
    peers
        What was asked for.
    costs
        Of each round, by reader.
    problems
        Reader: why it has no figures.
    stored
        Folder of files: bytes.
    requests
        Client: (requests, round trips) of opening and of the first sample.
    loaders
        (codec, start method): of each epoch the cost, that of the raw client after it, and (RSS, private) of workers.
    filling
        Codec: of each epoch that fills the cache, the cost and the chunks that it lacked.
    cached
        Codec: of each round the cost from the cache, that from a local folder, and the chunks that the cache lacked.
    written, ways
        Of each round, by way of writing; and their order.
    facts
        Lines about the run.
    """

    peers: dict[str, type[RemotePeer]] = field(default_factory=dict)
    costs: dict[str, list[Cost]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    requests: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    loaders: dict[tuple[str, str], list[tuple[Cost, Cost, list[tuple[int, int]]]]] = field(default_factory=dict)
    filling: dict[str, list[tuple[Cost, int]]] = field(default_factory=dict)
    cached: dict[str, list[tuple[Cost, Cost, int]]] = field(default_factory=dict)
    written: dict[str, list[Written]] = field(default_factory=dict)
    ways: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the figures of all rounds."""
        return {
            "problems": self.problems,
            "stored": self.stored,
            "requests": self.requests,
            "costs": {name: [asdict(cost) for cost in costs] for name, costs in self.costs.items()},
            "loaders": {
                " ".join(key): [[asdict(cost), asdict(raw), memory] for cost, raw, memory in epochs]
                for key, epochs in self.loaders.items()
            },
            "filling": {codec: [[asdict(cost), n] for cost, n in epochs] for codec, epochs in self.filling.items()},
            "cached": {
                codec: [[asdict(cached), asdict(local), n] for cached, local, n in rounds]
                for codec, rounds in self.cached.items()
            },
            "written": {name: [asdict(one) for one in rounds] for name, rounds in self.written.items()},
            "facts": self.facts,
        }


def speed(costs: list[Cost]) -> float:
    """Return MiB/s, the median of the rounds."""
    return statistics.median(cost.nbytes / cost.seconds for cost in costs) / 2**20


def cpu(costs: list[Cost]) -> float:
    """Return CPU seconds for each GB, the median of the rounds."""
    return statistics.median(cost.cpu / cost.nbytes for cost in costs) * 1e9


def ratios(costs: list[Cost], limit: list[Cost], *, by_nbytes: bool = False) -> list[float]:
    """Return how fast it was of the limit in each round: by the time for the same samples, or by bytes a second."""
    found = []
    for one, other in zip(costs, limit, strict=True):
        scale = one.nbytes / other.nbytes if by_nbytes else 1.0
        found.append(other.seconds / one.seconds * scale)
    return found
