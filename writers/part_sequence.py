"""The parts of one writer: the open one, when it ends, and the thread that makes ended ones durable.

Spec: rules WRITE-1 and WRITE-6.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from hsfmt import layout
from hsfmt.errors import UsageError
from hsfmt.storage import Store
from hsfmt.tables import pack_strings
from hsfmt.writers.part_writer import PartSettings, PartWriter, iter_ids
from hsfmt.writers.pipeline import Pipeline

_log = logging.getLogger("hsfmt")
# A part ends before its index or manifest comes near the largest that readers take.
_MAX_TABLE_NBYTES = 256 << 20
_MAX_WAITING = 2

_Packed = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


class _AtRisk:
    """What a writer that may never be closed has accepted and not made durable."""

    def __init__(self, url: str, waiting: list[tuple[PartWriter, Future[None]]]) -> None:
        self.part: PartWriter | None = None
        self._waiting = waiting
        self._url = url
        self._pid = os.getpid()

    def report(self) -> None:
        """Say what is lost, if anything is; not in a forked child, whose copy is not the writer."""
        if os.getpid() != self._pid:
            return
        failed = [part for part, future in self._waiting if not future.done() or future.exception() is not None]
        n_lost = sum(part.n_samples for part in (*failed, *([self.part] if self.part else [])))
        if n_lost:
            text = "%s: the writer was never closed: %d accepted samples are lost (use `with DatasetWriter(...)`)"
            _log.warning(text, self._url, n_lost)


class PartSequence:
    """Parts in the order they were begun. All calls are made under `lock`; an error leaves the open part incomplete.

    Parameters
    ----------
    store, settings, pipeline
        What every part is made with.
    names
        Makes a name for each part.
    limits
        (nbytes, seconds): a part ends when its states reach this many raw bytes, and at this age (None: never).
    lock
        The writer's.
    """

    def __init__(
        self,
        store: Store,
        settings: PartSettings,
        pipeline: Pipeline,
        names: Callable[[], str],
        limits: tuple[int, float | None],
        lock: threading.RLock,
    ) -> None:
        self._store, self._settings, self._pipeline = store, settings, pipeline
        self._names = names
        self._nbytes, self._seconds = limits
        self._lock = lock
        self._open: PartWriter | None = None
        self._timer: threading.Timer | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="hsfmt-commit")
        self._waiting: list[tuple[PartWriter, Future[None]]] = []
        self._durable: list[_Packed] = []
        # At exit too: a writer that nobody closes must not lose what it accepted without a word.
        self._at_risk = _AtRisk(store.url, self._waiting)
        self._reminder = weakref.finalize(self, self._at_risk.report)
        _LIVE.add(self)

    def open(self) -> PartWriter:
        """Return the open part, beginning one if there is none.

        Raises
        ------
        UsageError, FormatError
            The name that the caller's function made is taken, or can't be a part's.
        """
        if self._open is None:
            name = layout.check_part_name(self._names(), "part_names")
            if self._store.size(layout.manifest_path(name)) is not None:
                # Its files would be replaced in place before the manifest could be refused.
                raise UsageError.at("part_names", expected="a new part name", got=f"{name}, which is committed")
            self._open = self._at_risk.part = PartWriter(self._store, name, self._settings, self._pipeline)
            if self._seconds is not None:
                self._timer = threading.Timer(self._seconds, self._end_by_age, [self._open])
                self._timer.daemon = True
                self._timer.start()
        return self._open

    def end(self) -> None:
        """Hand the open part to the committing thread, so that writing goes on with the next one."""
        part = self._open
        if part is not None and (part.n_samples or part.holes):
            part.flush()
            self._waiting.append((part, self._executor.submit(self._commit, part)))
        # Only now: a part that could not be handed over must not be forgotten.
        self._open = self._at_risk.part = None
        self._stop_timer()

    def end_if_full(self) -> None:
        """End the open part if it has reached its size; wait while many others are not durable yet."""
        part = self._open
        if part is not None and (part.nbytes >= self._nbytes or part.table_nbytes >= _MAX_TABLE_NBYTES):
            self.end()
            # Each that waits holds its last rows in memory, and a thread.
            self.wait(_MAX_WAITING)

    def check(self) -> None:
        """Raise what a part failed with, if one did."""
        if self._open is not None:
            self._open.check()
        while self._waiting and self._waiting[0][1].done():
            self._waiting.pop(0)[1].result()

    def wait(self, left: int = 0) -> None:
        """Wait until all but `left` ended parts are durable; raise what one failed with."""
        while len(self._waiting) > left:
            self._waiting[0][1].exception()  # an interrupt while waiting leaves it in the list
            self._waiting.pop(0)[1].result()

    def take_ids(self) -> list[str]:
        """Return the ids that became durable since the last call."""
        packed, self._durable = self._durable, []
        return [sample_id for ids in packed for sample_id in iter_ids(ids)]

    def abort(self) -> None:
        """Commit nothing of the open part."""
        part, self._open, self._at_risk.part = self._open, None, None
        if part is not None and all(part is not waiting for waiting, _ in self._waiting):
            if part.n_samples:
                _log.warning("%s: %d accepted samples were not committed", self._store.url, part.n_samples)
            part.abort()

    def close(self) -> None:
        """End the threads once they are idle; log the failures that nobody has been told of."""
        self._stop_timer()
        self._reminder.detach()
        self._executor.shutdown(wait=True)
        for part, future in self._waiting:
            if (error := future.exception()) is not None:
                _log.error("%s: part %s could not be committed: %s", self._store.url, part.part, error)

    def drain(self) -> None:
        """Wait until ended parts are durable or have failed; nothing is raised."""
        for _, future in list(self._waiting):
            with suppress(BaseException):
                future.exception()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end_by_age(self, part: PartWriter) -> None:
        with self._lock:
            if part is self._open:
                self.end()

    def _commit(self, part: PartWriter) -> None:
        manifest = part.finish()
        _log.info("%s: committed part %s: %s", self._store.url, manifest.part, manifest.counts)
        # Only an atomic append: this thread must not wait for the writer's lock, whose holder may wait for it.
        self._durable.append(pack_strings(part.ids))


_LIVE: weakref.WeakSet[PartSequence] = weakref.WeakSet()


def _drain_all() -> None:
    for sequence in list(_LIVE):
        sequence.drain()


# At exit, executors take no more work long before atexit's callbacks run; parts that ended by size or age still need
# them. This hook is the one that runs before, and the one that concurrent.futures uses itself.
if (_register := getattr(threading, "_register_atexit", None)) is not None:
    _register(_drain_all)
