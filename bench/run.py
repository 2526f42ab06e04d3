"""Read the same samples through hsfmt and through what people would use instead, in one run, and print one table.

    make bench BENCH_ARGS=--quick                  about a minute
    make bench                                     about ten minutes, 6 GB of disk
    make bench BENCH_ARGS='--write docs/benchmarks.md'
    make bench BENCH_ARGS='--only "hsfmt none, reused" --only "hsfmt zstd, reused" --checks docs/reliability.md'

docs/benchmarks.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import machine
import measure
import memory
import table
from cases import Case, make_cases
from measure import Cost
from peers import all_peers
from peers.base import LAYERS, Peer
from results import Results
from synth import synth_hidden

_CONTEXT = multiprocessing.get_context("forkserver")
_ANSWER_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Attributes
    ----------
    lengths
        Tokens of each sample.
    hidden
        Channels.
    budget
        Tokens of a packed batch.
    rounds, starts
        Interleaved rounds of reading, and of fresh processes.
    snapshot
        Samples of the snapshot that is opened.
    """

    lengths: tuple[int, ...]
    hidden: int
    budget: int
    rounds: int
    starts: int
    snapshot: int


# The mean of a real data set is 1,730 tokens a sample; windows are of the longest.
SIZES = {
    "full": Size((1730, 4096, 640, 900), 7168, 4096, 5, 3, 1_000_000),
    "quick": Size((700, 1536, 333), 7168, 1536, 5, 1, 100_000),
    "tiny": Size((70, 300, 33), 64, 320, 2, 0, 0),
}


class FailedError(Exception):
    """A peer could not do what it was asked."""


class Workers:
    """The processes of the peers, started when they are first needed."""

    def __init__(self, peers: dict[str, type[Peer]], folder: Path, source: tuple[Path, tuple[int, ...], int]) -> None:
        self.peers, self.folder, self.source = peers, folder, source
        self.running: dict[tuple[str, int], tuple[Any, Any]] = {}

    def ask(self, name: str, threads: int, method: str, *arguments: Any) -> Any:
        """Let a peer's process do something and return the answer.

        Raises
        ------
        FailedError
            It raised, died, or took too long.
        """
        if (name, threads) not in self.running:
            here, there = _CONTEXT.Pipe()
            arguments_of_process = (there, name, self.folder / self.peers[name].files, self.source, threads)
            process = _CONTEXT.Process(target=measure.serve, args=arguments_of_process, daemon=True)
            process.start()
            there.close()
            self.running[name, threads] = (process, here)
        _, connection = self.running[name, threads]
        try:
            connection.send((method, arguments))
            if not connection.poll(_ANSWER_SECONDS):
                raise FailedError(f"no answer in {_ANSWER_SECONDS} s")
            value, problem = connection.recv()
        except (EOFError, OSError):
            raise FailedError("its process died") from None
        if problem:
            raise FailedError(problem)
        return value

    def stop(self, threads: int | None = None, name: str | None = None) -> None:
        """End the processes, or those with that number of threads, or of that peer."""
        for key, (process, connection) in list(self.running.items()):
            if threads in (None, key[1]) and name in (None, key[0]):
                connection.close()
                process.join(10)
                if process.is_alive():
                    process.kill()
                del self.running[key]


class Inline(Workers):
    """The same in this process: what the libraries share is not held apart, so no figures to quote."""

    def ask(self, name: str, threads: int, method: str, *arguments: Any) -> Any:
        """Do it here."""
        if (name, threads) not in self.running:
            peer = self.peers[name]
            reader = measure.Reader(peer, self.folder / peer.files, measure.load_source(*self.source), threads)
            self.running[name, threads] = (reader, None)
        try:
            return getattr(self.running[name, threads][0], method)(*arguments)
        except Exception as error:
            raise FailedError(f"{type(error).__name__}: {error}"[:300]) from error

    def stop(self, threads: int | None = None, name: str | None = None) -> None:
        """Close them."""
        for key, (reader, _) in list(self.running.items()):
            if threads in (None, key[1]) and name in (None, key[0]):
                reader.close()
                del self.running[key]


