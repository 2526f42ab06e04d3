"""kill -9 in the middle of an export to each format of a trainer: the same command ends in the same bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from foreign_folders import FOLDERS
from test_formats_matrix import MATRIX, TARGETS, options

pytestmark = pytest.mark.torch

HERE = Path(__file__).parent
# Real folders with a drafter's vocabulary, the last state after the norm or before it.
SOURCES = ("specforge-eagle3", "speculators")
# tests/cli/test_cli_export_resume.py kills exports to the others.
KILLED = [name for name in TARGETS if name not in ("safetensors", "npz", "zarr")]


def command(target: str, datasets: Path) -> list[str]:
    """The export to a target of the first of the sources that it takes, but for the destination."""
    for source in SOURCES:
        cell = MATRIX[source].split()[TARGETS.index(target)]
        if not cell.isupper():
            layers = [int(layer) for layer in FOLDERS[source].flags[1].split(",")]
            return ["export", str(datasets / source), "--to", target, "--range", "0:4", *options(cell, layers)]
    raise AssertionError(target)


@pytest.fixture(scope="module")
def datasets(hsfmt, data_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("datasets")
    for name in SOURCES:
        hsfmt("convert", data_dir / str(FOLDERS[name].path), folder / name, *FOLDERS[name].flags)
    return folder


def kill(repo_root: Path, datasets: Path, scratch: Path, n_moments: int):
    jobs = {name: command(name, datasets) for name in KILLED}
    paths = (repo_root, repo_root / "tests", repo_root / "tests" / "cli")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / "kill_moments.py", scratch, str(n_moments), json.dumps(jobs)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        text=True, capture_output=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def results(repo_root, datasets, tmp_path_factory):
    return kill(repo_root, datasets, tmp_path_factory.mktemp("killed"), 5)


@pytest.fixture(scope="module")
def many_results(repo_root, datasets, tmp_path_factory):
    return kill(repo_root, datasets, tmp_path_factory.mktemp("killed"), 12)


def check(result, n_moments):
    assert "failed" not in result, result["failed"]
    assert len(result["already"]) == n_moments
    assert result["calls"] > 3 * result["files"], "moments in the middle of files"
    assert result["already"][0] == 0
    assert result["already"][-1] > 0, "killed when all samples were there"


@pytest.mark.parametrize("target", KILLED)
def test_killed_at_five_moments(results, target):
    check(results[target], 5)


@pytest.mark.deep
@pytest.mark.parametrize("target", KILLED)
def test_killed_at_twelve_moments(many_results, target):
    check(many_results[target], 12)
