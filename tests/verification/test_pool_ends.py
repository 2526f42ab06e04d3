"""The workers of a verification end when their parent is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, time
from pathlib import Path
from hsfmt.readers.verification import verify
from hsfmt.storage.local import LocalStore
import multiprocessing

class Slow(LocalStore):
    def read_into(self, path, offset, buffer):
        if multiprocessing.parent_process() is not None:
            Path(sys.argv[2], str(os.getpid())).touch()
            time.sleep(600)
        super().read_into(path, offset, buffer)

if __name__ == "__main__":
    verify(Slow(sys.argv[1]), level="full", workers=2)
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="looks at processes through /proc")
def test_workers_end_after_a_parent_that_was_killed(pristine, tmp_path, repo_root):
    script, pids = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    pids.mkdir()
    environment = os.environ | {"PYTHONPATH": str(repo_root)}
    parent = subprocess.Popen([sys.executable, script, pristine, pids], env=environment)
    try:
        wait_until(lambda: len(list(pids.iterdir())) == 2)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    for path in pids.iterdir():
        wait_until(lambda pid=int(path.name): not is_running(pid))
