"""Files deleted, emptied, cut, grown, swapped, duplicated, stale, copied or foreign: each is found and named."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from hsfmt import DatasetWriter, HiddenStateDataset, seal
from hsfmt.digests import digest
from hsfmt.errors import HsfmtError, StorageError
from hsfmt.maintenance.repair import repair
from hsfmt.readers.verification import LEVELS, verify
from hsfmt.storage.local import LocalStore


def delete(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def grow_by_a_space(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def fill_with_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


ENDS = [cut, grow, grow_by_a_space]
DAMAGES = [delete, empty, cut, grow, grow_by_a_space, make_a_folder, fill_with_zeros]


@pytest.fixture(scope="module")
def originals(pristine):
    return {item["sample_id"]: item for item in HiddenStateDataset(pristine)}


def read_or_refuse(root: Path, originals: dict) -> bool:
    """Say whether all could be read, after comparing it; what is not readable must raise an error of ours."""
    try:
        items = list(HiddenStateDataset(root))
    except HsfmtError:
        return False
    assert {item["sample_id"] for item in items} == set(originals)
    for item in items:
        wanted = originals[item["sample_id"]]
        assert all(torch.equal(item[key], wanted[key]) for key in ("hidden_states", "input_ids", "loss_mask"))
    return True


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_damaged_in_turn(pristine, dataset, files, damage, originals):
    """A third of the files for each damage; every file meets two of them or more."""
    chosen = files(pristine)[DAMAGES.index(damage) % 3 :: 3]
    assert len(chosen) > 12
    check_damage(pristine, dataset, chosen, damage, originals)


@pytest.mark.deep
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_file_damaged_in_turn(pristine, dataset, files, damage, originals):
    check_damage(pristine, dataset, files(pristine), damage, originals)


def check_damage(pristine, dataset, names, damage, originals):
    for name in names:
        path = dataset / name
        damage(path)
        report = verify(dataset, level="full")
        named = [finding for finding in report.problems if finding.path == name]
        assert named, name
        assert all(finding.remedy and finding.expected and finding.got for finding in named)
        # A first seal that is killed leaves no pointer either; readers refuse the dataset.
        lost_pointer = name == "hsfmt/manifest.json" and damage is delete
        assert report.ok == lost_pointer
        assert ("warning" if lost_pointer else "error") in {finding.severity for finding in named}
        if "/c/" in name:
            assert any(finding.samples for finding in named), name
        if name.startswith(("hsfmt/manifests/", "hsfmt/index/")):
            part = Path(name).stem
            assert {f"s{part[-1]}-{i}" for i in range(3)} in [set(finding.samples) for finding in named], name
        readable = read_or_refuse(dataset, originals)
        if damage not in ENDS or "/c/" not in name:  # the chunks before a damaged end are as they were
            assert readable == unread(name), name
        restore(pristine / name, path)
    assert verify(dataset, level="full").problems == ()


def unread(name: str) -> bool:
    """Say whether plain items need nothing of this file: Zarr's metadata, the ids file, columns not asked for."""
    columns = any(f"/{column}/c/" in name for column in ("weight", "score", "topk"))
    return columns or name.endswith(("zarr.json", "/ids.safetensors"))


def restore(source: Path, path: Path) -> None:
    if path.is_dir():
        path.rmdir()
    shutil.copy(source, path)


@pytest.mark.parametrize("damage", [delete, empty, cut, grow])
def test_sizes_are_seen_at_tier_quick(dataset, damage):
    damage(dataset / "parts/part-1/hidden_states/c/1/0/0")
    damage(dataset / "parts/part-0/score/c/0")
    report = verify(dataset, level="quick")
    assert {finding.path for finding in report.errors} == {
        "parts/part-0/score/c/0",
        "parts/part-1/hidden_states/c/1/0/0",
    }


def swap(left: Path, right: Path) -> None:
    first, second = left.read_bytes(), right.read_bytes()
    assert first != second
    left.write_bytes(second)
    right.write_bytes(first)


SWAPS = [
    ("parts/part-0/hidden_states/c/0/0/0", "parts/part-0/hidden_states/c/1/0/0"),
    ("parts/part-0/hidden_states/c/0/0/0", "parts/part-1/hidden_states/c/0/0/0"),
    ("parts/part-0/input_ids/c/0", "parts/part-1/input_ids/c/0"),
    ("parts/part-0/hidden_states/zarr.json", "parts/part-1/input_ids/zarr.json"),
    ("hsfmt/index/part-0.safetensors", "hsfmt/index/part-1.safetensors"),
    ("hsfmt/manifests/part-0.json", "hsfmt/manifests/part-1.json"),
]


