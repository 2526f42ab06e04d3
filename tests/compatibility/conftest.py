"""Fixtures of the compatibility tests: the wheel of this tree, laid out as pip would."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

FOLDERS = ("hsfmt", "cli", "maintenance", "readers", "writers")


@pytest.fixture(scope="session")
def unpacked_wheel(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a wheel, built from a copy so that the checkout gets no build/ folder."""
    source, out = tmp_path_factory.mktemp("wheel-source"), tmp_path_factory.mktemp("wheel-built")
    for folder in FOLDERS:
        shutil.copytree(repo_root / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repo_root / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out]
    done = subprocess.run([*pip, source], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("hsfmt-*.whl")
    target = tmp_path_factory.mktemp("wheel-unpacked")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(target)
    return target
