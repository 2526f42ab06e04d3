"""Driving a server until every prompt of a file is durable, or has a reason why not.

Taken is not durable: what counts is the dataset's committed set, which is asked after each flush; what is not in it is
sent again. A run that is started again goes on from that set alone.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from hsfmt.cli.capture_prompts import BadLine, Prompt
from hsfmt.cli.capture_servers import AGAIN, TAKEN, CaptureServer
from hsfmt.errors import StorageError
from hsfmt.interruptions import interruptions_wait

_POLL_SECONDS = 0.2
_LOOK_SECONDS = 15.0
_NOT_SENT = "not_sent: the run ended before"
_NOT_DURABLE = "not_durable: it was taken, and is not in the dataset: see the server's log"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How hard a run tries.

    Attributes
    ----------
    concurrency
        Most prompts at the server at once.
    tries
        Times that a prompt is sent while the server has no answer or no room for it, with growing pauses.
    rounds
        Times that prompts are sent again which were taken and did not become durable.
    pause_seconds
        First pause between tries.
    durable_seconds
        How long what was taken may need to become durable after a flush.
    """

    concurrency: int = 32
    tries: int = 6
    rounds: int = 3
    pause_seconds: float = 0.5
    durable_seconds: float = 300.0


@dataclass(slots=True)
class Tally:
    """Counts of a run. `lines` = `bad` + `repeated` + `present` + `durable` + `failed`, whatever happened.

    Attributes
    ----------
    lines
        Lines of the file.
    bad
        Those that are no prompts, by line number with the reason.
    repeated
        Those whose id came before in the file.
    present
        In the dataset before the run.
    durable, tokens
        Samples, and their tokens, that became durable in this run.
    failed
        Ids that did not, with the reason.
    answered, answered_tokens
        Prompts that the server has answered for, and the tokens of those that it took.
    retries
        Tries beyond the first of each prompt.
    """

    lines: int = 0
    bad: dict[int, str] = field(default_factory=dict)
    repeated: int = 0
    present: int = 0
    durable: int = 0
    tokens: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    answered: int = 0
    answered_tokens: int = 0
    retries: int = 0

    @property
    def reasons(self) -> Counter[str]:
        """How many failed for which reason."""
        return Counter(text.partition(":")[0] for text in self.failed.values())

    def check(self) -> None:
        """Make sure that every line was counted once."""
        ends = len(self.bad) + self.repeated + self.present + self.durable + len(self.failed)
        assert self.lines == ends, (self.lines, self)


Progress = Callable[[Tally], Any]


class CaptureRun:
    """One run over a file.

    Parameters
    ----------
    server
        Takes prompts.
    committed
        Returns the ids that are durable now.
    options
        How hard to try.
    progress
        Called with the tally now and then.
    """

    def __init__(
        self,
        server: CaptureServer,
        committed: Callable[[], AbstractSet[str]],
        options: RunOptions,
        progress: Progress = lambda *_: None,
    ) -> None:
        self._server, self._committed, self._options, self._progress = server, committed, options, progress
        self.tally = Tally()
        self._sent: dict[str, int] = {}  # taken and not known to be durable: tokens by id
        self._stop = threading.Event()
        self._looked = time.monotonic()
        self._lock = threading.Lock()

    def run(self, prompts: Iterable[Prompt | BadLine]) -> Tally:
        """Capture every prompt; `prompts` is iterated once for each round.

        An interruption ends it early, with what was taken made durable and counted; it is raised again.

        Raises
        ------
        UsageError
            The server does not capture.
        """
        fresh = self._first(prompts)
        for number in range(self._options.rounds):
            try:
                self._send_all(fresh)
            finally:
                self._settle(last=number + 1 == self._options.rounds)
            if not self._sent:
                break
            again = set(self._sent)
            fresh = (prompt for prompt in prompts if isinstance(prompt, Prompt) and _take_out(again, prompt.sample_id))
            self._sent.clear()
        self.tally.check()
        return self.tally

    def _first(self, prompts: Iterable[Prompt | BadLine]) -> Iterator[Prompt]:
        """Count the lines, and yield those that are to be sent."""
        present = self._committed()
        seen: set[str] = set()
        for prompt in prompts:
            self.tally.lines += 1
            if isinstance(prompt, BadLine):
                self.tally.bad[prompt.number] = prompt.reason
            elif prompt.sample_id in seen:
                self.tally.repeated += 1
            else:
                seen.add(prompt.sample_id)
                if prompt.sample_id in present:
                    self.tally.present += 1
                else:
                    yield prompt

    def _send_all(self, prompts: Iterator[Prompt]) -> None:
        running: set[Future[None]] = set()
        with ThreadPoolExecutor(self._options.concurrency, thread_name_prefix="hsfmt-send") as pool:
            try:
                with interruptions_wait(second_strikes=True) as interrupt:
                    for prompt in prompts:
                        with self._lock:
                            self.tally.failed[prompt.sample_id] = _NOT_SENT
                        running.add(pool.submit(self._send, prompt))
                        interrupt()
                        while len(running) >= 2 * self._options.concurrency:
                            running = self._wait(running)
                            interrupt()
                    while running:
                        running = self._wait(running)
                        interrupt()
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _wait(self, running: set[Future[None]]) -> set[Future[None]]:
        """Wait for some of the prompts at the server; return the others."""
        done, left = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            self._count_durable()
        self._progress(self.tally)
        return left

    def _send(self, prompt: Prompt) -> None:
        pause = self._options.pause_seconds
        for left in reversed(range(self._options.tries)):
            if self._stop.is_set():
                return
            outcome = self._server.send(prompt)
            # Prompts that failed together must not come again together.
            if outcome.state != AGAIN or not left or self._stop.wait(pause * random.uniform(0.5, 1.5)):  # noqa: S311
                break
            pause *= 2
            with self._lock:
                self.tally.retries += 1
        with self._lock:
            self.tally.answered += 1
            # Another client, or an earlier try without an answer, may have brought it there.
            if outcome.state == TAKEN or outcome.reason == "duplicate":
                self._sent[prompt.sample_id] = len(prompt.token_ids)
                self.tally.answered_tokens += len(prompt.token_ids)
                self.tally.failed[prompt.sample_id] = _NOT_DURABLE
            else:
                self.tally.failed[prompt.sample_id] = f"{outcome.reason}: {outcome.detail}"

    def _settle(self, *, last: bool) -> None:
        """Make durable what was taken, and count it by what the dataset says."""
        if not self._sent:
            return
        problem = ""
        try:
            self._server.flush()
        except StorageError as error:
            problem = f"flush: {error}"
        deadline = time.monotonic() + (_POLL_SECONDS if problem else self._options.durable_seconds)
        while self._count_durable() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if problem and last:
            self.tally.failed.update((sample_id, problem) for sample_id in self._sent)

    def _count_durable(self) -> int:
        """Count what became durable of what was taken; return how much did not."""
        self._looked = time.monotonic()
        present = self._committed()
        with self._lock:
            for sample_id in [sample_id for sample_id in self._sent if sample_id in present]:
                self.tally.durable += 1
                self.tally.tokens += self._sent.pop(sample_id)
                self.tally.failed.pop(sample_id, None)
            return len(self._sent)


def _take_out(ids: set[str], sample_id: str) -> bool:
    """Remove an id; say whether it was there. Of lines of the same id the first is meant."""
    if sample_id in ids:
        ids.remove(sample_id)
        return True
    return False
