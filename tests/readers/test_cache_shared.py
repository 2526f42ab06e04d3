"""One cache under many processes: never wrong, nor above its limit, whoever dies and whatever is done to its files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 400_000  # a fifth of the data


def hunted(folder, repo_root, processes, rounds, seed):
    script = Path(__file__).parent / "cache_hunt.py"
    command = [sys.executable, str(script), *map(str, (folder, processes, rounds, seed, LIMIT))]
    env = {**os.environ, "PYTHONPATH": str(repo_root)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(counts, rounds):
    assert counts["looks"] == rounds
    assert counts["samples"] > 5 * rounds
    assert counts["kills"] > rounds // 10
    assert counts["damaged"] > rounds // 3
    assert counts["hits"] > counts["samples"] // 10
    assert LIMIT // 2 < counts["largest_nbytes"] <= LIMIT


@pytest.mark.parametrize("seed", [0, 1])
def test_two_processes_kills_and_damage(tmp_path, repo_root, seed):
    check(hunted(tmp_path, repo_root, 2, 60, seed), 60)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(2, 6))
def test_four_processes_for_long(tmp_path, repo_root, seed):
    check(hunted(tmp_path, repo_root, 4, 400, seed), 400)
