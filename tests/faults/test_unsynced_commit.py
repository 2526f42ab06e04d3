"""A manifest that another process left visible but not durable counts for nothing before its name is synced."""

import os

import pytest
from jobs import DATASET, put
from recorder import Recorder
from scenarios import N_FILES, SCENARIOS


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Run a scenario's step over its prepared state; return what it did to files."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)

    def run(before, step):
        before(tmp_path)
        recorder = Recorder(tmp_path)
        with recorder.active():
            step(tmp_path)
        return recorder.trace

    return run


def test_manifests_are_synced_before_a_source_file_that_was_converted_before_goes(recorded):
    scenario = SCENARIOS["delete what was converted"]
    trace = recorded(scenario.before, lambda folder: scenario.step(folder, set()))
    gone = [at for at, event in enumerate(trace) if event[0] == "unlink" and event[1].startswith("source/")]
    assert len(gone) == N_FILES
    assert ("sync folder", f"{DATASET}/hsfmt/manifests") in trace[: gone[0]]


def test_manifests_are_synced_before_a_sample_is_skipped_as_committed(recorded):
    trace = recorded(lambda folder: put(folder / DATASET, range(3)), lambda folder: put(folder / DATASET, range(3)))
    assert ("sync folder", f"{DATASET}/hsfmt/manifests") in trace
