"""The state machine of a dataset: the histories that CI has time for, and many more for nights."""

import json

import pytest
from dataset_machine import DatasetMachine
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from model_comparison import DONE

# Not shrunk: the steps of a failure are printed, and shrinking them would take longer than CI has.
SOME = settings(
    max_examples=30, stateful_step_count=40, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
MANY = settings(SOME, max_examples=300, stateful_step_count=100, derandomize=False)
# What must have happened in all, an example, over many of them; of a few histories only what is in nearly all.
HAPPENED = {
    "samples written": 4, "duplicates refused": 1, "commits": 1.5, "holes": 0.5, "commits that failed": 0.05,
    "processes killed": 0.3, "seals": 0.5, "seals that failed": 0.1, "retractions": 0.2,
    "retractions of crashed seals": 0.02, "readers": 0.3,
    "compactions": 0.1, "collections": 0.03, "merges": 0.5, "damages": 0.5, "damages refused by readers": 0.2,
    "repairs": 0.3, "samples lost": 0.05, "samples at risk that were saved": 0.05,
    "samples compared": 50, "verified": 0.4,
}  # fmt: skip


# Which histories those are depends on the modules that are imported, whose constants Hypothesis takes up.
IN_A_FEW = {"samples written": 30, "commits": 3, "seals": 5, "samples compared": 100}


def run(profile, least, record_property):
    DONE.clear()
    run_state_machine_as_test(DatasetMachine, settings=profile)
    record_property("counts", json.dumps(DONE))
    assert DONE["examples"] >= profile.max_examples
    assert DONE["steps"] >= profile.max_examples * profile.stateful_step_count / 2
    assert not {what: DONE[what] for what in least if DONE[what] < least[what]}, dict(DONE)


@pytest.mark.slow
def test_the_dataset_equals_the_model_after_every_step(record_property):
    run(SOME, IN_A_FEW, record_property)


@pytest.mark.deep
def test_the_dataset_equals_the_model_over_long_histories(record_property):
    run(MANY, {what: least * MANY.max_examples for what, least in HAPPENED.items()}, record_property)
