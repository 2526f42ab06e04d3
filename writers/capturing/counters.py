"""What became of every sample that was asked for, in numbers that add up."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

# Why a sample was not taken, or not kept. docs/sglang.md says what to do about each.
REASONS = (
    "aborted",  # the client went, or SGLang gave the request up
    "bad_request",  # its `hsfmt` value can't be read, or its mask does not fit
    "cache_hit",  # its first rows came from the prefix cache
    "changed_model",  # weights were updated since the server started
    "copy_failed",  # its rows could not be copied to the host
    "duplicate",  # its id is in the dataset, or on its way there
    "error",  # a fault in this plugin, in the log
    "gap",  # rows between two chunks are missing
    "length",  # the prompt is not as long as the request said
    "lora",  # states of an adapter, not of the model
    "nonfinite",  # NaN or Inf; recorded as a hole
    "not_tokens",  # the prompt is more than its token ids: images, embeddings
    "queue_full",  # no room in time: the storage is slower than the engine
    "timed_out",  # its next rows did not come
    "too_large",  # it alone is more than the queue holds
    "writer",  # DatasetWriter refused it
)


class Counters:
    """Counts of one rank. Calls come from the scheduler and from the writing thread.

    Each sample that was asked for ends as durable, lost or refused: `asked` = `n_open` + `n_refused` + `accepted`, and
    `accepted` = `durable` + `pending` + `lost` + `dropped`, where `dropped` are refusals by the writing thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.asked = 0
        self.accepted = 0
        self.durable = 0
        self.lost = 0
        self.dropped = 0
        self.tokens = 0
        self.nbytes = 0
        self.errors = 0
        self.flushes = 0
        self.refused: Counter[str] = Counter()

    @property
    def pending(self) -> int:
        """Samples accepted and not durable yet."""
        return self.accepted - self.durable - self.lost - self.dropped

    @property
    def n_refused(self) -> int:
        """Samples refused, by the scheduler's side or the writing thread."""
        return self.refused.total()

    def add(self, **counts: int) -> None:
        """Add to the counts of these names."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def refuse(self, reason: str) -> None:
        """Count a sample that is not taken."""
        assert reason in REASONS, reason
        with self._lock:
            self.refused[reason] += 1

    def drop(self, reason: str) -> None:
        """Count a sample that was accepted and is not kept."""
        self.refuse(reason)
        self.add(dropped=1)

    def to_json(self) -> dict[str, Any]:
        """Return all counts, plain."""
        with self._lock:
            names = ("asked", "accepted", "durable", "lost", "dropped", "tokens", "nbytes", "errors", "flushes")
            result: dict[str, Any] = {name: getattr(self, name) for name in names}
            return {**result, "pending": self.pending, "refused": dict(sorted(self.refused.items()))}
