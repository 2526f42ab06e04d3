"""Signals that come all the time: calls of the operating system are interrupted by them, for real (EINTR)."""

import signal

import pytest
from conditions import Promises
from jobs import DATASET
from scenarios import SCENARIOS

from hsfmt import seal

EVERY_SECONDS = 0.002


@pytest.fixture
def signals():
    """Let a timer's signal come again and again; return the list that it makes longer."""
    came = []
    former = signal.signal(signal.SIGALRM, lambda *_: came.append(1))
    signal.siginterrupt(signal.SIGALRM, True)
    signal.setitimer(signal.ITIMER_REAL, EVERY_SECONDS, EVERY_SECONDS)
    yield came
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, former)


@pytest.mark.parametrize("name", ["roll", "convert --delete-source", "export npz", "merge --move"])
def test_interrupted_calls_are_made_again(tmp_path, request, name):
    scenario = SCENARIOS[name]
    scenario.before(tmp_path)
    promises = Promises(scenario, tmp_path)
    signals = request.getfixturevalue("signals")
    acknowledged = set()
    scenario.step(tmp_path, acknowledged)
    came = len(signals)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert came > 0
    assert promises.found(tmp_path).keys() >= acknowledged
    assert seal(tmp_path / DATASET).snapshot.n_samples > 0
