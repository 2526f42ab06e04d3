"""Datasets that pass between an older and a newer hsfmt, each installed from a built wheel and run as a program.

No later format exists yet, so that the newer ones are imitations: this tree's wheel with other version numbers in
hsfmt/versions.py, and for one of them members that 1.0 does not know. The older one is the wheel as it is.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from frozen import DATASETS

OLDER = DATASETS / "bfloat16-zstd" / "dataset"
WRITE = """
import numpy, sys
from hsfmt import DatasetWriter
with DatasetWriter(sys.argv[1], layers=[1, 3], hidden_size=4, final_norm="pre", dtype="float32") as writer:
    for number, sample_id in enumerate(sys.argv[2:], 1):
        writer.write(sample_id, numpy.arange(5), numpy.full((5, 2, 4), number, numpy.float32), metadata={"n": number})
"""
# The newer writes members that the older does not know, where rule VER-4 lets it: in the manifest and in a column.
MORE_MEMBERS = '"readable_from": self.readable_from,'


class Installed:
    """An hsfmt in a folder of its own; its dependencies are those of this interpreter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def python(self, *args: object, code: int = 0) -> str:
        """Run Python without site-packages' .pth files, which would find the checkout."""
        path = [str(self.folder), *sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})]
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        env |= {"PYTHONPATH": os.pathsep.join(path)}
        command = [sys.executable, "-S", *map(str, args)]
        done = subprocess.run(
            command, cwd=self.folder, env=env, text=True, capture_output=True, check=False, timeout=300
        )
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stdout
        return done.stdout if code in (0, 3) and not done.stderr else done.stdout + done.stderr

    def __call__(self, *args: object, code: int = 0) -> str:
        return self.python("-m", "hsfmt.cli", *args, code=code)

    def json(self, *args: object, code: int = 0) -> dict:
        return json.loads(self(*args, "--json", code=code))

    def write(self, dataset: Path, *ids: str, refused: bool = False) -> str:
        return self.python("-c", WRITE, dataset, *ids, code=1 if refused else 0)


@pytest.fixture(scope="module")
def older(unpacked_wheel):
    return Installed(unpacked_wheel)


@pytest.fixture(scope="module")
def newer(unpacked_wheel, tmp_path_factory):
    """Make a later hsfmt: `format`, `readable_from` and `writable_from` as given."""

    def make(form: str, readable_from: str, writable_from: str) -> Installed:
        folder = tmp_path_factory.mktemp("newer") / "installed"
        shutil.copytree(unpacked_wheel, folder)
        versions, manifest = folder / "hsfmt/versions.py", folder / "hsfmt/manifest.py"
        major, minor = form.split(".")
        for name, value in (
            ("FORMAT", f'"{form}"'),
            ("READABLE_FROM", f'"{readable_from}"'),
            ("WRITABLE_FROM", f'"{writable_from}"'),
            ("_SUPPORTED", f"({major}, {minor})"),
        ):
            patch(versions, rf"(?m)^{name} = .*$", f"{name} = {value}")
        patch(manifest, re.escape(MORE_MEMBERS), MORE_MEMBERS + ' "later": {"list": [1, 2]},')
        return Installed(folder)

    return make


def patch(path: Path, pattern: str, text: str) -> None:
    """Replace one place of a file; it must be there."""
    changed, n = re.subn(pattern, text, path.read_text())
    assert n == 1, (path, pattern)
    path.write_text(changed)


def files(dataset: Path) -> dict[str, bytes]:
    return {path.relative_to(dataset).as_posix(): path.read_bytes() for path in dataset.rglob("*") if path.is_file()}


def ids(hsfmt: Installed, dataset: Path) -> list[str]:
    return [entry["id"] for entry in hsfmt.json("ls", dataset)["samples"]]


def test_each_runs_from_its_own_wheel(older, newer):
    later = newer("1.1", "1.0", "1.0")
    where = "import hsfmt, hsfmt.readers, hsfmt.versions as v; print(hsfmt.__file__, hsfmt.readers.__file__, v.FORMAT)"
    for installed, form in ((older, "1.0"), (later, "1.1")):
        *places, found = installed.python("-c", where).split()
        assert found == form
        assert all(place.startswith(f"{installed.folder}{os.sep}") for place in places)


