"""A collection or a merge, killed at a call of the system and run again, ends as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Calls of a whole run (about 130, 520, 430 and 480) are far enough apart for CI at these steps.
FEW = [("gc", 6, 19, 6), ("move", 31, 89, 5), ("link", 17, 131, 3), ("copy", 23, 149, 3)]


def kill_rounds(tmp_path, kind, first, step):
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here}:{here.parent}:{here.parent.parent}"}
    argv = [sys.executable, str(here / "gc_merge_kills.py"), kind, str(tmp_path), str(first), str(step)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "first", "step", "least"), FEW, ids=[kind for kind, *_ in FEW])
def test_killed_at_any_call_it_ends_the_same(tmp_path, kind, first, step, least):
    done = kill_rounds(tmp_path, kind, first, step)
    assert done["kills"] >= least


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "least"), [("gc", 120), ("move", 450), ("link", 380), ("copy", 400)])
def test_killed_at_every_call_it_ends_the_same(tmp_path, kind, least, record_property):
    done = kill_rounds(tmp_path, kind, 1, 1)
    record_property("counts", json.dumps(done))
    assert done["kills"] >= least
