"""Writers, merges, seals, compactions, collections and readers at once, in processes of their own: nothing is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repair_cases import contents

from hsfmt import seal
from hsfmt.readers.verification import verify


def run_all(tmp_path, rounds):
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{here}:{here.parent}:{here.parent.parent}"}
    kinds = {"w1": "write", "w2": "write", "m1": "merge", "s1": "seal", "g1": "gc", "r1": "read"}
    started = {}
    for name, what in kinds.items():
        argv = [sys.executable, str(here / "gc_merge_worker.py"), what, str(tmp_path), name, str(rounds)]
        started[name] = subprocess.Popen(
            argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    durable, refused = set(), {}
    for name, process in started.items():
        out, err = process.communicate()
        assert process.returncode == 0, err[-3000:]
        report = json.loads(out.splitlines()[-1])
        durable |= set(report["durable"])
        refused[name] = report["refused"]
    # Who adds samples is never refused.
    assert [refused[name] for name in ("w1", "w2", "m1")] == [[], [], []]
    unexpected = [text for texts in refused.values() for text in texts if text.startswith("CorruptionError")]
    assert unexpected == []
    seal(tmp_path / "d")
    assert contents(tmp_path / "d").keys() == durable
    assert [str(each) for each in verify(str(tmp_path / "d"), level="full").errors] == []
    return len(durable)


@pytest.mark.slow
def test_all_at_once_lose_nothing(tmp_path):
    assert run_all(tmp_path, 5) == 45


@pytest.mark.deep
def test_all_at_once_for_long_lose_nothing(tmp_path):
    assert run_all(tmp_path, 100) == 900
