"""Every call of the operating system may fail: what was committed stays as it was, and the next run ends the same.

A fault is an errno, once or from then on, a call that moves half of its bytes, or the process's death. After each one
the dataset is read, verified and gone on with; see injection.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from faulty_calls import CALLS
from injection import ALL, MAIN
from scenarios import SCENARIOS

HERE = Path(__file__).parent


def hunted(repo_root, script, *args, timeout=600, inside=()):
    """Run a script of this folder in a process of its own, since it replaces calls of `os`; return its report.

    `inside` is a command that runs it.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [repo_root, HERE, HERE.parent]))}
    done = subprocess.run(
        [*map(str, inside), sys.executable, "-W", "ignore", str(HERE / script), *map(str, args)],
        env=env,
        text=True,
        capture_output=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    wrong = [line for found in report.values() for line in found["wrong"]]
    assert not wrong, "\n".join(wrong)
    return report


@pytest.mark.slow
def test_some_calls_fail_in_turn(repo_root):
    amount = 3
    report = hunted(repo_root, "injection.py", "some", amount)
    assert list(report) == list(SCENARIOS)
    for name, found in report.items():
        assert found["injected"] >= amount - 1, name  # threads differ by a few calls
        assert found["n_calls"] > 5 * found["injected"], "the calls were spread"
    assert len({fault for found in report.values() for fault in found["faults"]}) == len({fault for fault, _ in ALL})
    assert len({call for found in report.values() for call in found["calls"]}) >= 8
    assert sum(found["refused"] for found in report.values()) >= 2 * len(SCENARIOS), "most faults end the run"


@pytest.mark.deep
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize(("mode", "faults"), [("main", MAIN), ("all", ALL)], ids=["main", "all"])
def test_every_call_fails(repo_root, name, mode, faults, record_property):
    """The main ways, and all of them."""
    (found,) = hunted(repo_root, "injection.py", mode, 1, name, timeout=50_000).values()
    record_property("counts", json.dumps({what: found[what] for what in ("n_calls", "injected", "refused")}))
    assert found["injected"] > found["n_calls"]
    assert len(found["faults"]) >= len({fault for fault, _ in faults})
    assert set(found["calls"]) <= set(CALLS)