@pytest.mark.parametrize(("left", "right"), SWAPS)
def test_swapped_files_are_both_named(dataset, originals, left, right):
    swap(dataset / left, dataset / right)
    report = verify(dataset, level="full")
    assert {finding.path for finding in report.errors} == {left, right}
    assert read_or_refuse(dataset, originals) == left.endswith("zarr.json")


@pytest.mark.parametrize(("source", "target"), SWAPS)
def test_a_file_copied_over_another_is_named(dataset, originals, source, target):
    shutil.copy(dataset / source, dataset / target)
    report = verify(dataset, level="full")
    assert {finding.path for finding in report.errors} == {target}
    assert read_or_refuse(dataset, originals) == target.endswith("zarr.json")


def test_part_folders_swapped(dataset, originals):
    parts = dataset / "parts"
    (parts / "part-0").rename(parts / "x")
    (parts / "part-1").rename(parts / "part-0")
    (parts / "x").rename(parts / "part-1")
    report = verify(dataset, level="full")
    assert {Path(f.path).parts[1] for f in report.errors} == {"part-0", "part-1"}
    assert not read_or_refuse(dataset, originals)


def test_a_part_copied_under_another_name_is_refused_by_its_own(dataset, originals):
    shutil.copytree(dataset / "parts/part-0", dataset / "parts/copy")
    shutil.copy(dataset / "hsfmt/index/part-0.safetensors", dataset / "hsfmt/index/copy.safetensors")
    shutil.copy(dataset / "hsfmt/manifests/part-0.json", dataset / "hsfmt/manifests/copy.json")
    for level in ("quick", "complete", "full"):
        (finding,) = verify(dataset, level=level).problems
        assert (finding.severity, finding.path) == ("error", "hsfmt/manifests/copy.json")
        assert "part-0" in finding.got
        assert "copied" in finding.remedy
    assert read_or_refuse(dataset, originals)
    with pytest.raises(HsfmtError):
        seal(dataset)


def test_a_part_folder_copied_alone_is_uncommitted(dataset, originals):
    shutil.copytree(dataset / "parts/part-0", dataset / "parts/copy")
    (finding,) = verify(dataset, level="full").problems
    assert (finding.severity, finding.code, finding.where) == ("info", "uncommitted", "parts/copy")
    assert read_or_refuse(dataset, originals)


def test_a_part_renamed_is_missing_and_refused(dataset):
    (dataset / "parts/part-0").rename(dataset / "parts/renamed")
    (dataset / "hsfmt/index/part-0.safetensors").rename(dataset / "hsfmt/index/renamed.safetensors")
    (dataset / "hsfmt/manifests/part-0.json").rename(dataset / "hsfmt/manifests/renamed.json")
    report = verify(dataset, level="full")
    assert {(f.code, f.path) for f in report.errors} == {
        ("missing", "hsfmt/manifests/part-0.json"),
        ("corrupt", "hsfmt/manifests/renamed.json"),
    }
    assert report.errors[0].samples == ("s0-0", "s0-1", "s0-2")


STRANGERS = {
    "notes.txt": "notes.txt",
    "backup/a/b.bin": "backup",
    "parts/part-0/hidden_states/c/9/0/0": "parts/part-0/hidden_states/c/9/0/0",
    "parts/part-0/other/zarr.json": "parts/part-0/other/zarr.json",
    "parts/stray": "parts/stray",
    "parts/Not A Part/zarr.json": "parts/Not A Part/zarr.json",
    "hsfmt/other.json": "hsfmt/other.json",
    "hsfmt/manifests/part-0.json.bak": "hsfmt/manifests/part-0.json.bak",
    "hsfmt/index/part-0.npz": "hsfmt/index/part-0.npz",
    "hsfmt/snapshots/latest": "hsfmt/snapshots/latest",
    "hsfmt/attachments/readme": "hsfmt/attachments/readme",
}


@pytest.mark.parametrize("name", STRANGERS)
def test_foreign_files_are_unexpected(dataset, name):
    path = dataset / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    for level in ("complete", "full"):
        (finding,) = verify(dataset, level=level).problems
        assert (finding.severity, finding.code, finding.where) == ("error", "unexpected", STRANGERS[name])
        assert finding.remedy
    assert verify(dataset, level="quick").ok


