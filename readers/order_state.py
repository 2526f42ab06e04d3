"""Where a training is in its order of batches: a few numbers that any JSON file can keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hsfmt.errors import Problem, UsageError

KIND = "hsfmt.order"
STATE_VERSION = 1
RETRAIN = "continue with what the training began with, or begin the epoch anew without this state"


@dataclass(frozen=True, slots=True)
class OrderState:
    """A position in an epoch, and what the order was made of.

    Attributes
    ----------
    fingerprint
        Of the dataset.
    settings
        What else the order depends on, JSON values by name.
    epoch
        Number of the epoch.
    batches
        Digest of the epoch's batches, so that the rest is a rest of the very same ones.
    start
        Global batches of the epoch that were consumed when the iteration began.
    world_size
        Ranks of that iteration.
    n_batches
        Batches that each rank has trained on since; None: not said.
    finished
        Whether those were all.
    """

    fingerprint: str
    settings: Mapping[str, Any]
    epoch: int
    batches: str
    start: int
    world_size: int
    n_batches: int | None
    finished: bool

    @property
    def consumed(self) -> int | None:
        """Global batches of the epoch that are behind, None where the state does not say."""
        return None if self.n_batches is None else self.start + self.n_batches * self.world_size

    def to_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "kind": KIND,
            "version": STATE_VERSION,
            "fingerprint": self.fingerprint,
            "settings": dict(self.settings),
            "epoch": self.epoch,
            "batches": self.batches,
            "start": self.start,
            "world_size": self.world_size,
            "n_batches": self.n_batches,
            "finished": self.finished,
        }


def parse_state(document: object) -> OrderState:
    """Parse a state.

    Raises
    ------
    UsageError
        It is none, or one of a newer library.
    """
    if not isinstance(document, Mapping) or document.get("kind") != KIND:
        got = sorted(map(str, document))[:10] if isinstance(document, Mapping) else type(document).__name__
        raise UsageError.at("order state", expected=f"what state_dict() gave, of kind {KIND}", got=str(got)[:200])
    if document.get("version") != STATE_VERSION:
        got = repr(document.get("version"))[:60]
        raise UsageError.at("order state", expected=f"version {STATE_VERSION}", got=got, remedy="upgrade hsfmt")
    try:
        n_batches = document["n_batches"]
        state = OrderState(
            fingerprint=_of(str, document["fingerprint"]),
            settings=_of(Mapping, document["settings"]),
            epoch=_of(int, document["epoch"]),
            batches=_of(str, document["batches"]),
            start=_of(int, document["start"]),
            world_size=_of(int, document["world_size"]),
            n_batches=None if n_batches is None else _of(int, n_batches),
            finished=bool(document["finished"]),
        )
    except (KeyError, TypeError) as error:
        raise UsageError.at("order state", expected="its members", got=repr(error)[:200]) from None
    if state.start < 0 or state.world_size < 1 or (state.n_batches is not None and state.n_batches < 0):
        raise UsageError.at("order state", expected="counts", got=f"{dict(document)}"[:200])
    return state


def refuse_another(state: OrderState, fingerprint: str, settings: Mapping[str, Any]) -> None:
    """Compare a state with a dataset and the settings of an order.

    Raises
    ------
    UsageError
        It is of another dataset or of other settings; all of them are named.
    """
    problems = []
    if state.fingerprint != fingerprint:
        remedy = f'open the dataset with snapshot="{state.fingerprint}"'
        problems.append(Problem("fingerprint of the order's state", fingerprint, state.fingerprint, remedy))
    for name in sorted({*settings, *state.settings}):
        here, there = settings.get(name), state.settings.get(name)
        if here != there:
            problems.append(Problem(f"{name} of the order's state", repr(here), repr(there)[:100], RETRAIN))
    if problems:
        raise UsageError(problems)


def _of(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
