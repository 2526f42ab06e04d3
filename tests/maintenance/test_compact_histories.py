"""Compaction of what has a history: compacted before, holes filled, copies, retractions; and two of them at once."""

import json
import shutil
import threading

import numpy as np
import pytest
from click.testing import CliRunner
from repair_cases import (
    build,
    contents,
    edit_manifest,
    flip,
    join,
    open_writer,
    tree,
    unsealed,
    without_fsync,
    write_sample,
)

import hsfmt.maintenance.compact as module
from hsfmt import compact, repair, seal
from hsfmt.catalog import committed_parts, load_index, load_manifest, read_header
from hsfmt.cli.main import main
from hsfmt.errors import HsfmtError
from hsfmt.maintenance import rewriting
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store
from hsfmt.storage.local import LocalStore


@pytest.fixture
def dataset(tmp_path):
    with without_fsync():
        yield build(tmp_path / "dataset", n_parts=3)


def manifest_of(root, part):
    store = open_store(root)
    return load_manifest(store, part, read_header(store))


def ids_of(root):
    return list(SampleReader(root).sample_ids)


def test_a_dataset_can_be_compacted_for_ever(tmp_path):
    """Documents may be 32 levels deep, and who compacts daily must not get there."""
    with without_fsync():
        root = build(tmp_path / "dataset", n_parts=1, n_samples=1, extras={})
        depths = []
        for day in range(3):
            with open_writer(root, f"zz-{day}", extras={}, seal=False) as writer:
                write_sample(writer, f"day-{day}", 3, day, plain=True)
            edit_manifest(root, f"zz-{day}-0", producer={"day": day})
            (group,) = compact(root).groups
            producer = manifest_of(root, group.new_part).producer
            assert [each["day"] for each in producer["producers"] if "day" in each] == list(range(day + 1))
            assert len(producer["producers"]) == day + 2
            depths.append(depth(producer))
        assert len(set(depths)) == 1
        assert len(contents(root)) == 4
        assert verify(root, level="full").ok


def depth(value):
    if isinstance(value, dict | list):
        return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)
    return 0


def test_a_repaired_compaction_is_compacted_with_its_provenance(dataset):
    (group,) = compact(dataset, target_nbytes=1 << 40).groups
    flip(dataset / f"parts/{group.new_part}/loss_mask/c/0")
    (fate,) = repair(dataset).parts
    with open_writer(dataset, "zz") as writer:
        write_sample(writer, "more", 5, 3)
    before = contents(dataset)
    (again,) = compact(dataset).groups
    producer = manifest_of(dataset, again.new_part).producer
    assert {each["repair"]["part"] for each in producer["producers"] if "repair" in each} == {group.new_part}
    assert "repair" not in producer
    # It is what the parts it replaced were, and they save it.
    (dataset / f"hsfmt/index/{again.new_part}.safetensors").unlink()
    assert repair(dataset).lost == ()
    assert contents(dataset) == before
    assert fate.new_part in committed_parts(open_store(dataset))
    assert verify(dataset, level="full").ok


@pytest.mark.parametrize("limit", ["_MAX_MANIFESTS_NBYTES", "_MAX_MANIFEST_VALUES", "_MAX_INDEXES_NBYTES"])
def test_no_group_comes_near_the_caps_of_documents(dataset, monkeypatch, limit):
    """Else hours of work end in a manifest or an index that no reader takes."""
    assert len(compact(dataset, dry_run=True).groups[0].parts) == 3
    sizes = module._sizes(manifest_of(dataset, "part-1"))
    most = {"_MAX_MANIFESTS_NBYTES": 1, "_MAX_MANIFEST_VALUES": 2, "_MAX_INDEXES_NBYTES": 3}
    monkeypatch.setattr(module, limit, 2.5 * sizes[most[limit]])
    before = contents(dataset)
    report = compact(dataset)
    assert [group.parts for group in report.groups] == [("part-0", "part-1")]
    assert contents(dataset) == before


