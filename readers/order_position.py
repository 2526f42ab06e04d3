"""How far the batches of an order were handed out, while it is read ahead of that."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hsfmt import digests
from hsfmt.errors import UsageError
from hsfmt.readers.sample_requests import integer

Batches = Iterable[Sequence[Any]]

_STATE_VERSION = 1
_KEYS = {"version", "n_batches", "of", "digest"}
_EXPECTED = "batches, each a list of numbers of samples or of windows (number, start, stop)"


class OrderPosition:
    """An order, and how far its batches were handed out.

    Its state is that of its iterators if they have one, as BatchOrder's do, else its own; of a sequence of batches a
    count, with what tells this sequence from another one. Of anything else, which may have other batches the next time,
    a count would say nothing.

    Parameters
    ----------
    batches
        The order.

    Raises
    ------
    UsageError
        It is none, or an iterator, which has no second epoch.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches: Any = _checked(batches)
        self._stateful = hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict")
        self._countable = not self._stateful and isinstance(batches, Sequence | np.ndarray)
        if self._countable and len(self._batches):
            check_batch(self._batches[0])
        self._live = False
        self._handed_out: Any = None
        # Of a stateful order: the state where the iteration began, the one it ran to, and its own as it was left.
        self._begun: dict[str, Any] = {}
        self._ran_to: dict[str, Any] = {}
        self._left: dict[str, Any] = {}
        # Of a sequence: what is skipped of it, and the sequence of the iteration under way.
        self._n_skipped = 0
        self._skipped_of = ""
        self._listed: Sequence[Any] = ()
        self._digest: str | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def begin(self) -> tuple[Iterator[Sequence[Any]], Callable[[], Any]]:
        """Return an iterator over the batches, and the function that says where it stands.

        Raises
        ------
        UsageError
            The state that was loaded is that of another list.
        """
        if not self._stateful:
            return self._begin_counted()
        iterator = iter(self._batches)
        stateful = iterator if hasattr(iterator, "state_dict") else self._batches

        def state() -> dict[str, Any]:
            self._ran_to, self._left = stateful.state_dict(), self._batches.state_dict()
            return self._ran_to

        self._begun = self._handed_out = state()
        self._live = True
        return iterator, state

    def _begin_counted(self) -> tuple[Iterator[Sequence[Any]], Callable[[], int]]:
        listed = self._batches
        if isinstance(listed, list):
            listed = listed.copy()  # shuffled in place for the next epoch, it would be another one under our hands
        n_skipped, self._n_skipped = self._n_skipped, 0
        if n_skipped and _digest(listed) != self._skipped_of:
            raise _another(f"digest {self._skipped_of}", "one that was changed since the state was loaded")
        self._listed, self._digest = listed, None
        counted = _Counted(listed, n_skipped)
        self._handed_out = n_skipped
        return counted, counted.state

    def seen(self, state: Any) -> None:
        """Note the state of what was handed out."""
        self._handed_out = state

    def end(self) -> None:
        """Make an order that was left half-way begin where it began, whatever was read ahead."""
        if not self._live:
            return
        self._live = False
        if self._ran_to != self._handed_out and not self._touched():
            self._batches.load_state_dict(copy.deepcopy(self._begun))
            self._left = self._batches.state_dict()

    def _touched(self) -> bool:
        """Say whether someone else has set the order to something since."""
        return self._stateful and bool(self._batches.state_dict() != self._left)

    def set_epoch(self, epoch: int) -> None:
        """Set the order's epoch; UsageError if it has none."""
        if not hasattr(self._batches, "set_epoch"):
            raise UsageError.at("order", expected="one with epochs", got=type(self._batches).__name__)
        self._batches.set_epoch(epoch)

    def state(self) -> dict[str, Any]:
        """Return the state as of what was handed out; UsageError if the order has none."""
        self._check_stateful()
        if self._countable:
            return self._counted_state(self._n_skipped if self._handed_out is None else self._handed_out)
        if self._handed_out is None or (not self._live and self._touched()):
            own: dict[str, Any] = self._batches.state_dict()
            return own
        handed_out: dict[str, Any] = copy.deepcopy(self._handed_out)
        return handed_out

    def _counted_state(self, n: int) -> dict[str, Any]:
        if not n or self._handed_out is None:  # of what is iterated next
            listed, digest = self._batches, _digest(self._batches)
        else:
            listed = self._listed
            digest = self._digest = self._digest or _digest(listed)
        return {"version": _STATE_VERSION, "n_batches": n, "of": len(listed), "digest": digest}

    def load(self, state: Any) -> None:
        """Let the next iteration go on from a state; UsageError if it is none of this order."""
        self._check_stateful()
        if self._stateful:
            self._batches.load_state_dict(state)
        elif not isinstance(state, dict) or set(state) != _KEYS or state["version"] != _STATE_VERSION:
            expected = f"the state of a list of batches, version {_STATE_VERSION}, with {', '.join(sorted(_KEYS))}"
            raise UsageError.at("state", expected=expected, got=repr(state)[:80])
        else:
            n, of = len(self._batches), state["of"]
            digest = _digest(self._batches)
            if (of, state["digest"]) != (n, digest):
                raise _another(f"{of} batches, digest {state['digest']}", f"{n} batches, digest {digest}")
            expected = f"an integer from 0 to {n}"
            n_skipped = integer(state["n_batches"], "n_batches", expected, 0)
            if n_skipped > n:
                raise UsageError.at("n_batches", expected=expected, got=str(n_skipped))
            self._n_skipped, self._skipped_of = n_skipped, digest
        self._handed_out = None

    def _check_stateful(self) -> None:
        if self._stateful or self._countable:
            return
        expected = "one with a position: a list of batches, or an order with state_dict and load_state_dict"
        got = f"{type(self._batches).__name__}, which may give other batches each time"
        raise UsageError.at("order", expected=expected, got=got, remedy="use BatchOrder, or list(order) for each epoch")