class Run:
    """One run of everything.

    Parameters
    ----------
    folder
        Empty; takes all files.
    size
        How much.
    names
        Parts of names of the peers wanted; empty: all.
    inline
        Without a process for each peer.
    """

    def __init__(self, folder: Path, size: Size, names: Sequence[str], *, inline: bool) -> None:
        self.folder, self.size, self.inline = folder, size, inline
        peers = {name: peer for name, peer in all_peers().items() if not names or any(part in name for part in names)}
        self.cases = {case.name: case for case in make_cases(size.lengths, size.budget)}
        self.results = Results(peers, self.cases, size.hidden)
        self.source = (folder / "source.bin", size.lengths, size.hidden)
        self.workers = (Inline if inline else Workers)(peers, folder, self.source)

    def all(self) -> Results:
        """Measure everything."""
        began = time.perf_counter()
        synth_hidden(sum(self.size.lengths), LAYERS, self.size.hidden).tofile(self.source[0])
        for step in (self.make, self.check, self.warm, self.cold, self.first, self.open_many):
            say(f"{time.perf_counter() - began:5.0f} s: {step.__doc__}")
            step()
        self.workers.stop()
        self.results.facts[:0] = self.facts(time.perf_counter() - began)
        return self.results

    def pairs(self, case: Case, threads: Sequence[int]) -> list[tuple[str, int]]:
        """Return the peers with figures that take part, for each number of threads."""
        names = [
            name
            for name, peer in self.results.peers.items()
            if name not in self.results.problems and (peer.cases is None or case.name in peer.cases)
        ]
        return [(name, n) for name in names for n in threads]

    def make(self) -> None:
        """Every peer writes its files."""
        for name, peer in self.results.peers.items():
            missing = measure.missing_package(peer)
            folder = self.folder / peer.files
            if missing:
                self.results.problems[name] = f"not installed ({missing})"
            elif not folder.exists():
                problem = self.apart(measure.make_files, name, folder, self.source)
                if problem:
                    self.fail(name, problem)
                else:
                    self.results.stored[peer.files] = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())

    def apart(self, function: Any, *arguments: Any) -> Any:
        """Return what a function returns in a process of its own."""
        if self.inline:
            return function(*arguments)
        with ProcessPoolExecutor(1, _CONTEXT) as pool:
            return pool.submit(function, *arguments).result()

    def check(self) -> None:
        """Everything that a peer delivers is compared with the source; then bytes are counted from a cold cache."""
        for case in self.cases.values():
            for name, threads in self.pairs(case, case.threads):
                try:
                    problem = self.workers.ask(name, threads, "check", case)
                    if problem:
                        raise FailedError(problem)
                    if threads == 1 and not case.budget:
                        cost = self.from_disk(name, case, list(range(len(case.reads))))
                        self.results.cold_bytes[name, case.name] = cost
                except FailedError as error:
                    self.fail(name, str(error))

    def warm(self) -> None:
        """Interleaved rounds from the page cache."""
        for number in range(self.size.rounds):
            chosen = random.Random(number)
            orders = {case.name: chosen.sample(range(len(case.reads)), len(case.reads)) for case in self.cases.values()}
            keys = [(*pair, case.name) for case in self.cases.values() for pair in self.pairs(case, case.threads)]
            for name, threads, case in chosen.sample(keys, len(keys)):
                read = partial(self.workers.ask, name, threads, "run", self.cases[case], orders[case])
                self.record((name, threads, case), read)

    def cold(self) -> None:
        """Interleaved rounds from the disk."""
        self.workers.stop(threads=2)
        case = self.cases["samples"]
        pairs = [pair for pair in self.pairs(case, (1,)) if not self.results.peers[pair[0]].cases]
        for number in range(self.size.rounds):
            chosen = random.Random(number)
            order = chosen.sample(range(len(case.reads)), len(case.reads))
            for name, threads in chosen.sample(pairs, len(pairs)):
                self.record((name, threads, "cold"), partial(self.from_disk, name, case, order))

    def from_disk(self, name: str, case: Case, order: Sequence[int]) -> Cost:
        """Return the cost of one pass whose files were dropped from the page cache before."""
        folder = self.folder / self.results.peers[name].files
        if self.results.peers[name].keeps_maps:
            self.workers.stop(name=name)
        self.workers.ask(name, 1, "open")
        measure.drop_from_cache(folder)
        resident = max(measure.resident_fraction(folder), self.results.resident.get(name, 0))
        self.results.resident[name] = resident
        cost: Cost = self.workers.ask(name, 1, "run", case, order)
        return cost

    def record(self, key: tuple[str, int, str], read: Callable[[], Cost]) -> None:
        """Add the cost of a round; a peer that fails gets no figures."""
        if key[0] in self.results.problems:
            return
        try:
            self.results.costs.setdefault(key, []).append(read())
        except FailedError as error:
            self.fail(key[0], str(error))

    def fail(self, name: str, problem: str) -> None:
        """Say in the table why there are no figures."""
        say(f"{name}: {problem}")
        self.results.problems[name] = problem
        self.results.costs = {key: costs for key, costs in self.results.costs.items() if key[0] != name}

    def first(self) -> None:
        """Fresh processes to their first sample."""
        for number in range(self.size.starts):
            names = [name for name, peer in self.results.peers.items() if peer.timed_start]
            for name in random.Random(number).sample(names, len(names)):
                if name not in self.results.problems:
                    folder = self.folder / self.results.peers[name].files
                    seconds = measure.first_sample(name, folder, self.size.lengths, self.size.hidden)
                    self.results.first.setdefault(name, []).append(seconds)

    def open_many(self) -> None:
        """A snapshot of many samples is opened by a fresh process."""
        if not self.size.snapshot:
            return
        url = self.folder / "many"
        self.apart(memory.make, url, self.size.snapshot)
        opened = memory.in_a_fresh_process("--opening", str(url))
        growth = max(opened[step]["rss"] for step in ("open", "lengths")) / 2**20
        seconds = {step: opened[step]["seconds"] * 1e3 for step in ("open", "index_of")}
        self.results.facts.append(
            f"Opening a snapshot of {self.size.snapshot:,} samples in 20 parts: {seconds['open']:.0f} ms, "
            f"{opened['open']['files']} files read, {growth:.0f} MiB of memory; the first sample that is looked up by "
            f"its id: {seconds['index_of']:.0f} ms."
        )

    def facts(self, seconds: float) -> list[str]:
        """Return what the figures were measured on."""
        raw = self.results.nbytes("samples")
        lengths = ", ".join(f"{n:,}" for n in self.size.lengths)
        resident = max(self.results.resident.values(), default=math.nan)
        shape = f"{len(self.size.lengths)} samples of {lengths} tokens, {LAYERS} layers of {self.size.hidden}, bf16"
        load = f"load of the machine at the end {os.getloadavg()[1]:.1f}"
        return [
            *machine.describe(self.folder),
            f"Data: {shape}, {raw / 1e9:.2f} GB raw; batches of {self.size.budget:,} tokens.",
            f"{self.size.rounds} rounds in {seconds / 60:.1f} minutes; {load}.",
            f"Cold: at most {resident:.1%} of a reader's pages were still in the page cache when it began.",
        ]


