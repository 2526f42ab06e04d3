"""Files of many samples that can't be mapped are read once for all of their rows, as long as memory allows."""

import pickle

import numpy as np
import pytest
import torch

from hsfmt.readers.sources import find_source, torch_containers
from hsfmt.readers.sources.torch_containers import TorchContainers


@pytest.fixture
def legacy(tmp_path):
    """Write files from before the zip format, of four rows each."""

    def save(*names):
        for n, name in enumerate(names):
            batch = {"states": torch.randn(4, 5, 8) + n, "input_ids": torch.arange(20).reshape(4, 5)}
            torch.save(batch, tmp_path / name, _use_new_zipfile_serialization=False)
        return [tmp_path / name for name in names]

    return save


@pytest.fixture
def reads(monkeypatch):
    seen = []
    original = torch_containers.read_torch_file

    def read(path, where):
        seen.append(path.name)
        return original(path, where)

    monkeypatch.setattr(torch_containers, "read_torch_file", read)
    return seen


def test_a_legacy_file_is_read_once(legacy, reads):
    one, two = legacy("a.pt", "b.pt")
    containers = TorchContainers()
    for _ in range(3):
        for path in (one, two):
            assert containers.load(path, path.name).value["states"].shape == (4, 5, 8)
    assert reads == ["a.pt", "b.pt"]


def test_a_file_that_changed_is_read_again(legacy, reads):
    (path,) = legacy("a.pt")
    containers = TorchContainers()
    before = containers.load(path, "a.pt").value["states"]
    path.unlink()
    legacy("a.pt")
    assert not torch.equal(containers.load(path, "a.pt").value["states"], before)
    assert reads == ["a.pt", "a.pt"]


def test_what_is_kept_is_bounded(legacy, reads, monkeypatch):
    paths = legacy("a.pt", "b.pt", "c.pt")
    monkeypatch.setattr(torch_containers, "_KEPT_NBYTES", 2 * paths[0].stat().st_size + 100)
    containers = TorchContainers()
    for path in (*paths, paths[2], paths[1], paths[0]):
        containers.load(path, path.name)
    assert reads == ["a.pt", "b.pt", "c.pt", "a.pt"]


def test_nothing_of_it_is_pickled(legacy):
    (path,) = legacy("a.pt")
    containers = TorchContainers()
    containers.load(path, "a.pt")
    assert len(pickle.dumps(containers)) < 200


def test_a_mapped_file_is_not_kept(tmp_path, reads):
    torch.save({"states": torch.zeros(2, 3, 4)}, tmp_path / "a.pt")
    containers = TorchContainers()
    for _ in range(3):
        containers.load(tmp_path / "a.pt", "a.pt")
    assert reads == ["a.pt"]
    assert containers._kept == {}


def test_rows_of_a_legacy_activault_folder(legacy, reads, tmp_path):
    (tmp_path / "blocks.1.hook_resid_post").mkdir()
    (path,) = legacy("blocks.1.hook_resid_post/0--0_0.saved.pt")
    batch = torch.load(path, weights_only=True)
    source = find_source(tmp_path, "activault")
    source.meaning()
    found = [source.load(item) for item in source.items]
    assert [sample.input_ids.tolist() for sample in found] == batch["input_ids"].tolist()
    assert np.array_equal(np.stack([sample.hidden_states[:, 0] for sample in found]), batch["states"].numpy())
    assert reads == ["0--0_0.saved.pt"]
