"""What many samples cost: flat arrays, read once, and nothing that grows from epoch to epoch."""

import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from hsfmt import HiddenStateDataset

N_SAMPLES = 100_000


@pytest.fixture(scope="module")
def many(tmp_path_factory, repo_root):
    """A dataset of 100,000 samples."""
    folder = tmp_path_factory.mktemp("many") / "dataset"
    bench(repo_root, "--make", folder)
    return folder


def bench(repo_root, *argv):
    command = [sys.executable, repo_root / "bench" / "memory.py", "--samples", str(N_SAMPLES), *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def peak_per_sample(work):
    """Bytes of memory that `work` needed at most, by the number of samples."""
    tracemalloc.start()
    try:
        kept = work()
        return tracemalloc.get_traced_memory()[1] / N_SAMPLES, kept
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.torch
def test_memory_by_sample(many):
    """A list costs at least 36 bytes a number, and one of ids some 80 an id."""
    before = HiddenStateDataset(many)  # so that modules are loaded
    assert before.index_of(before[1]["sample_id"]) == 1
    opened, dataset = peak_per_sample(lambda: HiddenStateDataset(many))
    assert len(dataset) == N_SAMPLES
    assert opened < 60  # the file, 24 bytes a sample, and what it takes to check it
    lengths, total = peak_per_sample(lambda: int(dataset.lengths.sum()))
    assert total == N_SAMPLES
    assert lengths < 10
    found, number = peak_per_sample(lambda: dataset.index_of("conversation-00050000"))
    assert number == 50_000
    assert found < 90  # the ids, 21 bytes each, their offsets, and the order of the hashes
    batch, item = peak_per_sample(lambda: dataset[77_777])
    assert item["sample_id"] == "conversation-00077777"
    assert batch < 25  # the index of a part, which is a twentieth of the samples
    as_list, _ = peak_per_sample(lambda: np.asarray(dataset.lengths + 1000).tolist())
    assert as_list > 36


@pytest.mark.slow
@pytest.mark.torch
def test_memory_stays_flat_over_epochs(many, repo_root):
    out = bench(repo_root, "--loading", many, "fork", "--workers", "4", "--epochs", "3")
    first, _, last = json.loads(out)
    a_list_of_them = N_SAMPLES * 36
    for of in (lambda row: row["parent"]["rss"], lambda row: row["parent"]["private"]):
        assert of(last) - of(first) < a_list_of_them
    for key in ("workers_rss", "workers_private"):
        assert last[key] - first[key] < 4 * a_list_of_them


def test_nothing_of_ours_makes_a_list_of_lengths(repo_root):
    """`approx_lengths` is one, for the samplers of speculators."""
    callers = [
        path.name
        for folder in ("readers", "cli", "hsfmt")
        for path in (repo_root / folder).rglob("*.py")
        if ".approx_lengths" in path.read_text()
    ]
    assert callers == []
