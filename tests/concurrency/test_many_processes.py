"""Writers, seals and readers of one dataset in processes of their own, some of them killed: no lock, nothing lost."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hsfmt import DatasetWriter, seal
from hsfmt.catalog import committed_parts
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store

HERE = Path(__file__).parent
SETTINGS = {"layers": [1, 2], "hidden_size": 4, "final_norm": "pre", "dtype": "float32", "threads": 1, "seal": False}


@pytest.fixture
def crew(repo_root):
    """Start scripts of this folder; whatever is left of them is ended."""
    processes = []
    path = os.pathsep.join(map(str, [repo_root, HERE, HERE.parent]))

    def begin(*args):
        command = [sys.executable, "-W", "ignore", str(HERE / "crew.py"), *map(str, args)]
        processes.append(
            subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True)
        )
        return processes[-1]

    yield begin
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


def said(process):
    out, _ = process.communicate(timeout=900)
    assert process.returncode == 0
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.slow
def test_readers_among_writers_and_seals_see_old_or_new(crew, tmp_path):
    """Each sample says who wrote it, as its how manieth and in which commit; a commit is seen whole or not at all."""
    url, n_writers, n_commits = str(tmp_path / "dataset"), 3, 8
    readers = [crew("read", url, n_writers * n_commits) for _ in range(2)]
    sealers = [crew("seal", url, n_writers * n_commits) for _ in range(2)]
    writers = [crew("write", url, number, n_commits) for number in range(n_writers)]
    acknowledged = {sample_id for writer in writers for line in said(writer) for sample_id in line}
    assert len(acknowledged) == n_writers * n_commits * 3
    assert sum(len(said(sealer)) for sealer in sealers) >= 2
    looks = [line for reader in readers for line in said(reader)]
    assert {look["parts"] for look in looks} >= {n_writers * n_commits}
    assert len({look["parts"] for look in looks}) > 1, "the readers looked on while it grew"
    reader = SampleReader(url)
    assert set(reader.sample_ids) == acknowledged
    assert verify(url, level="full").ok


@pytest.mark.slow
def test_one_of_two_seals_is_killed_at_any_moment(crew, tmp_path):
    """What the other one was told, and acknowledged, is there as soon as anyone seals again."""
    rng = random.Random(6)
    acknowledged = took_effect = killed = 0
    for number in range(8):
        url = str(tmp_path / f"{number}")
        with DatasetWriter(url, **SETTINGS) as writer:
            for sample_id in "abcdef":
                writer.write(sample_id, [1, 2], np.full((2, 2, 4), ord(sample_id), np.float32))
        seal(url)
        victim = crew("retract", url, rng.randint(20, 250), "a", "b", "c")
        other = crew("retract", url, 0, "d", "e", "f")
        assert victim.stdout.readline() == other.stdout.readline() == '"ready"\n'
        (Path(url) / "go.tmp").touch()
        told = set(map(json.loads, victim.communicate(timeout=900)[0].splitlines()))
        assert victim.returncode in (-signal.SIGKILL, 0)
        killed += victim.returncode != 0
        assert said(other) == ["d", "e", "f"]
        snapshot = seal(url).snapshot
        gone = set("abcdef") - set(SampleReader(url).sample_ids)
        assert {*told, *"def"} <= gone, "what was acknowledged stays"
        assert {part.name for part in snapshot.parts} == set(committed_parts(open_store(url)))
        assert verify(url, level="full").ok
        acknowledged += len(told)
        took_effect += len(gone) - 3
    assert acknowledged <= took_effect
    assert killed >= 4, "it may have ended before its call"


def test_writers_whose_clocks_differ_lose_nothing(tmp_path, monkeypatch):
    """A host a day behind names its parts as if they came first: they are in the next snapshot all the same."""
    url, clock, shift = str(tmp_path / "dataset"), time.time(), 0
    monkeypatch.setattr(time, "time", lambda: clock + shift)
    monkeypatch.setattr(time, "time_ns", lambda: int((clock + shift) * 1e9))
    sizes, names = [], []
    for number, ahead in enumerate([0, -86400, 86400, 0, -3600, -86400 * 365, 7]):
        shift = ahead
        with DatasetWriter(url, **SETTINGS) as writer:
            writer.write(f"s{number}", [1, 2], np.full((2, 2, 4), number, np.float32))
        names.append(next(iter(set(committed_parts(open_store(url))) - set(names))))
        sizes.append(seal(url).snapshot.n_samples)
    assert sizes == [1, 2, 3, 4, 5, 6, 7]
    assert names != sorted(names), "part names tell the clocks, and nothing depends on their order"
    reader = SampleReader(url)
    assert [reader.sample_ids[i] for i in range(7)] == [f"s{number}" for number in range(7)]
    assert [float(found.hidden_states[0, 0, 0]) for found in reader.read_many(range(7))] == list(range(7))
