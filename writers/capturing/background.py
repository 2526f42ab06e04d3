"""The thread that writes: whole samples in, a dataset out. Nothing here is raised to, or waited for by, the engine.

What the storage does to it: samples wait in the queue, whose bytes are bounded by `Room`; when the storage fails, what
was accepted and is not durable is lost and counted, and a new DatasetWriter goes on as soon as one can be opened.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt.errors import DuplicateSampleError, HsfmtError, NonFiniteError, SampleError
from hsfmt.idset import CommittedIds, IdSet
from hsfmt.writers.capturing.assembler import Assembly
from hsfmt.writers.capturing.counters import Counters
from hsfmt.writers.capturing.room import Room
from hsfmt.writers.dataset_writer import DatasetWriter

_log = logging.getLogger("hsfmt")
_FIRST_PAUSE_SECONDS = 0.5
_IDLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What a flush did.

    Attributes
    ----------
    ok
        Whether all samples accepted before it are durable now.
    n_durable
        Samples durable since the process started.
    problem
        Why not, "" for ok.
    """

    ok: bool
    n_durable: int
    problem: str = ""


@dataclass(eq=False, slots=True)
class _Flush:
    done: threading.Event = field(default_factory=threading.Event)
    report: FlushReport | None = None
    close: bool = False
    abandoned: bool = False


