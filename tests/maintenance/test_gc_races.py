"""Collections beside seals, readers and merges: hooks at the storage seam run the other one at every single call."""

import os
import shutil
import time
from datetime import timedelta

import numpy as np
import pytest
from gc_merge_kills import supersede, write
from repair_cases import contents

from hsfmt import seal
from hsfmt.catalog import committed_parts, read_pointer
from hsfmt.errors import NotFoundError
from hsfmt.maintenance.collect import collect
from hsfmt.maintenance.merge import merge
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store
from hsfmt.storage.local import LocalStore

NOW = {"older_than": timedelta(0), "force": True}
CALLS = (
    "read",
    "size",
    "list",
    "walk",
    "create",
    "write",
    "remove",
    "modified",
    "sync",
    "open_object",
    "remove_folder",
)


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


class At:
    """Runs an action just before the k-th call of the storage that the work makes."""

    def __init__(self, monkeypatch, k, action):
        self.n, self.k, self.action, self.ran = 0, k, action, False
        for name in CALLS:
            monkeypatch.setattr(LocalStore, name, self.hooked(getattr(LocalStore, name)))

    def hooked(self, real):
        def call(*args, **kwargs):
            if not self.ran:
                self.n += 1
                if self.n == self.k:
                    self.ran = True
                    self.action()
            return real(*args, **kwargs)

        return call


def all_is_old(monkeypatch, url):
    """Let all that is there by now look a month old, and what comes later new."""
    time.sleep(0.02)  # more than a tick of the file system's clock
    probe = url / "probe"
    probe.touch()
    until, real = probe.stat().st_ctime, LocalStore.modified
    probe.unlink()
    time.sleep(0.02)

    def modified(store, path):
        at = real(store, path)
        return at - 30 * 86400 if at is not None and at <= until else at

    monkeypatch.setattr(LocalStore, "modified", modified)


def steps(few):
    """In CI at a call in so many."""
    return pytest.mark.parametrize("step", [few, pytest.param(1, marks=pytest.mark.deep)])


def at_every_call(monkeypatch, tmp_path, source, work, action, check, step):
    """Return how many calls the work makes; at one in `step` of them the action ran just before it."""
    k = 1
    while True:
        url = shutil.copytree(source, tmp_path / f"round-{k}")
        with monkeypatch.context() as patch:
            all_is_old(patch, url)
            at = At(patch, k, lambda url=url: action(url))
            work(url)
        if not at.ran:
            return k - 1
        check(url)
        shutil.rmtree(url)
        k += step


def check(url):
    assert [str(each) for each in verify(str(url), level="full").errors] == []


@pytest.fixture
def returning(tmp_path):
    """A dataset whose next seal makes a former snapshot, and lists a former attachment, again."""
    url = tmp_path / "returning"
    write(url, ["a", "b"], "p-one")
    seal(url, attachments={"d2t": np.arange(3)})
    seal(url, drop_attachments=["d2t"])
    return url


def attach_again(url):
    seal(url, attachments={"d2t": np.arange(3)})


def collect_all(url):
    return collect(url, keep_snapshots=1, **NOW)


def collect_old(url):
    return collect(url, keep_snapshots=1, older_than=timedelta(days=7))


def check_attached(url):
    check(url)
    (entry,) = [path for path, _ in open_store(url).walk("hsfmt/attachments")]
    assert entry.endswith("d2t.npy")
    assert contents(url).keys() == {"a", "b"}


@steps(3)
def test_a_seal_at_every_call_of_a_collection_loses_nothing(monkeypatch, tmp_path, returning, step):
    n = at_every_call(monkeypatch, tmp_path, returning, collect_old, attach_again, check_attached, step)
    assert n >= 40


@steps(2)
def test_a_collection_at_every_call_of_a_seal_loses_nothing(monkeypatch, tmp_path, returning, step):
    n = at_every_call(monkeypatch, tmp_path, returning, attach_again, collect_old, check_attached, step)
    assert n >= 20


@steps(5)
def test_a_reader_at_every_call_of_a_collection_reads_all(monkeypatch, tmp_path, step):
    url = tmp_path / "d"
    write(url, ["a", "b"], "p-one")
    supersede(url, "p-one", "p-two")
    seal(url)
    want = contents(url)

    def read(url):
        assert contents(url) == want

    assert at_every_call(monkeypatch, tmp_path, url, collect_old, read, check, step) >= 60


@steps(5)
def test_a_collection_at_every_call_of_a_merge_loses_nothing(monkeypatch, tmp_path, step):
    source = tmp_path / "s"
    write(source, ["x", "y"], "p-s")
    base = tmp_path / "d"
    write(base, ["a"], "p-one")
    n = at_every_call(
        monkeypatch,
        tmp_path,
        base,
        lambda url: merge(url, [source]),
        # By the ages that a collection goes by, however old the linked files are.
        lambda url: collect(url, older_than=timedelta(days=1), keep_snapshots=1),
        lambda url: (check(url), contents(url).keys() == {"a", "x", "y"} or pytest.fail("lost")),
        step,
    )
    assert n >= 60


