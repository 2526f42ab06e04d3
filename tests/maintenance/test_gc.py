"""`gc` removes what nothing needs, and nothing else."""

import os
from datetime import timedelta

import ml_dtypes
import numpy as np
import pytest

from hsfmt import DatasetWriter, HiddenStateDataset, layout, seal
from hsfmt.catalog import committed_parts, load_manifest, read_header
from hsfmt.errors import UsageError
from hsfmt.maintenance import collect as collecting
from hsfmt.maintenance.collect import collect
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store

NOW = {"older_than": timedelta(0), "force": True}


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def write(url, ids, part, *, sealed=True, value=1, replaces=None):
    with DatasetWriter(
        url, layers=[1, 2], hidden_size=8, final_norm="pre", codec="none", seal=sealed, part_names=lambda: part
    ) as writer:
        for sample_id in ids:
            writer.write(sample_id, np.arange(3), np.full((3, 2, 8), value, ml_dtypes.bfloat16))


def supersede(url, old, new):
    """Commit a copy of the samples in a part that replaces the old one; its files bear its name."""
    from hsfmt.catalog import load_index
    from hsfmt.maintenance.rewriting import PartSamples, settings_like, write_part

    store = open_store(url)
    header = read_header(store)
    manifest = load_manifest(store, old, header)
    samples = PartSamples(store, header, manifest, load_index(store, manifest))
    rows = [samples.read(row) for row in range(manifest.counts.samples)]
    samples.close()
    settings = settings_like(manifest.columns, header, {})
    write_part(store, new, settings, rows, holes={}, replaces={old: manifest.digest()})


def files(url):
    return {path for path, _ in open_store(url).walk("")}


def check(url):
    assert verify(str(url), level="full").errors == ()


def test_leftovers_go_and_all_else_stays(tmp_path):
    url = tmp_path / "d"
    write(url, ["a", "b"], "p-one")
    before = files(url)
    (url / "parts/dead/input_ids/c").mkdir(parents=True)
    (url / "parts/dead/input_ids/c/0").write_bytes(b"x")
    (url / "hsfmt/manifests/q.json.0123456789abcdef.tmp").write_bytes(b"x")
    (url / "parts/dead/notes.txt").write_text("mine")
    planned = collect(url, dry_run=True, **NOW)
    assert sorted(path for group in planned.removed for path, _ in group.files) == sorted(
        files(url) - before - {"parts/dead/notes.txt"}
    )
    report = collect(url, **NOW)
    assert report.strays == ("parts/dead/notes.txt",)
    assert files(url) == before | {"parts/dead/notes.txt"}
    assert collect(url, **NOW).removed == ()


def test_what_is_young_stays(tmp_path):
    url = tmp_path / "d"
    write(url, ["a"], "p-one")
    (url / "parts/open").mkdir()
    (url / "parts/open/zarr.json").write_bytes(b"x")
    report = collect(url, older_than=timedelta(days=7))
    assert (report.removed, len(report.young)) == ((), 1)
    with pytest.raises(UsageError, match="at least a day"):
        collect(url, older_than=timedelta(hours=1))


def test_superseded_parts_go_when_no_kept_snapshot_names_them(tmp_path):
    url = tmp_path / "d"
    write(url, ["a", "b"], "p-one")
    supersede(url, "p-one", "p-two")
    assert collect(url, **NOW).removed == ()  # newer than the seal
    seal(url)
    assert collect(url, **NOW).removed == ()  # the old snapshot names it
    report = collect(url, keep_snapshots=1, **NOW)
    assert len(report.removed) == 2
    assert committed_parts(open_store(url)) == ["p-two"]
    check(url)
    assert len(HiddenStateDataset(str(url))) == 2


def test_a_superseded_part_stays_while_it_keeps_another_one_superseded(tmp_path):
    url = tmp_path / "d"
    write(url, ["a"], "p-one")
    first = seal(url).snapshot.fingerprint
    supersede(url, "p-one", "p-two")
    supersede(url, "p-two", "p-three")
    seal(url)
    collect(url, **NOW)
    assert committed_parts(open_store(url)) == ["p-one", "p-three", "p-two"]
    assert len(HiddenStateDataset(str(url), snapshot=first)) == 1
    again = seal(url).snapshot
    assert [ref.name for ref in again.parts] == ["p-three"]
    assert collect(url, keep_snapshots=1, **NOW).removed
    assert committed_parts(open_store(url)) == ["p-three"]


def test_a_part_committed_between_plan_and_removal_stays(tmp_path, monkeypatch):
    url = tmp_path / "d"
    write(url, ["a"], "p-one")
    write(url, ["b"], "p-two", sealed=False)
    manifest = url / layout.manifest_path("p-two")
    data = manifest.read_bytes()
    manifest.unlink()
    real = collecting.plan_groups

    def commit_after(*args):
        planned = real(*args)
        manifest.write_bytes(data)
        return planned

    monkeypatch.setattr(collecting, "plan_groups", commit_after)
    report = collect(url, **NOW)
    assert [group.part for group in report.spared] == ["p-two"]
    assert seal(url).snapshot.n_samples == 2
    check(url)


def test_killed_at_any_removal_the_dataset_is_whole(tmp_path, monkeypatch):
    from hsfmt.storage.local import LocalStore

    class Killed(BaseException):
        pass

    real, n_killed = LocalStore.remove, 0
    for k in range(1, 100):
        url = tmp_path / f"d{k}"
        write(url, ["a"], "p-one")
        supersede(url, "p-one", "p-two")
        supersede(url, "p-two", "p-three")
        seal(url)
        left = k + 1  # the probe is the first

        def remove(store, path):
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            real(store, path)

        monkeypatch.setattr(LocalStore, "remove", remove)
        try:
            collect(url, keep_snapshots=1, **NOW)
        except Killed:
            n_killed += 1
        else:
            break
        finally:
            monkeypatch.setattr(LocalStore, "remove", real)
        check(url)
        assert [ref.name for ref in seal(url).snapshot.parts] == ["p-three"]
        collect(url, keep_snapshots=1, **NOW)
        assert committed_parts(open_store(url)) == ["p-three"]
    assert n_killed >= 18
