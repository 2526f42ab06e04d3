"""`hsfmt export` into a bucket: the same files as in a folder, as whole objects, and it can be gone on with."""

import json
import tempfile

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from killed_on_s3 import Program, command
from killing import hold_from, kill_held
from servers.fault_proxy import Fault

from hsfmt import DatasetWriter
from hsfmt.cli.main import main
from hsfmt.storage import open_store
from hsfmt.storage.local import LocalStore
from hsfmt.writers.targets.registry import target_class

N = 20
TARGETS = {
    "safetensors": [],
    "npz": [],
    "zarr": ["--option", "chunk_tokens=16", "--option", "shard_tokens=64"],
    "vllm": [],
    "deepspec": ["--option", "shard_size=8KiB"],
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Datasets by what their final state is."""
    made = {norm: str(tmp_path_factory.mktemp("export") / norm) for norm in ("pre", "post")}
    for norm, url in made.items():
        with DatasetWriter(url, layers=[2, 3, 5, 8], hidden_size=16, final_norm=norm, model="tiny") as writer:
            for i in range(N):
                states = np.random.default_rng(i).standard_normal((4 + i, 4, 16), np.float32)
                mask = np.ones(4 + i, np.uint8)
                writer.write(f"chat/{i}", np.arange(4 + i), states.astype(ml_dtypes.bfloat16), mask)
    return made


@pytest.fixture
def source(sources):
    return sources["pre"]


@pytest.fixture
def place(s3_server, bucket, monkeypatch, tmp_path):
    """A URL that commands find by their environment; what is on its way there is in an empty folder."""
    for name, value in zip(("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"), list(s3_server.options().values()), strict=False):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    passing = tmp_path / "passing"
    passing.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(passing))
    yield f"s3://{bucket}/a/out"
    assert list(passing.glob("hsfmt-*")) == []


def export(*words, code=0):
    result = CliRunner().invoke(main, ["export", *map(str, words), "--json"], prog_name="hsfmt")
    assert result.exit_code == code, f"{result.stdout}\n{result.stderr}\n{result.exception!r}"
    return json.loads(result.stdout)


def refused(*words):
    """What an export that never begins says."""
    (problem,) = export(*words, code=2)["error"]
    return " ".join(map(str, problem.values()))


def files(place):
    store = open_store(place)
    return {path: store.read(path, nbytes) for path, nbytes in store.walk("")}


@pytest.mark.parametrize("name", TARGETS)
def test_a_bucket_gets_the_files_that_a_folder_gets(sources, place, tmp_path, name):
    source = sources[target_class(name).final_norm or "pre"]
    flags = ["--to", name, *TARGETS[name]]
    export(source, tmp_path / "out", *flags)
    report = export(source, place, *flags)
    assert files(place) == files(tmp_path / "out")
    assert report["counts"] == {"asked": N, "written": N, "already_there": 0, "not_reached": 0}
    assert report["complete"]
    assert (report["folder"], report["journal"]) == (place, f"{place}.hsfmt-export")
    again = export(source, place, *flags)
    assert again["counts"]["already_there"] == N
    assert again["files_written"] == 0


@pytest.mark.torch
def test_a_target_of_torch(sources, place, tmp_path):
    source = sources["post"]
    flags = ["--to", "specforge-eagle3"]
    export(source, tmp_path / "out", *flags)
    export(source, place, *flags)
    assert files(place) == files(tmp_path / "out")


def test_an_export_that_failed_goes_on(source, place, s3_faults, tmp_path, monkeypatch):
    flags = ["--to", "npz"]
    export(source, tmp_path / "out", *flags)
    monkeypatch.setenv("HSFMT_RETRY_SECONDS", "0.2")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_faults.url)
    s3_faults.faults.append(Fault("status", "out/", method="PUT", count=None, skip=7))
    report = export(source, place, *flags, code=3)
    assert report["counts"]["not_reached"] > 0
    assert "injected" in str(report["error"])
    s3_faults.reset()
    monkeypatch.delenv("HSFMT_RETRY_SECONDS")
    there = files(place)
    assert len(there) == 7
    report = export(source, place, *flags)
    assert report["counts"]["not_reached"] == 0
    assert files(place) == files(tmp_path / "out")
    assert open_store(place).unfinished_uploads() == []


def test_what_is_nobodys_business_is_left(source, place):
    store = open_store(place)
    store.write("notes.txt", b"mine")
    assert "1 other file: notes.txt" in refused(source, place, "--to", "npz")
    assert "to go on with the export" in refused(source, place, "--to", "npz", "--no-resume")
    store.remove("notes.txt")
    export(source, place, "--to", "npz")
    assert "as in the export there" in refused(source, place, "--to", "safetensors")


def test_another_export_at_work_is_noticed(source, place, monkeypatch):
    export(source, place, "--to", "npz", "--range", "0:10")
    above = open_store(place.removesuffix("/out"))
    create = type(above).create

    def late(self, path, data):
        if path.endswith("00000000.jsonl"):
            create(self, path, b"of the other one")
        return create(self, path, data)

    for path in files(place):
        open_store(place).remove(path)
    monkeypatch.setattr(type(above), "create", late)
    assert "no export at work" in refused(source, place, "--to", "npz")


def test_places_that_are_none(source, place):
    bucket = place.removesuffix("/a/out")
    for url, says in {
        bucket: "all of a storage",
        "memory://out": "all of a storage",
        "simplecache::memory://a/out": "a chained one",
        "http://127.0.0.1:9/out": "one whose files can't be listed",
    }.items():
        assert says in refused(source, url, "--to", "npz")
    store = open_store(f"{place}/d")
    with DatasetWriter(store, layers=[2], hidden_size=4, final_norm="pre", dtype="float32") as writer:
        writer.write("a", [1], np.ones((1, 1, 4), np.float32))
    for url in (place, f"{place}/d", f"{place}/d/x"):
        assert "apart from the dataset" in refused(f"{place}/d", url, "--to", "npz")


def test_no_room_on_the_way(source, place, monkeypatch):
    monkeypatch.setattr(LocalStore, "free_nbytes", lambda self: 100)
    report = export(source, place, "--to", "npz", code=3)
    assert "let TMPDIR name a larger file system" in str(report["error"])
    assert files(place) == {}
    export(source, place, "--to", "npz", "--force")
    assert len(files(place)) == N


@pytest.mark.slow
def test_a_killed_export_leaves_whole_files_and_goes_on(source, place, s3_server, s3_faults, tmp_path):
    flags = ["--to", "safetensors", "--workers", "2"]
    export(source, tmp_path / "out", *flags)
    whole = files(tmp_path / "out")
    words = ["export", source, place, *flags, "--quiet"]
    hold_from(s3_faults, 12)
    options = s3_server.options(endpoint=s3_faults.url)
    program = Program(command, words, options, tmp_path / "left", out=tmp_path / "said")
    assert kill_held(program, s3_faults, 12)
    there = files(place)
    assert set(there.items()) <= set(whole.items())
    assert len(there) < N
    export(source, place, *flags)
    assert files(place) == whole
