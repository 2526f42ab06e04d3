"""Batches made in threads ahead of the loop that takes them: in order, so many at a time, errors at their turn.

What the taking side does may be struck by a signal handler that raises, at any instruction, and its end may come from
the garbage collector in any thread: it shares nothing with the threads but queues whose calls are atomic (see
threads.py).
"""

from __future__ import annotations

import _thread
import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from hsfmt.errors import UsageError
from hsfmt.readers.process_state import ForkAware
from hsfmt.storage.abandonment import Abandonment

_S = TypeVar("_S")
_T = TypeVar("_T")

_NOTHING: Any = object()
_LOOK_SECONDS = 0.002
# What an exit waits for a read in hand, which may hang in a file system; longer than one that does not.
_EXIT_SECONDS = 10.0


@dataclass(slots=True)
class _Entry:
    """What one turn gives: a value or an error; neither is the end. `state` is the source's after it."""

    value: Any = _NOTHING
    error: BaseException | None = None
    state: Any = None


_Box = SimpleQueue[_Entry]


class ReadAhead(ForkAware, Generic[_S, _T]):
    """Iterator over `make(item)` for the items of `source`, made ahead in threads once it is started.

    Where several threads take from it, it ends for each of them, and `state` is that of what one of them took last. It
    does not survive a fork: in the child, taking raises.

    Parameters
    ----------
    source
        Iterated by the threads, by one at a time. Closed with this, if it can be.
    make
        Called once an item, by as many threads at a time as there are.
    state
        Called after each item and at the end: where the source stands then.
    depth
        How many batches may be made, or in the making, and not yet taken.
    n_threads
        How many to make at a time.
    settle
        Called by the thread that made a batch, once it can be taken.

    Attributes
    ----------
    state
        What `state` said of the last item taken, or of the end once that was; None before.
    ended
        Why nothing is taken any more: "" while it is, "end" at the end.
    """

    def __init__(
        self,
        source: Iterator[_S],
        make: Callable[[_S], _T],
        *,
        state: Callable[[], Any] | None = None,
        depth: int = 2,
        n_threads: int = 1,
        settle: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._source: Iterator[_S] | None = source
        self._make = make
        self._source_state = state
        self._settle = settle
        self._n_threads = min(n_threads, depth)
        self._n_started = self._n_left = 0
        self.state: Any = None
        self.ended = ""
        self._over = False
        self._forked = False
        self._make_queues()
        for _ in range(depth):
            self._permits.put(None)
        _OPEN.add(self)

    def _make_queues(self) -> None:
        self._turn = threading.Lock()
        self._permits: SimpleQueue[None] = SimpleQueue()
        self._boxes: SimpleQueue[_Box | None] = SimpleQueue()
        self._active: list[None] = []
        # Those in __next__, and those of them that found the threads gone: a list's length is a count that is atomic.
        self._takers: list[None] = []
        self._awaiting: list[None] = []
        self._work = Abandonment()

    def after_fork(self) -> None:
        """Forget the threads, which are the parent's."""
        self._make_queues()
        self._over = self._forked = True
        self.ended = self.ended or "a fork: its threads are the parent's"

    def start(self) -> None:
        """Start the threads. Where the system allows none, batches are made when they are taken."""
        if isinstance(self._source, ReadAhead):
            self._source.start()
        for _ in range(self._n_threads):
            try:
                _thread.start_new_thread(self._serve, ())
            except RuntimeError:  # from Python 3.12 on also at the interpreter's exit
                break
            self._n_started += 1

    @property
    def busy(self) -> bool:
        """Whether a thread has not ended yet."""
        return self._n_left < self._n_started

    def __iter__(self) -> ReadAhead[_S, _T]:
        return self

    def __next__(self) -> _T:
        """Return the next batch.

        Raises
        ------
        StopIteration
            There is none left.
        UsageError
            This was closed, by an error too, or belongs to the process that this one was forked from.
        BaseException
            What making this batch, or coming to it, raised; after that this is closed.
        """
        if self.ended == "end":
            raise StopIteration
        if self.ended:
            raise _closed(self.ended)
        entry = None
        try:
            if not self._n_started:
                self._one()
            self._takers.append(None)
            box = self._boxes.get()
            if box is None:
                if self._await_end() == "end":
                    raise StopIteration
                raise _closed(self.ended)
            entry = box.get()
            if isinstance(entry.error, StopIteration):  # else the batches that follow would be missing without a word
                raise RuntimeError("making a batch raised StopIteration") from entry.error  # noqa: TRY004
            if entry.error is not None:
                raise entry.error
            self.state = entry.state
            if entry.value is _NOTHING:
                self.ended = "end"
                raise StopIteration
            value: _T = entry.value
            if self._n_started:
                self._permits.put(None)
            return value
        except BaseException as error:
            self.ended = self.ended or f"an error before, {type(error).__name__}"
            self.close()
            raise
        finally:  # an error that its own traceback leads to would keep buffers until the garbage collector
            entry = None
            with suppress(IndexError):
                self._takers.pop()

    def _await_end(self) -> str:
        """Pass the end on to other taking threads, and return, when that is known, which one it is."""
        self._boxes.put(None)
        self._awaiting.append(None)
        while not self.ended and len(self._takers) > len(self._awaiting):  # one has the last entry in hand
            time.sleep(_LOOK_SECONDS)
        self.ended = self.ended or "the end of its threads"
        return self.ended

    def cancel(self) -> None:
        """Let the threads end once what they have in hand is done, without waiting for that.

        What they wait for from a remote storage is given up.
        """
        self._over = True
        self.ended = self.ended or "close()"
        self._work.give_up()
        for _ in range(self._n_threads):
            self._permits.put(None)
        source = self._source  # the last thread may let go of it meanwhile
        if isinstance(source, ReadAhead):
            source.cancel()

    def abandon(self) -> None:
        """Let a thread that takes from this get an error, and the others end."""
        self.cancel()

    def close(self, timeout: float | None = None) -> None:
        """End the threads, and return when none of them works on anything any more.

        Neither do those of a source that reads ahead itself. That holds for exceptions too: an interrupt takes effect
        once what is in hand is done.

        Parameters
        ----------
        timeout
            Seconds to wait at most; None: as long as it takes.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        interrupt: BaseException | None = None
        done = False
        # Two loops in each other, as in threads.run_all, which says why; their conditions call nothing.
        while not done:
            try:
                while not done:
                    try:
                        self.cancel()
                        busy = self._busy_stage()
                        done = busy is None or _past(deadline)
                        if not done:
                            # No queue's get(timeout): shared by two that close, it may wait for ever (CPython 3.11).
                            time.sleep(_LOOK_SECONDS)
                    except BaseException as error:  # noqa: BLE001  raised below
                        interrupt = error if interrupt is None else interrupt
            except BaseException as error:  # noqa: BLE001
                interrupt = error if interrupt is None else interrupt
        if not self._active and not self._forked:
            self._release()
            _OPEN.discard(self)
        try:
            if interrupt is not None:
                raise interrupt
        finally:
            interrupt = None

    def _busy_stage(self) -> ReadAhead[Any, Any] | None:
        """Return this, or else what it takes from, if a thread works for it."""
        source = self._source  # the last thread may let go of it meanwhile
        if self._active:
            return self
        return source._busy_stage() if isinstance(source, ReadAhead) else None  # noqa: SLF001  of this class

    def _release(self) -> None:
        """Let go of the source, and of what was made and is not wanted."""
        source, self._source = self._source, None
        close = getattr(source, "close", None)
        if close is not None:
            close()
        with suppress(Empty):
            while True:
                self._boxes.get_nowait()
        self._boxes.put(None)  # for threads that wait, or come later

    def _serve(self) -> None:
        # Entered before `_over` is looked at: who set that sees us, or we see it.
        self._active.append(None)
        try:
            while True:
                self._permits.get()
                if self._over or not self._one():
                    break
        finally:
            self._boxes.put(None)
            with self._turn:
                self._n_left += 1
            try:
                if self.ended and self._n_left == self._n_started:  # dropped: nobody else would
                    self._release()
            finally:  # whatever the source's end raises
                self._active.pop()

    def _one(self) -> bool:
        """Make one batch; return whether there may be another."""
        box: _Box = SimpleQueue()
        entry = _Entry()
        item: Any = _NOTHING
        try:
            with self._work:
                with self._turn:
                    if self._over:
                        return False
                    self._boxes.put(box)
                    item = _NOTHING if self._source is None else next(self._source, _NOTHING)
                    entry.state = None if self._source_state is None else self._source_state()
                if item is not _NOTHING:
                    entry.value = self._make(item)
        except BaseException as error:  # noqa: BLE001  raised where the batch is taken
            entry.error = error
        finally:
            made = entry.value is not _NOTHING
            self._over = self._over or not made
            item = None
            box.put(entry)
            del entry, box
        return made and self._settled()

    def _settled(self) -> bool:
        try:
            if self._settle is not None:
                self._settle()
        except BaseException as error:  # noqa: BLE001  raised at the next batch's turn
            self._over = True
            box: _Box = SimpleQueue()
            box.put(_Entry(error=error))
            self._boxes.put(box)
            return False
        return True


class Batches(Generic[_T]):
    """What a loop holds of a ReadAhead. Dropped, as by `break`, it ends the threads without waiting for them.

    Parameters
    ----------
    ahead
        What it takes from; started here.
    seen
        Called with the state of what was taken, before it is handed out and at the end.
    receive
        Called with what was taken, in the taking thread; returns what is handed out.
    """

    def __init__(
        self, ahead: ReadAhead[Any, Any], seen: Callable[[Any], None], receive: Callable[[Any], _T] | None = None
    ) -> None:
        self._ahead = ahead
        self._seen = seen
        self._receive = receive
        ahead.start()

    def __iter__(self) -> Batches[_T]:
        return self

    def __next__(self) -> _T:
        """Return the next batch; raises what making it raised, and UsageError once this is closed."""
        try:
            taken = next(self._ahead)
        except StopIteration:
            self._seen(self._ahead.state)
            raise
        batch: _T = taken if self._receive is None else self._receive(taken)
        self._seen(self._ahead.state)
        return batch

    def __enter__(self) -> Batches[_T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("an iteration can't be pickled or copied: its threads belong to this process")

    def __del__(self) -> None:
        # The garbage collector may do this in one of the threads that close() waits for.
        self._ahead.cancel()

    def close(self) -> None:
        """End the threads; when this returns, none of them works on anything any more."""
        self._ahead.close()


_OPEN: weakref.WeakSet[ReadAhead[Any, Any]] = weakref.WeakSet()


def _past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _closed(by: str) -> UsageError:
    remedy = "begin a new iteration"
    return UsageError.at("prefetching", expected="an open iterator", got=f"one ended by {by}", remedy=remedy)


@atexit.register
def _end_all() -> None:
    """Leave no thread at work on memory, or in a device's driver, that the exit takes away."""
    still_open = list(_OPEN)
    for ahead in still_open:
        ahead.cancel()
    for ahead in still_open:
        ahead.close(_EXIT_SECONDS)
