"""Threads that fetch, check and decode: one bounded pool a process and size, made on first use.

Not concurrent.futures, which an exception out of a signal handler leaves with locks held for ever (conditions and
semaphores are Python code, which it can strike between the lock and the block that gives it back), and with workers
that go on to write into the caller's buffers.
"""

from __future__ import annotations

import _thread
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from hsfmt.cores import n_cores
from hsfmt.errors import HsfmtError
from hsfmt.readers.process_state import ForkAware

_T = TypeVar("_T")
_MAX_DEFAULT_THREADS = 4
_KEPT_SCRATCH_NBYTES = 16 << 20


def default_threads(*, remote: bool = False) -> int:
    """Return up to 4 as there are cores for it; 1 in a DataLoader's worker that reads what is local.

    The cores are shared with the other ranks of this machine, of which torchrun and others say how many there are, and
    with the loader's other workers. Of these there are many already; one of them that reads over a network, though, has
    to keep up with all that arrives. A rank that was started by torch.multiprocessing is no worker, though a child
    process like one.
    """
    n_workers = n_loader_workers()
    if n_workers and not remote:
        return 1
    return max(1, min(_MAX_DEFAULT_THREADS, n_cores() // (_local_ranks() * (n_workers or 1))))


def n_loader_workers() -> int:
    """Return how many workers the DataLoader has that this process is one of; 0 in any other process."""
    data = sys.modules.get("torch.utils.data")  # a worker has it
    worker_info = getattr(data, "get_worker_info", None)
    info = None if worker_info is None else worker_info()
    return 0 if info is None else int(info.num_workers)


def _local_ranks() -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if re.fullmatch("[0-9]{1,6}", text) else 1


class _Run(Generic[_T]):
    """One call of `run_all`, as the threads that take part in it share it; its operations are atomic, without locks.

    Attributes
    ----------
    over
        No item is begun any more: all are, one failed, or the caller was interrupted.
    active
        An entry for each thread that takes part.
    left
        Gets, whenever a thread has left, how many still take part; 0 means that nobody will be at work any more.
    errors
        What `work` raised.
    """

    __slots__ = ("_items", "_work", "active", "errors", "left", "over")

    def __init__(self, work: Callable[[_T], None], items: list[_T]) -> None:
        self._work = work
        self._items = iter(items)
        self.over = False
        self.active: list[None] = []
        self.left: SimpleQueue[int] = SimpleQueue()
        self.errors: list[BaseException] = []

    def forget(self) -> None:
        """Let go of what is left, once the run has ended: an error that is kept leads to the run."""
        self.errors.clear()

    def take_part(self) -> None:
        """Work on items until the run is over."""
        # Entered before `over` is looked at: a caller that set it sees us, or we see it.
        self.active.append(None)
        try:
            for item in self._items:  # next() of a list's iterator is atomic
                if self.over:
                    break
                self._work(item)
        except BaseException as error:  # noqa: BLE001  raised by the caller
            self.errors.append(error)
        self.over = True
        self.active.pop()
        self.left.put(len(self.active))


class _Coming(_Run[_T]):
    """A run whose items are handed over one by one; each is a turn of whichever thread comes to it first.

    Attributes
    ----------
    n_turns
        How many there will be.
    left
        Gets something after each turn.
    """

    __slots__ = ("_handed", "_pool", "n_turns")

    def __init__(self, work: Callable[[_T], None], pool: _Pool) -> None:
        super().__init__(work, [])
        self._pool = pool
        self._handed: SimpleQueue[_T] = SimpleQueue()
        self.n_turns = 0

    def hand(self, item: _T) -> None:
        """Have an item worked on."""
        self._handed.put(item)
        self._pool.begin_turn(self)
        self.n_turns += 1

    def forget(self) -> None:
        """Let go of what was handed over, too."""
        self.over = True
        self._handed = SimpleQueue()
        super().forget()

    def take_part(self) -> None:
        """Work on one item, unless the run is over."""
        self.active.append(None)  # as above: before `over` is looked at
        try:
            if not self.over:
                self._work(self._handed.get_nowait())
        except BaseException as error:  # noqa: BLE001  raised by the caller
            self.errors.append(error)
            self.over = True
        self.active.pop()
        self.left.put(len(self.active))


class _Pool:
    """Up to `n_threads` threads that wait for runs. They are no reason for the interpreter not to exit."""

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self._lock = threading.Lock()
        self._runs: SimpleQueue[_Run[Any]] = SimpleQueue()
        self.n_started = 0

    def usable(self) -> bool:
        """Say whether there is a thread, starting one if need be: from Python 3.12 on none may start at exit."""
        try:
            self._start_one()
        except RuntimeError:
            return False
        return True

    def begin(self, run: _Run[Any]) -> None:
        """Let every thread take part in a run once it is free.

        Raises
        ------
        RuntimeError
            The system allows no threads.
        """
        for _ in range(self._n_threads):
            self._start_one()
            self._runs.put(run)

    def begin_turn(self, run: _Run[Any]) -> None:
        """Let one thread take part in a run, the first one that is free; raises as `begin`."""
        self._start_one()
        self._runs.put(run)

    def _start_one(self) -> None:
        if self.n_started == self._n_threads:  # without the lock: a signal handler may read, too
            return
        with self._lock:
            if self.n_started == self._n_threads:
                return
            try:
                _thread.start_new_thread(_serve, (self._runs,))
                self.n_started += 1
            except RuntimeError:
                if not self.n_started:
                    raise


def _serve(runs: SimpleQueue[_Run[Any]]) -> None:
    threading.current_thread().name = "hsfmt-read"
    while True:
        run = runs.get()
        run.take_part()
        del run  # or it would keep the buffers of the last read until the next one


class _Pools(ForkAware):
    def __init__(self) -> None:
        super().__init__()
        self.after_fork()

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[int, _Pool] = {}

    def get(self, n_threads: int) -> _Pool:
        with self._lock:
            if n_threads not in self._pools:
                self._pools[n_threads] = _Pool(n_threads)
            return self._pools[n_threads]


_POOLS = _Pools()


def run_all(
    work: Callable[[_T], None],
    items: list[_T],
    n_threads: int,
    *,
    inline: bool,
    abandon: Callable[[], None] | None = None,
) -> None:
    """Call `work` on every item, in threads of the pool, and return when none of them runs any more.

    That holds for exceptions too: an interrupt (Ctrl-C, a signal handler that raises) takes effect once the items in
    hand are done, since nothing may write to the caller's buffers after that.

    Parameters
    ----------
    work
        Called once an item, in no particular order.
    items
        What to do.
    n_threads
        How many of them at a time.
    inline
        Whether the calling thread may do it all where one thread is enough. numcodecs' Blosc must not be called on the
        main thread: there it uses global state and threads of its own, which a fork breaks.
    abandon
        Called when the caller was interrupted: ends what items in hand may be waiting for.

    Raises
    ------
    BaseException
        The first interrupt, else what `work` raised first; items that were not begun by then are left out.
    """
    n_threads = min(n_threads, len(items))
    if n_threads == 0:
        return
    if inline and n_threads == 1:
        for item in items:
            work(item)
        return
    pool = _POOLS.get(n_threads)
    if not pool.usable():
        for item in items:
            work(item)
        return
    run = _Run(work, items)

    def wait() -> None:
        pool.begin(run)
        deque(iter(run.left.get, 0), maxlen=0)

    _carry_out(run, wait, abandon)


def run_coming(
    work: Callable[[_T], None],
    items: Iterator[_T],
    n_threads: int,
    *,
    inline: bool,
    abandon: Callable[[], None],
) -> None:
    """Call `work` on every item as it comes, in threads of the pool, and return when none of them runs any more.

    The calling thread waits for items, so that threads which several calls share never wait for those of one of them.

    Parameters
    ----------
    work
        Called once an item. What it raises should end `items` too.
    items
        Comes to an end soon once `abandon` was called.
    n_threads, inline
        As of `run_all`.
    abandon
        Called when the caller was interrupted, or could not go on.

    Raises
    ------
    BaseException
        As `run_all`; or what `items` raised.
    """
    pool = None if inline and n_threads == 1 else _POOLS.get(n_threads)
    if pool is None or not pool.usable():
        for item in items:
            work(item)
        return
    run = _Coming(work, pool)

    def wait() -> None:
        deque(map(run.hand, items), maxlen=0)  # one call, as below
        deque(islice(iter(run.left.get, None), run.n_turns), maxlen=0)

    _carry_out(run, wait, abandon)


def _carry_out(run: _Run[Any], wait: Callable[[], None], abandon: Callable[[], None] | None) -> None:
    """Wait for a run, return when no thread takes part in it any more, and raise what ended it."""
    # The first interrupt is raised below; those that follow while threads are busy are swallowed, also those that come
    # together with it. Interrupts come after calls, where a function is entered and where a loop turns back, which a
    # `try` around the loop covers in some versions of Python only: so nothing is called on the way to the loops, each
    # waiting is one call, and a loop in a loop swallows one that comes while another is being swallowed.
    interrupt: BaseException | None = None
    failure: HsfmtError | None = None
    abandoned = True
    try:
        wait()
    except HsfmtError as error:
        run.over = True
        failure = error
        abandoned = abandon is None
    except BaseException as error:  # noqa: BLE001  raised below
        run.over = True
        interrupt = error
        abandoned = abandon is None
    while run.active or not abandoned:
        try:
            while run.active or not abandoned:
                try:
                    if not abandoned and abandon is not None:
                        abandon()
                        abandoned = True
                    else:
                        run.left.get()
                except BaseException as error:  # noqa: BLE001
                    interrupt = error if interrupt is None else interrupt
        except BaseException as error:  # noqa: BLE001
            interrupt = error if interrupt is None else interrupt
    try:
        if interrupt is not None:
            raise interrupt
        if failure is not None:
            raise failure
        if run.errors:
            raise run.errors[0]
    finally:  # an error that its own traceback leads to would keep the caller's buffers until the garbage collector
        interrupt = failure = None
        run.forget()


class Scratch(threading.local):
    """A few buffers a thread, reused from chunk to chunk: touching fresh memory costs as much as decoding.

    What a thread keeps is bounded: each of its three buffers grows with the chunks that it has seen (`encoded` to a
    payload or 4 MiB of small ones, `decoded` to a block of 512 KiB, or a chunk where one is decoded whole, `staged` to
    224 KiB, or 4 MiB with more than two threads), and one above 16 MiB goes again after its chunk.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, npt.NDArray[np.uint8]] = {}

    def get(self, name: str, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return `nbytes` bytes of the buffer `name`, valid until the next call for it in this thread."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < nbytes:
            buffer = np.empty(nbytes, np.uint8)
            if nbytes <= _KEPT_SCRATCH_NBYTES:
                self._buffers[name] = buffer
        return buffer[:nbytes]


def needs_pool(codecs: Iterable[str]) -> bool:
    """Say whether any of the codecs must stay off the main thread."""
    return any(codec != "none" for codec in codecs)
