"""Threads that fetch, check and decode: one bounded pool a process and size, made on first use."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hsfmt.readers.process_state import ForkAware

_T = TypeVar("_T")
_MAX_DEFAULT_THREADS = 4
_KEPT_SCRATCH_NBYTES = 16 << 20


def default_threads() -> int:
    """Return 1 in a worker process, of which there are many already, else up to 4 as there are cores."""
    if multiprocessing.parent_process() is not None:
        return 1
    return min(_MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0)))


class _Pools(ForkAware):
    def __init__(self) -> None:
        super().__init__()
        self.after_fork()

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def get(self, n_threads: int) -> ThreadPoolExecutor:
        with self._lock:
            if n_threads not in self._pools:
                self._pools[n_threads] = ThreadPoolExecutor(n_threads, thread_name_prefix="hsfmt-read")
            return self._pools[n_threads]


_POOLS = _Pools()


def run_all(work: Callable[[_T], None], items: list[_T], n_threads: int, *, inline: bool) -> None:
    """Call `work` on every item, in threads of the pool, and return when none of them runs any more.

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

    Raises
    ------
    Exception
        What `work` raised first; items that were not begun by then are left out.
    """
    n_threads = min(n_threads, len(items))
    if n_threads == 0:
        return
    if inline and n_threads == 1:
        for item in items:
            work(item)
        return
    pool = _POOLS.get(n_threads)
    remaining = iter(items)
    failed = threading.Event()
    futures = [pool.submit(_drain, work, remaining, failed) for _ in range(n_threads)]
    wait(futures)
    for future in futures:
        future.result()


def _drain(work: Callable[[_T], None], items: Iterator[_T], failed: threading.Event) -> None:
    for item in items:  # next() of a list's iterator is atomic
        if failed.is_set():
            return
        try:
            work(item)
        except BaseException:
            failed.set()
            raise


class Scratch(threading.local):
    """Two buffers a thread, reused from chunk to chunk: touching fresh memory costs as much as decoding."""

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
