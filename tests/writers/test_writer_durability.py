"""The order of system calls by which a part becomes durable: data, folders, manifest, its folder."""

import os
from pathlib import Path

import numpy as np
import part_oracles as oracles
import pytest

from hsfmt import DatasetWriter, seal
from hsfmt.storage.local import LocalStore

KEEP_FSYNC = True


@pytest.fixture
def events(monkeypatch, tmp_path):
    """Record (call, path relative to the dataset), a renamed or linked file under its final name."""
    recorded = []
    root = tmp_path / "dataset"

    def relative(path):
        return os.path.relpath(path, root)

    def record(name, final):
        real = getattr(os, name)

        def call(*args, **kwargs):
            result = real(*args, **kwargs)
            recorded.append((name, *final(*args)))
            return result

        monkeypatch.setattr(os, name, call)

    def of_fd(fd):
        path = Path(f"/proc/self/fd/{fd}").readlink()
        return (relative(path), "folder" if path.is_dir() else "file")

    for name in ("rename", "replace", "link"):
        record(name, lambda source, target: (relative(source), relative(target)))
    record("fsync", of_fd)
    return recorded


def write(url):
    writer = DatasetWriter(
        url,
        layers=[1, 2],
        hidden_size=4,
        final_norm="pre",
        dtype="float32",
        chunk_tokens=2,
        shard_tokens=4,
        seal=False,
        part_names=lambda: "p",
    )
    writer.write("a", np.arange(9), np.ones((9, 2, 4), np.float32))
    return writer


def positions(events, path):
    """Return when the file's bytes, its name and the name's folder became durable."""
    (named,) = [at for at, event in enumerate(events) if event[0] in ("rename", "link", "replace") and event[2] == path]
    temporary = events[named][1]
    assert temporary.startswith(f"{path}.")
    assert temporary.endswith(".tmp")
    synced = [at for at, event in enumerate(events) if event == ("fsync", temporary, "file")]
    folder = str(Path(path).parent)
    folder_synced = [at for at, event in enumerate(events) if event == ("fsync", folder, "folder") and at > named]
    return synced[-1], named, folder_synced


def test_a_commit_is_durable_in_order(events, tmp_path):
    url = str(tmp_path / "dataset")
    writer = write(url)
    del events[:]
    writer.commit()
    (part,) = oracles.loaded_parts(url)
    manifest = "hsfmt/manifests/p.json"
    bytes_synced, manifest_named, manifest_folder_synced = positions(events, manifest)
    assert bytes_synced < manifest_named
    assert manifest_folder_synced, "the manifest's name is durable when commit() returns"
    assert len(part.manifest.files) == 3 + 3 + 1 + 3 + 3 + 1
    for entry in part.manifest.files:
        file_synced, named, folder_synced = positions(events, entry.path)
        assert file_synced < named < manifest_named, f"{entry.path}: fsync before rename, both before the manifest"
        assert min(folder_synced) < manifest_named, f"{entry.path}: its folder before the manifest"
        for parent in Path(entry.path).parent.parents:
            synced = [at for at, event in enumerate(events) if event == ("fsync", str(parent), "folder")]
            assert any(named < at < manifest_named for at in synced), f"{parent}: holds a folder of {entry.path}"
    after = [event for event in events[manifest_named + 1 :] if event[0] != "fsync"]
    assert after == [], "nothing is named after the manifest"
    assert not [event for event in events[manifest_named + 1 :] if event[2] != "folder"]


def test_the_manifest_is_made_by_link_so_that_none_is_overwritten(events, tmp_path):
    write(str(tmp_path / "dataset")).commit()
    assert [event[0] for event in events if event[-1] == "hsfmt/manifests/p.json"] == ["link"]
    assert [event[0] for event in events if event[-1] == "zarr.json"] == ["link"]


def test_a_seal_names_the_pointer_last(events, tmp_path):
    url = str(tmp_path / "dataset")
    write(url).close()
    del events[:]
    snapshot = seal(url).snapshot
    folder = f"hsfmt/snapshots/{snapshot.fingerprint.rpartition(':')[2]}"
    pointer_synced, pointer_named, pointer_folder = positions(events, "hsfmt/manifest.json")
    ids, index = (positions(events, f"{folder}/{name}.safetensors") for name in ("ids", "index"))
    assert ids[0] < ids[1] < index[0] < index[1] < pointer_synced < pointer_named < max(pointer_folder)
    assert index[1] < min(index[2]) < pointer_named
    # What other hosts committed is made durable here before the snapshot relies on it.
    first = min(ids[0], index[0])
    synced = {event[1] for event in events[:first] if event[0] == "fsync"}
    (part,) = oracles.loaded_parts(url)
    assert {"hsfmt/manifests", *(str(Path(entry.path).parent) for entry in part.manifest.files)} <= synced
    assert [event for event in events[pointer_named + 1 :] if event[0] != "fsync"] == []


def test_sizes_are_checked_between_the_data_and_the_manifest(events, tmp_path, monkeypatch):
    url = str(tmp_path / "dataset")
    writer = write(url)
    real = LocalStore.size

    def recorded(self, path):
        events.append(("size", path, "file"))
        return real(self, path)

    monkeypatch.setattr(LocalStore, "size", recorded)
    del events[:]
    writer.commit()
    monkeypatch.undo()
    (part,) = oracles.loaded_parts(url)
    last_file = max(at for at, event in enumerate(events) if event[0] == "rename")
    manifest = next(at for at, event in enumerate(events) if event[0] == "link")
    checked = [event[1] for event in events[last_file:manifest] if event[0] == "size"]
    assert sorted(checked) == [entry.path for entry in part.manifest.files]


def test_a_sample_is_skipped_as_committed_only_once_its_manifest_is_durable(events, tmp_path):
    """Its writer may have been killed between the name and the sync of its folder."""
    write(tmp_path / "dataset").close()
    events.clear()
    options = {"layers": [1, 2], "hidden_size": 4, "final_norm": "pre", "dtype": "float32", "seal": False}
    with DatasetWriter(tmp_path / "dataset", on_duplicate="skip", **options) as writer:
        assert not writer.write("a", np.arange(9), np.ones((9, 2, 4), np.float32))
    assert ("fsync", "hsfmt/manifests", "folder") in events
