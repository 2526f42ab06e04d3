"""Random histories with collections in them: no kept snapshot, durable sample or foreign file is ever lost."""

import json
import os
from collections import Counter

import pytest
from gc_histories import Clock, History


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def run(monkeypatch, tmp_path, seeds, n_steps):
    """Return what all the histories did."""
    counts = Counter()
    for seed in seeds:
        with monkeypatch.context() as patch:
            clock = Clock()
            clock.install(patch)
            history = History(tmp_path / str(seed), seed, clock)
            try:
                for _ in range(n_steps):
                    history.step()
            except BaseException as error:
                error.add_note(f"seed {seed}: {' '.join(history.trace)}")
                raise
            finally:
                history.close()
            counts += Counter(history.counts) + Counter(history.trace)
    return counts


@pytest.mark.slow
def test_random_histories_lose_nothing(monkeypatch, tmp_path):
    counts = run(monkeypatch, tmp_path, range(2), 60)
    assert counts["collect"] >= 12
    assert counts["removed"] >= 20
    assert counts["snapshots_gone"] >= 3


@pytest.mark.deep
def test_many_random_histories_lose_nothing(monkeypatch, tmp_path, record_property):
    counts = run(monkeypatch, tmp_path, range(1000, 1040), 100)
    record_property("counts", json.dumps(counts))
    assert counts["collect"] >= 500
    assert counts["removed"] >= 800
    assert counts["withheld"] >= 50
    assert counts["unfinished"] >= 5
