"""What a repair could lose without a word: holes, retractions, what a stopped one lost, provenance, scales."""

import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from repair_cases import build, contents, flip, flip_at, open_writer, truncate, unsealed, without_fsync, write_sample

from hsfmt import DatasetWriter, compact, repair, seal
from hsfmt.catalog import load_manifest, read_header
from hsfmt.cli.main import main
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store
from hsfmt.writers.extras import Extra

STATES = "parts/part-0/hidden_states/c/0/0/0"
MANIFEST = "hsfmt/manifests/part-0.json"
INDEX = "hsfmt/index/part-0.safetensors"


@pytest.fixture
def dataset(tmp_path):
    with without_fsync():
        yield build(tmp_path / "dataset")


def sound(root):
    return verify(root, level="full").ok and not repair(root).changed


@pytest.mark.parametrize("damage", [STATES, INDEX, MANIFEST])
def test_a_stopped_compaction_saves_what_is_damaged_then(dataset, damage):
    before = contents(dataset)
    unsealed(dataset, compact)
    flip(dataset / damage)
    assert not verify(dataset, level="full").ok
    plan = repair(dataset, dry_run=True)
    report = repair(dataset)
    assert report.to_json() | {"dry_run": True, "snapshot": None} == plan.to_json()
    assert (report.changed, report.ok, report.lost) == (True, True, ())
    assert contents(dataset) == before
    assert sound(dataset)


def test_what_a_stopped_repair_lost_is_named_by_the_next_one(dataset):
    flip(dataset / STATES)
    before = contents_but(dataset, plan := repair(dataset, dry_run=True))
    unsealed(dataset, repair)
    report = repair(dataset)
    assert report.lost == plan.lost != ()
    assert not report.ok
    assert all("lost in a repair of part part-0" in reason for reason in report.parts[0].lost.values())
    assert contents(dataset) == before
    assert sound(dataset)


def test_what_was_made_again_since_is_not_lost(dataset):
    flip(dataset / STATES)
    plan = repair(dataset, dry_run=True)
    unsealed(dataset, repair)
    with open_writer(dataset, "again", on_duplicate="skip", seal=False) as writer:
        for seed in range(3):
            write_sample(writer, f"s0-{seed}", 3 + seed, seed)
    assert plan.lost
    assert repair(dataset).lost == ()
    assert len(contents(dataset)) == 6
    assert sound(dataset)


def contents_but(dataset, plan):
    """Return what is left when the lost samples are gone; the dataset is repaired in a copy."""
    copy = shutil.copytree(dataset, dataset.parent / "copy")
    repair(copy)
    found = contents(copy)
    assert found.keys().isdisjoint(plan.lost)
    shutil.rmtree(copy)
    return found


@pytest.mark.parametrize("damage", [flip, truncate, lambda path: path.unlink()], ids=["flip", "truncate", "delete"])
@pytest.mark.parametrize("ids", [True, False], ids=["ids", "no ids"])
def test_holes_that_go_with_a_manifest_are_counted(dataset, damage, ids):
    damage(dataset / MANIFEST)
    if not ids:
        for path in (dataset / "hsfmt/snapshots").rglob("ids.safetensors"):
            path.unlink()
    plan, report = repair(dataset, dry_run=True), repair(dataset)
    assert plan.warnings == report.warnings
    (warning,) = report.warnings
    assert warning.startswith("1 hole(s) of part part-0" if ids else "the holes of part part-0"), warning
    assert SampleReader(dataset).snapshot.counts["holes"] == 1
    assert sound(dataset)


def test_no_word_of_holes_where_there_were_none(tmp_path):
    with without_fsync(), open_writer(tmp_path / "dataset") as writer:
        write_sample(writer, "a", 5, 1)
    (tmp_path / "dataset" / MANIFEST).unlink()
    report = repair(tmp_path / "dataset")
    assert (report.changed, report.ok, report.warnings) == (True, True, ())


def test_a_hole_that_was_filled_is_none_after_a_repair(dataset):
    with open_writer(dataset, "zz") as writer:
        write_sample(writer, "hole-0", 5, 1)
    before = contents(dataset)
    flip(dataset / STATES)
    lost = repair(dataset).lost
    counts = SampleReader(dataset).snapshot.counts
    assert counts["holes"] == 1 + len(lost)
    assert contents(dataset) == {key: value for key, value in before.items() if key not in lost}


