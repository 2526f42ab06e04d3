"""DataLoaders in programs of their own: every way to start workers, and every way to end."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hsfmt import HiddenStateDataset

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parent / "loader_script.py"
TIMEOUT_SECONDS = 300


def expected_of(written, folder):
    """A file of what every item must be, from what was written."""
    rows = []
    for sample in written.content.values():
        parts = (sample.states, sample.input_ids.astype("int64"), sample.loss_mask)
        rows.append([sample.sample_id, hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()])
    path = folder / "expected.json"
    path.write_text(json.dumps(rows))
    return path


def start(repo_root, *argv, **options):
    env = os.environ | {"PYTHONPATH": str(repo_root), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, argv)],
        env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, **options,
    )  # fmt: skip


def finish(process, timeout):
    """Return (stdout, stderr); what does not end by itself is an error."""
    try:
        return process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"does not end: {process.communicate()}")


def assert_gone(pids):
    """The processes end; they have some minutes."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    alive = list(pids)
    while alive and time.monotonic() < deadline:
        alive = [pid for pid in alive if is_running(pid)]
        time.sleep(0.05)
    assert alive == []


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_summary_is_of_what_was_written(write, tmp_path):
    from loader_script import summary

    written = write()
    wanted = json.loads(expected_of(written, tmp_path).read_text())
    assert [summary(item) for item in HiddenStateDataset(written.url)] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_every_combination_gives_the_same_items_and_ends(write, tmp_path, repo_root, method):
    written = write()
    process = start(repo_root, "matrix", written.url, expected_of(written, tmp_path), method)
    out, err = finish(process, timeout=11 * TIMEOUT_SECONDS)
    assert process.returncode == 0, err
    assert len(out.splitlines()) == 10


@pytest.mark.slow
def test_exit_with_live_persistent_workers(write, repo_root):
    process = start(repo_root, "exit_with_workers", write().url)
    out, err = finish(process, TIMEOUT_SECONDS)
    assert (process.returncode, err) == (0, "")
    assert_gone(json.loads(out))


@pytest.mark.slow
def test_iterators_dropped_half_way(write, tmp_path, repo_root):
    written = write()
    process = start(repo_root, "drop_iterators", written.url, expected_of(written, tmp_path))
    out, err = finish(process, 2 * TIMEOUT_SECONDS)
    assert (process.returncode, err) == (0, "")
    assert_gone(json.loads(out))


@pytest.mark.slow
def test_ctrl_c(write, repo_root):
    process = start(repo_root, "wait_for_interrupt", write().url)
    workers = json.loads(process.stdout.readline())
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to workers too
    _, err = finish(process, TIMEOUT_SECONDS)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in err
    assert_gone(workers)
