"""What a repair leaves to writers and readers: holes to retry, retractions, attachments, snapshots, exit codes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from repair_cases import build, contents, flip, open_writer, tree, without_fsync, write_sample

from hsfmt import repair, seal
from hsfmt.catalog import committed_parts, load_manifest, read_header, read_pointer
from hsfmt.cli.converting.converted_sources import _n_missing
from hsfmt.cli.main import main
from hsfmt.errors import CorruptionError, FormatVersionError, StorageError
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store
from hsfmt.storage.local import LocalStore

STATES = "parts/part-0/hidden_states/c/0/0/0"


@pytest.fixture
def dataset(tmp_path):
    with without_fsync():
        yield build(tmp_path / "dataset")


def run(*argv):
    return CliRunner().invoke(main, [str(each) for each in argv], standalone_mode=True)


def test_a_dry_run_changes_nothing(dataset):
    flip(dataset / STATES)
    (dataset / "hsfmt/manifest.json").unlink()
    before = tree(dataset)
    assert repair(dataset, dry_run=True).n_lost == 2
    assert tree(dataset) == before


def test_the_new_part_says_what_it_is(dataset):
    flip(dataset / STATES)
    store = open_store(dataset)
    header = read_header(store)
    old = load_manifest(store, "part-0", header)
    (fate,) = repair(dataset).parts
    new = load_manifest(store, fate.new_part, header)
    assert new.replaces == {"part-0": old.digest()}
    assert new.producer["repair"]["part"] == "part-0"
    assert new.producer["repair"]["library"].startswith("hsfmt ")
    assert {key: new.producer[key] for key in old.producer} == dict(old.producer)
    assert set(new.holes) == {"hole-0", *fate.lost}
    assert all("part-0" in new.holes[key] for key in fate.lost)


def test_lost_samples_are_retried_by_a_producer(dataset):
    before = contents(dataset)
    flip(dataset / STATES)
    lost = repair(dataset).lost
    assert lost
    with open_writer(dataset, "again", on_duplicate="skip") as writer:
        for seed in range(6):
            name = f"s{seed // 3}-{seed % 3}"
            assert (name in writer.committed_ids()) == (name not in lost)
            write_sample(writer, name, 3 + seed % 7, seed)
    found = contents(dataset)
    assert {key: value[:5] for key, value in found.items()} == {key: value[:5] for key, value in before.items()}
    assert verify(dataset, level="full").ok


def test_a_reader_opened_before_goes_on(dataset):
    reader = SampleReader(dataset)
    n = len(reader)
    old = read_pointer(open_store(dataset)).fingerprint
    flip(dataset / STATES)
    lost = repair(dataset).lost
    read = []
    for number in range(n):
        try:
            read.append(reader.read(number).sample_id)
        except CorruptionError:
            continue
    assert set(read) | set(lost) == {f"s{p}-{i}" for p in range(2) for i in range(3)}
    assert len(SampleReader(dataset, snapshot=old)) == n


@pytest.mark.parametrize("name", ["s0-0", "s0-2", "s1-1"])
@pytest.mark.parametrize("damage", [STATES, "hsfmt/manifests/part-0.json", "hsfmt/manifest.json"])
def test_what_was_retracted_stays_so(dataset, name, damage):
    seal(dataset, retract=[name])
    flip(dataset / damage)
    report = repair(dataset)
    assert name not in contents(dataset)
    assert len(contents(dataset)) == 5 - len(set(report.lost) - {name})
    assert verify(dataset, level="full").ok


def test_a_damaged_attachment_is_dropped_with_a_warning(dataset):
    seal(dataset, attachments={"d2t": np.arange(9), "t2d": np.arange(5)})
    (path,) = dataset.rglob("d2t.npy")
    flip(path)
    report = repair(dataset)
    assert not report.ok
    assert sorted(SampleReader(dataset).attachments()) == ["t2d"]
    assert verify(dataset, level="full").ok
    assert not repair(dataset).changed


def test_a_lost_snapshot_is_built_again_byte_for_byte(dataset):
    seal(dataset, attachments={"d2t": np.arange(9)}, retract=["s0-1"])
    for snapshot in sorted((dataset / "hsfmt/snapshots").iterdir()):
        before = tree(snapshot)
        shutil.rmtree(snapshot)
        report = repair(dataset)
        current = snapshot.name in read_pointer(open_store(dataset)).fingerprint
        assert verify(dataset, level="full").ok
        if report.documents and report.documents[0].fate == "restored":
            assert current
            assert tree(snapshot) == before


def test_a_dataset_that_was_never_sealed_stays_so(tmp_path):
    root = build(tmp_path / "dataset", seal=False)
    flip(root / STATES)
    report = repair(root)
    assert report.snapshot is None
    assert len(report.lost) == 2
    assert not (root / "hsfmt/manifest.json").exists()
    assert len(SampleReader(root, snapshot="live")) == 4
    assert verify(root, level="full").ok


@pytest.mark.parametrize("remains", ["flip", "truncate"])
def test_a_manifest_that_no_snapshot_names_still_proves_its_index(tmp_path, remains):
    root = build(tmp_path / "dataset", seal=False)
    before = contents(root, "live")
    path = root / "hsfmt/manifests/part-0.json"
    data = path.read_bytes()
    place = data.index(b'"producer"') + 30
    path.write_bytes(data[:place] + (b"" if remains == "truncate" else bytes([data[place] ^ 1]) + data[place + 1 :]))
    (fate,) = repair(root).parts
    assert (fate.fate, fate.n_saved, dict(fate.lost)) == ("quarantined", 3, {})
    assert contents(root, "live") == before
    assert (root / "hsfmt/quarantine/part-0.json").is_file()
    assert verify(root, level="full").ok
    assert not repair(root).changed


def test_without_proof_nothing_is_kept(tmp_path):
    root = build(tmp_path / "dataset", seal=False)
    (root / "hsfmt/manifests/part-0.json").write_bytes(b"")
    report = repair(root)
    (fate,) = report.parts
    assert (report.ok, report.n_lost) == (False, 3)
    assert (fate.fate, fate.new_part, fate.n_saved, fate.n_unknown) == ("quarantined", None, 0, 3)
    assert sorted(contents(root, "live")) == ["s1-0", "s1-1", "s1-2"]
    assert verify(root, level="full").ok


def test_a_manifest_of_a_later_version_is_not_damage(dataset):
    from hsfmt import canonical, digests

    path = dataset / "hsfmt/manifests/part-0.json"
    document = canonical.loads(path.read_bytes(), "m")
    document |= {"format": "9.0", "readable_from": "9.0"}
    del document["digest"]
    document["digest"] = digests.digest(canonical.dumps(document))
    path.write_bytes(canonical.dumps(document))
    before = tree(dataset)
    with pytest.raises(FormatVersionError):
        repair(dataset)
    assert tree(dataset) == before


def test_a_storage_that_fails_is_not_damage(dataset, monkeypatch):
    real = LocalStore.read_into

    def failing(self, path, offset, buffer):
        if path == STATES:
            raise StorageError.at(path, expected="to read", got="EIO")
        real(self, path, offset, buffer)

    monkeypatch.setattr(LocalStore, "read_into", failing)
    before = tree(dataset)
    with pytest.raises(StorageError, match="copy the dataset"):
        repair(dataset)
    assert tree(dataset) == before


def test_a_repaired_part_can_break_again(dataset):
    before = contents(dataset)
    flip(dataset / STATES)
    first = repair(dataset)
    new = first.parts[0].new_part
    flip(dataset / f"parts/{new}/input_ids/c/0")
    second = repair(dataset)
    assert set(contents(dataset)) == set(before) - set(first.lost) - set(second.lost)
    assert committed_parts(open_store(dataset))
    assert verify(dataset, level="full").ok
    assert not repair(dataset).changed


def test_a_lost_index_of_a_part_with_retracted_samples_stops_no_seal(dataset):
    seal(dataset, retract=["s0-1", "s1-0"])
    flip(dataset / "hsfmt/index/part-0.safetensors")
    report = repair(dataset)
    assert (report.lost, report.n_lost) == (("s0-0", "s0-2"), 3)
    assert seal(dataset).snapshot.counts["retracted"] == 1
    assert list(contents(dataset)) == ["s1-1", "s1-2"]
    assert len(SampleReader(dataset, snapshot="live")) == 2
    assert verify(dataset, level="full").ok


def test_a_converted_source_misses_what_a_repair_lost(dataset):
    store = open_store(dataset)
    count = lambda: _n_missing([{"source_items": 6}], read_header(store), store)  # noqa: E731
    assert count() == 0
    flip(dataset / STATES)
    lost = repair(dataset).lost
    assert count() == len(lost) == 2
    (dataset / "hsfmt/index/part-0.safetensors").unlink()
    assert count() == 2


def test_a_lost_snapshot_that_retracted_is_warned_of(dataset):
    sealed = seal(dataset, retract=["s0-1"]).snapshot.fingerprint.rpartition(":")[2]
    (dataset / f"hsfmt/snapshots/{sealed}/index.safetensors").unlink()
    report = repair(dataset)
    assert any("retract again" in warning for warning in report.warnings)
    assert verify(dataset, level="full").ok


def test_quarantine_and_retraction_outlive_a_second_repair(dataset):
    flip(dataset / STATES)
    flip(dataset / "hsfmt/manifests/part-1.json")
    first = repair(dataset)
    seal(dataset, retract=["s1-0", "s0-0"])
    before, kept = contents(dataset), tree(dataset)
    assert set(before) == {f"s{p}-{i}" for p in range(2) for i in range(3)} - set(first.lost) - {"s1-0", "s0-0"}
    assert not repair(dataset).changed
    assert tree(dataset) == kept
    flip(dataset / "hsfmt/manifest.json")
    (dataset / f"hsfmt/manifests/{first.parts[1].new_part}.json").unlink()
    assert repair(dataset).lost == ()
    assert contents(dataset) == before
    assert verify(dataset, level="full").ok
    assert not repair(dataset).changed
    assert (dataset / "hsfmt/quarantine/part-1.json").is_file()


def test_the_command_tells_by_its_exit_code(dataset):
    assert run("repair", dataset).exit_code == 0
    (dataset / "hsfmt/manifests/part-1.json").unlink()
    assert run("repair", dataset, "--dry-run").exit_code == 0
    result = run("repair", dataset, "-q")
    assert result.exit_code == 0
    assert "all samples kept" in result.output
    flip(dataset / STATES)
    result = run("repair", dataset, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["lost"] == [entry["id"] for part in document["parts"] for entry in part["lost"]]
    assert document["lost"]
    result = run("repair", dataset)
    assert (result.exit_code, "nothing to repair" in result.output) == (0, True)
    assert run("repair", dataset / "none").exit_code == 3


def kill_rounds(tmp_path, kind, first, step, most):
    here = Path(__file__).parent
    environment = {"PYTHONPATH": f"{here}:{here.parent}:{here.parent.parent}"}
    argv = [sys.executable, str(here / "repair_kills.py"), kind, str(tmp_path), str(first), str(step), str(most)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_killed_repair_ends_the_same(tmp_path):
    done = kill_rounds(tmp_path, "repair", 5, 41, 3)
    assert done["kills"] >= 3


@pytest.mark.deep
def test_a_repair_killed_at_every_call_ends_the_same(tmp_path, record_property):
    done = kill_rounds(tmp_path, "repair", 1, 1, 1000)
    record_property("counts", json.dumps(done))
    assert done["finished"]
    assert done["kills"] > 100