def test_newer_reads_and_goes_on_with_what_older_wrote(older, newer, tmp_path):
    dataset = tmp_path / "dataset"
    older.write(dataset, "a", "b")
    before = older.json("info", dataset)
    for form in ("1.1", "2.0"):
        later = newer(form, "1.0", "1.0")
        assert later.json("info", dataset)["content_digest"] == before["content_digest"]
        assert later.json("verify", dataset, "--level", "full")["ok"]
        assert ids(later, dataset) == ids(older, dataset)
        assert later("cat", dataset, "a") == older("cat", dataset, "a")
    later.write(dataset, "c")
    assert ids(later, dataset) == ["a", "b", "c"]


def test_newer_reads_frozen_datasets(older, newer, tmp_path):
    later = newer("2.0", "2.0", "2.0")
    frozen = [path for path in sorted(DATASETS.iterdir()) if path.is_dir()]
    assert len(frozen) == 8
    for folder in frozen:
        pointer = json.loads((folder / "dataset/hsfmt/manifest.json").read_bytes())
        info = later.json("info", folder / "dataset")
        assert info["content_digest"] == pointer["content_digest"]


def test_older_reads_and_writes_beside_a_newer_that_lets_it(older, newer, tmp_path):
    """A higher `format` alone is no reason to refuse (rule VER-2); unknown members are ignored and kept (VER-4)."""
    dataset = tmp_path / "dataset"
    later = newer("1.1", "1.0", "1.0")
    later.write(dataset, "a", "b")
    (manifest,) = [data for path, data in files(dataset).items() if path.startswith("hsfmt/manifests/")]
    assert json.loads(manifest)["format"] == "1.1"
    assert json.loads(manifest)["later"] == {"list": [1, 2]}
    assert older.json("verify", dataset, "--level", "full")["ok"]
    assert older("cat", dataset, "a") == later("cat", dataset, "a")
    older.write(dataset, "c")
    older("seal", dataset)
    assert ids(older, dataset) == ids(later, dataset) == ["a", "b", "c"]
    assert manifest in files(dataset).values()
    assert later.json("verify", dataset, "--level", "full")["ok"]


def test_older_reads_but_does_not_write_beside_a_newer_that_forbids_it(older, newer, tmp_path):
    """Rule VER-3."""
    dataset = tmp_path / "dataset"
    later = newer("1.1", "1.0", "1.1")
    later.write(dataset, "a", "b")
    assert ids(older, dataset) == ["a", "b"]
    assert older.json("verify", dataset, "--level", "full")["ok"]
    before = files(dataset)
    for said in (older.write(dataset, "c", refused=True), older("seal", dataset, code=2)):
        assert "supports up to 1.0" in said
        assert "from 1.1 on" in said
        assert "install a newer hsfmt" in said
    assert files(dataset) == before


@pytest.mark.parametrize("form", ["1.1", "2.0"])
def test_older_refuses_what_needs_a_newer_to_be_read(older, newer, tmp_path, form):
    """Rule VER-2: it says what it found, what it supports and what to do, and touches nothing."""
    dataset = tmp_path / "dataset"
    later = newer(form, form, form)
    later.write(dataset, "a", "b")
    assert ids(later, dataset) == ["a", "b"]
    assert later.json("verify", dataset, "--level", "full")["ok"]
    before = files(dataset)
    refusals = [
        older("ls", dataset, code=2),
        older("info", dataset, code=2),
        older("cat", dataset, "a", code=2),
        older("verify", dataset, code=1),
        older("seal", dataset, code=2),
        older("export", dataset, tmp_path / "out", "--to", "npz", code=2),
        older.write(dataset, "c", refused=True),
    ]
    for said in refusals:
        assert f"from {form} on" in said
        assert "supports up to 1.0" in said
        assert "install a newer hsfmt (pip install -U hsfmt)" in " ".join(said.split())
    assert files(dataset) == before
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
