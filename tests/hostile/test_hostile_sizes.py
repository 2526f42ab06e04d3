"""A sample of 2^31 - 1 tokens in a few megabytes: who can't hold it says so, before anything of its size is taken."""

import sys

import consumers
import pytest
from address_space import address_space_limited
from large_sample import CHUNK_NBYTES, build_large
from outcomes import observe

from hsfmt.errors import HsfmtError
from hsfmt.readers.sample_reader import ReadOptions, SampleReader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
N_TOKENS = 2**31 - 1  # the cap: 64 GiB decoded
HEADROOM_NBYTES = 2 * CHUNK_NBYTES
HOLDS_IT = ("read", "read windows", "metadata", "ids", "live", "cat")
WRITES_IT = ("export safetensors", "export zarr", "export npz live")
DOES_NOT = ("attachments", "verify quick", "verify complete", "info", "info --json", "info live", "ls", "ls --json")
KNOWN = {**consumers.READING, **consumers.TORCH, **consumers.MAINTAINING, **consumers.WRITING}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return build_large(tmp_path_factory.mktemp("sizes") / "large", N_TOKENS)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Of the same form: what is imported and started lazily is so before anything is limited."""
    return build_large(tmp_path_factory.mktemp("sizes") / "small", 4)


def outcome(name, root, small, tmp_path):
    (tmp_path / "warm").mkdir()
    (tmp_path / "scratch/folder").mkdir(parents=True)
    try:
        KNOWN[name](small, tmp_path / "warm")
    except HsfmtError:
        assert name == "cat"  # asks for more samples than there are
    with address_space_limited(HEADROOM_NBYTES):
        return observe(lambda: KNOWN[name](root, tmp_path / "scratch/folder"), root, tmp_path / "scratch")


def test_the_dataset_is_small(large):
    assert sum(path.stat().st_size for path in large.rglob("*") if path.is_file()) < 8 << 20
    assert SampleReader(large).lengths.tolist() == [N_TOKENS]


@pytest.mark.parametrize("name", HOLDS_IT)
def test_who_must_hold_a_sample_refuses_one_beyond_memory(large, small, tmp_path, name):
    found = outcome(name, large, small, tmp_path)
    assert found.findings == []
    assert "expected memory for 1 sample(s)" in str(found.error)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["items", "batch"])
def test_a_trainer_is_told_so_too(large, small, tmp_path, name):
    found = outcome(name, large, small, tmp_path)
    assert found.findings == []
    assert "expected memory for 1 sample(s)" in str(found.error)


@pytest.mark.parametrize("name", WRITES_IT)
def test_an_export_of_more_than_the_disk_has_is_refused(large, small, tmp_path, monkeypatch, name):
    monkeypatch.setattr("hsfmt.storage.local.LocalStore.free_nbytes", lambda store: 60 << 30)
    found = outcome(name, large, small, tmp_path)
    assert found.findings == []
    assert isinstance(found.error, HsfmtError)
    assert "memory" in str(found.error) or "room" in str(found.error)


@pytest.mark.parametrize("name", DOES_NOT)
def test_who_does_not_hold_it_works(large, small, tmp_path, name):
    found = outcome(name, large, small, tmp_path)
    assert (found.findings, found.error) == ([], None)


def test_a_window_of_it_is_read(large):
    reader = SampleReader(large, options=ReadOptions(n_threads=1))
    reader.read(0, 0, 1)
    with address_space_limited(HEADROOM_NBYTES):
        window = reader.read(0, N_TOKENS - 5, N_TOKENS)
    assert window.hidden_states.shape == (5, 1, 8)
    assert not window.hidden_states.any()
