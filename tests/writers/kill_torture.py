"""Kill a writing process again and again, and look what is left; run by test_writer_kill.py in a process of its own.

That process never starts a thread, so that it can fork its victims instead of paying for their imports.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import part_oracles as oracles
from killing import in_fork, killing_at, no_fsync

from hsfmt import DatasetWriter, seal
from hsfmt.catalog import committed_parts
from hsfmt.storage import open_store

JOB = 60


def sample(number):
    n_tokens = 1 + number * 7 % 23
    rng = np.random.default_rng(number)
    return np.arange(n_tokens) + number, rng.standard_normal((n_tokens, 2, 64), np.float32)


def produce(url, pipe, job, hook):
    hook()
    with DatasetWriter(
        url,
        layers=[1, 2],
        hidden_size=64,
        final_norm="pre",
        dtype="float32",
        on_duplicate="skip",
        seal=False,
        chunk_tokens=4,
        shard_tokens=16,
        part_nbytes=20_000,
        threads=2,
    ) as writer:
        for number in range(job):
            writer.write(f"s{number}", *sample(number), metadata={"number": number})
            if number % 9 == 8 or number == job - 1:
                os.write(pipe, "".join(f"{sample_id}\n" for sample_id in writer.commit()).encode())


def run(url, job=JOB, seconds=None, lines=0, hook=no_fsync):
    """Fork a producer, killed as `in_fork` says; return (acknowledged ids, whether it was killed)."""
    text, died = in_fork(lambda pipe: produce(url, pipe, job, hook), seconds, lines)
    whole_lines = text.decode().rpartition("\n")[0]
    return set(whole_lines.split()), died


def look(url, acknowledged):
    """Check every committed sample and that no acknowledged one is missing; return their ids."""
    if not (Path(url) / "zarr.json").exists():
        assert not acknowledged
        return set()
    read = oracles.read_samples(url)
    assert acknowledged <= set(read), acknowledged - set(read)
    for sample_id, found in read.items():
        number = int(sample_id[1:])
        ids, states = sample(number)
        assert found.states.tobytes() == states.tobytes()
        assert found.input_ids.tolist() == ids.tolist()
        assert found.metadata == {"number": number}
    return set(read)


def finish(url, job, acknowledged, expected_digest):
    more, killed = run(url, job)
    assert not killed
    assert look(url, acknowledged | more) == {f"s{number}" for number in range(job)}
    sealed = seal(url, expect=job).snapshot
    assert sealed.content_digest == expected_digest


def expected_digest(folder, job):
    url = str(folder / f"undisturbed-{job}")
    run(url, job)
    return seal(url).snapshot.content_digest


def random_moments(folder, rounds):
    digest = expected_digest(folder, JOB)
    start = time.monotonic()
    run(str(folder / "timed"))
    duration = time.monotonic() - start
    rng = random.Random(0)
    number, killed_rounds, acknowledged, lost, partly = 0, 0, set(), 0, 0
    while killed_rounds < rounds:
        url = str(folder / f"{number}")
        # What a run takes differs by the machine's load: half of the first kills wait for a commit.
        lines = 0 if acknowledged or rng.random() < 0.5 else rng.randrange(1, JOB // 2)
        more, killed = run(url, seconds=rng.uniform(0, duration / 8 if lines else duration), lines=lines)
        killed_rounds += killed
        acknowledged |= more
        there = look(url, acknowledged)
        partly += 0 < len(there) < JOB
        lost += len(acknowledged - there)
        if not killed or rng.random() < 0.2:
            finish(url, JOB, acknowledged, digest)
            number, acknowledged = number + 1, set()
    finish(str(folder / f"{number}"), JOB, acknowledged, digest)
    return {"killed": killed_rounds, "lost": lost, "partly": partly, "datasets": number + 1}


CALLS = ("write", "rename", "link", "unlink", "fsync", "open", "close")


def every_call(folder, step):
    job = 10
    digest = expected_digest(folder, job)
    k, killed = 1, True
    parts_seen = set()
    while killed:
        url = str(folder / f"{k}")
        acknowledged, killed = run(url, job, hook=killing_at(k, CALLS))
        there = look(url, acknowledged)
        assert killed or len(there) == job
        parts_seen.add(len(committed_parts(open_store(url))) if (Path(url) / "zarr.json").exists() else 0)
        finish(url, job, acknowledged, digest)
        k += step
    return {"calls": k - step, "parts": sorted(parts_seen)}


if __name__ == "__main__":
    mode, folder, amount = sys.argv[1:]
    print(json.dumps({"random": random_moments, "calls": every_call}[mode](Path(folder), int(amount))))  # noqa: T201 - its result