def _checked(batches: Any) -> Any:
    if isinstance(batches, str | bytes | Mapping) or not isinstance(batches, Iterable):
        raise UsageError.at("order", expected=_EXPECTED, got=repr(batches)[:60])
    # An order's own __iter__ may begin an epoch: only what is an iterator already is asked.
    if isinstance(batches, Iterator) and iter(batches) is batches:
        remedy = "give list(order), or an object that makes an iterator for each epoch"
        expected = "batches that can be iterated once an epoch"
        raise UsageError.at("order", expected=expected, got=f"an iterator, {type(batches).__name__}", remedy=remedy)
    return batches


def check_batch(indices: Any) -> Any:
    """Return what an order gave, if it can be a batch; raises UsageError."""
    is_number = hasattr(indices, "__index__") and getattr(indices, "ndim", 0) == 0
    if is_number or isinstance(indices, str | bytes | Mapping) or not isinstance(indices, Iterable):
        remedy = "an order of single samples makes batches of one as [[number] for number in order]"
        raise UsageError.at("order", expected=_EXPECTED, got=f"{indices!r:.60} as a batch", remedy=remedy)
    return indices


class _Counted(Iterator[Sequence[Any]]):
    """Batches, counted; at the end the count is that of the next epoch's start."""

    def __init__(self, batches: Batches, n_skipped: int) -> None:
        self._batches = itertools.islice(batches, n_skipped, None)
        self._n = n_skipped

    def __next__(self) -> Sequence[Any]:
        for indices in self._batches:
            self._n += 1
            return indices
        self._n = 0
        raise StopIteration

    def state(self) -> int:
        return self._n


def _digest(batches: Sequence[Any]) -> str:
    """Return the digest of the lengths of the batches and of the numbers in them."""
    lengths = np.fromiter((len(check_batch(batch)) for batch in batches), "<i8")
    try:
        numbers = np.fromiter(itertools.chain.from_iterable(batches), "<i8").tobytes()
    except (TypeError, ValueError):  # windows, which may be open
        numbers = repr([[_plain(index) for index in batch] for batch in batches]).encode()
    return digests.digest(lengths.tobytes() + numbers)


def _plain(index: Any) -> Any:
    return (
        [_plain(part) for part in index] if isinstance(index, tuple | list) else None if index is None else int(index)
    )


def _another(expected: str, got: str) -> UsageError:
    remedy = "make the same list as in the run that saved the state"
    return UsageError.at("order", expected=f"the list of the state: {expected}", got=got, remedy=remedy)
