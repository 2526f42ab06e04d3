"""Ctrl-C at any line of what the main thread runs around a pool of processes ends the pool.

It used to leave the lock of a future held now and then, and the command never ended.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from struck_pool import Unshown, Whole

from hsfmt.cli.boards import until_told
from hsfmt.cli.worker_pool import run_slices
from hsfmt.errors import StorageError

HERE = Path(__file__).resolve().parent


def struck(pool: str, stride: int) -> list[tuple[str, str, int]]:
    env = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    command = [sys.executable, HERE / "struck_pool.py", pool, str(stride)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return [tuple(place) for place in json.loads(done.stdout)]


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["slices", "verify"])
def test_wherever_it_strikes_the_pool_ends(pool):
    assert len(struck(pool, 12)) >= 8


@pytest.mark.deep
@pytest.mark.parametrize("pool", ["slices", "verify"])
def test_wherever_it_strikes_the_pool_ends_at_every_line(pool):
    places = struck(pool, 1)
    assert len(places) >= 32
    assert {"_base.py", "threading.py"} <= {name for name, _, _ in places}


def killed_with_the_lock(numbers, board):
    if numbers == [0]:
        with board._shared.get_lock():
            os.kill(os.getpid(), signal.SIGKILL)
    return Whole()


def test_a_worker_killed_while_it_counts_does_not_hold_up_the_others_end():
    with pytest.raises(StorageError, match="killed for its memory"):
        list(run_slices(killed_with_the_lock, [[0], [1]], 2, Unshown()))


def test_without_a_pool_ctrl_c_waits_for_the_end_of_an_item():
    done = []

    def struck(numbers, board):
        for number in until_told(numbers, board):
            signal.raise_signal(signal.SIGINT)
            done.append(number)
        return Whole()

    with pytest.raises(KeyboardInterrupt):
        list(run_slices(struck, [[0, 1, 2]], 1, Unshown()))
    assert done == [0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