def test_holes_that_were_filled(dataset):
    with open_writer(dataset, "zz") as writer:
        write_sample(writer, "hole-0", 4, 5)
        writer.hole("hole-2", "again nothing")
    seal(dataset, retract=["s1-0"])
    before, order = contents(dataset), ids_of(dataset)
    assert SampleReader(dataset).snapshot.counts["holes"] == 2
    (group,) = compact(dataset).groups
    assert SampleReader(dataset).snapshot.counts["holes"] == 2
    assert manifest_of(dataset, group.new_part).holes == {
        "hole-1": "the engine gave nothing",
        "hole-2": "the engine gave nothing",
    }
    (dataset / f"hsfmt/index/{group.new_part}.safetensors").unlink()
    assert repair(dataset).lost == ()
    assert contents(dataset) == before
    assert ids_of(dataset) == order
    assert verify(dataset, level="full").ok


def test_copies_that_are_left_behind_are_counted(dataset):
    with open_writer(dataset, "zz") as writer:
        write_sample(writer, "more", 4, 5)
    join(dataset, build(dataset.parent / "copies", prefix="yy", n_parts=1, first_seed=40))
    seal(dataset)
    before = contents(dataset)
    plan, report = compact(dataset, dry_run=True), compact(dataset)
    assert (plan.n_left, report.n_left, report.parts_after) == (3, 3, 1)
    assert json.loads(json.dumps(report.to_json()))["groups"][0]["copies_left"] == 3
    assert contents(dataset) == before
    assert SampleReader(dataset).snapshot.counts["shadowed"] == 0
    assert verify(dataset, level="full").ok


@pytest.mark.parametrize("damage", ["index", "index and pointer"])
def test_what_was_left_behind_stays_so_when_the_index_is_lost(dataset, damage):
    """Nothing but the part that serves an id tells that a compaction passed its copy over, where no snapshot does."""
    with open_writer(dataset.parent / "between", extras={}, part_names=lambda: "part-1-a") as writer:
        write_sample(writer, "s2-0", 4, 40, plain=True)
    join(dataset, dataset.parent / "between")
    join(dataset, build(dataset.parent / "last", prefix="part-5", n_parts=1, first_seed=50))
    seal(dataset)
    before = contents(dataset)
    (group,) = unsealed(dataset, compact).groups
    assert group.n_left == 4
    for path in (dataset / "hsfmt/index").glob("part-0-c*"):
        path.unlink()
    if damage != "index":
        shutil.rmtree(dataset / "hsfmt/snapshots")
        (dataset / "hsfmt/manifest.json").unlink()
    assert repair(dataset).lost == ()
    if damage != "index":
        seal(dataset)
    assert contents(dataset) == before
    assert verify(dataset, level="full").ok


def test_a_dry_run_counts_what_is_not_sealed_yet(dataset):
    with open_writer(dataset, "zz", seal=False) as writer:
        write_sample(writer, "more", 4, 5)
    before = tree(dataset)
    plan = compact(dataset, dry_run=True)
    assert tree(dataset) == before
    assert plan.parts_before == 4
    assert plan.to_json()["groups"] == compact(dataset).to_json()["groups"]
    output = CliRunner().invoke(main, ["compact", str(dataset)]).output
    assert "nothing to compact, 1 part" in output


def test_the_order_of_samples_stays(tmp_path):
    """It is by place in the source, then by id, whatever part a sample lies in."""
    rng = np.random.default_rng(1)
    places = [int(n) for n in rng.integers(0, 4, 12)]
    with without_fsync():
        root = tmp_path / "dataset"
        with open_writer(root, extras={}) as writer:
            for number, place in enumerate(places):
                states = rng.integers(1, 0x7000, (2 + number, 2, 8)).astype(np.uint16)
                writer.write(f"s{number * 7 % 12}", np.arange(2 + number), states, source_index=place)
                if number % 3 == 2:
                    writer.commit()
        before, order, lengths = contents(root), ids_of(root), SampleReader(root).snapshot.n_tokens.tolist()
        assert compact(root).parts_after == 1
        assert ids_of(root) == order
        assert SampleReader(root).snapshot.n_tokens.tolist() == lengths
        assert contents(root) == before


