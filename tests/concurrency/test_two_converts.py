"""Two conversions, or a merge and a writer, into one dataset at once."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from hsfmt import DatasetWriter, seal
from hsfmt.catalog import committed_parts
from hsfmt.maintenance.merge import merge
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store

SETTINGS = {"layers": [1], "hidden_size": 4, "final_norm": "pre", "dtype": "float32", "threads": 1}


def source(folder, numbers):
    safetensors = pytest.importorskip("safetensors.numpy")
    folder.mkdir()
    for number in numbers:
        states = np.full((2 + number % 3, 2, 4), number, np.float32)
        tensors = {"hidden_states": states, "token_ids": np.arange(len(states), dtype=np.int64)}
        safetensors.save_file(tensors, folder / f"s{number}.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("same", [False, True])
def test_two_converts_into_one_dataset(repo_root, tmp_path, same):
    """Of other files, or of the same ones: each file is there once, and both converts call it a success."""
    first = source(tmp_path / "first", range(12))
    second = first if same else source(tmp_path / "second", range(12, 24))
    url = tmp_path / "dataset"
    options = ["--from", "vllm", "--layer-ids", "1,3", "--part-size", "100B", "--workers", "1"]
    converts = [
        subprocess.Popen(
            [sys.executable, "-m", "hsfmt.cli", "convert", str(folder), str(url), *options],
            env={**os.environ, "PYTHONPATH": str(repo_root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for folder in (first, second)
    ]
    outputs = [convert.communicate(timeout=900)[0] for convert in converts]
    assert [convert.returncode for convert in converts] == [0, 0], outputs
    reader = SampleReader(str(url))
    n = 12 if same else 24
    assert sorted(reader.sample_ids) == sorted(f"s{number}" for number in range(n))
    for sample_id, found in zip(reader.sample_ids, reader.read_many(range(n)), strict=True):
        number = int(sample_id[1:])
        assert found.hidden_states.tolist() == np.full((2 + number % 3, 2, 4), number).tolist()
    assert {part.name for part in reader.snapshot.parts} == set(committed_parts(open_store(url)))
    assert verify(str(url), level="full").ok


def test_a_merge_among_commits_and_seals(tmp_path):
    """A writer commits and seals all the time while other datasets are merged into its own."""
    url, failures, merged = str(tmp_path / "dataset"), [], threading.Event()

    def write(url, name, number, **settings):
        with DatasetWriter(url, **{**SETTINGS, **settings}) as writer:
            writer.write(name, [1, 2], np.full((2, 1, 4), number, np.float32))

    for number in range(4):
        write(f"{tmp_path}/other{number}", f"other{number}", number)
        seal(f"{tmp_path}/other{number}", retract=["other3"] if number == 3 else [])
    write(url, "first", 9)
    written = ["first"]

    def produce():
        try:
            for number in range(300):
                write(url, f"s{number}", number)
                written.append(f"s{number}")
                if merged.is_set() and number >= 3:
                    break
        except BaseException as error:  # noqa: BLE001 - the thread's error is the test's result
            failures.append(error)

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        for number, how in enumerate(["link", "copy", "move", "auto"]):
            merge(url, [f"{tmp_path}/other{number}"], how=how)
    finally:
        merged.set()
        thread.join()
    assert failures == []
    reader = SampleReader(url)
    assert set(reader.sample_ids) == {*written, "other0", "other1", "other2"}
    assert reader.snapshot.counts["retracted"] == 1
    assert verify(url, level="full").ok
