"""`merge` resurrects nothing, drops nothing silently, and a move never removes the last good copy."""

import os
import shutil

import ml_dtypes
import numpy as np
import pytest
from gc_merge_kills import supersede
from repair_cases import contents, flip

from hsfmt import DatasetWriter, seal
from hsfmt.catalog import committed_parts
from hsfmt.errors import CorruptionError, NotFoundError, UsageError
from hsfmt.maintenance.merge import merge
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store
from hsfmt.storage.local import LocalStore


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def write(url, ids, part, *, value=1, meta=None, **settings):
    with DatasetWriter(
        url, layers=[1, 2], hidden_size=8, final_norm="pre", codec="none", part_names=lambda: part, **settings
    ) as writer:
        for sample_id in ids:
            writer.write(sample_id, np.arange(3), np.full((3, 2, 8), value, ml_dtypes.bfloat16), metadata=meta)


def check(url):
    assert [str(each) for each in verify(str(url), level="full").errors] == []


@pytest.fixture
def chain(tmp_path):
    """A dataset as it was, and as it is after a part was replaced twice."""
    write(tmp_path / "now", ["a", "b"], "p-one")
    seal(tmp_path / "now")
    shutil.copytree(tmp_path / "now", tmp_path / "before")
    supersede(tmp_path / "now", "p-one", "p-two")
    supersede(tmp_path / "now", "p-two", "p-three")
    seal(tmp_path / "now")
    return tmp_path


@pytest.mark.parametrize("order", ["now before", "before now"])
def test_what_was_replaced_twice_is_not_served_again(chain, order):
    for name in order.split():
        merge(chain / "d", [chain / name])
        check(chain / "d")
    assert [ref.name for ref in seal(chain / "d").snapshot.parts] == ["p-three"]
    assert (
        merge(chain / "d", [chain / "now", chain / "before"]).fingerprint
        == merge(chain / "e", [chain / "before", chain / "now"]).fingerprint
    )


def test_a_damaged_part_that_is_the_only_link_is_refused(chain):
    merge(chain / "d", [chain / "before"])
    (chain / "now/hsfmt/index/p-two.safetensors").unlink()
    with pytest.raises(CorruptionError, match="only it says that p-one is replaced"):
        merge(chain / "d", [chain / "now"])
    assert committed_parts(open_store(chain / "d")) == ["p-one"]
    # Where nothing it replaces is there, nothing is lost without it.
    merge(chain / "new", [chain / "now"])
    assert committed_parts(open_store(chain / "new")) == ["p-three"]


def test_other_metadata_is_another_content(tmp_path):
    write(tmp_path / "a", ["x", "y"], "p-a", meta={"split": "train"})
    write(tmp_path / "b", ["x"], "p-b", meta={"split": "test"})
    with pytest.raises(UsageError, match="metadata and extra columns"):
        merge(tmp_path / "d", [tmp_path / "a", tmp_path / "b"])
    report = merge(tmp_path / "d", [tmp_path / "a", tmp_path / "b"], on_duplicate="first")
    assert (report.same, report.conflicts) == (0, (("x", "p-a", "p-b"),))


def test_attachments_of_other_writers_merge_again_and_again(tmp_path):
    """A file in Fortran order has another digest than the one that a seal makes of its values."""
    from hsfmt import attachments, digests
    from hsfmt.catalog import read_header

    values = np.asfortranarray(np.arange(6).reshape(2, 3))
    write(tmp_path / "a", ["x"], "p-a")
    np.save(tmp_path / "d2t.npy", values)
    data = (tmp_path / "d2t.npy").read_bytes()
    entry = {"digest": digests.digest(data), "name": "d2t.npy", "nbytes": len(data)}
    assert entry != attachments.encode("d2t", values)[0]
    store = open_store(tmp_path / "a")
    store.write(attachments.entry_path(entry, "here"), data)
    _seal_with(store, read_header(store), entry)
    first = merge(tmp_path / "d", [tmp_path / "a"])
    again = merge(tmp_path / "d", [tmp_path / "a"])
    assert first.fingerprint == again.fingerprint
    assert first.attachments == ("d2t",)
    check(tmp_path / "d")
    write(tmp_path / "b", ["z"], "p-b")
    seal(tmp_path / "b", attachments={"d2t": values + 1})
    with pytest.raises(UsageError, match="attachment d2t"):
        merge(tmp_path / "d", [tmp_path / "b"])