@pytest.mark.parametrize("name", [b"bad\xff\xfe", b"two\nlines", b"\x1b[31mred"])
def test_foreign_files_of_any_name_can_be_printed(dataset, name):
    (Path(os.fsdecode(os.fsencode(dataset) + b"/parts/" + name))).write_bytes(b"x")
    (finding,) = verify(dataset, level="complete").errors
    assert finding.code == "unexpected"
    assert str(finding).isprintable()
    str(finding).encode()


def test_a_folder_that_can_not_be_listed(dataset, monkeypatch):
    walk = LocalStore.walk

    def broken(self, prefix):
        for path, nbytes in walk(self, prefix):
            if path.startswith("parts/part-0"):
                raise StorageError.at("parts/part-0", expected="the storage to work", got="Permission denied")
            yield path, nbytes

    monkeypatch.setattr(LocalStore, "walk", broken)
    cut(dataset / "parts/part-1/loss_mask/c/0")
    for level in ("quick", "full"):
        assert {(f.code, f.path) for f in verify(dataset, level=level).errors} >= {
            ("unreadable", "parts/part-0"),
            ("size", "parts/part-1/loss_mask/c/0"),
        }


def test_an_attachment_that_no_snapshot_names(dataset):
    data = b"\x93NUMPY"
    path = dataset / "hsfmt/attachments" / digest(data).partition(":")[2] / "d2t.npy"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    (finding,) = verify(dataset, level="complete").problems
    assert (finding.severity, finding.code) == ("info", "uncommitted")
    path.write_bytes(b"\x93NUMPX")
    (finding,) = verify(dataset, level="complete").errors
    assert (finding.code, finding.path) == ("attachment", path.relative_to(dataset).as_posix())


@pytest.mark.parametrize("damage", [delete, cut, fill_with_zeros])
@pytest.mark.parametrize("name", ["hsfmt/manifest.json", "ids.safetensors", "index.safetensors"])
def test_the_remedy_for_a_pointer_or_snapshot_helps(dataset, name, damage):
    (path,) = dataset.rglob(name)
    damage(path)
    (finding,) = [f for f in verify(dataset).problems if f.path == path.relative_to(dataset).as_posix()]
    if finding.code == "no_pointer":
        assert "hsfmt seal" in finding.remedy
        seal(dataset)
    else:
        assert "`hsfmt repair URL --dry-run`" in finding.remedy
        repair(dataset)
    report = verify(dataset, level="full")
    assert report.ok
    assert {f.code for f in report.problems} <= {"quarantined"}


def test_everything_wrong_is_reported_at_once(dataset):
    damaged = {
        "parts/part-0/hidden_states/c/0/0/0": cut,
        "parts/part-0/input_ids/c/1": fill_with_zeros,
        "parts/part-0/weight/zarr.json": grow_by_a_space,
        "parts/part-1/loss_mask/c/0": delete,
        "parts/part-1/zarr.json": empty,
        "parts/zarr.json": delete,
        "stray.bin": lambda path: path.write_bytes(b"x"),
    }
    for name, damage in damaged.items():
        damage(dataset / name)
    report = verify(dataset, level="full")
    assert {finding.path for finding in report.errors} == set(damaged)


def test_a_broken_manifest_hides_nothing_of_other_parts(dataset):
    fill_with_zeros(dataset / "hsfmt/manifests/part-0.json")
    cut(dataset / "parts/part-1/hidden_states/c/0/0/0")
    report = verify(dataset, level="full")
    assert {f.path for f in report.errors} == {
        "hsfmt/manifests/part-0.json",
        "parts/part-1/hidden_states/c/0/0/0",
    }


def test_a_broken_index_hides_nothing_of_its_part(dataset):
    fill_with_zeros(dataset / "hsfmt/index/part-0.safetensors")
    fill_with_zeros(dataset / "parts/part-0/hidden_states/c/0/0/0")
    report = verify(dataset, level="full")
    assert {(f.code, f.path) for f in report.errors} == {
        ("corrupt", "hsfmt/index/part-0.safetensors"),
        ("digest", "parts/part-0/hidden_states/c/0/0/0"),
    }
    assert [(f.severity, f.code) for f in report.problems if f.severity != "error"] == [("info", "not_checked")]


