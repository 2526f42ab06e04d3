"""Random damage to a dataset with a history: nothing comes out that was not served, and nothing goes unsaid."""

import json
import random
import shutil

import numpy as np
import pytest
from repair_cases import (
    DAMAGES,
    build,
    contents,
    files_of,
    flip_at,
    join,
    open_writer,
    unsealed,
    without_fsync,
    write_sample,
)

from hsfmt import compact, repair, seal
from hsfmt.catalog import read_pointer
from hsfmt.errors import CorruptionError
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store

RETRACTED = {"s0-1", "s1-0"}


@pytest.fixture(scope="module")
def histories(tmp_path_factory):
    """Folders of datasets: with copies of the same and of other content, compacted, repaired, not compressed."""
    folder = tmp_path_factory.mktemp("hunt")
    with without_fsync():
        plain = build(folder / "plain", extras={})
        copies = build(folder / "copies", extras={})
        join(copies, build(folder / "same", prefix="yy", n_parts=1, extras={}))
        join(copies, build(folder / "other", prefix="zz", n_parts=1, first_seed=50, extras={}))
        seal(copies, retract=RETRACTED)
        compacted = shutil.copytree(plain, folder / "compacted")
        seal(compacted, retract=RETRACTED)
        compact(compacted)
        repaired = build(folder / "repaired", extras={}, codec="none")
        flip_at(repaired / "parts/part-0/hidden_states/c/0/0/0", 4)
        repair(repaired)
        with open_writer(repaired, "again", on_duplicate="skip", extras={}, codec="none") as writer:
            for seed in range(6):
                write_sample(writer, f"s{seed // 3}-{seed % 3}", 3 + seed % 7, seed, plain=True)
        yield [(root, contents(root)) for root in (plain, copies, compacted, repaired)]


@pytest.fixture(scope="module")
def more_histories(tmp_path_factory):
    """As `histories`: with extras, attachments and two codecs; and where a repair or a compaction has not sealed."""
    folder = tmp_path_factory.mktemp("more")
    with without_fsync():
        rich = build(folder / "rich")
        join(rich, build(folder / "raw", prefix="yy", n_parts=1, first_seed=6, extras={}, codec="none"))
        with open_writer(rich, "zz") as writer:
            write_sample(writer, "hole-0", 4, 9)
        seal(rich, retract=RETRACTED, attachments={"d2t": np.arange(9), "t2d": np.arange(5)})
        compacting = shutil.copytree(rich, folder / "compacting")
        unsealed(compacting, compact)
        repairing = shutil.copytree(rich, folder / "repairing")
        flip_at(repairing / "parts/part-0/hidden_states/c/0/0/0", 4)
        end = shutil.copytree(repairing, folder / "end")
        repair(end)
        unsealed(repairing, repair)
        yield [(rich, contents(rich)), (compacting, contents(rich)), (repairing, contents(end))]


def hunt(histories, tmp_path, seeds):
    """Return counts of what happened."""
    counts = dict.fromkeys(("rounds", "damages", "lost", "all kept", "refused", "warned"), 0)
    for seed in seeds:
        rng = random.Random(seed)
        source, before = histories[seed % len(histories)]
        root = shutil.copytree(source, tmp_path / "dataset")
        for _ in range(rng.randint(1, 4)):
            path = root / rng.choice([name for name in files_of(root) if (root / name).stat().st_size])
            kind = rng.choice([*DAMAGES, "byte"])
            if kind in ("byte", "flip"):
                flip_at(path, rng.randrange(path.stat().st_size) if kind == "byte" else path.stat().st_size // 2)
            else:
                DAMAGES[kind](path)
            counts["damages"] += 1
        report = check(root, before, counts, seed)
        if report is not None and read_pointer(open_store(root)):
            check_besides(source, root, report, seed)
        shutil.rmtree(root)
    return counts


def check(root, before, counts, seed):
    counts["rounds"] += 1
    try:
        report = repair(root)
    except CorruptionError as error:
        assert [problem.expected for problem in error.problems] == ["one header in all documents"]  # noqa: PT017
        counts["refused"] += 1
        return None
    found = contents(root) if read_pointer(open_store(root)) else {}
    lost = set(report.lost)
    assert before.keys() - found.keys() <= lost or report.n_lost > len(lost), seed
    assert len(before.keys() - found.keys()) <= report.n_lost, seed
    changed = {key for key in before.keys() & found.keys() if found[key] != before[key]}
    assert changed <= lost, seed
    assert found.keys() - before.keys() <= RETRACTED, seed
    if found.keys() - before.keys():
        assert report.warnings, seed
    if found:
        verified = verify(root, level="full")
        assert verified.ok, (seed, verified.errors)
    assert not repair(root).changed, seed
    counts["lost"] += report.n_lost
    counts["all kept"] += report.ok
    counts["warned"] += bool(report.warnings)
    return report


def check_besides(source, root, report, seed):
    """Attachments are what they were or said to be dropped; holes do not become fewer without a word."""
    before, after = SampleReader(source), SampleReader(root)
    said = {document.path.rpartition("/")[2] for document in report.documents if document.fate == "dropped"}
    old, new = before.attachments(), after.attachments()
    for name, array in old.items():
        assert (name in new and np.array_equal(array, new[name])) or f"{name}.npy" in said or report.warnings, seed
    assert new.keys() <= old.keys(), seed
    fewer = after.snapshot.counts["holes"] < before.snapshot.counts["holes"]
    assert not fewer or report.warnings or report.n_lost > len(report.lost), seed


def test_random_damage(histories, tmp_path):
    seeds = [*range(4), 41, 136, 225, 381]
    counts = hunt(histories, tmp_path, seeds)
    assert counts["rounds"] == len(seeds)
    assert counts["lost"] > 5
    assert counts["all kept"] > 2


def test_random_damage_to_more(more_histories, tmp_path):
    counts = hunt(more_histories, tmp_path, [2, 4, 59])
    assert counts["rounds"] == 3
    assert counts["lost"] >= 2


@pytest.mark.deep
def test_much_random_damage_to_more(more_histories, tmp_path, record_property):
    counts = hunt(more_histories, tmp_path, range(6, 306))
    record_property("counts", json.dumps(counts))
    assert counts["rounds"] == 300
    assert counts["damages"] > 600
    assert counts["lost"] > 60
    assert counts["all kept"] > 60
    assert counts["refused"] < 20


@pytest.mark.deep
def test_much_random_damage(histories, tmp_path, record_property):
    counts = hunt(histories, tmp_path, range(24, 1024))
    record_property("counts", json.dumps(counts))
    assert counts["rounds"] == 1000
    assert counts["damages"] > 2000
    assert counts["lost"] > 200
    assert counts["all kept"] > 200
    assert counts["refused"] < 50
