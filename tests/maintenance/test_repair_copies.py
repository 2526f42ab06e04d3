"""What other parts say of a broken one: copies are not lost, corrections stay, and no other content takes a place."""

import shutil

import pytest
from repair_cases import build, contents, edit_manifest, flip, join, unsealed, without_fsync

from hsfmt import compact, repair, seal
from hsfmt.catalog import committed_parts
from hsfmt.errors import UsageError
from hsfmt.maintenance.rewriting import derived_name
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store

STATES = "parts/part-0/hidden_states/c/0/0/0"
INDEX = "hsfmt/index/part-0.safetensors"
MANIFEST = "hsfmt/manifests/part-0.json"


@pytest.fixture
def dataset(tmp_path):
    with without_fsync():
        yield build(tmp_path / "dataset")


def sound(root):
    return verify(root, level="full").ok and not repair(root).changed


@pytest.mark.parametrize("damage", [STATES, MANIFEST])
def test_a_sample_of_which_a_copy_is_whole_is_not_lost(dataset, tmp_path, damage):
    join(dataset, build(tmp_path / "again", prefix="zz"))
    seal(dataset)
    before = contents(dataset)
    flip(dataset / STATES)
    flip(dataset / damage) if damage != STATES else None
    report = repair(dataset)
    assert (report.ok, report.lost, report.n_saved) == (True, (), 3)
    assert contents(dataset) == before
    assert sound(dataset)


def test_a_copy_that_is_damaged_or_differs_saves_nothing(dataset, tmp_path):
    join(dataset, build(tmp_path / "again", prefix="yy"))
    join(dataset, build(tmp_path / "differs", prefix="zz", first_seed=50))
    seal(dataset)
    before = contents(dataset)
    flip(dataset / STATES)
    flip(dataset / STATES.replace("part-0", "yy-0"))
    report = repair(dataset)
    assert report.lost == ("s0-1", "s0-2")
    reasons = {key: reason for fate in report.parts for key, reason in fate.lost.items()}
    assert all("other content, served from now on" in reason for reason in reasons.values())
    found = contents(dataset)
    assert {key for key in before if found[key] != before[key]} == set(report.lost)
    assert sound(dataset)


@pytest.mark.parametrize("damage", ["index", "states", "manifest"])
def test_what_a_compaction_replaced_saves_it(dataset, damage):
    seal(dataset, retract=["s1-1"])
    before = contents(dataset)
    (new,) = [group.new_part for group in compact(dataset).groups]
    path = {
        "index": f"hsfmt/index/{new}.safetensors",
        "states": f"parts/{new}/hidden_states/c/0/0/0",
        "manifest": f"hsfmt/manifests/{new}.json",
    }[damage]
    flip(dataset / path)
    report = repair(dataset)
    assert report.lost == ()
    assert contents(dataset) == before
    assert "s1-1" not in contents(dataset)
    assert sound(dataset)


def test_what_a_repair_replaced_saves_it_again(dataset):
    flip(dataset / STATES)
    first = repair(dataset)
    before = contents(dataset)
    (dataset / f"hsfmt/index/{first.parts[0].new_part}.safetensors").unlink()
    assert repair(dataset).lost == ()
    assert contents(dataset) == before
    assert set(first.lost).isdisjoint(before)
    assert sound(dataset)


@pytest.mark.parametrize("remains", ["flipped", "nothing"])
@pytest.mark.parametrize("sealed_before", [True, False])
def test_what_was_corrected_does_not_come_back(dataset, tmp_path, remains, sealed_before):
    if not sealed_before:
        shutil.rmtree(dataset / "hsfmt/snapshots")
        (dataset / "hsfmt/manifest.json").unlink()
    old = repair(dataset, dry_run=True) and contents(dataset, None if sealed_before else "live")
    join(dataset, build(tmp_path / "corrected", prefix="zz", n_parts=1, first_seed=50))
    digest = edit_manifest(dataset, "part-0")
    edit_manifest(dataset, "zz-0", replaces=[{"part": "part-0", "digest": digest}])
    seal(dataset)
    before = contents(dataset)
    assert before["s0-0"] != old["s0-0"]
    path = dataset / "hsfmt/manifests/zz-0.json"
    if remains == "flipped":
        flip(path)
    else:
        path.unlink()
    report = repair(dataset)
    assert report.lost == ()
    assert contents(dataset) == before
    assert sound(dataset)


