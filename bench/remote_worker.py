"""A process for each reader of the remote bench: it reads what it is told to and says what that took."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from measure import load_source
from peers.base import Source
from remote_link import Place
from remote_peers import Batches, RemotePeer, all_peers

CONTEXT = multiprocessing.get_context("spawn")
_ANSWER_SECONDS = 900


class FailedError(Exception):
    """A peer could not do what it was asked."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one pass took: seconds, CPU seconds of the process and its children, bytes of states (raw: of ranges)."""

    seconds: float
    cpu: float
    nbytes: int


def load_place(place: Place) -> Source:
    """Map the samples."""
    return load_source(place.folder / "source.bin", place.lengths, place.hidden)


def missing_package(peer: type[RemotePeer]) -> str | None:
    """Return the first of its packages that is not installed."""
    return next((name for name in peer.packages if importlib.util.find_spec(name) is None), None)


def make_files(name: str, folder: Path, place: Place) -> None:
    """Let a peer write its files."""
    folder.mkdir()
    all_peers()[name]().make(folder, load_place(place))


def cpu_seconds() -> float:
    """Return user and system time of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Reader:
    """A peer that is open."""

    def __init__(self, peer: type[RemotePeer], place: Place) -> None:
        self.peer, self.place = peer, place
        self.one: RemotePeer | None = None

    def opened(self, *, fresh: bool = False) -> RemotePeer:
        """Open it, if it is not, or if it is to be opened anew."""
        if fresh:
            self.close()
        if self.one is None:
            self.one = self.peer()
            self.one.open(self.place)
        return self.one

    def close(self) -> None:
        """Close it."""
        if self.one is not None:
            self.one.close()
            self.one = None

    def check(self, batches: Batches) -> str | None:
        """Compare everything that it delivers with what was written; return what differs."""
        source = load_place(self.place)
        wanted = {number for batch in batches for number in batch}
        n = 0
        for number, states in self.opened(fresh=self.peer.fresh).read(batches):
            n += 1
            if number is None:
                wanted.clear()
            elif not np.array_equal(states, source.sample(number)):
                return f"sample {number} differs from what was written"
            elif self.peer.order == "random":
                wanted.remove(number)
            else:
                wanted.pop()
        return f"{len(wanted)} samples were not delivered" if wanted or not n else None

    def run(self, batches: Batches) -> Cost:
        """Read all batches."""
        one = self.opened(fresh=self.peer.fresh)
        cpu, began, nbytes = cpu_seconds(), time.perf_counter(), 0
        for number, states in one.read(batches):
            nbytes += len(states) if number is None else states.nbytes
        return Cost(time.perf_counter() - began, cpu_seconds() - cpu, nbytes)

    def write_down_ranges(self, batches: Batches) -> None:
        """Let hsfmt say which ranges it asks for."""
        one: Any = self.opened()
        one.write_down_ranges(self.place, batches)


def serve(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Answer until the other side hangs up: (method, arguments) in, (value, None) or (None, what went wrong) out."""
    with contextlib.redirect_stdout(sys.stderr):
        target: Any = None
        while True:
            try:
                method, words = connection.recv()
            except EOFError:
                return
            try:
                target = make(*arguments) if target is None else target
                connection.send((getattr(target, method)(*words), None))
            except Exception as error:  # noqa: BLE001  whatever a library raises goes into the table
                connection.send((None, f"{type(error).__name__}: {error}"[:300]))


class Worker:
    """A process with an object in it, which is made when it is first asked for something.

    Parameters
    ----------
    make, arguments
        Make the object there.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._connection, there = CONTEXT.Pipe()
        # Not a daemon: it may start workers of a DataLoader.
        self._process = CONTEXT.Process(target=serve, args=(there, make, arguments))
        self._process.start()
        there.close()

    def ask(self, method: str, *words: Any) -> Any:
        """Let it do something and return the answer; raises FailedError."""
        self.send(method, *words)
        return self.answer()

    def send(self, method: str, *words: Any) -> None:
        """Let it do something."""
        with contextlib.suppress(OSError):
            self._connection.send((method, words))

    def answer(self) -> Any:
        """Wait for what it was told to do."""
        try:
            if not self._connection.poll(_ANSWER_SECONDS):
                raise FailedError(f"no answer in {_ANSWER_SECONDS} s")
            value, problem = self._connection.recv()
        except (EOFError, OSError):
            raise FailedError("its process died") from None
        if problem:
            raise FailedError(problem)
        return value

    def stop(self) -> None:
        """End it."""
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Inline:
    """The same in this process: what libraries share is not held apart, so no figures to quote."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._make, self._arguments = make, arguments
        self._target: Any = None
        self._told: tuple[str, tuple[Any, ...]] = ("", ())

    def ask(self, method: str, *words: Any) -> Any:
        """Do it here; raises FailedError."""
        try:
            self._target = self._make(*self._arguments) if self._target is None else self._target
            return getattr(self._target, method)(*words)
        except Exception as error:
            raise FailedError(f"{type(error).__name__}: {error}"[:300]) from error

    def send(self, method: str, *words: Any) -> None:
        """Note what to do."""
        self._told = method, words

    def answer(self) -> Any:
        """Do what was noted."""
        method, words = self._told
        return self.ask(method, *words)

    def stop(self) -> None:
        """Let go of it."""
        if hasattr(self._target, "close"):
            self._target.close()
        self._target = None


def make_reader(name: str, place: Place) -> Reader:
    """Make a reader in its process."""
    return Reader(all_peers()[name], place)