def test_a_linked_file_is_new_however_old_it_was(tmp_path):
    source = tmp_path / "s"
    write(source, ["x"], "p-s")
    for path, _ in open_store(source).walk(""):
        os.utime(source / path, (1e9, 1e9))
    store = open_store(tmp_path / "d")
    path = "parts/p-s/zarr.json"
    assert store.link(open_store(source), path)
    assert (tmp_path / "d" / path).stat().st_mtime == 1e9
    assert store.modified(path) > 1.7e9


@pytest.mark.parametrize("years", [-20, 20])
def test_the_storage_has_the_only_clock(tmp_path, monkeypatch, years):
    url = tmp_path / "d"
    write(url, ["a"], "p-one")
    (url / "parts/dead").mkdir()
    (url / "parts/dead/zarr.json").write_bytes(b"x")
    real = LocalStore.modified
    ages = {"parts/dead/zarr.json": 8}

    def modified(store, path):
        at = real(store, path)
        return at and at + years * 365 * 86400 - ages.get(path, 0) * 86400

    monkeypatch.setattr(LocalStore, "modified", modified)
    assert collect(url, older_than=timedelta(days=9)).removed == ()
    (group,) = collect(url, older_than=timedelta(days=7)).removed
    assert group.part == "dead"
    check(url)


def aged(monkeypatch, ages):
    """Let files whose path holds a key look so many days old."""
    real = LocalStore.modified

    def modified(store, path):
        at = real(store, path)
        return at and at - 86400 * next((days for key, days in ages.items() if key in path), 0)

    monkeypatch.setattr(LocalStore, "modified", modified)


def test_a_snapshot_that_was_current_until_now_stays(tmp_path, monkeypatch):
    url = tmp_path / "d"
    write(url, ["a", "b"], "p-one")
    first = seal(url).snapshot.fingerprint
    supersede(url, "p-one", "p-two")
    seal(url)
    # Both parts are old; whoever opened the first snapshot yesterday still reads it.
    aged(monkeypatch, {"p-one": 30, "p-two": 20, first.rpartition(":")[2]: 30})
    report = collect(url, older_than=timedelta(days=7), keep_snapshots=1)
    assert report.removed == ()
    assert contents(url, snapshot=first).keys() == {"a", "b"}
    aged(monkeypatch, {"p-one": 30, "p-two": 20, "snapshots": 10, "hsfmt/manifest.json": 10})
    assert len(collect(url, older_than=timedelta(days=7), keep_snapshots=1).removed) == 2


def test_old_snapshots_go_by_age_and_by_number(tmp_path, monkeypatch):
    url = tmp_path / "d"
    write(url, ["a", "b", "c"], "p-one")
    prints = [seal(url, retract=retract).snapshot.fingerprint for retract in ([], ["a"], ["a", "b"])]
    names = [name.rpartition(":")[2] for name in prints]
    aged(monkeypatch, {names[0]: 300, names[1]: 100, names[2]: 50, "hsfmt/manifest.json": 50})
    old = collect(url, older_than=timedelta(days=7), drop_snapshots_older_than=timedelta(days=200), dry_run=True)
    assert [group.snapshot for group in old.removed] == prints[:1]
    three = collect(url, older_than=timedelta(days=7), keep_snapshots=3, dry_run=True)
    two = collect(url, older_than=timedelta(days=7), keep_snapshots=2, dry_run=True)
    assert ([g.snapshot for g in three.removed], [g.snapshot for g in two.removed]) == ([], prints[:1])
    all_old = collect(url, older_than=timedelta(days=7), drop_snapshots_older_than=timedelta(days=1))
    assert {group.snapshot for group in all_old.removed} == set(prints[:2])
    assert read_pointer(open_store(url)).fingerprint == prints[2]
    assert open_store(url).list("hsfmt/snapshots") == names[2:]
    check(url)


def test_a_young_superseded_part_keeps_what_supersedes_it(tmp_path, monkeypatch):
    url = tmp_path / "d"
    write(url, ["a", "b"], "p-one")
    supersede(url, "p-one", "p-two")
    supersede(url, "p-two", "p-three")
    seal(url)
    old = {"p-two": 30, "p-three": 30, "snapshots": 30, "hsfmt/manifest.json": 30}
    aged(monkeypatch, old)  # p-one was linked elsewhere just now, which makes its files new
    collect(url, older_than=timedelta(days=7), keep_snapshots=1)
    assert [ref.name for ref in seal(url).snapshot.parts] == ["p-three"]
    assert set(committed_parts(open_store(url))) == {"p-one", "p-two", "p-three"}


