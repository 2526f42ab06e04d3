"""One process of several on a dataset: writes, seals, reads or retracts; a line of JSON for each thing done."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from killing import killing_at

from hsfmt import DatasetWriter, seal
from hsfmt.catalog import committed_parts
from hsfmt.errors import NotFoundError
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.storage import open_store

SETTINGS = {"layers": [1, 2], "hidden_size": 4, "final_norm": "pre", "dtype": "float32", "threads": 1, "seal": False}
SIZE = 3


def say(what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def write(url, number, n_commits):
    with DatasetWriter(url, part_seconds=None, **SETTINGS) as writer:
        for commit in range(int(n_commits)):
            for i in range(SIZE):
                stamp = [int(number), commit, i]
                states = np.resize(np.array([*stamp, 7], np.float32), (i + 1, 2, 4))
                writer.write("-".join(map(str, stamp)), [*range(i + 1)], states)
            say(writer.commit())


def until_all(url, n_parts):
    """Yield until all parts are committed, and once more."""
    deadline, store, last = time.monotonic() + 600, open_store(url), False
    while not last:
        assert time.monotonic() < deadline
        last = len(committed_parts(store)) == int(n_parts)
        yield


def seal_all(url, n_parts):
    for _ in until_all(url, n_parts):
        try:
            before = set(committed_parts(open_store(url)))
            sealed = seal(url)
        except NotFoundError:
            continue  # nothing is committed yet
        assert before <= {part.name for part in sealed.snapshot.parts}
        say(sealed.rounds)


def look(url, which):
    reader = SampleReader(url, snapshot=which)
    ids = [reader.sample_ids[i] for i in range(len(reader))]
    commits = {}
    for sample_id, found in zip(ids, reader.read_many(range(len(ids))), strict=True):
        number, commit, i = map(int, sample_id.split("-"))
        assert found.input_ids.tolist() == [*range(i + 1)]
        assert found.hidden_states.reshape(-1, 4).tolist() == [[number, commit, i, 7]] * (2 * (i + 1))
        commits.setdefault((number, commit), set()).add(i)
    assert all(found == set(range(SIZE)) for found in commits.values()), "half a commit"
    for number in {number for number, _ in commits}:
        mine = sorted(commit for other, commit in commits if other == number)
        assert mine == list(range(len(mine))), "a later commit without an earlier one"
    return len(commits)


def read_all(url, n_parts):
    seen = {None: 0, "live": 0}
    for _ in until_all(url, n_parts):
        for which, before in list(seen.items()):
            try:
                n = look(url, which)
            except NotFoundError:
                assert before == 0
                continue
            # Of two seals that race the slower one may point at less for a moment; what is committed never shrinks.
            assert which is None or n >= before
            seen[which] = n
            say({"which": which, "parts": n})


def retract(url, k, *ids):
    """Seal once for each id; killed before the k-th call of the operating system (0: never)."""
    say("ready")
    while not (Path(url) / "go.tmp").exists():
        time.sleep(0.001)
    if int(k):
        killing_at(int(k), ("open", "write", "rename", "link", "unlink", "close"))()
    for sample_id in ids:
        seal(url, retract=[sample_id])
        say(sample_id)


if __name__ == "__main__":
    os.fsync = lambda fd: None
    {"write": write, "seal": seal_all, "read": read_all, "retract": retract}[sys.argv[1]](*sys.argv[2:])
