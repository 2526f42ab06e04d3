"""One rank's capture: assembler, queue, writing thread, counters and status, with nothing of the engine in it.

Only `launch`, `receive` and what follows from a request are called while it serves; none of them raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from hsfmt.header import Identity
from hsfmt.writers.capturing.assembler import Assembler, Assembly, Rows, Slice, Span
from hsfmt.writers.capturing.background import BackgroundWriter, FlushReport
from hsfmt.writers.capturing.counters import Counters
from hsfmt.writers.capturing.room import Room
from hsfmt.writers.dataset_writer import DatasetWriter
from hsfmt.writers.sglang.meaning import Meaning
from hsfmt.writers.sglang.options import MIB, CaptureOptions

_log = logging.getLogger("hsfmt")
_SWEEP_SECONDS = 1.0
_MAX_LOGGED_ERRORS = 20


class Capture:
    """Takes the rows of forwards and writes whole samples.

    Parameters
    ----------
    options
        The operator's.
    meaning
        What the states are.
    model
        Identity of the model for the header.
    producer
        What the parts say about this run; its `dp_rank` names this writer in the status.

    Raises
    ------
    HsfmtError
        The dataset can't be opened, or means something else.
    """

    def __init__(
        self, options: CaptureOptions, meaning: Meaning, model: str | Identity, producer: dict[str, Any]
    ) -> None:
        self.options = options
        self.meaning = meaning
        self.rank = int(producer.get("dp_rank", 0))
        self.counters = Counters()
        self.room = Room(options.queue_nbytes)
        self._writer = BackgroundWriter(
            lambda: _open_writer(options, meaning, model, producer), self.room, self.counters, options.retry_seconds
        )
        self._assembler = Assembler(
            meaning.row_nbytes,
            self.room,
            self.counters,
            self._writer.is_taken,
            block_seconds=options.block_seconds,
            sample_seconds=options.sample_seconds,
        )
        self._swept = self._logged = time.monotonic()
        self._logged_counts: tuple[int, int, int] = (0, 0, 0)

    def launch(self, slices: Iterable[Slice]) -> tuple[list[Span], list[Assembly]]:
        """Take note of a forward, as `Assembler.launch`."""
        return self._assembler.launch(slices)

    def receive(self, span: Span, rows: Rows) -> None:
        """Take the rows of a span; a sample that is whole goes to the writing thread."""
        sample = self._assembler.receive(span, rows)
        if sample is not None:
            self._writer.submit(sample)

    def refuse(self, assembly: Assembly, reason: str, detail: str = "") -> None:
        """Give up a sample that is not whole."""
        self._assembler.refuse(assembly, reason, detail)

    def tend(self, is_finished: Callable[[Any], bool], *, now: float | None = None) -> None:
        """Do what is due from time to time: give up samples whose request ended, log the status."""
        now = time.monotonic() if now is None else now
        if now - self._swept >= _SWEEP_SECONDS:
            self._swept = now
            self._assembler.sweep(is_finished)
        if now - self._logged >= self.options.status_seconds:
            self._log_status(now)

    def fault(self, what: str) -> None:
        """Count an exception of this plugin that is being handled, and log it; after many, only count."""
        self.counters.add(errors=1)
        if self.counters.errors <= _MAX_LOGGED_ERRORS:
            _log.exception("hidden states: a fault in %s", what)

    def flush(self) -> FlushReport:
        """Make all accepted samples durable, within `flush_seconds`."""
        report = self._writer.flush(self.options.flush_seconds)
        _log.info("hidden states: flushed: %s", report)
        return report

    def close(self) -> FlushReport:
        """Flush, and end; open samples are given up."""
        self._assembler.refuse_all("aborted")
        report = self._writer.close(self.options.flush_seconds)
        self._log_status(time.monotonic())
        return report

    def status(self) -> dict[str, Any]:
        """Return the counters and the queue's state, plain."""
        return {
            "rank": self.rank,
            "out": self.options.out,
            "layers": list(self.meaning.layers),
            "final_norm": self.meaning.final_norm,
            **self.counters.to_json(),
            "open": self._assembler.n_open,
            "queue_nbytes": self.room.used,
            "queue_high_water": self.room.high_water,
            "waited_seconds": round(self.room.waited_seconds, 3),
            "longest_wait": round(self.room.longest_wait, 3),
            "problem": self._writer.problem,
        }

    def _log_status(self, now: float) -> None:
        counters = self.counters
        counts = (counters.nbytes, counters.accepted, counters.n_refused)
        if counts != self._logged_counts:
            rate = (counts[0] - self._logged_counts[0]) / MIB / max(now - self._logged, 1e-3)
            refused = ", ".join(f"{reason} {count}" for reason, count in sorted(counters.refused.items())) or "none"
            _log.info(
                "hidden states: %d accepted, %d durable, %d lost, refused: %s; "
                "%d tokens, %.1f MB/s, queue %.0f of %.0f MB%s",
                counters.accepted, counters.durable, counters.lost, refused, counters.tokens, rate,
                self.room.used / MIB, self.room.limit / MIB,
                f"; {self._writer.problem}" if self._writer.problem else "",
            )  # fmt: skip
        self._logged, self._logged_counts = now, counts


def _open_writer(
    options: CaptureOptions, meaning: Meaning, model: str | Identity, producer: dict[str, Any]
) -> DatasetWriter:
    return DatasetWriter(
        options.out,
        layers=meaning.layers,
        hidden_size=meaning.hidden_size,
        final_norm=meaning.final_norm,
        dtype=meaning.dtype,
        model=model,
        tokenizer=options.tokenizer or None,
        producer=producer,
        codec=options.codec,
        part_nbytes=options.part_nbytes,
        part_seconds=options.part_seconds,
        threads=options.threads or None,
        chunk_tokens=options.chunk_tokens or None,
        queue_nbytes=options.writer_queue_nbytes,
        nonfinite="raise",
        on_duplicate="error",
        seal=False,
        storage_options=options.storage_options or None,
    )
