"""Where the datasets of a merge lie: in each other, behind links, on other disks; no move removes the only copy."""

import errno
import os
import shutil
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from gc_merge_kills import supersede, write
from repair_cases import contents

from hsfmt import seal
from hsfmt.errors import CorruptionError, NotFoundError, StorageError, UsageError
from hsfmt.maintenance.collect import collect
from hsfmt.maintenance.merge import merge
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store
from hsfmt.storage.local import LocalStore
from hsfmt.storage.remote import RemoteStore

HOWS = ["auto", "link", "copy", "move"]


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def source(tmp_path):
    write(tmp_path / "a", ["x", "y"], "p-a")
    return tmp_path / "a"


def check(url, ids):
    assert [str(each) for each in verify(str(url), level="full").errors] == []
    assert contents(url).keys() == set(ids)


def tree(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("how", HOWS)
def test_a_dataset_is_not_merged_into_itself(tmp_path, source, how):
    (tmp_path / "link").symlink_to(source)
    before = tree(source)
    for other in (source, f"{source}/", tmp_path / "link", source / "parts" / "..", f"file://{source}"):
        with pytest.raises(UsageError, match="beside the destination"):
            merge(source, [other], how=how)
        with pytest.raises(UsageError, match="beside the destination"):
            merge(other, [source], how=how)
    assert tree(source) == before


@pytest.mark.parametrize("how", HOWS)
def test_by_another_url_it_is_the_same_dataset(tmp_path, source, how):
    """As `s3://` and a mount of the same bucket: the paths tell nothing."""
    other = RemoteStore(f"file://{source}", {"auto_mkdir": True})
    before = tree(source)
    for destination, origin in ((source, other), (other, source)):
        with pytest.raises(UsageError, match="by another name"):
            merge(destination, [origin], how=how)
    assert tree(source) == before
    write(f"memory://same-{how}/d", ["x"], "p-a")
    with pytest.raises(UsageError, match="by another name"):
        merge(f"memory://same-{how}/d", [f"memory:///same-{how}/d"], how=how)
    check(f"memory://same-{how}/d", ["x"])


@pytest.mark.parametrize("how", HOWS)
def test_neither_lies_in_the_other(tmp_path, source, how):
    before = tree(source)
    for place in (source / "inner", source / "parts/inner", source / "hsfmt"):
        with pytest.raises(UsageError, match="one inside the other"):
            merge(place, [source], how=how)
    shutil.copytree(source, tmp_path / "outer/inner")
    with pytest.raises(UsageError, match="one inside the other"):
        merge(tmp_path / "outer", [tmp_path / "outer/inner"], how=how)
    assert tree(source) == before
    # A name that begins with the other's is another place.
    merge(tmp_path / "ab", [source], how="copy")
    check(tmp_path / "ab", ["x", "y"])


@pytest.mark.parametrize("how", HOWS)
def test_a_source_that_is_named_twice_counts_once(tmp_path, source, how):
    (tmp_path / "link").symlink_to(source)
    report = merge(tmp_path / "d", [source, source, tmp_path / "link"], how=how)
    assert list(report.parts) == ["p-a"]
    assert report.left == {}
    check(tmp_path / "d", ["x", "y"])


def refuse_links(monkeypatch, code):
    """As between two file systems; within a folder, where a new object gets its name, links work."""
    real = os.link

    def refuse(source, target, **options):
        if Path(source).parent != Path(target).parent:
            raise OSError(code, os.strerror(code), source)
        real(source, target, **options)

    monkeypatch.setattr(os, "link", refuse)


def test_on_another_file_system_a_link_is_refused_and_auto_copies(tmp_path, source, monkeypatch):
    refuse_links(monkeypatch, errno.EXDEV)
    with pytest.raises(UsageError, match="file system of the destination") as error:
        merge(tmp_path / "linked", [source], how="link")
    assert "how='auto'" in error.value.problems[0].remedy
    report = merge(tmp_path / "auto", [source])
    assert (report.linked_nbytes, report.copied_nbytes > 0) == (0, True)
    check(tmp_path / "auto", ["x", "y"])
    report = merge(tmp_path / "moved", [source], how="move")
    assert (report.linked_nbytes, report.left) == (0, {})
    check(tmp_path / "moved", ["x", "y"])
    assert not list(source.iterdir())


def test_between_two_real_file_systems(tmp_path, source):
    """Where the machine has a second one; the test above holds the same anywhere."""
    shm = Path("/dev/shm")
    other = shm if shm.is_dir() and os.access(shm, os.W_OK) else tmp_path
    url = other / f"hsfmt-merge-{os.getpid()}"
    try:
        apart = other.stat().st_dev != tmp_path.stat().st_dev
        if apart:
            with pytest.raises(UsageError, match="file system of the destination"):
                merge(url, [source], how="link")
        report = merge(url, [source], how="move")
        assert bool(report.copied_nbytes) == apart
        check(url, ["x", "y"])
    finally:
        shutil.rmtree(url, ignore_errors=True)


def test_a_file_that_may_not_be_linked_is_copied_or_said(tmp_path, source, monkeypatch):
    for code in (errno.EPERM, errno.EMLINK, errno.ENOTSUP):
        with monkeypatch.context() as patch:
            refuse_links(patch, code)
            report = merge(tmp_path / f"d{code}", [source])
        assert report.linked_nbytes == 0
        check(tmp_path / f"d{code}", ["x", "y"])
    refuse_links(monkeypatch, errno.EIO)
    with pytest.raises(StorageError, match="Input/output error"):
        merge(tmp_path / "broken", [source])


def test_a_move_keeps_a_source_that_the_destination_only_links_to(tmp_path, source):
    """Someone made the destination of symbolic links into the source: emptied, nothing would be left."""
    merge(tmp_path / "d", [source], how="copy")
    shard = "parts/p-a/hidden_states/c/0/0/0"
    (tmp_path / "d" / shard).unlink()
    (tmp_path / "d" / shard).symlink_to(source / shard)
    report = merge(tmp_path / "d", [source], how="move")
    assert report.emptied == ()
    assert "symbolic link into the source" in report.left[str(source)]
    check(source, ["x", "y"])
    check(tmp_path / "d", ["x", "y"])


def test_a_source_of_links_is_moved_and_what_they_lead_to_stays(tmp_path, source):
    """As a hub's download cache has it."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for i, path in enumerate(sorted(path for path in source.rglob("*") if path.is_file())):
        path.rename(blobs / str(i))
        path.symlink_to(blobs / str(i))
    before = tree(blobs)
    report = merge(tmp_path / "d", [source], how="move")
    assert report.left == {}
    assert tree(blobs) == before
    assert not any(path.is_symlink() for path in (tmp_path / "d").rglob("*"))
    shutil.rmtree(blobs)
    check(tmp_path / "d", ["x", "y"])


def test_a_move_leaves_no_folder(tmp_path, source):
    seal(source, attachments={"d2t": np.arange(3)})
    supersede(source, "p-a", "p-b")
    seal(source, drop_attachments=["d2t"])
    # What replaced parts are in the way of is said; a collection makes room.
    collect(source, older_than=timedelta(0), force=True, keep_snapshots=1)
    (source / "parts/hollow/input_ids/c").mkdir(parents=True)
    (source / "hsfmt/snapshots/0123456789abcdef0123456789abcdef").mkdir()
    report = merge(tmp_path / "d", [source], how="move")
    assert report.left == {}
    assert list(source.iterdir()) == []
    check(tmp_path / "d", ["x", "y"])


def test_a_move_leaves_what_other_software_put_there(tmp_path, source):
    (source / "README.md").write_text("mine")
    (source / "parts/p-a/.DS_Store").write_bytes(b"mine")
    report = merge(tmp_path / "d", [source], how="move")
    assert report.left == {}
    assert tree(source) == {"README.md": b"mine", "parts/p-a/.DS_Store": b"mine"}
    assert merge(tmp_path / "d", [source], how="move").left == {}
    check(tmp_path / "d", ["x", "y"])


def test_a_foreign_file_keeps_the_source(tmp_path, source):
    (source / "parts/p-a/notes.txt").write_text("mine")
    before = tree(source)
    report = merge(tmp_path / "d", [source], how="move")
    assert "notes.txt was not carried over" in report.left[str(source)]
    assert tree(source) == before
    check(tmp_path / "d", ["x", "y"])


def test_a_copy_made_by_the_server_is_compared_when_asked(source, monkeypatch):
    """It has the right size, and that is all that a plain merge looks at."""
    merge("memory://served/a", [source], how="copy")
    real = RemoteStore.link

    def rotten(store, origin, path):
        done = real(store, origin, path)
        if path.endswith("hidden_states/c/0/0/0"):
            data = bytearray(store.read(path, 1 << 20))
            data[5] ^= 1
            store.write(path, data)
        return done

    monkeypatch.setattr(RemoteStore, "link", rotten)
    with pytest.raises(CorruptionError, match="memory://served/full: parts/p-a/hidden_states"):
        merge("memory://served/full", ["memory://served/a"], verify="full")
    assert open_store("memory://served/full").list("hsfmt/manifests") == []
    # A move is compared whether asked or not, before anything goes.
    report = merge("memory://served/moved", ["memory://served/a"], how="move")
    assert "damaged in the destination" in report.left["memory://served/a"]
    check("memory://served/a", ["x", "y"])


@pytest.mark.parametrize("what", ["manifest", "index", "snapshot", "pointer", "root"])
def test_of_several_sources_the_damaged_one_is_named(tmp_path, source, what):
    from repair_cases import flip

    write(tmp_path / "b", ["z"], "p-b")
    flip(
        {
            "manifest": tmp_path / "b/hsfmt/manifests/p-b.json",
            "index": tmp_path / "b/hsfmt/index/p-b.safetensors",
            "snapshot": next((tmp_path / "b/hsfmt/snapshots").glob("*/index.safetensors")),
            "pointer": tmp_path / "b/hsfmt/manifest.json",
            "root": tmp_path / "b/zarr.json",
        }[what]
    )
    before = tree(tmp_path)
    with pytest.raises((CorruptionError, ValueError)) as error:
        merge(tmp_path / "d", [source, tmp_path / "b"], how="move")
    assert str(error.value).startswith(f"{tmp_path / 'b'}: ")
    assert tree(tmp_path) == before


def test_a_missing_or_short_file_of_a_source_is_found_before_anything_is_written(tmp_path, source):
    shard = source / "parts/p-a/hidden_states/c/0/0/0"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with pytest.raises(CorruptionError, match="hidden_states"):
        merge(tmp_path / "d", [source])
    shard.unlink()
    with pytest.raises(NotFoundError, match="hsfmt repair"):
        merge(tmp_path / "d", [source])
    assert not (tmp_path / "d").exists()


def test_is_same_is_a_second_name_and_not_the_same_one(tmp_path):
    a, b = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    for name in ("linked", "copied", "led"):
        a.write(name, b"x")
    assert b.link(a, "linked")
    b.write("copied", b"x")
    (tmp_path / "b/led").symlink_to(tmp_path / "a/led")
    assert [b.is_same(a, name) for name in ("linked", "copied", "led")] == [True, False, False]
    assert not a.is_same(LocalStore(tmp_path / "a"), "copied")
