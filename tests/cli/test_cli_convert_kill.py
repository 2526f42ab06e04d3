"""kill -9 of a conversion: the next run ends with the same content, and no file is gone whose samples are not there."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DELETE = "--delete-source"
SPLIT = ("--split-long", "4")


def torture(repo_root, *args):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [repo_root, HERE, HERE.parent]))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / "convert_torture.py", *map(str, args)],
        env=env,
        text=True,
        capture_output=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("flags", [(), (DELETE,)], ids=["keep", "delete"])
def test_killed_at_a_few_random_moments(repo_root, tmp_path, flags):
    result = torture(repo_root, "random", tmp_path, 5, *flags)
    assert result["killed"] == 5


@pytest.mark.deep
@pytest.mark.parametrize(
    ("flags", "n"), [((), 30), ((DELETE,), 30), ((DELETE, *SPLIT), 10)], ids=["keep", "delete", "delete-split"]
)
def test_killed_at_random_moments(repo_root, tmp_path, flags, n):
    result = torture(repo_root, "random", tmp_path, n, *flags)
    assert result["killed"] == n
    assert len(result["phases"]) > 1, result  # which ones depends on the machine; below every one is demanded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "step"), [((), 67), ((DELETE,), 31), ((DELETE, *SPLIT), 67)], ids=["keep", "delete", "delete-split"]
)
def test_killed_before_every_few_calls(repo_root, tmp_path, flags, step):
    """Each 31st or 67th write, rename, link, unlink, open and close, one run for each; every phase is hit."""
    result = torture(repo_root, "calls", tmp_path, step, *flags)
    assert result["calls"] > 200
    phases = set(result["phases"])
    assert {phase.partition(",")[0] for phase in phases} >= {"nothing", "some committed", "done"}, result
    if DELETE in flags:
        assert "some committed" in phases, "after the files of a part were deleted"
        assert "some committed, files left of committed samples" in phases, "before they were"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), (DELETE,)], ids=["keep", "delete"])
def test_killed_with_its_workers(hsfmt, process, tmp_path, flags):
    """The whole process group, as a node that goes down: two workers, each with parts of its own."""
    import convert_torture

    convert_torture.make_source(tmp_path / "pristine")
    options = ("--from", "vllm", "--layer-ids", "1,2", "--part-size", "6KiB", "--workers", 2)
    whole = hsfmt.json("convert", tmp_path / "pristine", tmp_path / "whole", *options)
    rng, killed = random.Random(0), 0
    source, dataset = tmp_path / "source", tmp_path / "d"
    for _ in range(8):
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(dataset, ignore_errors=True)
        shutil.copytree(tmp_path / "pristine", source)
        running = process("convert", source, dataset, *options, *flags, "--quiet", start_new_session=True)
        # What a run takes before and after its first part differs by the machine: half of the kills wait for it.
        first = rng.random() < 0.5
        end = time.monotonic() + 300
        while first and not list(dataset.glob("hsfmt/manifests/*.json")) and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.4 if first else 4))
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            killed += 1
        running.communicate(timeout=300)
        live = hsfmt.json("ls", dataset, "--snapshot", "live")["samples"] if (dataset / "zarr.json").exists() else []
        gone = {f"r{n}" for n in range(convert_torture.FILES)} - {path.stem for path in source.glob("*.safetensors")}
        assert gone <= {row["id"] for row in live}
        assert flags or not gone
        report = hsfmt.json("convert", source, dataset, *options, *flags)
        assert report["snapshot"]["content_digest"] == whole["snapshot"]["content_digest"]
        assert report["counts"]["hole"] == report["counts"]["failed"] == 0
    assert killed
