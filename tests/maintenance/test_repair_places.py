"""Repair and compaction of remote datasets, and in little memory."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
from repair_cases import build, contents, files_of, flip, without_fsync

from hsfmt import DatasetWriter, compact, repair, seal
from hsfmt.readers.verification import verify

STATES = "parts/part-0/hidden_states/c/0/0/0"
MEASURE = """
import json, sys
from pathlib import Path
import hsfmt.maintenance.compact, hsfmt.maintenance.repair, hsfmt.maintenance.rewriting as rewriting
from hsfmt import compact, repair

def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10

rewriting._QUEUE_NBYTES = 8 << 20
repair(sys.argv[2])  # what is allocated once
before = peak()
report = repair(sys.argv[1]) if sys.argv[3] == "repair" else compact(sys.argv[1])
done = report.n_saved if sys.argv[3] == "repair" else sum(group.n_samples for group in report.groups)
print(json.dumps({"growth": peak() - before, "samples": done}))
"""


@pytest.fixture
def remote(tmp_path):
    """(url, local folder) of the same dataset; what the URL names is gone afterwards."""
    url = f"memory://{tmp_path.name}/dataset"
    with without_fsync():
        root = build(tmp_path / "dataset")
        upload(root, url)
        yield url, root
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def upload(root, url):
    fs = fsspec.filesystem("memory")
    for name in files_of(root):
        fs.pipe_file(f"{url.removeprefix('memory:/')}/{name}", (root / name).read_bytes())


@pytest.mark.parametrize("damage", [STATES, "hsfmt/manifests/part-0.json", "hsfmt/manifest.json", "zarr.json"])
def test_a_remote_dataset_is_repaired_as_a_local_one(remote, damage):
    url, root = remote
    flip(root / damage)
    upload(root, url)
    report, local = repair(url), repair(root)
    assert report.to_json() | {"url": None} == local.to_json() | {"url": None}
    assert contents(url) == contents(root)
    assert verify(url, level="full").ok
    assert not repair(url).changed


def test_a_remote_dataset_is_compacted_as_a_local_one(remote):
    url, root = remote
    before = contents(url)
    assert compact(url).to_json() | {"url": None} == compact(root).to_json() | {"url": None}
    assert contents(url) == before
    assert verify(url, level="full").ok


@pytest.mark.slow
@pytest.mark.parametrize("work", ["repair", "compact"])
def test_memory_does_not_grow_with_the_data(tmp_path, work):
    """96 MiB in two parts, through a queue of 8."""
    root, n_samples = tmp_path / "dataset", 48
    rng = np.random.default_rng(0)
    names = iter(["part-0", "part-1"])
    with (
        without_fsync(),
        DatasetWriter(
            root, layers=[1, 2], hidden_size=1024, final_norm="pre", codec="none", part_names=lambda: next(names)
        ) as writer,
    ):
        for number in range(n_samples):
            states = rng.integers(1, 0x7000, (512, 2, 1024)).astype(np.uint16)
            writer.write(f"s{number}", np.arange(512), states)
            if number == n_samples // 2 - 1:
                writer.commit()
    shutil.copytree(root, tmp_path / "sound")
    if work == "repair":
        flip(root / STATES)
        flip(root / STATES.replace("part-0", "part-1"))
    argv = [sys.executable, "-c", MEASURE, str(root), str(tmp_path / "sound"), work]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["samples"] == (n_samples - 2 if work == "repair" else n_samples)
    assert found["growth"] < 48 << 20
    assert seal(root).snapshot.n_samples == found["samples"]
