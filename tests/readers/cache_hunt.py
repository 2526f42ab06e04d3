"""Processes that share one small cache, and somebody who kills them and changes its files.

A script, run by test_cache_shared.py: FOLDER PROCESSES ROUNDS SEED LIMIT; writes what happened as JSON. Each round all
of them are stopped, so that what the cache holds at one instant can be measured.
"""

import json
import os
import random
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from written import RemoteLikeStore, Written, assert_same, write_dataset

from hsfmt.readers import local_cache
from hsfmt.readers.sample_reader import ReadOptions, SampleReader
from hsfmt.storage import cache_entries, cache_folder
from hsfmt.storage.cache_layout import charged


@dataclass
class Counts:
    """What happened."""

    samples: int = 0
    looks: int = 0
    kills: int = 0
    damaged: int = 0
    largest_nbytes: int = 0
    unfinished: int = 0
    hits: int = 0


def used(folder: Path) -> tuple[int, int]:
    """Bytes of all files in whole blocks, and how many are shorter than they say."""
    total = unfinished = 0
    for path in folder.glob("*/*/*"):
        nbytes = path.stat().st_size
        total += charged(nbytes)
        unfinished += nbytes < int(path.name.rpartition("-")[2])
    return total, unfinished


def read_on(written: Written, options: ReadOptions, seed: int, report: int) -> None:
    """Read samples in random order for ever, and compare each.

    A byte into `report` for each: "h" if
    some of it came out of the cache, "!" for a wrong one.
    """
    rng = random.Random(seed)
    try:
        reader = SampleReader(RemoteLikeStore(written.path), options=options)
        hits = 0
        while True:
            number = rng.randrange(len(written.ids))
            assert_same(reader.read(number), written.content[written.ids[number]])
            hits, before = reader.cache.n_hits, hits
            os.write(report, b"h" if hits > before else b".")
    except BaseException:  # noqa: BLE001  reported
        traceback.print_exc(file=sys.stderr)
        os.write(report, b"!")
    finally:
        os._exit(1)


def start(written: Written, options: ReadOptions, seed: int, report: int) -> int:
    pid = os.fork()
    if pid == 0:
        local_cache._CACHES.clear()
        read_on(written, options, seed, report)
    return pid


def damage(rng: random.Random, folder: Path) -> int:
    """Change a few files as a bad disk or a careless person would; return how many."""
    paths = sorted(folder.glob("*/*/*"))
    n = 0
    for path in rng.sample(paths, min(len(paths), 4)):
        body = bytearray(path.read_bytes())
        if not body:
            continue
        n += 1
        how = rng.randrange(4)
        if how == 0:
            body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
        elif how == 1:
            body = body[: rng.randrange(len(body))]
        elif how == 2:
            body = bytearray(len(body))
        else:
            same = [other for other in paths if other.name.rpartition("-")[2] == f"{len(body)}"]
            body = bytearray(rng.choice(same).read_bytes()) if same else body
        path.write_bytes(body)
    return n


def hunt(written: Written, options: ReadOptions, *, processes: int, rounds: int, seed: int) -> Counts:
    """Let processes read, `rounds` times stop them all and measure, and kill, damage and start anew."""
    rng, other = random.Random(seed), random.Random(seed)  # who is killed when does not depend on what the cache holds
    counts = Counts()
    folder = Path(options.cache_dir)
    reading, report = os.pipe()
    pids = [start(written, options, rng.random(), report) for _ in range(processes)]
    try:
        for _ in range(rounds):
            wanted = rng.randrange(1, 40)
            while wanted > 0:
                said = os.read(reading, 4096)
                assert b"!" not in said, "a process read something wrong, or failed"
                counts.samples += len(said)
                counts.hits += said.count(b"h")
                wanted -= len(said)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
                assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1]), "a process read something wrong, or failed"
            nbytes, unfinished = used(folder)
            counts.looks += 1
            counts.unfinished += unfinished
            counts.largest_nbytes = max(counts.largest_nbytes, nbytes)
            victim = rng.randrange(len(pids)) if rng.random() < 0.3 else None
            if victim is not None:
                os.kill(pids[victim], signal.SIGKILL)
                os.waitpid(pids[victim], 0)
                counts.kills += 1
            if rng.random() < 0.5:
                counts.damaged += damage(other, folder)
            if victim is not None:
                pids[victim] = start(written, options, rng.random(), report)
            for number, pid in enumerate(pids):
                if number != victim:
                    os.kill(pid, signal.SIGCONT)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        os.close(reading)
        os.close(report)
    return counts


def main(folder: str, processes: str, rounds: str, seed: str, limit: str) -> None:
    cache_entries.ABANDONED_SECONDS = 0.3  # also reaps those of processes that are stopped, as slow ones
    cache_folder._TOUCH_SECONDS = 0.0
    written = write_dataset(Path(folder) / "dataset", (60, 200, 90, 130, 250, 31, 300, 64), hidden=256, chunk_tokens=32,
                            shard_tokens=128, codec=("none", "zstd")[int(seed) % 2])  # fmt: skip
    options = ReadOptions(cache_dir=Path(folder) / "cache", cache_size=int(limit), n_threads=1)
    counts = hunt(written, options, processes=int(processes), rounds=int(rounds), seed=int(seed))
    json.dump(asdict(counts), sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
