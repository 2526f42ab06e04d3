"""What `gc` finds and does not know: files of the user's own, links, places that are not what they seem."""

import os
import shutil
from datetime import timedelta

import numpy as np
import pytest
from gc_merge_kills import supersede, write
from repair_cases import contents

from hsfmt import seal
from hsfmt.catalog import committed_parts
from hsfmt.errors import FormatError
from hsfmt.maintenance.collect import collect
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store

NOW = {"older_than": timedelta(0), "force": True, "keep_snapshots": 1}


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def url(tmp_path):
    """A dataset of which a collection removes a part, an attachment and an old snapshot."""
    url = tmp_path / "d"
    write(url, ["a", "b"], "p-one", seal=False)
    seal(url, attachments={"d2t": np.arange(3)})
    supersede(url, "p-one", "p-two")
    seal(url, drop_attachments=["d2t"])
    return url


def all_files(url):
    return {path: path.read_bytes() for path in url.rglob("*") if path.is_file()}


FOREIGN = ["mine.txt", "x.tmp", "0.bak", "zarr.json.orig", "notes.0123456789abcdef.tmp", "c.0", "00", "INDEX.JSON", "ü"]


def test_files_of_the_users_own_stay_wherever_they_lie(url):
    folders = [url, *(path for path in url.rglob("*") if path.is_dir())]
    mine = {folder / name for folder in folders for name in FOREIGN}
    # In a shard's folder this is a name that a shard could have.
    mine -= {path for path in mine if path.name == "00" and "c" in path.relative_to(url).parts[3:]}
    for path in mine:
        path.write_bytes(b"mine")
    report = collect(url, **NOW)
    assert len(mine) > 100
    assert {path for path in mine if not path.exists() or path.read_bytes() != b"mine"} == set()
    assert {url / path for path in report.strays} == mine
    assert committed_parts(open_store(url)) == ["p-two"]
    assert contents(url).keys() == {"a", "b"}


def test_a_foreign_part_folder_stays(url):
    """One that is a Zarr group of another program, though its name could be a part's."""
    (url / "parts/mine/weights/c/0").mkdir(parents=True)
    files = {"zarr.json": b'{"node_type":"group","zarr_format":3}', "weights/zarr.json": b"{}", "weights/c/0/0": b"1"}
    for name, data in files.items():
        (url / "parts/mine" / name).write_bytes(data)
    report = collect(url, **NOW)
    assert {name: (url / "parts/mine" / name).read_bytes() for name in files} == files
    assert set(report.strays) == {f"parts/mine/{name}" for name in files}


def test_a_link_goes_and_what_it_leads_to_stays(url, tmp_path):
    """Of a download cache: the files of the dataset are links to blobs elsewhere."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for i, path in enumerate(sorted(all_files(url))):
        path.rename(blobs / str(i))
        path.symlink_to(blobs / str(i))
    before = all_files(blobs)
    collect(url, **NOW)
    assert all_files(blobs) == before
    assert committed_parts(open_store(url)) == ["p-two"]
    assert verify(str(url), level="full").errors == ()
    assert contents(url).keys() == {"a", "b"}


def test_folders_that_are_links_are_not_followed(url, tmp_path):
    outside = tmp_path / "outside"
    (outside / "input_ids/c").mkdir(parents=True)
    (outside / "input_ids/c/0").write_bytes(b"mine")
    (url / "parts/linked").symlink_to(outside)
    (url / "parts/p-two/extra").symlink_to(outside)
    (url / "hsfmt/snapshots/0123456789abcdef0123456789abcdef").symlink_to(outside)
    (url / "loop").symlink_to(url)
    before = all_files(outside)
    with pytest.raises(FormatError, match="symbolic link that leads out"):
        collect(url, **NOW)
    (url / "hsfmt/snapshots/0123456789abcdef0123456789abcdef").unlink()
    report = collect(url, **NOW)
    assert all_files(outside) == before
    assert set(report.strays) == {"loop", "parts/linked", "parts/p-two/extra"}
    assert committed_parts(open_store(url)) == ["p-two"]


def test_a_root_that_is_a_link_is_collected_as_what_it_leads_to(url, tmp_path):
    (tmp_path / "link").symlink_to(url)
    (url / "parts/dead").mkdir()
    (url / "parts/dead/zarr.json.0123456789abcdef.tmp").write_bytes(b"x")
    report = collect(tmp_path / "link", **NOW)
    assert {group.part for group in report.removed} == {"p-one", "dead", None}
    assert (tmp_path / "link").is_symlink()
    assert verify(str(url), level="full").errors == ()
    assert contents(tmp_path / "link").keys() == {"a", "b"}


def test_a_part_that_was_moved_elsewhere_stays_there(url, tmp_path):
    """Who has put a part's folder on another disk is told to put it back; nothing of it is removed."""
    (url / "parts/p-one").rename(tmp_path / "elsewhere")
    (url / "parts/p-one").symlink_to(tmp_path / "elsewhere")
    before = all_files(tmp_path / "elsewhere")
    collect(url, **NOW)
    assert all_files(tmp_path / "elsewhere") == before
    assert contents(url).keys() == {"a", "b"}
    # The part that counts: what it replaces is not given up for it.
    shutil.copytree(url, tmp_path / "again", symlinks=True)


def test_unknown_files_in_quarantine_are_of_the_repair(url):
    """The folder is documented to hold what can go."""
    (url / "hsfmt/quarantine").mkdir()
    (url / "hsfmt/quarantine/mine.txt").write_bytes(b"x")
    report = collect(url, older_than=timedelta(days=7))
    assert [group.why for group in report.young if group.files[0][0].endswith("mine.txt")] == ["set aside by repair"]
    collect(url, **NOW)
    assert not (url / "hsfmt/quarantine/mine.txt").exists()
