"""kill -9 at random moments: what was acknowledged is there, and the next run ends with the same; see sigkill.py."""

import json

import pytest
from scenarios import SCENARIOS
from test_fault_injection import hunted

WRITING = ["write", "roll", "seal", "convert"]


@pytest.mark.slow
def test_killed_at_some_random_moments(repo_root):
    report = hunted(repo_root, "sigkill.py", 16, *WRITING)
    assert list(report) == WRITING
    assert sum(found["killed"] for found in report.values()) >= 16
    assert sum(found["half way"] for found in report.values()) >= 2


@pytest.mark.deep
@pytest.mark.parametrize(
    "names", [WRITING, [name for name, each in SCENARIOS.items() if each.makes and name not in WRITING]], ids=len
)
def test_killed_at_five_hundred_random_moments_of_every_kind_of_run(repo_root, names, record_property):
    report = hunted(repo_root, "sigkill.py", 500, *names, timeout=20_000)
    sums = {what: sum(found[what] for found in report.values()) for what in ("killed", "half way")}
    record_property("counts", json.dumps(sums))
    assert sum(found["killed"] for found in report.values()) >= 500
    assert all(found["half way"] for found in report.values())
