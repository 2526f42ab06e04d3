"""`hsfmt convert` into a bucket, and `hsfmt export` from there into it: all as in a folder."""

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner

from hsfmt import HiddenStateDataset
from hsfmt.catalog import committed_parts
from hsfmt.cli.main import main
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store
from hsfmt.writers.sample_files import FileTensor, write_sample_file

N = 18


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    for number in range(N):
        states = np.random.default_rng(number).integers(0, 0x7F00, (5 + number, 2, 64), np.uint16)
        tensors = {
            "hidden_states": FileTensor("bfloat16", states),
            "token_ids": FileTensor("int64", np.arange(len(states))),
        }
        write_sample_file(folder / f"r{number:02}.safetensors", tensors, {})
    return folder


@pytest.fixture
def place(s3_server, bucket, monkeypatch):
    options = s3_server.options()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
    return f"s3://{bucket}/d"


def hsfmt(*words):
    result = CliRunner().invoke(main, [*map(str, words), "--json"], prog_name="hsfmt")
    assert result.exit_code == 0, f"{result.stdout}\n{result.stderr}\n{result.exception!r}"
    return json.loads(result.stdout)


def convert(*words):
    return hsfmt("convert", *words, "--from", "vllm", "--layer-ids", "1,2", "--part-size", "8KiB")


@pytest.mark.slow
def test_conversions_into_a_bucket_join_and_resume(source, place, tmp_path):
    """Two processes, parts that roll, a second run for files that came later, and a third that finds nothing to do."""
    early = tmp_path / "early"
    shutil.copytree(source, early)
    (early / "r03.safetensors").unlink()
    first = convert(early, place, "--workers", 2)
    assert (first["counts"]["sample"], first["workers"]) == (N - 1, 2)
    assert len(committed_parts(open_store(place))) > 2
    shutil.copy(source / "r03.safetensors", early)
    second = convert(early, place)
    assert (second["counts"]["sample"], second["counts"]["skipped"]) == (1, N - 1)
    third = convert(early, place)
    assert (third["counts"]["sample"], third["counts"]["skipped"]) == (0, N)
    convert(source, tmp_path / "local")
    there, here = HiddenStateDataset(place), HiddenStateDataset(tmp_path / "local")
    assert there.content_digest == here.content_digest
    store = open_store(place)
    assert verify(store, level="full").ok
    assert store.unfinished_uploads() == []


def test_from_a_bucket_to_a_bucket(source, place, tmp_path):
    for url in (place, tmp_path / "d"):
        convert(source, url)
    out = place.removesuffix("/d") + "/out"
    hsfmt("export", place, out, "--to", "npz")
    hsfmt("export", tmp_path / "d", tmp_path / "out", "--to", "npz")
    there, here = (dict(open_store(folder).walk("")) for folder in (out, tmp_path / "out"))
    assert there == here
    assert len(there) == N
