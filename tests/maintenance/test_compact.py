"""Compaction: same samples, same order, same content digest, fewer parts, whatever stops it."""

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from repair_cases import build, contents, edit_manifest, flip, open_writer, tree, without_fsync, write_sample
from test_repair_meaning import kill_rounds

from hsfmt import compact, seal
from hsfmt.catalog import load_manifest, read_header
from hsfmt.cli.main import main
from hsfmt.errors import CorruptionError, NotFoundError, UsageError
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store


@pytest.fixture
def dataset(tmp_path):
    with without_fsync():
        yield build(tmp_path / "dataset", n_parts=4)


def test_many_parts_become_one(dataset):
    before, ids = contents(dataset), list(SampleReader(dataset).sample_ids)
    digest = SampleReader(dataset).content_digest
    old = SampleReader(dataset)
    report = compact(dataset)
    assert (report.parts_before, report.parts_after) == (4, 1)
    assert report.content_digest == digest
    assert contents(dataset) == before
    assert list(SampleReader(dataset).sample_ids) == ids
    assert [old.read(i).sample_id for i in range(len(old))] == ids
    verified = verify(dataset, level="full")
    assert verified.ok
    assert SampleReader(dataset).snapshot.counts["holes"] == 4
    after = tree(dataset)
    assert compact(dataset).groups == ()
    assert tree(dataset) == after


def test_a_dry_run_changes_nothing(dataset):
    before = tree(dataset)
    plan = compact(dataset, dry_run=True)
    assert tree(dataset) == before
    assert plan.to_json()["groups"] == compact(dataset).to_json()["groups"]


def test_the_target_bounds_the_parts(dataset):
    row = 2 * 8 * 2
    sizes = [sum(3 + seed % 7 for seed in range(first, first + 3)) * row for first in (0, 3, 6, 9)]
    report = compact(dataset, target_nbytes=sizes[0] + sizes[1])
    assert report.groups
    assert all(len(group.parts) > 1 for group in report.groups)
    assert report.parts_after < 4
    assert report.parts_after > 1
    assert compact(dataset, target_nbytes=1).groups == ()


def test_retracted_and_repeated_samples(dataset):
    with open_writer(dataset, "zz") as writer:
        write_sample(writer, "more", 5, 3)
    seal(dataset, retract=["s1-1", "s2-0"])
    before = contents(dataset)
    digest = SampleReader(dataset).content_digest
    report = compact(dataset)
    assert report.parts_after == 1
    assert report.content_digest == digest
    snapshot = SampleReader(dataset).snapshot
    assert snapshot.counts["retracted"] == 2
    assert contents(dataset) == before
    assert verify(dataset, level="full").ok


def test_parts_of_other_columns_are_not_mixed(dataset):
    with open_writer(dataset, "zz", extras={}) as writer:
        for name in ("x", "y"):
            writer.write(name, [1, 2], np.ones((2, 2, 8), np.uint16))
            writer.commit()
    before = contents(dataset)
    report = compact(dataset)
    assert (report.parts_before, report.parts_after) == (6, 2)
    assert contents(dataset) == before
    assert verify(dataset, level="full").ok


def test_sources_whose_files_were_deleted_are_not_mixed(dataset):
    for part, source in [("part-0", "/one"), ("part-1", "/one"), ("part-2", "/two"), ("part-3", "/two")]:
        edit_manifest(dataset, part, producer={"host": "h", "options": {"delete_source": True}, "source": source})
    # No seal takes other manifests than those that a snapshot names.
    (dataset / "hsfmt/manifest.json").unlink()
    shutil.rmtree(dataset / "hsfmt/snapshots")
    seal(dataset)
    before = contents(dataset)
    report = compact(dataset)
    assert [group.parts for group in report.groups] == [("part-0", "part-1"), ("part-2", "part-3")]
    store = open_store(dataset)
    made = [load_manifest(store, group.new_part, read_header(store)).producer for group in report.groups]
    assert [producer["source"] for producer in made] == ["/one", "/two"]
    assert contents(dataset) == before


def test_a_damaged_part_stops_it(dataset):
    flip(dataset / "parts/part-2/hidden_states/c/0/0/0")
    before = {name for name in tree(dataset) if name.startswith("hsfmt/manifests/")}
    with pytest.raises(CorruptionError, match="hsfmt repair"):
        compact(dataset)
    assert {name for name in tree(dataset) if name.startswith("hsfmt/manifests/")} == before


def test_what_can_not_be_compacted(dataset, tmp_path):
    with pytest.raises(NotFoundError):
        compact(tmp_path / "nothing")
    with pytest.raises(UsageError):
        compact(dataset, target_nbytes=0)
    with pytest.raises(NotFoundError, match="never sealed"):
        compact(build(tmp_path / "other", seal=False), dry_run=True)


def test_the_command(dataset):
    run = CliRunner().invoke
    assert "would be compacted" in run(main, ["compact", str(dataset), "--dry-run"]).output
    document = json.loads(run(main, ["compact", str(dataset), "--json"]).stdout)
    assert (document["parts_before"], document["parts_after"]) == (4, 1)
    result = run(main, ["compact", str(dataset), "--target-size", "1GiB", "-q"])
    assert (result.exit_code, "nothing to compact" in result.output) == (0, True)


@pytest.mark.slow
def test_a_killed_compaction_ends_the_same(tmp_path):
    assert kill_rounds(tmp_path, "compact", 5, 31, 3)["kills"] >= 3


@pytest.mark.deep
def test_a_compaction_killed_at_every_call_ends_the_same(tmp_path, record_property):
    done = kill_rounds(tmp_path, "compact", 1, 1, 1000)
    record_property("counts", json.dumps(done))
    assert done["finished"]
    assert done["kills"] > 50
