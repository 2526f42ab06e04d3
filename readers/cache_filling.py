"""Writing what was read to the local cache, in a thread of its own: no reader waits for the disk."""

from __future__ import annotations

import _thread
import multiprocessing.util
import threading
from queue import Empty, SimpleQueue
from typing import Any

from hsfmt.readers.process_state import ForkAware
from hsfmt.storage.cache_folder import CacheFolder
from hsfmt.storage.cache_layout import EntryName

# Where the disk is slower than the network, entries are left out rather than waited for.
MAX_WAITING_NBYTES = 128 << 20
_BATCH_NBYTES = 16 << 20
_EXIT_SECONDS = 10.0
_Item = tuple[EntryName, bytes | memoryview]


class Filler(ForkAware):
    """Adds entries to a folder, in the order in which they come, as long as there are not too many of them.

    Parameters
    ----------
    folder
        Where they go.

    Attributes
    ----------
    n_left_out
        Entries that were not written since too many waited.
    """

    def __init__(self, folder: CacheFolder) -> None:
        super().__init__()
        self._folder = folder
        self.n_left_out = 0
        self.after_fork()

    def after_fork(self) -> None:
        """Begin anew: the thread, and what waits for it, are the parent's."""
        self._lock = threading.Lock()
        self._queue: SimpleQueue[_Item | SimpleQueue[None]] = SimpleQueue()
        self._waiting_nbytes = 0
        self._started = False

    def add(self, name: EntryName, body: bytes | memoryview, *, wait: bool = False) -> None:
        """Write an entry later, of bytes that nobody changes; where too many wait, wait for them, or leave it out."""
        if not self._folder.writable:
            return
        if wait and self._waiting_nbytes + name.nbytes > MAX_WAITING_NBYTES:
            self.drain()
        with self._lock:
            if not wait and self._waiting_nbytes and self._waiting_nbytes + name.nbytes > MAX_WAITING_NBYTES:
                self.n_left_out += 1
                return
            self._waiting_nbytes += name.nbytes
        self._queue.put((name, body))
        self._start()

    def drain(self, timeout: float | None = None) -> None:
        """Wait until all that was added so far is written or given up."""
        if not self._started:
            return
        done: SimpleQueue[None] = SimpleQueue()
        self._queue.put(done)
        try:
            done.get(timeout=timeout)
        except Empty:
            return

    def _start(self) -> None:
        with self._lock:
            if self._started:
                return
            try:
                _thread.start_new_thread(self._serve, (self._queue,))
            except RuntimeError:  # the interpreter is about to exit
                return
            self._started = True
        # Runs at the end of workers of DataLoaders too, which end without atexit's functions.
        multiprocessing.util.Finalize(None, self.drain, kwargs={"timeout": _EXIT_SECONDS}, exitpriority=10)

    def _serve(self, queue: SimpleQueue[Any]) -> None:
        threading.current_thread().name = "hsfmt-cache"
        while True:
            item: _Item | SimpleQueue[None] | None = queue.get()
            batch: list[_Item] = []
            nbytes = 0
            while isinstance(item, tuple):
                batch.append(item)
                nbytes += item[0].nbytes
                try:
                    item = queue.get_nowait() if nbytes < _BATCH_NBYTES else None
                except Empty:
                    item = None
            try:
                self._folder.insert(batch)
            finally:
                batch.clear()
                with self._lock:
                    self._waiting_nbytes -= nbytes
                if item is not None:
                    item.put(None)
