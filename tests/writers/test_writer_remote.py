"""The same writer on an fsspec file system: the same objects, whole, the manifest last."""

import fsspec
import numpy as np
import part_oracles as oracles
import pytest

from hsfmt import DatasetWriter, seal
from hsfmt.catalog import committed_parts, read_pointer
from hsfmt.errors import StorageError
from hsfmt.storage import open_store
from hsfmt.storage.remote import RemoteStore


@pytest.fixture
def remote():
    url = "memory://bucket/dataset"
    yield url
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def writer_of(url, **settings):
    options = {"layers": [1, 2], "hidden_size": 8, "final_norm": "pre", "dtype": "float32", "seal": False}
    return DatasetWriter(
        url, **{**options, "part_names": lambda: "p", "chunk_tokens": 4, "shard_tokens": 8, **settings}
    )


def fill(writer, states):
    for number in range(5):
        writer.write(
            f"s{number}", np.arange(1 + number * 3), states(1 + number * 3, seed=number), metadata={"n": number}
        )
    writer.hole("h", "failed")


def test_a_remote_dataset_has_the_same_objects(url, remote, states):
    for target in (url, remote):
        with writer_of(target) as writer:
            fill(writer, states)
            assert len(writer.commit()) == 5
            assert "s4" in writer.committed_ids()
    there = dict(open_store(remote).walk(""))
    assert sorted(there) == oracles.left_files(url)
    local, store = open_store(url), open_store(remote)
    for path, nbytes in there.items():
        if "manifests" not in path:  # it says when the run started
            assert store.read(path, nbytes) == local.read(path, nbytes), path
    sealed = seal(remote).snapshot
    assert sealed.content_digest == seal(url).snapshot.content_digest
    assert read_pointer(store).fingerprint == sealed.fingerprint
    with writer_of(remote, part_names=lambda: "q", on_duplicate="skip") as writer:
        assert writer.write("s0", [0], states(1)) is False
        assert writer.write("s9", [0], states(1)) is True
    assert committed_parts(store) == ["p", "q"]


def test_the_manifest_is_the_last_object(remote, states, monkeypatch):
    put = []
    for name in ("create", "write"):
        real = getattr(RemoteStore, name)
        monkeypatch.setattr(
            RemoteStore, name, lambda self, path, data, real=real: (put.append(path), real(self, path, data))[1]
        )
    open_object = RemoteStore.open_object

    def recorded(self, path):
        writer = open_object(self, path)
        commit = writer.commit
        writer.commit = lambda: (commit(), put.append(path))
        return writer

    monkeypatch.setattr(RemoteStore, "open_object", recorded)
    with writer_of(remote) as writer:
        del put[:]
        fill(writer, states)
    assert put[-1] == "hsfmt/manifests/p.json"
    assert (
        len(set(put))
        == len(put)
        == len(dict(open_store(remote).walk("hsfmt"))) + len([path for path, _ in open_store(remote).walk("parts/p")])
    )


def test_an_upload_that_fails_commits_nothing_and_can_be_run_again(remote, states, monkeypatch):
    with monkeypatch.context() as patch:
        open_object = RemoteStore.open_object

        def refuse(self, path):
            if path.startswith("hsfmt/index/"):
                raise StorageError.at(path, expected="the storage to work", got="403")
            return open_object(self, path)

        patch.setattr(RemoteStore, "open_object", refuse)
        with pytest.raises(StorageError, match="403"), writer_of(remote) as writer:
            fill(writer, states)
    store = open_store(remote)
    assert committed_parts(store) == []
    assert [path for path, _ in store.walk("")] == oracles.empty_dataset_files()
    with writer_of(remote) as writer:
        fill(writer, states)
    assert committed_parts(store) == ["p"]