def say(text: str) -> None:
    """Report progress."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_const", const="quick", dest="size", help="about a minute")
    size.add_argument("--tiny", action="store_const", const="tiny", dest="size", help="seconds; no figures to quote")
    parser.add_argument("--inline", action="store_true", help="all in one process; no figures to quote")
    parser.add_argument("--rounds", type=int, help="interleaved rounds, 5 by default")
    parser.add_argument("--only", action="append", default=[], help="peers whose name contains this")
    parser.add_argument("--folder", type=Path, help="where to put the data for the time of the run")
    parser.add_argument("--json", type=Path, help="all figures of all rounds")
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    parser.add_argument("--checks", type=Path, help="the page whose table of what the checks cost is replaced")
    options = parser.parse_args()
    chosen = SIZES[options.size or "full"]
    if options.rounds:
        chosen = replace(chosen, rounds=options.rounds)
    _CONTEXT.set_forkserver_preload(sorted({name for peer in all_peers().values() for name in peer.preload}))
    with tempfile.TemporaryDirectory(prefix="hsfmt-bench-", dir=options.folder) as name:
        results = Run(Path(name), chosen, options.only, inline=options.inline).all()
    text = table.document(results)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(results.as_json(), indent=1))
    if options.write:
        table.write(options.write, text)
    if options.checks:
        table.write(options.checks, table.checks(results), table.CHECKS)


if __name__ == "__main__":
    main()
