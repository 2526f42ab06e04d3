"""kill -9 of a writing process: acknowledged samples stay, none is half there, the next run finishes the job."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def torture(repo_root, *args, timeout=1200):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [repo_root, HERE, HERE.parent]))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / "kill_torture.py", *map(str, args)],
        env=env,
        text=True,
        capture_output=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_killed_at_fifty_random_moments(repo_root, tmp_path):
    result = torture(repo_root, "random", tmp_path, 50)
    assert result["killed"] == 50
    assert result["lost"] == 0
    assert result["partly"] >= 10, "most kills hit a run that had committed something, and not all"


@pytest.mark.deep
def test_killed_at_five_hundred_random_moments(repo_root, tmp_path):
    result = torture(repo_root, "random", tmp_path, 500, timeout=7200)
    assert result["killed"] == 500
    assert result["lost"] == 0
    assert result["partly"] >= 100


def test_killed_before_every_few_calls(repo_root, tmp_path):
    """Each eleventh write, rename, link, unlink, open and close of a small job, one run for each."""
    result = torture(repo_root, "calls", tmp_path, 11)
    assert result["calls"] > 60
    assert len(result["parts"]) > 2, "before, between and after the commits"