def test_a_retracted_sample_that_is_lost_is_named(dataset):
    seal(dataset, retract=["s0-1", "s1-1"])
    flip(dataset / STATES)
    report = repair(dataset)
    assert "s0-1" in report.lost
    (warning,) = report.warnings
    assert warning == "1 of the lost samples were retracted, and stay so if they are made again: s0-1"
    with open_writer(dataset, "again", on_duplicate="skip") as writer:
        for seed in range(6):
            write_sample(writer, f"s{seed // 3}-{seed % 3}", 3 + seed % 7, seed)
    # As long as the snapshot that says so is there, who makes it again does not bring it back.
    assert sorted(contents(dataset)) == ["s0-0", "s0-2", "s1-0", "s1-2"]
    assert SampleReader(dataset).snapshot.counts["retracted"] == 2
    assert sound(dataset)


def test_each_repair_stays_in_the_provenance(dataset):
    store = open_store(dataset)
    header = read_header(store)
    part, made_of = "part-0", []
    for path in ("hidden_states/c/0/0/0", "weight/c/0", "flag/c/0"):
        flip(dataset / f"parts/{part}/{path}")
        (fate,) = repair(dataset).parts
        made_of.append(part)
        part = fate.new_part
    producer = load_manifest(store, part, header).producer
    assert [each["part"] for each in [*producer["repairs"], producer["repair"]]] == made_of
    assert producer["codec"] == load_manifest(store, "part-0", header).producer["codec"]


def test_a_whole_part_that_is_gone_is_lost_by_name(dataset):
    before = contents(dataset)
    shutil.rmtree(dataset / "parts/part-0")
    (dataset / INDEX).unlink()
    (dataset / MANIFEST).unlink()
    report = repair(dataset)
    assert report.lost == ("s0-0", "s0-1", "s0-2")
    assert report.n_lost == 3
    assert contents(dataset) == {key: value for key, value in before.items() if key not in report.lost}
    assert SampleReader(dataset).snapshot.counts["holes"] == 4
    assert sound(dataset)


def test_an_attachment_of_a_former_snapshot_only(dataset):
    seal(dataset, attachments={"d2t": np.arange(9)})
    seal(dataset, drop_attachments=["d2t"])
    (path,) = dataset.rglob("d2t.npy")
    flip(path)
    report = repair(dataset)
    assert [document.fate for document in report.documents] == ["quarantined"]
    assert sound(dataset)


@pytest.mark.parametrize("column", ["hidden_states/c/0/0/0", "scale/c/0", "loss_mask/c/0", "input_ids/c/0"])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_float8_with_scales(tmp_path, column, codec):
    rng = np.random.default_rng(0)
    root = tmp_path / "dataset"
    names = iter(["part-0", "part-1"])
    with (
        without_fsync(),
        DatasetWriter(
            root,
            layers=[1, 3],
            hidden_size=8,
            final_norm="pre",
            dtype="float8_e4m3fn",
            scaling={"column": "scale", "rule": "bfloat16_product"},
            extras={"scale": Extra("token", "float32")},
            chunk_tokens=4,
            codec=codec,
            part_names=lambda: next(names),
        ) as writer,
    ):
        for number in range(4):
            states = rng.integers(0, 0x7F, (6, 2, 8)).astype(np.uint8)
            mask = np.arange(6) % 2
            writer.write(f"s{number}", np.arange(6), states, mask, scale=rng.random(6, dtype=np.float32))
            if number == 1:
                writer.commit()
    before = contents(root)
    flip_at(root / "parts/part-0" / column, 0)
    report = repair(root)
    assert report.n_saved + len(report.lost) == 2
    assert report.n_saved == 1
    assert contents(root) == {key: value for key, value in before.items() if key not in report.lost}
    kept = contents(root)
    assert compact(root).parts_after == 1
    assert contents(root) == kept
    assert sound(root)


def test_the_command_says_what_to_do_next(dataset):
    run = CliRunner().invoke
    flip(dataset / STATES)
    dry = run(main, ["repair", str(dataset), "--dry-run", "-q"])
    assert (dry.exit_code, "restore from a copy" in dry.output, "`hsfmt repair URL` does it" in dry.output) == (1, 1, 1)
    done = run(main, ["repair", str(dataset), "-q"])
    assert done.exit_code == 1
    assert "run the producer again" in done.output
    assert all(f"lost: {name}: " in result.output for name in ("s0-1", "s0-2") for result in (dry, done))
    assert "1 saved, 2 lost" in done.output
    (dataset / "parts/zarr.json").unlink()
    assert "`hsfmt verify --level full URL` ends with 0 now" in run(main, ["repair", str(dataset), "-q"]).output