def test_an_older_snapshot_is_checked_too(dataset, add_part):
    (old,) = (dataset / "hsfmt/snapshots").iterdir()
    add_part(dataset, seal=True)
    assert verify(dataset, level="full").problems == ()
    fill_with_zeros(old / "ids.safetensors")
    report = verify(dataset, level="complete")
    assert [f.path for f in report.errors] == [f"hsfmt/snapshots/{old.name}/ids.safetensors"]
    assert verify(dataset, level="quick").ok
    (old / "index.safetensors").unlink()
    report = verify(dataset, level="complete")
    assert [(f.severity, f.code) for f in report.problems] == [("warning", "incomplete_snapshot")]


def test_a_stale_manifest_and_index_are_not_what_the_snapshot_names(dataset, tmp_path, build_dataset, originals):
    former = build_dataset(tmp_path / "former", n_parts=1, first_seed=1)
    for name in ("hsfmt/manifests/part-0.json", "hsfmt/index/part-0.safetensors"):
        shutil.copy(former / name, dataset / name)
    report = verify(dataset, level="full")
    assert ("snapshot_part", "hsfmt/manifests/part-0.json") in {(f.code, f.path) for f in report.errors}
    assert not read_or_refuse(dataset, originals)


def test_a_whole_part_replaced_by_a_former_one_is_not_what_the_snapshot_names(
    dataset, tmp_path, build_dataset, originals
):
    former = build_dataset(tmp_path / "former", n_parts=1, first_seed=1)
    shutil.rmtree(dataset / "parts/part-0")
    shutil.copytree(former / "parts/part-0", dataset / "parts/part-0")
    for name in ("hsfmt/manifests/part-0.json", "hsfmt/index/part-0.safetensors"):
        shutil.copy(former / name, dataset / name)
    for level in ("quick", "full"):
        report = verify(dataset, level=level)
        assert {(f.code, f.path) for f in report.errors} == {("snapshot_part", "hsfmt/manifests/part-0.json")}
    assert not read_or_refuse(dataset, originals)


def test_a_stale_index_alone_is_not_what_the_manifest_names(dataset, tmp_path, build_dataset, originals):
    former = build_dataset(tmp_path / "former", n_parts=1, first_seed=1)
    name = "hsfmt/index/part-0.safetensors"
    shutil.copy(former / name, dataset / name)
    assert {f.path for f in verify(dataset, level="full").errors} == {name}
    assert not read_or_refuse(dataset, originals)


def test_a_part_of_another_meaning_is_refused_by_name(dataset, tmp_path, build_dataset):
    other = build_dataset(tmp_path / "other", n_parts=1, prefix="foreign", model="another")
    for path in other.rglob("*foreign-0*/**/*"):
        if path.is_file():
            target = dataset / path.relative_to(other)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    for name in ("hsfmt/manifests/foreign-0.json", "hsfmt/index/foreign-0.safetensors"):
        shutil.copy(other / name, dataset / name)
    (finding,) = verify(dataset, level="full").errors
    assert (finding.code, finding.path) == ("header", "hsfmt/manifests/foreign-0.json")
    assert "another" in finding.got


def test_a_root_of_another_meaning_is_blamed_itself(dataset, tmp_path, build_dataset):
    other = build_dataset(tmp_path / "other", n_parts=1, model="another")
    shutil.copy(other / "zarr.json", dataset / "zarr.json")
    (finding,) = verify(dataset, level="quick").errors
    assert (finding.code, finding.path) == ("header", "zarr.json")


def test_links_that_lead_nowhere_or_out_are_findings(dataset):
    path = dataset / "parts/part-0/weight/c/0"
    path.unlink()
    path.symlink_to("/nowhere/at/all")
    report = verify(dataset, level="full")
    assert {f.path for f in report.errors} == {"parts/part-0/weight/c/0"}
    shutil.rmtree(dataset / "parts/part-1")
    (dataset / "parts/part-1").symlink_to("/usr")
    report = verify(dataset, level="full")
    assert {f.path.split("/")[1] for f in report.errors} >= {"part-0", "part-1"}


def test_a_lost_manifest_of_a_part_of_holes_is_a_finding(tmp_path):
    root = tmp_path / "dataset"
    settings = {"layers": [1], "hidden_size": 4, "final_norm": "pre", "dtype": "float32"}
    with DatasetWriter(root, part_names=iter(["one", "two"]).__next__, **settings) as writer:
        writer.write("a", [1], np.ones((1, 1, 4), np.float32))
        writer.commit()
        writer.hole("b", "failed")
    (root / "hsfmt/manifests/two.json").unlink()
    for level in LEVELS:
        assert ("error", "hsfmt/manifests/two.json") in {
            (f.severity, f.path) for f in verify(root, level=level).problems
        }