def test_the_grid_is_that_of_the_largest_part(dataset):
    with open_writer(dataset, "a", seal=False) as writer:  # the first by name, and too small to tell
        write_sample(writer, "small", 2, 1)
    (group,) = compact(dataset).groups
    columns = manifest_of(dataset, group.new_part).columns
    assert columns["hidden_states"].chunk_rows == 4


def test_columns_without_any_row(tmp_path):
    """Of a ragged column that is null throughout there are no rows, before and after."""
    with without_fsync():
        root = build(tmp_path / "dataset", n_parts=1, n_samples=1, first_seed=1)  # odd seeds have no topk
        with open_writer(root, "zz") as writer:
            write_sample(writer, "more", 4, 3)
        before = contents(root)
        (group,) = compact(root).groups
        assert manifest_of(root, group.new_part).columns["topk"].n_rows == 0
        assert contents(root) == before
        flip(root / f"parts/{group.new_part}/flag/c/0")
        assert repair(root).lost == ()
        assert contents(root) == before
        assert verify(root, level="full").ok


def test_a_part_of_nothing_but_copies(dataset):
    join(dataset, build(dataset.parent / "copies", prefix="yy"))
    join(dataset, build(dataset.parent / "again", prefix="zz"))
    seal(dataset)
    before = contents(dataset)
    report = compact(dataset, target_nbytes=400 * 32)
    assert report.parts_after == 1
    assert contents(dataset) == before
    assert verify(dataset, level="full").ok


@pytest.mark.parametrize("work", ["repair", "compact"])
def test_who_fails_while_another_commits_the_same_part_removes_nothing(dataset, monkeypatch, work):
    """Two of the same at once: the one that fails must not take the other's files with it."""
    if work == "repair":
        flip(dataset / "parts/part-0/hidden_states/c/0/0/0")
    do = repair if work == "repair" else compact
    real, first = rewriting.check_written, threading.Event()

    def check(store, manifest):
        if first.is_set():
            return real(store, manifest)
        first.set()
        do(dataset)
        raise HsfmtError.at("here", expected="no interruption", got="one")

    monkeypatch.setattr(rewriting, "check_written", check)
    plan = do(dataset, dry_run=True)
    report = do(dataset)  # it finds the other's part, which is whole
    assert report.to_json() | {"dry_run": True, "snapshot": None} == plan.to_json() | {"snapshot": None}
    assert verify(dataset, level="full").ok


@pytest.mark.parametrize("work", ["repair", "compact"])
def test_an_interrupt_while_another_commits_the_same_part_removes_nothing(dataset, monkeypatch, work):
    if work == "repair":
        flip(dataset / "parts/part-0/hidden_states/c/0/0/0")
    do = repair if work == "repair" else compact
    real, first = LocalStore.create, threading.Event()

    def create(self, path, data):
        if first.is_set() or not path.startswith("hsfmt/manifests/"):
            return real(self, path, data)
        first.set()
        do(dataset)
        return real(self, path, data)

    monkeypatch.setattr(LocalStore, "create", create)
    do(dataset)
    assert verify(dataset, level="full").ok
    reader = SampleReader(dataset)
    assert len(reader.read_many(range(len(reader)))) == len(reader)


def test_many_at_once_end_in_one_dataset(dataset):
    before = contents(dataset)
    errors = []

    def run():
        try:
            compact(dataset)
        except HsfmtError as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    compact(dataset)
    assert len(errors) < 3
    assert contents(dataset) == before
    verified = verify(dataset, level="full")
    assert verified.ok, verified.errors
    store = open_store(dataset)
    (part,) = [name for name in committed_parts(store) if "-c" in name]
    assert load_index(store, manifest_of(dataset, part)).n_samples == len(before)