@pytest.mark.parametrize("remains", ["flipped", "nothing"])
def test_what_is_newer_than_the_seal_was_not_replaced(dataset, tmp_path, remains):
    """A repair that was not sealed yet is no former part of another whose manifest is lost, though they share ids."""
    join(dataset, build(tmp_path / "differs", prefix="zz", n_parts=1, first_seed=50))
    seal(dataset)
    before = contents(dataset)
    flip(dataset / STATES)
    unsealed(dataset, repair)
    path = dataset / MANIFEST.replace("part-0", "zz-0")
    flip(path) if remains == "flipped" else path.unlink()
    lost = repair(dataset).lost
    found = contents(dataset)
    assert {key for key in before if found[key] != before[key]} == set(lost)
    assert len(lost) == 2
    assert sound(dataset)


def test_what_a_snapshot_has_beside_a_lost_part_was_not_replaced_by_it(dataset, tmp_path):
    """So not either where a seal was stopped before the pointer named its snapshot."""
    pointer = (dataset / "hsfmt/manifest.json").read_bytes()
    join(dataset, build(tmp_path / "differs", prefix="a", n_parts=1, first_seed=50))
    seal(dataset)
    (dataset / "hsfmt/manifest.json").write_bytes(pointer)
    (dataset / MANIFEST).unlink()
    assert repair(dataset).lost == ()
    assert {part for part, *_ in parts_of(dataset)} == {"a-0", "part-1"}
    assert SampleReader(dataset).snapshot.counts["shadowed"] == 3


def parts_of(root):
    reader = SampleReader(root)
    return [(part.name, row) for part, row in map(reader.locate, range(len(reader)))]


def test_no_other_part_takes_the_place_of_a_repaired_one(dataset, tmp_path):
    join(dataset, build(tmp_path / "differs", prefix="part-0", first_seed=50))
    seal(dataset)
    before = contents(dataset)
    flip(dataset / STATES)
    report = repair(dataset)
    found = contents(dataset)
    assert {key for key in before if found[key] != before[key]} == set(report.lost)
    assert len(report.lost) == 2
    assert sound(dataset)


def test_names_stay_beside_the_old_ones_and_do_not_grow():
    first = derived_name("20260101t000000z-0123456789abcdef", "c", 1)
    for mark, contents_ in [("r", 2), ("c", 3), ("r", 4)]:
        again = derived_name(first, mark, contents_)
        assert len(again) == len(first)
        assert again != first
        first = again
    assert derived_name("part-1", "r", 1, others=["part-1-0", "part-10", "part-2"]) < "part-1-0"
    assert derived_name("part-1", "r", 1, others=["part-1-0"]) > "part-1"
    long = "p" * 60
    assert len(derived_name(long + "b", "r", 1, others=["a", "q"])) <= 64
    with pytest.raises(UsageError, match="in the way"):
        derived_name(long + "b", "r", 1, others=[long + "a"])


def test_a_long_name_is_refused_only_where_ids_meet(tmp_path):
    with without_fsync():
        names = iter(["p" * 60 + "a", "p" * 60 + "b", "p" * 60 + "c"])
        root = build(tmp_path / "dataset", part_names=lambda: next(names))
        before = contents(root)
        flip(root / f"parts/{'p' * 60}b/hidden_states/c/0/0/0")
        report = repair(root)
        assert report.lost
        assert contents(root) == {key: value for key, value in before.items() if key not in report.lost}
        assert sound(root)
        assert all(len(name) <= 64 for name in committed_parts(open_store(root)))
        assert len(SampleReader(root)) == 6 - len(report.lost)


def test_copies_of_retracted_samples_stay_hidden_when_the_index_is_lost(dataset, tmp_path):
    join(dataset, build(tmp_path / "again", prefix="zz"))
    seal(dataset, retract=["s0-1"])
    before = contents(dataset)
    (dataset / INDEX).unlink()
    report = repair(dataset)
    assert any("ids of 1 retracted sample" in warning for warning in report.warnings)
    assert contents(dataset).keys() == before.keys()
    assert SampleReader(dataset).snapshot.counts["retracted"] == 1
    assert sound(dataset)
