"""What verification advises can be done, and ends in a dataset that is in order."""

import shutil
from datetime import timedelta

import numpy as np
import pytest

from hsfmt import DatasetWriter, seal
from hsfmt.errors import CorruptionError, DuplicateSampleError, NotFoundError
from hsfmt.maintenance.collect import collect
from hsfmt.maintenance.repair import repair
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.verification import verify
from hsfmt.storage.local import LocalStore

SETTINGS = {"layers": [1, 3], "hidden_size": 4, "final_norm": "pre", "dtype": "float32"}
DAMAGED = [
    "parts/one/hidden_states/c/0/0/0",
    "parts/one/hidden_states/zarr.json",
    "hsfmt/index/one.safetensors",
    "hsfmt/manifests/one.json",
]


def write(path, *ids, part, **options):
    with DatasetWriter(path, part_names=lambda: part, **SETTINGS, **options) as writer:
        for sample_id in ids:
            writer.write(sample_id, [1, 2, 3], np.full((3, 2, 4), len(sample_id), np.float32))


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("damage", [flip, lambda path: path.unlink()], ids=["flip", "delete"])
@pytest.mark.parametrize("name", DAMAGED)
def test_repair_and_writing_again_end_in_order(tmp_path, name, damage, alone):
    root = tmp_path / "dataset"
    if not alone:
        write(root, "c", part="other")
    write(root, "a", "bb", part="one")
    damage(root / name)
    advice = {f.remedy for f in verify(root, level="full").errors if f.path == name}
    assert advice
    assert all("`hsfmt repair URL --dry-run`" in text and "remove" not in text for text in advice), advice
    repair(root)
    assert verify(root, level="full").ok
    if lost := sorted({"a", "bb"} - set(served(root))):
        write(root, *lost, part="again")
    report = verify(root, level="full")
    assert report.ok
    assert served(root) == (["a", "bb"] if alone else ["a", "bb", "c"])
    # And with the advice of what is left followed, nothing is left to say.
    assert all("`hsfmt gc" in f.remedy for f in report.problems if f.code != "not_checked")
    collect(root, older_than=timedelta(0), keep_snapshots=1, force=True)
    assert verify(root, level="full").problems == ()


def served(root):
    reader = SampleReader(root)
    return sorted(sample.sample_id for sample in reader.read_many(range(len(reader))))


def test_a_part_can_be_left_out(tmp_path):
    write(tmp_path / "d", "c", part="other")
    write(tmp_path / "d", "a", "bb", part="one")
    (tmp_path / "d/hsfmt/manifests/one.json").unlink()
    with pytest.raises(CorruptionError, match="--drop-missing"):
        seal(tmp_path / "d")
    seal(tmp_path / "d", drop_missing=True)
    assert served(tmp_path / "d") == ["c"]
    report = verify(tmp_path / "d", level="full")
    assert {(f.severity, f.code) for f in report.problems} == {("info", "uncommitted"), ("warning", "old_snapshot")}


def test_a_writer_that_closes_says_what_it_could_not_seal(tmp_path):
    write(tmp_path / "d", "a", part="one")
    (tmp_path / "d/hsfmt/manifests/one.json").unlink()
    with pytest.raises(
        CorruptionError, match=r"1 of its 1 sample\(s\): one — restore .* what is committed stays committed"
    ):
        write(tmp_path / "d", "b", part="two")
    assert (tmp_path / "d/hsfmt/manifests/two.json").exists()
    assert seal(tmp_path / "d", drop_missing=True).snapshot.n_samples == 1


def test_an_id_that_was_retracted_stays_taken(tmp_path):
    write(tmp_path / "d", "a", part="one")
    seal(tmp_path / "d", retract=["a"])
    with pytest.raises(DuplicateSampleError, match="one that was retracted stays taken"):
        write(tmp_path / "d", "a", part="two")


def test_parts_that_only_an_old_snapshot_names_are_a_warning(tmp_path):
    root = tmp_path / "dataset"
    write(root, "a", part="one")
    write(root, "b", part="two")
    (root / "hsfmt/manifests/one.json").unlink()
    for level in ("quick", "full"):
        # Its other files are not called uncommitted, to be removed: with the manifest restored, all is well.
        report = verify(root, level=level)
        assert [(f.code, f.path) for f in report.problems if f.code != "old_snapshot"] == [
            ("missing", "hsfmt/manifests/one.json")
        ]
    current = seal(root, drop_missing=True).snapshot.fingerprint.partition(":")[2]
    report = verify(root, level="complete")
    assert report.ok
    warnings = report.of("warning")
    assert [f.code for f in warnings] == ["old_snapshot"] * 2
    assert {"none of 1: one"} == {f.got for f in warnings}
    for finding in warnings:
        assert current not in finding.path
        shutil.rmtree((root / finding.path).parent)
    assert verify(root, level="complete").of("warning") == ()


def test_a_damaged_old_snapshot_can_be_removed(dataset, add_part):
    (old,) = (dataset / "hsfmt/snapshots").iterdir()
    add_part(dataset, seal=True)
    for name in ("ids", "index"):
        flip(old / f"{name}.safetensors")
        (finding,) = verify(dataset, level="complete").errors
        assert "`hsfmt repair URL --dry-run`" in finding.remedy
    repair(dataset)
    report = verify(dataset, level="complete")
    assert report.ok
    assert not [f for f in report.of("warning") if f.code != "old_snapshot"]


@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_pointer_that_is_not_there_is_a_warning(dataset, level):
    """A first seal that is killed leaves that, and after a kill a dataset is in order; readers refuse it."""
    (dataset / "hsfmt/manifest.json").unlink()
    with pytest.raises(NotFoundError, match="hsfmt seal"):
        SampleReader(dataset)
    report = verify(dataset, level=level)
    (finding,) = report.problems
    assert report.ok
    assert (finding.severity, finding.code, finding.where) == ("warning", "no_pointer", "hsfmt/manifest.json")
    assert "`hsfmt seal`" in finding.remedy
    seal(dataset)
    assert verify(dataset, level=level).problems == ()


def test_a_first_seal_at_work_is_no_error(dataset, monkeypatch):
    """Its snapshot is there a moment before its pointer."""
    pointer = dataset / "hsfmt/manifest.json"
    data = pointer.read_bytes()
    pointer.unlink()
    listed = LocalStore.list

    def then_point(self, prefix):
        names = listed(self, prefix)
        if prefix == "hsfmt/snapshots":
            pointer.write_bytes(data)
        return names

    monkeypatch.setattr(LocalStore, "list", then_point)
    assert verify(dataset, level="full").problems == ()


@pytest.mark.parametrize("name", ["zarr.json", "parts/zarr.json"])
@pytest.mark.parametrize("damage", [flip, lambda path: path.unlink()], ids=["flip", "delete"])
def test_a_writer_puts_the_root_back(dataset, pristine, build_dataset, name, damage):
    damage(dataset / name)
    (finding,) = [f for f in verify(dataset, level="full").errors if f.path == name]
    assert "`hsfmt repair URL`" in finding.remedy
    (dataset / name).unlink(missing_ok=True)
    build_dataset(dataset, n_parts=0)
    assert (dataset / name).read_bytes() == (pristine / name).read_bytes()
    assert verify(dataset, level="full").problems == ()


def test_no_advice_to_retract_without_the_way():
    from hsfmt.readers.verification.report import _DOCUMENT_REMEDIES, REMEDIES

    for text in (*REMEDIES.values(), *_DOCUMENT_REMEDIES.values()):
        assert "retract" not in text or "hsfmt.seal(url, retract=[ids])" in text or "hsfmt retract URL" in text
