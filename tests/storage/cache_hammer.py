"""Processes that fill one cache folder as fast as they can, stopped now and then to measure it.

A script, run by test_cache_processes.py: FOLDER PROCESSES ROUNDS SEED; writes what happened as JSON.
"""

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from hsfmt.storage import cache_entries
from hsfmt.storage.cache_entries import read_entry
from hsfmt.storage.cache_folder import CacheFolder
from hsfmt.storage.cache_layout import EntryName, charged, key_of

LIMIT = 1 << 20
LARGEST = 128 << 10
NAMES = 300


def entry(number: int) -> tuple[EntryName, bytes]:
    rng = random.Random(number)
    nbytes = rng.choice((100, 5000, 20_000, 60_000, LARGEST))
    return EntryName(key_of("hammer", str(number)), nbytes), bytes([number % 251]) * nbytes


def fill(path: str, seed: float, report: int) -> None:
    rng = random.Random(seed)
    folder = CacheFolder(path, LIMIT)
    while True:
        numbers = [rng.randrange(NAMES) for _ in range(rng.randrange(1, 4))]
        inserted = folder.insert([entry(number) for number in numbers])
        name, body = entry(rng.randrange(NAMES))
        found = folder.locate(name)
        data = None if found is None else read_entry(found, name.nbytes)
        # Whoever forgets what is another one does so in the reader; here no file is changed by other hands.
        os.write(report, b"!" if data not in (None, body) else b"i" if inserted else b"-")


def main(path: str, processes: str, rounds: str, seed: str) -> None:
    cache_entries.ABANDONED_SECONDS = 0.3  # so that those that are stopped lose theirs
    rng = random.Random(int(seed))
    reading, report = os.pipe()

    def start() -> int:
        chosen = rng.random()
        pid = os.fork()
        if pid == 0:
            try:
                fill(path, chosen, report)
            finally:
                os.write(report, b"!")
                os._exit(1)
        return pid

    pids = [start() for _ in range(int(processes))]
    counts = {"looks": 0, "inserted": 0, "kills": 0, "largest_nbytes": 0, "unfinished": 0}
    try:
        for n_looks in range(int(rounds)):
            said = b""
            while not said or counts["inserted"] < 3 * n_looks:  # however slow the machine is
                said = os.read(reading, 1 << 16)
                assert b"!" not in said, "a process found something wrong, or failed"
                counts["inserted"] += said.count(b"i")
            time.sleep(rng.random() * 0.01)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
                assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
            sizes = [(file.stat().st_size, int(file.name.rpartition("-")[2])) for file in Path(path).glob("*/*/*")]
            counts["looks"] += 1
            counts["largest_nbytes"] = max(counts["largest_nbytes"], sum(charged(size) for size, _ in sizes))
            counts["unfinished"] += sum(size < named for size, named in sizes)
            if rng.random() < 0.1:
                number = rng.randrange(len(pids))
                os.kill(pids[number], signal.SIGKILL)
                os.waitpid(pids[number], 0)
                pids[number] = start()
                counts["kills"] += 1
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    json.dump(counts, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
