"""Batches that a remote dataset will be asked for, read before it is: with each batch its order says what follows.

So a DataLoader, which asks for one batch after the other, in each of its workers or without any, does not wait for a
round trip each time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from hsfmt.readers.process_state import ForkAware
from hsfmt.readers.read_ahead import ReadAhead
from hsfmt.readers.threads import n_loader_workers
from hsfmt.storage.abandonment import wait_for

_T = TypeVar("_T")

# Of all batches that are ahead, over all workers of a loader.
AHEAD_NBYTES = 512 << 20
# Likewise. Each of them is a thread while it is read, which waits more than it works, and a descriptor in a worker.
MAX_BATCHES = 32
# So many batches in a row of which all was cached, and what follows is taken for cached, too. Many, since one that is
# not costs a round trip then: of nine cached batches in ten it is one in thirty that does.
CACHED_IN_A_ROW = 32


class Batch(list[int]):
    """The sample numbers of a batch: a list, which brings along what its order has after it.

    Parameters
    ----------
    numbers
        The samples.
    following
        The batches that come next, as far as they may be read ahead.
    """

    __slots__ = ("following",)

    def __init__(self, numbers: Iterable[int] = (), following: Sequence[list[int]] = ()) -> None:
        super().__init__(numbers)
        self.following = following


class _Waiting(Generic[_T]):
    """A batch that is being read, or was; dropped, it is given up."""

    def __init__(self, numbers: list[int], read: Callable[[list[int]], _T], nbytes: int) -> None:
        self.nbytes = nbytes
        # Of two turns the second is the end: the thread does not wait for this batch to be taken.
        self.stage: ReadAhead[list[int], _T] = ReadAhead(iter([numbers]), read, depth=2)

    def __del__(self) -> None:
        self.stage.cancel()


class BatchesAhead(ForkAware, Generic[_T]):
    """Reads the batches that follow the one that is asked for, as many as `max_nbytes` has room for.

    Each is read by a thread of its own. What goes wrong is raised when that batch is asked for. What the order turns
    out not to have next is given up. Nothing of it crosses a fork or a pickle; workers of a DataLoader divide
    `max_nbytes` among them.

    As long as all comes from a local cache, nothing is read ahead: there is no round trip to wait for, and memory that
    goes from core to core makes reading at the speed of memory half again as expensive.

    Several threads may take from it; what they do are atomic operations of a dict, so that an interrupt may strike
    anywhere.

    Parameters
    ----------
    max_nbytes
        Bytes of the batches that are ahead, those in the making included.
    """

    def __init__(self, max_nbytes: int) -> None:
        super().__init__()
        self.max_nbytes = max_nbytes
        self.after_fork()

    def after_fork(self) -> None:
        """Forget the parent's batches, and its threads."""
        self._waiting: dict[tuple[int, ...], _Waiting[tuple[_T, bool]]] = {}
        self._given_up: list[_Waiting[tuple[_T, bool]]] = []
        self._prepared: _Waiting[None] | None = None
        self._n_cached = 0  # batches in a row, as they were asked for

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.max_nbytes,)

    @property
    def held_nbytes(self) -> int:
        """Bytes of the batches that are ahead, and of those that were given up and are not ended yet."""
        self._given_up = [waiting for waiting in self._given_up if waiting.stage.busy]
        return sum(waiting.nbytes for waiting in [*self._waiting.values(), *self._given_up])

    def take(
        self,
        batch: Batch,
        read: Callable[[list[int]], _T],
        nbytes_of: Callable[[list[int]], int],
        prepare: Callable[[list[int]], None],
        count_fetched: Callable[[], int] | None = None,
    ) -> _T:
        """Return a batch, and have those read that follow it.

        Parameters
        ----------
        batch
            What is asked for.
        read
            Reads a batch.
        nbytes_of
            The bytes that one takes.
        prepare
            Loads what is small, of the first batch that there is no room for.
        count_fetched
            Returns a number that grows with all that a local cache does not have; None where there is none.

        Raises
        ------
        BaseException
            What reading this batch raised.
        """
        reading = partial(_read_noting, read, count_fetched)
        n_workers = n_loader_workers() or 1
        following = batch.following[n_workers - 1 :: n_workers]  # a worker gets every so manieth
        mine = self._waiting.pop(tuple(batch), None)
        self._give_up_all_but({tuple(numbers) for numbers in following})
        n_most = max(MAX_BATCHES // n_workers, 1) if self._n_cached < CACHED_IN_A_ROW else 0
        for numbers in following[:n_most]:
            key, nbytes = tuple(numbers), nbytes_of(numbers)
            if key in self._waiting:
                continue
            if self.held_nbytes + nbytes > self.max_nbytes // n_workers:
                self._prepare(numbers, prepare)
                break
            waiting = _Waiting(numbers, reading, nbytes)
            if self._waiting.setdefault(key, waiting) is waiting:
                waiting.stage.start()
        if mine is None:
            items, was_cached = reading(batch)
        else:
            wait_for(mine.stage)
            items, was_cached = next(mine.stage)
        self._n_cached = self._n_cached + 1 if was_cached else 0
        return items

    def close(self) -> None:
        """Give up what is ahead."""
        self._give_up_all_but(())

    def _prepare(self, numbers: list[int], prepare: Callable[[list[int]], None]) -> None:
        """Prepare one batch at a time; what goes wrong is found again when it is read."""
        if self._prepared is None or not self._prepared.stage.busy:
            self._prepared = _Waiting(numbers, prepare, 0)
            self._prepared.stage.start()

    def _give_up_all_but(self, wanted: Collection[tuple[int, ...]]) -> None:
        for key in [key for key in list(self._waiting) if key not in wanted]:
            waiting = self._waiting.pop(key, None)
            if waiting is not None:
                waiting.stage.cancel()
                self._given_up.append(waiting)


def _read_noting(
    read: Callable[[list[int]], _T], count_fetched: Callable[[], int] | None, numbers: list[int]
) -> tuple[_T, bool]:
    """Read a batch, and say whether all of it was cached; if others fetch meanwhile, it is not known to be."""
    before = None if count_fetched is None else count_fetched()
    items = read(numbers)
    return items, count_fetched is not None and count_fetched() == before
