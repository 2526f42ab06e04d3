"""What `gc` does where something is damaged: keep all that it could need, say so, and collect the rest."""

import json
import os
from datetime import timedelta

import numpy as np
import pytest
from click.testing import CliRunner
from gc_merge_kills import supersede, write
from repair_cases import contents, empty, flip, truncate

from hsfmt import layout, seal
from hsfmt.catalog import committed_parts, read_pointer
from hsfmt.cli.main import main
from hsfmt.errors import HsfmtError
from hsfmt.maintenance.collect import collect
from hsfmt.maintenance.repair import repair
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store
from hsfmt.storage.local import LocalStore

NOW = {"older_than": timedelta(0), "force": True}


def overlong(path):
    path.write_bytes(path.read_bytes() + b"x")


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def url(tmp_path):
    """One of everything that a collection removes, with `old` naming the part and the attachment."""
    url = tmp_path / "d"
    write(url, ["a", "b"], "p-one", seal=False)
    seal(url, attachments={"d2t": np.arange(3)})
    supersede(url, "p-one", "p-two")
    seal(url, drop_attachments=["d2t"])
    (url / "parts/dead").mkdir()
    (url / "parts/dead/zarr.json").write_bytes(b"x")
    (url / "hsfmt/manifests/q.json.0123456789abcdef.tmp").write_bytes(b"x")
    (url / "hsfmt/snapshots/00000000000000000000000000000000").mkdir()
    (url / "hsfmt/snapshots/00000000000000000000000000000000/ids.safetensors").write_bytes(b"x")
    return url


def old_snapshot(url):
    current = read_pointer(open_store(url)).fingerprint.rpartition(":")[2]
    (old,) = set(open_store(url).list(layout.SNAPSHOTS)) - {current, "0" * 32}
    return old, url / f"hsfmt/snapshots/{old}/index.safetensors"


def files(url):
    return {path for path, _ in open_store(url).walk("")}


@pytest.mark.parametrize("damage", [flip, truncate, empty, overlong])
def test_a_damaged_old_snapshot_keeps_all_that_it_could_name(url, damage):
    old, path = old_snapshot(url)
    whole = path.read_bytes()
    named = contents(url, f"xxh3_128:{old}")
    damage(path)
    before = files(url)
    report = collect(url, **NOW)
    gone = before - files(url)
    # Only what no snapshot can name.
    assert gone == {
        "hsfmt/manifests/q.json.0123456789abcdef.tmp",
        "hsfmt/snapshots/00000000000000000000000000000000/ids.safetensors",
    }
    assert list(report.damaged) == [f"xxh3_128:{old}"]
    assert f"hsfmt/snapshots/{old}/index.safetensors" in report.damaged[f"xxh3_128:{old}"]
    assert [group.part for group in report.withheld] == ["p-one", "dead", None]
    assert report.removed
    path.write_bytes(whole)
    assert contents(url, f"xxh3_128:{old}") == named


def test_who_does_without_a_damaged_snapshot_gets_all_collected(url):
    old, path = old_snapshot(url)
    flip(path)
    report = collect(url, keep_snapshots=1, **NOW)
    assert (report.damaged, report.withheld) == ({}, ())
    assert old not in open_store(url).list(layout.SNAPSHOTS)
    assert committed_parts(open_store(url)) == ["p-two"]
    assert not (url / "parts/dead").exists()
    assert verify(str(url), level="full").errors == ()
    assert contents(url).keys() == {"a", "b"}


def test_a_repair_restores_the_snapshot_or_frees_what_it_named(url):
    old, path = old_snapshot(url)
    whole = path.read_bytes()
    flip(path)
    repair(url)
    collect(url, **NOW)
    if path.exists():
        assert path.read_bytes() == whole
        assert contents(url, f"xxh3_128:{old}").keys() == {"a", "b"}
    else:
        assert committed_parts(open_store(url)) == ["p-two"]
    assert verify(str(url), level="full").errors == ()


@pytest.mark.parametrize(
    ("which", "damage"),
    [
        *((which, damage) for which in ("pointer", "current", "manifest", "root") for damage in (flip, empty)),
        ("current", os.unlink),
        ("root", os.unlink),
    ],
)
def test_without_what_says_what_is_needed_nothing_is_removed(url, which, damage):
    current = read_pointer(open_store(url)).fingerprint
    path = (
        url
        / {
            "pointer": layout.POINTER,
            "current": layout.snapshot_path(current, "index"),
            "manifest": layout.manifest_path("p-two"),
            "root": layout.ROOT_METADATA,
        }[which]
    )
    before = files(url) - {str(path.relative_to(url))}
    damage(path)
    with pytest.raises(HsfmtError) as error:
        collect(url, keep_snapshots=1, **NOW)
    assert error.value.problems[0].remedy
    assert files(url) >= before


def test_without_a_pointer_all_snapshots_stay(url):
    path = url / layout.POINTER
    whole = path.read_bytes()
    before = files(url)
    path.unlink()
    collect(url, keep_snapshots=1, **NOW)
    path.write_bytes(whole)
    assert before - files(url) == {
        "hsfmt/manifests/q.json.0123456789abcdef.tmp",
        "hsfmt/snapshots/00000000000000000000000000000000/ids.safetensors",
        "parts/dead/zarr.json",
    }


def test_the_files_of_a_part_whose_manifest_was_lost_stay(url):
    """They look as those of a writer that was killed; that a snapshot names them tells."""
    path = url / layout.manifest_path("p-two")
    whole = path.read_bytes()
    path.unlink()
    collect(url, keep_snapshots=1, **NOW)
    path.write_bytes(whole)
    assert contents(url).keys() == {"a", "b"}
    assert verify(str(url), level="full").errors == ()
    # What it replaces stays too: without the manifest nothing says so.
    assert set(committed_parts(open_store(url))) == {"p-one", "p-two"}


def test_a_snapshot_that_is_damaged_during_a_collection_counts_too(url, monkeypatch):
    """One that another host has just written, and that this one can't read."""
    real, seen = LocalStore.list, []

    def listed(store, prefix):
        seen.append(prefix)
        if prefix == layout.SNAPSHOTS and seen.count(prefix) == 2:
            (url / "hsfmt/snapshots/11111111111111111111111111111111").mkdir()
            (url / "hsfmt/snapshots/11111111111111111111111111111111/index.safetensors").write_bytes(b"half")
        return real(store, prefix)

    monkeypatch.setattr(LocalStore, "list", listed)
    report = collect(url, keep_snapshots=1, **NOW)
    assert {group.part for group in report.spared} >= {"p-one", "dead"}
    assert set(committed_parts(open_store(url))) == {"p-one", "p-two"}


def test_the_command_says_what_is_damaged_and_what_to_do(url):
    old, path = old_snapshot(url)
    flip(path)
    words = ["gc", str(url), "--older-than", "0s", "--force"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1, done.output
    assert f"damaged snapshot, kept with all that it could name: xxh3_128:{old}: hsfmt/snapshots" in done.output
    assert "3 items kept for it" in done.output
    assert "`hsfmt repair` restores it or sets it aside" in done.output
    document = json.loads(CliRunner().invoke(main, [*words, "--json"]).output)
    assert list(document["damaged"]) == [f"xxh3_128:{old}"]
    assert len(document["withheld"]) == 3
    assert CliRunner().invoke(main, [*words, "--keep-snapshots", "1"]).exit_code == 0
