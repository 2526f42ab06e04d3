"""What containers and clusters limit: descriptors, /dev/shm, mmap."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from loader_script import TIMEOUT_SECONDS, as_is, maps
from test_loader_processes import SCRIPT, expected_of, finish, start
from torch.utils.data import DataLoader
from written import Content, Written, as_written, make_content

from hsfmt import DatasetWriter, HiddenStateDataset

# Python 3.12 and later warn of any fork in a process with threads; that it works all the same is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")

MOUNT = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
IN_SMALL_SHM = ["unshare", "--mount", "--map-root-user", "sh", "-c", MOUNT, "-"]


@pytest.mark.slow
def test_256_descriptors_for_more_files_than_that(tmp_path, repo_root):
    """4 workers, 90 parts of 3 files each."""
    content = {}
    with DatasetWriter(tmp_path / "d", layers=[1], hidden_size=8, final_norm="pre", codec="none") as writer:
        for number in range(90):
            sample = make_content(number, f"id-{number:03}", 5, layers=1, hidden=8)
            content[sample.sample_id] = sample
            states = as_written(sample.states, "bfloat16")
            writer.write(sample.sample_id, sample.input_ids, states, sample.loss_mask, source_index=number)
            writer.commit()
    written = Written(tmp_path / "d", content, [1], "bfloat16")
    assert len(list(written.path.glob("parts/*/*/c/**/0"))) > 256
    process = start(repo_root, "few_descriptors", written.url, expected_of(written, tmp_path))
    out, err = finish(process, 3 * TIMEOUT_SECONDS)
    assert process.returncode == 0, err
    assert int(out) < 256


@pytest.fixture
def large(tmp_path):
    """Three samples of 70 MiB, whose states are easy to compress."""
    content = {}
    with DatasetWriter(tmp_path / "d", layers=[1], hidden_size=7168, final_norm="pre", codec="zstd") as writer:
        for number in range(3):
            n_tokens = 5120
            states = np.full((n_tokens, 1, 7168), 100 + number, np.uint16)
            sample = Content(f"id-{number}", np.arange(n_tokens), np.ones(n_tokens, bool), states)
            content[sample.sample_id] = sample
            writer.write(sample.sample_id, sample.input_ids, as_written(states, "bfloat16"), sample.loss_mask)
    return Written(tmp_path / "d", content, [1], "bfloat16")


def may_mount():
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*IN_SMALL_SHM, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_samples_larger_than_dev_shm(large, tmp_path, repo_root):
    if not may_mount():
        pytest.skip("NOT TESTED HERE: this system lets nobody mount a small /dev/shm; see the next test")
    expected = str(expected_of(large, tmp_path))
    env = os.environ | {"PYTHONPATH": str(repo_root)}
    done = subprocess.run(
        [*IN_SMALL_SHM, sys.executable, SCRIPT, "large_samples", large.url, expected],
        env=env, text=True, capture_output=True, check=False, timeout=2 * TIMEOUT_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    size, nbytes = json.loads(done.stdout)
    assert size == 64 << 20 < nbytes


class Watched:
    """A dataset whose items say what is mapped where they were read, of /dev/shm and of the dataset."""

    def __init__(self, dataset, folder):
        self.dataset = dataset
        self.folder = folder

    def __len__(self):
        return len(self.dataset)

    def __getitems__(self, numbers):
        items = self.dataset.__getitems__(numbers)
        return [item | {"mapped": found(self.folder)} for item in items]


def found(folder):
    """Mapped files of the dataset, and of /dev/shm those of torch."""
    return [line for line in maps().splitlines() if str(folder) in line or "/dev/shm/torch" in line]


@pytest.mark.parametrize("view", ["raw", "speculators"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_nothing_goes_through_dev_shm_and_no_file_is_mapped(write, view, dtype):
    """torch would have made a file in /dev/shm for every tensor that is not in memory of ours."""
    written = write(dtype=dtype, layers=(1, 3, 5))
    dataset = HiddenStateDataset(written.url, view=view)
    wanted = list(dataset)
    loader = DataLoader(
        Watched(dataset, written.path), batch_size=4, num_workers=2, collate_fn=as_is, timeout=TIMEOUT_SECONDS,
        multiprocessing_context="fork",
    )  # fmt: skip
    n_items = 0
    for batch in loader:
        storages = set()
        for item in batch:
            assert item.pop("mapped") == []
            assert list(item) == list(wanted[n_items])
            for key, value in item.items():
                if isinstance(value, torch.Tensor):
                    assert value.is_shared(), key
                    storages.add(value.untyped_storage().data_ptr())
                    assert torch.equal(value.view(torch.uint8), wanted[n_items][key].view(torch.uint8)), key
            n_items += 1
        assert len(storages) == 2, "descriptors of a batch"
        assert found(written.path) == []
    assert n_items == len(wanted)


def test_items_of_the_main_process_have_memory_of_their_own(write):
    """One that is kept or saved must not bring its batch along."""
    items = HiddenStateDataset(write().url).__getitems__([0, 1, 2])
    for item in items:
        for value in item.values():
            if isinstance(value, torch.Tensor):
                assert value.untyped_storage().nbytes() == value.nbytes