def _seal_with(store, header, entry):
    from hsfmt import layout
    from hsfmt.catalog import committed_parts, load_part
    from hsfmt.pointer import make_pointer
    from hsfmt.snapshot import parse_snapshot
    from hsfmt.snapshot_builder import build_snapshot

    parts = [load_part(store, name, header) for name in committed_parts(store)]
    index, ids = build_snapshot(parts, header, (), [entry])
    snapshot = parse_snapshot(index, "snapshot")
    for file, data in (("ids", ids), ("index", index)):
        store.write(layout.snapshot_path(snapshot.fingerprint, file), data)
    store.replace(layout.POINTER, make_pointer(snapshot, len(index), "2026-11-30T00:00:00+00:00").to_bytes())


def test_a_move_keeps_the_good_copy_of_a_file_that_rotted_in_the_destination(tmp_path):
    write(tmp_path / "a", ["x", "y"], "p-a")
    want = contents(tmp_path / "a")
    merge(tmp_path / "d", [tmp_path / "a"], how="copy")
    flip(tmp_path / "d/parts/p-a/hidden_states/c/0/0/0")
    report = merge(tmp_path / "d", [tmp_path / "a"], how="move")
    assert report.emptied == ()
    assert "damaged in the destination" in report.left[str(tmp_path / "a")]
    check(tmp_path / "a")
    assert contents(tmp_path / "a") == want


def test_a_finished_move_can_be_run_again(tmp_path):
    write(tmp_path / "a", ["x"], "p-a")
    write(tmp_path / "b", ["y"], "p-b")
    sources = [tmp_path / "a", tmp_path / "b"]
    first = merge(tmp_path / "d", sources, how="move")
    assert first.emptied == tuple(map(str, sources))
    assert not any(path for source in sources for path in source.iterdir())
    assert merge(tmp_path / "d", sources, how="move").fingerprint == first.fingerprint
    with pytest.raises(NotFoundError):
        merge(tmp_path / "d", [tmp_path / "typo"], how="move")
    with pytest.raises(NotFoundError):
        merge(tmp_path / "d", sources, how="link")


def test_a_source_that_was_never_sealed_is_moved_too(tmp_path):
    write(tmp_path / "a", ["x"], "p-a", seal=False)
    report = merge(tmp_path / "d", [tmp_path / "a"], how="move")
    assert (report.left, list((tmp_path / "a").iterdir())) == ({}, [])
    assert contents(tmp_path / "d").keys() == {"x"}


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.deep)])
def test_a_remote_move_can_be_killed_at_every_removal(monkeypatch, step):
    from hsfmt.storage.remote import RemoteStore

    class Killed(BaseException):
        pass

    real, n_killed = RemoteStore.remove, 0
    for k in range(1, 100, step):
        url, left = f"memory://move-{step}-{k}", k
        write(f"{url}/a", ["x"], "p-a")
        seal(f"{url}/a", attachments={"d2t": np.arange(3)})

        def remove(store, path):
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            real(store, path)

        with monkeypatch.context() as patch:
            patch.setattr(RemoteStore, "remove", remove)
            try:
                merge(f"{url}/d", [f"{url}/a"], how="move")
            except Killed:
                n_killed += 1
            else:
                break
        store = open_store(f"{url}/a")
        if store.size("zarr.json") is not None:
            check(f"{url}/a")
        report = merge(f"{url}/d", [f"{url}/a"], how="move")
        assert (report.left, report.emptied) == ({}, (f"{url}/a",))
        assert list(store.walk("")) == []
        check(f"{url}/d")
        assert contents(f"{url}/d").keys() == {"x"}
    assert n_killed >= 15 // step


def test_too_little_space_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    write(tmp_path / "a", ["x"], "p-a")
    monkeypatch.setattr(LocalStore, "free_nbytes", lambda store: 1000)
    with pytest.raises(UsageError, match="free space"):
        merge(tmp_path / "d", [tmp_path / "a"], how="copy")
    assert not (tmp_path / "d").exists()
    assert merge(tmp_path / "d", [tmp_path / "a"], how="link").copied_nbytes == 0


def test_no_seal_leaves_the_pointer_and_move_needs_one(tmp_path):
    write(tmp_path / "a", ["x"], "p-a")
    report = merge(tmp_path / "d", [tmp_path / "a"], seal=False)
    assert report.fingerprint is None
    assert not (tmp_path / "d/hsfmt/manifest.json").exists()
    with pytest.raises(UsageError, match="no-seal"):
        merge(tmp_path / "d", [tmp_path / "a"], how="move", seal=False)
    check(tmp_path / "a")
