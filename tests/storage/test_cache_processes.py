"""Processes that fill one cache at once are within its limit together, at every moment; so are killed ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 1 << 20


def hammered(folder, repo_root, processes, rounds, seed):
    command = [sys.executable, Path(__file__).parent / "cache_hammer.py", folder, *map(str, (processes, rounds, seed))]
    env = {**os.environ, "PYTHONPATH": str(repo_root)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(counts, rounds):
    assert counts["looks"] == rounds
    assert counts["inserted"] > 2 * rounds
    assert counts["kills"] > rounds // 30
    assert counts["unfinished"] > rounds // 10
    assert LIMIT // 2 < counts["largest_nbytes"] <= LIMIT


def test_three_processes(tmp_path, repo_root):
    check(hammered(tmp_path / "cache", repo_root, 3, 300, 0), 300)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(1, 4))
def test_six_processes_for_long(tmp_path, repo_root, seed):
    check(hammered(tmp_path / "cache", repo_root, 6, 800, seed), 800)