def test_what_a_damaged_part_replaces_stays(tmp_path):
    url = tmp_path / "d"
    write(url, ["a", "b"], "p-one")
    supersede(url, "p-one", "p-two")
    seal(url)
    shard = next(iter((url / "parts/p-two/hidden_states").rglob("c/0/0/0")))
    data = shard.read_bytes()
    shard.unlink()
    report = collect_all(url)
    assert "p-one" in [group.part for group in report.spared]
    shard.parent.mkdir(parents=True, exist_ok=True)
    shard.write_bytes(data)
    assert "p-one" in [group.part for group in collect_all(url).removed]
    check(url)


def test_what_repair_set_aside_has_its_time(tmp_path, monkeypatch):
    url = tmp_path / "d"
    write(url, ["a"], "p-one")
    write(url, ["b"], "p-two", seal=False)
    (url / "hsfmt/quarantine/objects/hsfmt").mkdir(parents=True)
    (url / "hsfmt/manifests/p-two.json").rename(url / "hsfmt/quarantine/p-two.json")
    (url / "hsfmt/quarantine/objects/hsfmt/manifest.json").write_bytes(b"{}")
    aged(monkeypatch, {"parts/p-two": 30, "index/p-two": 30})
    assert collect(url, older_than=timedelta(days=7)).removed == ()
    aged(monkeypatch, {"p-two": 30, "quarantine": 30})
    assert len(collect(url, older_than=timedelta(days=7)).removed) == 2
    assert not (url / "hsfmt/quarantine").exists() or not any((url / "hsfmt/quarantine").iterdir())
    check(url)


def test_a_writer_that_goes_on_keeps_its_part(tmp_path, monkeypatch):
    url = tmp_path / "d"
    write(url, ["a"], "p-one")
    dead = url / "parts/p-open/input_ids/c"
    dead.mkdir(parents=True)
    (dead / "0").write_bytes(b"x")
    real = LocalStore.list
    seen = []

    def listed(store, prefix):
        seen.append(prefix)
        if seen.count("hsfmt/manifests") == 2:  # the second look
            (dead / "1").write_bytes(b"y")
        return real(store, prefix)

    monkeypatch.setattr(LocalStore, "list", listed)
    assert [group.part for group in collect(url, **NOW).spared] == ["p-open"]
    assert (dead / "0").exists()


def test_empty_folders_go_when_they_are_old(tmp_path, monkeypatch):
    url = tmp_path / "d"
    write(url, ["a"], "p-one")
    (url / "parts/dead/input_ids/c").mkdir(parents=True)
    collect(url, older_than=timedelta(days=7))
    assert (url / "parts/dead/input_ids/c").exists()
    aged(monkeypatch, {"parts/dead": 8})
    collect(url, older_than=timedelta(days=7))
    assert not (url / "parts/dead").exists()
    check(url)


def test_a_remote_dataset_is_collected_too(tmp_path):
    url = "memory://gc-remote/d"
    write(url, ["a", "b"], "p-one")
    supersede(url, "p-one", "p-two")
    seal(url, attachments={"d2t": np.arange(3)})
    seal(url, drop_attachments=["d2t"])
    store = open_store(url)
    store.write("parts/dead/input_ids/c/0", b"x")
    store.write("parts/dead/mine.txt", b"x")
    report = collect(url, keep_snapshots=1, **NOW)
    assert {group.part for group in report.removed} == {None, "p-one", "dead"}
    assert report.strays == ("parts/dead/mine.txt",)
    store.remove("parts/dead/mine.txt")
    assert verify(url, level="full").errors == ()
    assert committed_parts(store) == ["p-two"]
    assert len(contents(url)) == 2
    with pytest.raises(NotFoundError):
        collect("memory://gc-remote/none", **NOW)


def test_parts_that_replace_each_other_are_refused(tmp_path):
    from dataclasses import replace

    from hsfmt.catalog import load_manifest, read_header
    from hsfmt.errors import CorruptionError
    from hsfmt.layout import manifest_path

    url = tmp_path / "d"
    write(url, ["a"], "p-one")
    supersede(url, "p-one", "p-two")
    store = open_store(url)
    one, two = (load_manifest(store, name, read_header(store)) for name in ("p-one", "p-two"))
    # The digest of each would have to be in the other.
    store.replace(manifest_path("p-one"), replace(one, replaces={"p-two": two.digest()}, stored=None).to_bytes())
    for act in (lambda: collect_all(url), lambda: merge(tmp_path / "m", [url]), lambda: seal(url)):
        with pytest.raises(CorruptionError, match="replaces it"):
            act()
    assert set(committed_parts(store)) == {"p-one", "p-two"}
    assert not (tmp_path / "m").exists()
