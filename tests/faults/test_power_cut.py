"""A power cut at any moment: what was acknowledged is there, and the next run ends with the same; see power_cut.py."""

import json

import pytest
from power_cut import DATA, NAMES
from scenarios import SCENARIOS
from test_fault_injection import hunted

MAKING = [name for name, scenario in SCENARIOS.items() if scenario.makes]
SOME = ["commit", "roll", "seal", "convert --delete-source", "export npz", "merge --move", "repair"]


@pytest.mark.slow
def test_cut_after_some_calls(repo_root):
    report = hunted(repo_root, "power_cut.py", "prefixes", 2)
    assert list(report) == MAKING
    assert all(found["cuts"] >= 2 < found["events"] for found in report.values())
    assert sum(found["partly"] for found in report.values()) > len(MAKING), "most cuts hit something committed"


@pytest.mark.slow
def test_killed_run_again_and_cut_once_that_is_acknowledged(repo_root):
    """What the killed run left visible is not durable by that: whoever relies on it has to make it so."""
    report = hunted(repo_root, "power_cut.py", "kills", 1, *SOME)
    assert list(report) == SOME
    assert all(found["killed"] == found["cuts"] >= 1 for found in report.values())


@pytest.mark.slow
def test_an_fsync_fails_and_later_ones_lie(repo_root):
    """What was committed before is not touched by that, and no file is relied on whose fsync failed once."""
    report = hunted(repo_root, "power_cut.py", "lies", 1, *SOME)
    assert list(report) == SOME
    assert all(found["lied"] >= 1 for found in report.values())


@pytest.mark.deep
@pytest.mark.parametrize("name", MAKING)
def test_cut_after_every_call(repo_root, name, record_property):
    (found,) = hunted(repo_root, "power_cut.py", "prefixes", 0, name, timeout=50_000).values()
    record_property("counts", json.dumps({what: n for what, n in found.items() if isinstance(n, int)}))
    assert found["cuts"] == (found["events"] + 1) * len(DATA) * len(NAMES)


@pytest.mark.deep
@pytest.mark.parametrize("name", MAKING)
def test_killed_at_every_call_run_again_and_cut(repo_root, name, record_property):
    (found,) = hunted(repo_root, "power_cut.py", "kills", 0, name, timeout=50_000).values()
    record_property("counts", json.dumps({what: n for what, n in found.items() if isinstance(n, int)}))
    assert found["killed"] == found["cuts"] >= 20


@pytest.mark.deep
@pytest.mark.parametrize("name", MAKING)
def test_every_fsync_fails_and_later_ones_lie(repo_root, name, record_property):
    (found,) = hunted(repo_root, "power_cut.py", "lies", 0, name, timeout=50_000).values()
    record_property("counts", json.dumps({what: n for what, n in found.items() if isinstance(n, int)}))
    assert found["lied"] >= 8
