"""From rows of forwards to whole samples: nothing else leaves this module.

A prompt may be split anywhere, over many forwards, beside others; its rows may be computed twice (after a retraction)
or not at all (prefix cache). The rule for all of it: rows are taken in order from the first token on, and a sample is
whole when each token of its prompt has had its row, once.

A forward is seen twice: when it is launched (`launch`: what is in it, no values yet) and when its rows are on the host
(`receive`). With the overlap scheduler the next launch comes between the two.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt.errors import SampleError
from hsfmt.writers.capturing.ask import Ask, parse_ask
from hsfmt.writers.capturing.counters import Counters
from hsfmt.writers.capturing.room import Room

Rows = Sequence[npt.NDArray[Any]]
_TAKEN = "a sample of this id is in the dataset or on its way there"


@dataclass(frozen=True, slots=True)
class Slice:
    """One request's rows in one forward.

    Attributes
    ----------
    request
        The engine's request object: its identity is what rows are joined by, since ids may be used again.
    ask
        Its `hsfmt` value, or an `Ask`.
    prompt
        Token ids of the whole prompt.
    start, n_tokens
        The rows: their first position in prompt and output, and how many.
    offset
        Row of the forward's tensors that is the first of them.
    obstacle
        Reason why the request can't be captured, "" for none.
    """

    request: Any
    ask: Any
    prompt: Sequence[int]
    start: int
    n_tokens: int
    offset: int
    obstacle: str = ""


@dataclass(eq=False, slots=True)
class Assembly:
    """A sample on its way. `state` is "open", "accepted" or the reason of its refusal."""

    request: weakref.ref[Any]
    sample_id: str
    ask: Ask | None = None
    input_ids: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    nbytes: int = 0
    state: str = "open"
    detail: str = ""
    launched: int = 0
    received: int = 0
    pieces: list[Rows] = field(default_factory=list)
    touched: float = 0.0

    @property
    def n_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.input_ids)

    def acknowledgement(self) -> dict[str, Any] | None:
        """Return what the client is told, None while it is open."""
        if self.state == "open":
            return None
        if self.state == "accepted":
            return {"id": self.sample_id, "accepted": True, "n_tokens": self.n_tokens}
        return {"id": self.sample_id, "accepted": False, "reason": self.state, "detail": self.detail}


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of a forward that a sample needs: `offset` and `n_tokens` in its tensors, `start` in the prompt."""

    assembly: Assembly
    offset: int
    start: int
    n_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether they are the last rows of the prompt."""
        return self.start + self.n_tokens == self.assembly.n_tokens


class Assembler:
    """Joins the rows of each request; called by the scheduler's thread alone.

    Parameters
    ----------
    row_nbytes
        Bytes of one token's states.
    room
        Bound on the bytes of all samples on their way.
    counters
        Where asked and refused samples are counted.
    is_taken
        Says whether a sample of an id is in the dataset or on its way there.
    block_seconds, sample_seconds
        As `CaptureOptions`.
    """

    def __init__(
        self,
        row_nbytes: int,
        room: Room,
        counters: Counters,
        is_taken: Callable[[str], bool],
        *,
        block_seconds: float,
        sample_seconds: float,
    ) -> None:
        self._row_nbytes = row_nbytes
        self._room = room
        self._counters = counters
        self._is_taken = is_taken
        self._block_seconds = block_seconds
        self._sample_seconds = sample_seconds
        # Requests belong to the engine: what is known of one goes when it goes.
        self._known: weakref.WeakKeyDictionary[Any, Assembly] = weakref.WeakKeyDictionary()
        self._open: dict[Assembly, None] = {}

    @property
    def n_open(self) -> int:
        """Samples that are not whole yet."""
        return len(self._open)

    def launch(self, slices: Iterable[Slice]) -> tuple[list[Span], list[Assembly]]:
        """Take note of a forward; return (rows to copy to the host, all samples that have a request in it).

        Waits for room at most `block_seconds`, for all requests of the forward together.
        """
        spans, assemblies = [], []
        now = time.monotonic()
        for piece in slices:
            assembly = self._known.get(piece.request)
            if assembly is None:
                assembly = self._begin(piece, now + self._block_seconds)
            assemblies.append(assembly)
            if assembly.state == "open":
                span = self._advance(assembly, piece)
                if span is not None:
                    assembly.touched = now
                    spans.append(span)
        return spans, assemblies

    def receive(self, span: Span, rows: Rows) -> Assembly | None:
        """Take a span's rows; return the sample if it is whole now, accepted, with all its rows in `pieces`."""
        assembly = span.assembly
        if assembly.state != "open":
            return None
        if span.start != assembly.received or any(len(array) != span.n_tokens for array in rows):
            self.refuse(assembly, "gap", f"rows from {span.start} on came when those from {assembly.received} were due")
            return None
        assembly.pieces.append(rows)
        assembly.received += span.n_tokens
        if assembly.received < assembly.n_tokens:
            return None
        if self._is_taken(assembly.sample_id):  # by another request of that id, since this one began
            self.refuse(assembly, "duplicate", _TAKEN)
            return None
        assembly.state = "accepted"
        del self._open[assembly]
        self._counters.add(accepted=1)
        return assembly

    def refuse(self, assembly: Assembly, reason: str, detail: str = "") -> None:
        """Give a sample up, if it is open; its rows and its room are free at once."""
        if assembly.state != "open":
            return
        assembly.state, assembly.detail = reason, detail
        assembly.pieces.clear()
        del self._open[assembly]
        self._room.give(assembly.nbytes)
        self._counters.refuse(reason)

    def refuse_all(self, reason: str) -> None:
        """Give all open samples up."""
        for assembly in list(self._open):
            self.refuse(assembly, reason)

    def sweep(self, is_finished: Callable[[Any], bool]) -> None:
        """Give up samples whose request has finished, or is gone, or has had no rows for long.

        To be called when no forward is under way, or for requests that no forward holds.
        """
        oldest = time.monotonic() - self._sample_seconds
        for assembly in list(self._open):
            request = assembly.request()
            if request is None or is_finished(request):
                self.refuse(assembly, "aborted", "the request ended before its last rows")
            elif assembly.touched < oldest:
                self.refuse(assembly, "timed_out", f"no further rows for {self._sample_seconds:g} s")

    def _begin(self, piece: Slice, deadline: float) -> Assembly:
        self._counters.add(asked=1)
        assembly = Assembly(weakref.ref(piece.request), "", touched=time.monotonic())
        self._known[piece.request] = assembly
        self._open[assembly] = None
        try:
            ask = piece.ask if isinstance(piece.ask, Ask) else parse_ask(piece.ask)
        except SampleError as error:
            self.refuse(assembly, "bad_request", str(error)[:1000])
            return assembly
        assembly.ask, assembly.sample_id = ask, ask.sample_id
        reason, detail = self._obstacle(ask, piece)
        if not reason:
            nbytes = len(piece.prompt) * self._row_nbytes
            if self._room.take(nbytes, deadline):
                assembly.nbytes = nbytes
                assembly.input_ids = np.array(piece.prompt, np.int64)
                return assembly
            reason, detail = "queue_full", f"no room for {nbytes} bytes within {self._block_seconds:g} s"
        self.refuse(assembly, reason, detail)
        return assembly

    def _obstacle(self, ask: Ask, piece: Slice) -> tuple[str, str]:
        n_tokens = len(piece.prompt)
        nbytes = n_tokens * self._row_nbytes
        runs = ask.mask_runs or ((0, 0),)
        if piece.obstacle:
            return piece.obstacle, ""
        if ask.n_tokens not in (None, n_tokens):
            return "length", f"the prompt has {n_tokens} tokens here, and {ask.n_tokens} by the request"
        if runs[-1][1] > n_tokens:
            return "bad_request", f"the loss mask goes to token {runs[-1][1]} of {n_tokens}"
        if piece.start > 0:
            return "cache_hit", f"the first {piece.start} of {n_tokens} tokens came from the prefix cache"
        if self._is_taken(ask.sample_id):
            return "duplicate", _TAKEN
        if nbytes > self._room.limit:
            return "too_large", f"{nbytes} bytes, and the queue holds {self._room.limit}"
        return "", ""

    def _advance(self, assembly: Assembly, piece: Slice) -> Span | None:
        """Return the rows that are new, or None; rows that were computed before, and those of output, are not."""
        start, stop = assembly.launched, min(piece.start + piece.n_tokens, assembly.n_tokens)
        if start == assembly.n_tokens:
            return None
        if piece.obstacle or len(piece.prompt) != assembly.n_tokens:
            # SGLang gives an aborted request a prompt of one token.
            self.refuse(assembly, piece.obstacle or "aborted", "the request was given up")
            return None
        if piece.start > start:
            self.refuse(assembly, "gap", f"rows from {piece.start} on were computed when those from {start} were due")
            return None
        if stop <= start:
            return None
        assembly.launched = stop
        return Span(assembly, piece.offset + start - piece.start, start, stop - start)