class BackgroundWriter:
    """Writes accepted samples in the order they came, in a thread of its own.

    Parameters
    ----------
    open_writer
        Opens a DatasetWriter; called again after it failed.
    room
        Given the bytes of each sample back once it is written.
    counters
        Where durable, lost and dropped samples are counted.
    retry_seconds
        Longest pause between attempts to open a writer.

    Raises
    ------
    HsfmtError
        The first writer can't be opened.
    """

    def __init__(
        self, open_writer: Callable[[], DatasetWriter], room: Room, counters: Counters, retry_seconds: float
    ) -> None:
        self._open_writer = open_writer
        self._room = room
        self._counters = counters
        self._retry_seconds = retry_seconds
        self._writer: DatasetWriter | None = open_writer()
        self._present: CommittedIds | None = self._writer.committed_ids()
        self._accepted = IdSet()
        self._not_durable: set[str] = set()
        self._gone: set[str] = set()  # accepted, and lost or dropped since: may come again
        self._n_lost_reported = 0
        self.problem = ""
        self._stuck = False
        self._queue: queue.SimpleQueue[Assembly | _Flush] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hsfmt-capture", daemon=True)
        self._thread.start()

    def is_taken(self, sample_id: str) -> bool:
        """Say whether a sample of this id is in the dataset, as of the start, or was accepted and not lost since."""
        if sample_id in self._accepted and sample_id not in self._gone:
            return True
        return self._present is not None and sample_id in self._present

    def submit(self, sample: Assembly) -> None:
        """Take a whole sample; never waits."""
        self._accepted.add(sample.sample_id)
        self._gone.discard(sample.sample_id)
        self._queue.put(sample)

    def flush(self, seconds: float, *, close: bool = False) -> FlushReport:
        """Make durable what was submitted; wait for it at most `seconds`, after which it goes on by itself.

        A flush fails once for samples that were lost since the one before it.
        """
        marker = _Flush(close=close)
        if close:
            self._closing.set()
        self._queue.put(marker)
        deadline = time.monotonic() + seconds
        while not marker.done.wait(min(0.1, max(0.0, deadline - time.monotonic()))):
            # While a sample can't be written there is nothing to wait for.
            if self._stuck or time.monotonic() >= deadline or not self._thread.is_alive():
                marker.abandoned = True
                problem = self.problem or f"not done within {seconds:g} s; it goes on"
                return FlushReport(ok=False, n_durable=self._counters.durable, problem=problem)
        assert marker.report is not None
        return marker.report

    def close(self, seconds: float) -> FlushReport:
        """Flush, and end the thread; nothing is sealed. A second call does nothing."""
        if self._closing.is_set():
            return FlushReport(ok=True, n_durable=self._counters.durable)
        report = self.flush(seconds, close=True)
        if not report.ok:
            _log.error("%d accepted samples are not durable at the end: %s", self._counters.pending, report.problem)
        return report

    def _run(self) -> None:
        ended = False
        while not ended:
            item: Assembly | _Flush | None = None
            with suppress(queue.Empty):
                item = self._queue.get(timeout=_IDLE_SECONDS)
            self._handle(item)
            ended = isinstance(item, _Flush) and item.close

    def _handle(self, item: Assembly | _Flush | None) -> None:
        """Do one thing; whatever it raises, the thread goes on."""
        try:
            if isinstance(item, _Flush):
                self._end_flush(item)
            elif item is not None:
                self._keep_trying(item)
            self._note_durable()  # parts end by size, and by age while nothing comes
        except BaseException as error:  # noqa: BLE001  see above
            self._counters.add(errors=1)
            _log.exception("a fault in the writing thread")
            if isinstance(item, Assembly):
                self._drop(item, "error", repr(error))
        finally:
            self._stuck = False
            if isinstance(item, Assembly):
                item.pieces.clear()
                self._room.give(item.nbytes)
            elif item is not None and item.report is None:
                item.report = FlushReport(ok=False, n_durable=self._counters.durable, problem="a fault: see the log")
                item.done.set()

    def _keep_trying(self, sample: Assembly) -> None:
        """Write a sample; where the storage fails, again and again, so that it alone does not lose what waits."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            if self._keep(sample):
                return
            self._stuck = True
            if self._closing.wait(pause):
                self._lose([sample.sample_id])
                return
            pause = min(2 * pause, self._retry_seconds)

    def _keep(self, sample: Assembly) -> bool:
        """Try to write a sample; return whether it is settled."""
        writer = self._usable_writer()
        if writer is None:
            return False
        try:
            if self.problem and self._present is not None and sample.sample_id in self._present:
                self._count_durable([sample.sample_id])  # the commit that seemed to fail did not
            elif self._write(writer, sample):
                self._not_durable.add(sample.sample_id)
                if self.problem:
                    # The storage failed before: writing is only believed once something is durable.
                    self._count_durable(writer.commit())
                    _log.info("%s: the storage is back", writer.url)
                    self.problem = ""
                self._counters.add(tokens=sample.n_tokens, nbytes=sample.nbytes)
        except (HsfmtError, OSError) as error:
            self._not_durable.discard(sample.sample_id)
            self._fail(writer, error)
            return sample.sample_id in self._gone  # dropped before the failure
        return True

    def _write(self, writer: DatasetWriter, sample: Assembly) -> bool:
        """Write a sample; return False when the writer does not want it."""
        assert sample.ask is not None
        states = _dense(sample, writer.header.hidden_size)
        sample.pieces = [[states]]  # the copies they came in are free while the writer works
        try:
            return writer.write(
                sample.sample_id,
                sample.input_ids,
                states,
                sample.ask.loss_mask(sample.n_tokens),
                sample.ask.metadata,
                source_index=sample.ask.source_index,
            )
        except NonFiniteError as error:
            self._drop(sample, "nonfinite", str(error))
            writer.hole(sample.sample_id, str(error)[:1000])
        except DuplicateSampleError as error:
            self._drop(sample, "duplicate", str(error))
        except SampleError as error:
            self._drop(sample, "writer", str(error))
        return False

    def _drop(self, sample: Assembly, reason: str, detail: str) -> None:
        if reason != "duplicate":
            self._gone.add(sample.sample_id)
        self._counters.drop(reason)
        _log.warning("sample %r was accepted and is not kept: %s", sample.sample_id, detail)

    def _usable_writer(self) -> DatasetWriter | None:
        """Return the writer, or one that is newly opened, or None."""
        if self._writer is None:
            try:
                self._writer = self._open_writer()
                self._present = self._writer.committed_ids()
            except (HsfmtError, OSError) as error:
                self.problem = f"the storage fails: {error}"
        return self._writer

    def _end_flush(self, flush: _Flush) -> None:
        problem = self._commit(close=flush.close)
        n_lost = self._counters.lost - self._n_lost_reported
        if not flush.abandoned:
            self._n_lost_reported += n_lost
        if not problem and n_lost:
            problem = f"{n_lost} accepted samples were lost when the storage failed"
        self._counters.add(flushes=1)
        flush.report = FlushReport(ok=not problem, n_durable=self._counters.durable, problem=problem)
        flush.done.set()

    def _commit(self, *, close: bool) -> str:
        writer = self._usable_writer()
        if writer is None:
            return self.problem
        try:
            self._count_durable(writer.commit())
            self.problem = ""
            if close:
                writer.close(seal=False)
        except (HsfmtError, OSError) as error:
            self._fail(writer, error)
            return f"the storage failed: {error}"
        return ""

    def _note_durable(self) -> None:
        """Count samples of parts that ended by size or age."""
        if self._writer is not None:
            self._count_durable(self._writer.take_durable())

    def _count_durable(self, ids: list[str]) -> None:
        self._not_durable.difference_update(ids)
        self._counters.add(durable=len(ids))

    def _fail(self, writer: DatasetWriter, error: Exception) -> None:
        """Let a broken writer go, and count what it loses."""
        writer.abort()
        self._count_durable(writer.take_durable())
        self._writer = None
        self.problem = f"the storage failed: {error}"
        lost = list(self._not_durable)
        self._not_durable.clear()
        _log.error("%s: the storage failed, %d accepted samples are lost: %s", writer.url, len(lost), error)
        self._lose(lost)

    def _lose(self, ids: list[str]) -> None:
        self._gone.update(ids)
        self._counters.add(lost=len(ids))


def _dense(sample: Assembly, hidden: int) -> npt.NDArray[Any]:
    """Return the rows of a sample as one C-contiguous [token, layer, hidden] array of patterns."""
    first = sample.pieces[0]
    if len(first) == 1 and first[0].ndim == 3:
        return first[0]
    n_layers = sum(array.shape[1] // hidden for array in first)
    states = np.empty((sample.n_tokens, n_layers, hidden), first[0].dtype)
    token = 0
    for arrays in sample.pieces:
        layer = 0
        for array in arrays:
            width = array.shape[1] // hidden
            states[token : token + len(array), layer : layer + width] = array.reshape(len(array), width, hidden)
            layer += width
        token += len(arrays[0])
    return states
