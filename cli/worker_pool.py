"""Slices of a conversion on a pool of processes, or in this one."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, Protocol, TypeVar

from hsfmt.cli.boards import ABANDON, FINISH, ITEMS, N_SHARED, NBYTES, ORDER, Board, LocalBoard, SharedBoard
from hsfmt.cli.progress import Progress
from hsfmt.errors import HsfmtError, StorageError
from hsfmt.interruptions import interruptions_wait
from hsfmt.worker_process import end_with_parent

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 2.0  # for a slice to remove what it did not commit
_STOP_SECONDS = 10  # for one that was told to end, before it is ended
_SIGNALS = {signal.SIGINT, signal.SIGTERM}


class Outcome(Protocol):
    """What became of a slice; `error` is why it did not get to its end."""

    @property
    def error(self) -> HsfmtError | None:
        """None where it did."""


T = TypeVar("T", bound=Outcome)
Work = Callable[[Sequence[int], Board], T]
_WORKER: list[tuple[Work[Any], Board]] = []


def _start_worker(work: Work[Any], shared: Any, memory_nbytes: int | None) -> None:
    logging.getLogger("hsfmt").addHandler(logging.NullHandler())  # as in the parent
    end_with_parent(_GRACE_SECONDS)
    board = SharedBoard(shared, memory_nbytes)
    signal.signal(signal.SIGTERM, lambda *_: _stop(board))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _WORKER[:] = [(work, board)]


def _stop(board: SharedBoard) -> None:
    """Take SIGTERM: from a scheduler, which sends it to the parent too, or from the pool once another worker died."""
    board.stop()
    # It must not end a process that waits for work: the parent would take that for a crash before it hears of SIGTERM.
    signal.alarm(_STOP_SECONDS)


def _run_in_worker(numbers: Sequence[int]) -> Any:
    work, board = _WORKER[0]
    try:
        return work(numbers, board)
    except KeyboardInterrupt:
        return None


def run_slices(
    work: Work[T],
    slices: Sequence[Sequence[int]],
    workers: int,
    progress: Progress,
    memory_nbytes: int | None = None,
) -> Generator[T, None, None]:
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
    memory_nbytes
        What the items that are in memory at once may take together, None for any size.

    Closing the generator ends the workers, as an interruption does.

    Raises
    ------
    HsfmtError
        The first one of a slice, when all that run have ended.
    KeyboardInterrupt
        When all that run have ended.
    """
    if workers == 1 or len(slices) <= 1:
        # The threads that read and encode have locks too.
        with interruptions_wait(second_strikes=True) as interrupt:
            board = LocalBoard(progress, interrupt)
            for numbers in slices:
                tally = work(numbers, board)
                yield tally
                if tally.error is not None:
                    return
        return
    context = get_context("spawn")  # a fork would copy locks that threads of ours may hold
    shared = context.Array("q", N_SHARED)
    figures: Any = shared.get_obj()  # without the lock, which a worker that was killed may hold for ever
    n = min(workers, len(slices))
    start: dict[str, Any] = {"initializer": _start_worker, "initargs": (work, shared, memory_nbytes)}
    with interruptions_wait() as interrupt, ProcessPoolExecutor(n, context, **start) as pool:
        # The terminal sends Ctrl-C to the workers too, which inherit that it is blocked: only we decide what it means.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        waiting = {pool.submit(_run_in_worker, numbers) for numbers in slices}
        failure: BaseException | None = None
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            while waiting:
                done, waiting = wait(waiting, _POLL_SECONDS, FIRST_COMPLETED)
                interrupt()
                progress.update(figures[NBYTES], f"{figures[ITEMS]:,} {progress.noun}")
                for future in done:
                    outcome, error = _outcome(future)
                    failure = failure or error
                    if outcome is not None:
                        yield outcome
                    if error is not None or (outcome is not None and outcome.error is not None):
                        figures[ORDER] = FINISH
                        waiting = {other for other in waiting if not other.cancel()}
        except BaseException:  # Ctrl-C, or a caller that has enough
            figures[ORDER] = ABANDON
            # What they commit until they have ended belongs into the report.
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    if failure is not None:
        raise failure


def _outcome(future: Future[T | None]) -> tuple[T | None, BaseException | None]:
    try:
        return future.result(), None
    except BrokenProcessPool:
        remedy = "use fewer --workers, then run the same command again: it goes on from what is committed"
        got = "the end of a process, perhaps killed for its memory"
        return None, StorageError.at("worker process", expected="to run to its end", got=got, remedy=remedy)
    except Exception as error:  # noqa: BLE001  raised by the caller, once the other slices have ended
        return None, error
