"""Files that appear whole or not at all, and names made of any ids."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsfmt.errors import UsageError
from hsfmt.writers.targets.atomic import is_temporary, remove_temporaries, replacing, writing
from hsfmt.writers.targets.base import Target
from hsfmt.writers.targets.names import MAX_STEM, file_stem, file_stems
from hsfmt.writers.targets.registry import TARGET_NAMES, target_class


def test_a_file_appears_with_its_folders(tmp_path):
    with writing(tmp_path / "a" / "b" / "x.pt") as file:
        file.write(b"data")
        assert not (tmp_path / "a" / "b" / "x.pt").exists()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["x.pt"]
    assert (tmp_path / "a" / "b" / "x.pt").read_bytes() == b"data"


def test_the_umask_decides_who_may_read(tmp_path):
    before = os.umask(0o027)
    try:
        with writing(tmp_path / "x") as file:
            file.write(b"1")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_a_failing_block_leaves_what_was_there(tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(TypeError), writing(tmp_path / "x") as file:
        file.writelines([b"new", None])
    assert (tmp_path / "x").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_block_that_writes_nothing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "x"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_no_pattern_for_data_files_finds_a_temporary_one(tmp_path):
    with replacing(tmp_path / "x.pt") as temporary:
        assert temporary.parent == tmp_path
        assert is_temporary(temporary.name)
        assert temporary.name.startswith(".")
        assert temporary.suffix == ".tmp"
        temporary.write_bytes(b"1")


def test_the_order_is_fsync_rename_fsync_of_the_folder(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, Path.replace

    def logged_fsync(fd):
        calls.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    def logged_replace(self, target):
        calls.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(Path, "replace", logged_replace)
    with writing(tmp_path / "new" / "x") as file:
        file.write(b"1")
    # The first one is for the folder that was found: whoever made it may have been killed before it was durable.
    assert calls == ["folder", "folder", "file", "rename", "folder"]
    calls.clear()
    with writing(tmp_path / "new" / "y") as file:
        file.write(b"1")
    assert calls == ["file", "rename", "folder"], "once a process"


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    (tmp_path / "a").mkdir()
    ours = [tmp_path / ".hsfmt-0123456789abcdef.tmp", tmp_path / "a" / ".hsfmt-fedcba9876543210.tmp"]
    others = [tmp_path / ".other.tmp", tmp_path / "a" / "hsfmt-1.tmp", tmp_path / "x.pt"]
    for path in (*ours, *others):
        path.write_bytes(b"1")
    assert remove_temporaries(tmp_path) == 2
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(others)


HOSTILE = ["../x", "/etc/passwd", "", ".", "..", "a/b", "a\\b", "a\nb", "a\0b", "é", "e\u0301", "x" * 240, "x" * 4096]
HOSTILE += ["-rf", "~", "$HOME", "a b", "%2E", "%", "con", "日本語" * 80, ".hsfmt-0123456789abcdef.tmp", "7"]


def test_hostile_ids_become_names_inside_the_folder(tmp_path):
    stems = file_stems(HOSTILE)
    for stem in stems:
        name = f"{stem}.safetensors"
        assert stem
        assert stem.isascii()
        assert len(stem) <= MAX_STEM
        assert not name.startswith(".")
        assert (tmp_path / name).resolve().parent == tmp_path.resolve()
        (tmp_path / name).write_bytes(b"1")
    assert len(list(tmp_path.iterdir())) == len(HOSTILE)


def test_names_do_not_depend_on_the_other_ids_unless_case_is_all_that_differs():
    assert file_stems(["a", "b"]) == ["a", "b"]
    stems = file_stems(["Sample", "sample", "SAMPLE", "other"])
    assert stems[3] == "other"
    assert len({stem.lower() for stem in stems}) == 4
    assert file_stems(["sample", "Sample"])[0] == stems[1]


def test_an_id_that_looks_like_the_name_of_another():
    taken = file_stems(["a", "A"])
    stems = file_stems(["a", "A", *taken])
    assert len({stem.lower() for stem in stems}) == 4


@given(st.lists(st.text(max_size=300), unique=True, max_size=20))
def test_any_ids_have_names_of_their_own(ids):
    stems = file_stems(ids)
    assert len({stem.lower() for stem in stems}) == len(ids)
    for stem in stems:
        assert 0 < len(stem.encode()) <= MAX_STEM
        assert "/" not in stem
        assert not stem.startswith(".")


def test_a_stem_is_the_id_where_that_is_harmless():
    assert file_stem("chat-7_a.b~c") == "chat-7_a.b~c"


@pytest.mark.parametrize("name", ["safetensors", "npz", "zarr"])
def test_targets_are_found_by_name(name):
    kind = target_class(name)
    assert issubclass(kind, Target)
    assert kind.name == name
    assert kind.summary


def test_an_unknown_target_is_refused_with_the_known_ones():
    with pytest.raises(UsageError) as caught:
        target_class("hdf5")
    assert all(name in str(caught.value) for name in TARGET_NAMES)
