"""Slices of a conversion: a pure function on some items of a source, run here or on a pool of processes.

A slice opens a writer of its own and commits parts of its own, so that slices need to know nothing of each other.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import get_context, parent_process
from typing import Any, Protocol

import numpy as np

from hsfmt.cli.progress import Progress
from hsfmt.errors import FormatError, HsfmtError, NonFiniteError, Problem, SampleError, SourceError, StorageError
from hsfmt.readers.sources import AbsentSampleError, Source, SourceItem, SourceSample
from hsfmt.writers.dataset_writer import DatasetWriter

GO_ON, FINISH, ABANDON = 0, 1, 2
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 2.0  # for a slice to remove what it did not commit
_SHOWN_IDS = 20


@dataclass(frozen=True, slots=True)
class Task:
    """What all slices of a conversion share.

    Attributes
    ----------
    source
        The foreign folder.
    url
        The dataset.
    writer
        Keyword arguments of DatasetWriter.
    on_bad, nonfinite
        "raise" or "hole": what a file that can't be taken, and one with NaN or Inf, does; nonfinite also "keep".
    recorded_holes
        Id to reason, of holes that are committed already and need not be recorded again.
    """

    source: Source
    url: str
    writer: Mapping[str, Any]
    on_bad: str
    nonfinite: str
    recorded_holes: Mapping[str, str]


@dataclass(slots=True)
class Tally:
    """What became of a slice's items, for the report.

    Attributes
    ----------
    samples, tokens, supervised, nbytes
        Samples written, their tokens, supervised tokens and raw bytes of states.
    already
        Numbers of items whose id another writer committed since the conversion began.
    same
        Numbers of items whose content was compared with the committed sample's and found to be the same.
    conflicts
        Item number to what is wrong, of items whose id the dataset has for another sample.
    holes
        Item number to reason.
    failed
        Number of the item that stopped the slice, or None.
    error
        Why.
    masks, all_zero, all_one
        Samples with a loss mask of their own, those where it is 0, and 1, throughout.
    unsupervised
        Ids of the first samples without a supervised token.
    """

    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    nbytes: int = 0
    already: list[int] = field(default_factory=list)
    same: list[int] = field(default_factory=list)
    conflicts: dict[int, Problem] = field(default_factory=dict)
    holes: dict[int, str] = field(default_factory=dict)
    failed: int | None = None
    error: HsfmtError | None = None
    masks: int = 0
    all_zero: int = 0
    all_one: int = 0
    unsupervised: list[str] = field(default_factory=list)

    def take(self, sample: SourceSample) -> None:
        """Count a written sample."""
        self.samples += 1
        self.tokens += len(sample.input_ids)
        self.nbytes += sample.hidden_states.nbytes
        mask = sample.loss_mask
        supervised = len(sample.input_ids) if mask is None else int(np.count_nonzero(mask))
        self.supervised += supervised
        if mask is not None:
            self.masks += 1
            self.all_zero += supervised == 0
            self.all_one += supervised == len(mask)
            if not supervised and len(self.unsupervised) < _SHOWN_IDS:
                self.unsupervised.append(sample.sample_id)

    def add(self, other: Tally) -> None:
        """Add another slice's figures."""
        for name in ("samples", "tokens", "supervised", "nbytes", "already", "same", "masks", "all_zero", "all_one"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.conflicts |= other.conflicts
        self.holes |= other.holes
        if self.error is None:
            self.failed, self.error = other.failed, other.error
        self.unsupervised = (self.unsupervised + other.unsupervised)[:_SHOWN_IDS]


class Board(Protocol):
    """Where a slice says how far it is, and reads whether to go on."""

    def advance(self, nbytes: int) -> None:
        """Count an item done."""

    def order(self) -> int:
        """Return GO_ON, FINISH (commit what was taken) or ABANDON (commit nothing of the open part)."""


def until_told(numbers: Sequence[int], board: Board) -> Iterator[int]:
    """Yield the numbers until the board says FINISH.

    Raises
    ------
    KeyboardInterrupt
        It says ABANDON.
    """
    for number in numbers:
        order = board.order()
        if order == ABANDON:
            raise KeyboardInterrupt
        if order == FINISH:
            return
        yield number


def convert_slice(task: Task, numbers: Sequence[int], board: Board) -> Tally:
    """Convert some items of the source into parts of their own; one sample is in memory at a time.

    A file that can't be taken ends the slice under on_bad="raise": what was taken before it is committed.

    Raises
    ------
    StorageError, CorruptionError
        Source or dataset can't be read or written; the open part is not committed.
    KeyboardInterrupt
        The board says ABANDON.
    """
    tally = Tally()
    with DatasetWriter(task.url, **task.writer) as writer:
        # What is wrong with the dataset shows here, not as a fault of the first file.
        writer.committed_ids()
        for number in until_told(numbers, board):
            item = task.source.items[number]
            try:
                _convert_item(task, number, writer, tally)
            except (SourceError, SampleError, FormatError) as error:
                tally.failed, tally.error = number, naming(error, item)
                break
            board.advance(item.nbytes)
    return tally


def _convert_item(task: Task, number: int, writer: DatasetWriter, tally: Tally) -> None:
    item = task.source.items[number]
    try:
        sample = task.source.load(item)
        written = writer.write(
            item.sample_id,
            sample.input_ids,
            sample.hidden_states,
            sample.loss_mask,
            _metadata(item, sample),
            source_index=item.index,
            **sample.extras,
        )
    except (SourceError, SampleError, FormatError) as error:
        policy = task.nonfinite if isinstance(error, NonFiniteError) else task.on_bad
        if policy != "hole" and not isinstance(error, AbsentSampleError):
            raise
        reason = reason_of(error)
        tally.holes[number] = reason
        if task.recorded_holes.get(item.sample_id) != reason:
            writer.hole(item.sample_id, reason)
        return
    if written:
        tally.take(sample)
    else:
        tally.already.append(number)


def _metadata(item: SourceItem, sample: SourceSample) -> dict[str, Any]:
    if "source" in sample.metadata:
        return {"source": item.key, "columns": sample.metadata}
    return {"source": item.key, **sample.metadata}


def reason_of(error: HsfmtError) -> str:
    """Return an error as the reason of a hole."""
    return "; ".join(f"expected {problem.expected}, got {problem.got}" for problem in error.problems)


def naming(error: HsfmtError, item: SourceItem) -> HsfmtError:
    """Return the error as one about the item's file, whoever found the fault; it is a fault of the data."""
    if isinstance(error, SourceError):
        return error
    named = SourceError(replace(problem, where=f"{item.key}: {problem.where}") for problem in error.problems)
    named.__cause__ = error
    return named


class LocalBoard:
    """The board of a conversion within this process."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._items = self._nbytes = 0

    def advance(self, nbytes: int) -> None:
        """Count an item done."""
        self._items += 1
        self._nbytes += nbytes
        self._progress.update(self._nbytes, f"{self._items:,} files")

    def order(self) -> int:
        """Return GO_ON: an interruption comes as KeyboardInterrupt."""
        return GO_ON


class _SharedBoard:
    """Figures in shared memory: order, items, nbytes. No queue, which a stopping parent might leave full."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared
        self._parent = os.getppid()

    def advance(self, nbytes: int) -> None:
        with self._shared.get_lock():
            self._shared[1] += 1
            self._shared[2] += nbytes

    def order(self) -> int:
        if os.getppid() != self._parent:  # it was killed: nobody is left who would seal or report
            return ABANDON
        order: int = self._shared[0]
        return order


Work = Callable[[Sequence[int], Board], Tally]
_WORKER: list[tuple[Work, Board]] = []


def _start_worker(work: Work, shared: Any) -> None:
    logging.getLogger("hsfmt").addHandler(logging.NullHandler())  # as in the parent
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _WORKER[:] = [(work, _SharedBoard(shared))]


def _end_with_parent() -> None:
    """End this process after its parent, which the pool would wait for in vain: its queue is open in all workers."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        time.sleep(_GRACE_SECONDS)
        os._exit(1)


def _run_in_worker(numbers: Sequence[int]) -> Tally | None:
    work, board = _WORKER[0]
    try:
        return work(numbers, board)
    except KeyboardInterrupt:
        return None


def run_slices(work: Work, slices: Sequence[Sequence[int]], workers: int, progress: Progress) -> Iterator[Tally]:
    """Do the work on all slices and yield their tallies as they come; after a failed one the others finish early.

    Parameters
    ----------
    work
        A function on a slice, which more than one worker need pickled.
    slices
        Numbers of items.
    workers
        Processes; 1 for this one.
    progress
        Is told how far all slices are.

    Raises
    ------
    HsfmtError
        The first one of a slice, when all that run have ended.
    KeyboardInterrupt
        When all that run have ended.
    """
    if workers == 1 or len(slices) <= 1:
        for numbers in slices:
            tally = work(numbers, LocalBoard(progress))
            yield tally
            if tally.error is not None:
                return
        return
    context = get_context("spawn")  # a fork would copy locks that threads of ours may hold
    shared = context.Array("q", 3)
    n = min(workers, len(slices))
    with ProcessPoolExecutor(n, context, initializer=_start_worker, initargs=(work, shared)) as pool:
        # The terminal sends Ctrl-C to the workers too, which inherit that it is blocked: only we decide what it means.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        waiting = {pool.submit(_run_in_worker, numbers) for numbers in slices}
        failure: BaseException | None = None
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            while waiting:
                done, waiting = wait(waiting, _POLL_SECONDS, FIRST_COMPLETED)
                progress.update(shared[2], f"{shared[1]:,} files")
                for future in done:
                    outcome, error = _outcome(future)
                    failure = failure or error
                    if outcome is not None:
                        yield outcome
                    if error is not None or (outcome is not None and outcome.error is not None):
                        shared[0] = FINISH
                        waiting = {other for other in waiting if not other.cancel()}
        except BaseException:  # Ctrl-C wherever it strikes: leaving this block waits for the workers
            shared[0] = ABANDON
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failure is not None:
        raise failure


def _outcome(future: Future[Tally | None]) -> tuple[Tally | None, BaseException | None]:
    try:
        return future.result(), None
    except BrokenProcessPool:
        remedy = "use fewer --workers, then run the same command again: it goes on from what is committed"
        got = "the end of a process, perhaps killed for its memory"
        return None, StorageError.at("worker process", expected="to run to its end", got=got, remedy=remedy)
    except Exception as error:  # noqa: BLE001  raised by the caller, once the other slices have ended
        return None, error
