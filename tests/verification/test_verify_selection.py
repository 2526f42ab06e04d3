"""Verification of a share of the data: what is read, what is remembered, what the report says of it."""

import json
import sys
from dataclasses import replace
from datetime import timedelta

import pytest

from hsfmt import seal
from hsfmt.errors import UsageError
from hsfmt.manifest import parse_manifest
from hsfmt.readers.verification import objects, verify, work
from hsfmt.storage import open_store
from hsfmt.storage.local import LocalStore

HOUR = timedelta(hours=1)


class CountingStore(LocalStore):
    """Counts the bytes read of every shard."""

    def __init__(self, root):
        super().__init__(root)
        self.read_bytes = {}

    def read_into(self, path, offset, buffer):
        super().read_into(path, offset, buffer)
        if "/c/" in path:
            self.read_bytes[path] = self.read_bytes.get(path, 0) + len(buffer)


def shards(root):
    return {
        p.relative_to(root).as_posix(): p.stat().st_size
        for p in root.rglob("*")
        if "/c/" in p.as_posix() and p.is_file()
    }


def n_slices(root):
    return sum("/hidden_states/" in path for path in shards(root))


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("level", ["complete", "full"])
def test_subsets_read_every_byte_once(dataset, level):
    store, sizes = CountingStore(dataset), shards(dataset)
    assert len(sizes) > 20
    for n in range(1, 11):
        report = verify(store, level=level, sample=f"{n}/10")
        assert report.ok
        assert not report.whole
        assert report.verdict.startswith("fine so far, sample of")
    if level == "complete":
        assert store.read_bytes == sizes
    else:  # also what samples that begin in the slice need of other files
        assert store.read_bytes.keys() == sizes.keys()
        assert all(store.read_bytes[path] >= nbytes for path, nbytes in sizes.items())


@pytest.mark.parametrize("level", ["complete", "full"])
@pytest.mark.parametrize("seed", [1, 2, 3, None])
def test_a_share_reads_no_more(dataset, level, seed):
    store, total = CountingStore(dataset), sum(shards(dataset).values())
    report = verify(store, level=level, sample="20%", seed=seed)
    n_read = report.coverage.read_nbytes
    assert 0 < n_read <= 0.2 * total
    if level == "complete":
        assert sum(store.read_bytes.values()) == n_read > 0.1 * total
    assert report.coverage.total_nbytes == total
    again = CountingStore(dataset)
    verify(again, level=level, sample="20%", seed=report.coverage.selection["seed"])
    assert again.read_bytes == store.read_bytes


@pytest.mark.parametrize(
    ("level", "options"), [("complete", {"sample": "20%", "seed": 5}), ("full", {"parts": ["part-1"]})]
)
def test_workers_give_the_same_report(dataset, level, options):
    flip(dataset / next(iter(sorted(shards(dataset)))))
    flip(dataset / max(shards(dataset)))
    one, three = (verify(dataset, level=level, workers=n, **options).to_json() for n in (1, 2))
    assert one == three
    assert one["coverage"]["read_nbytes"] > 0


def test_only_a_part(dataset):
    store = CountingStore(dataset)
    report = verify(store, level="complete", parts=["part-1"])
    assert {path.split("/")[1] for path in store.read_bytes} == {"part-1"}
    assert report.ok
    assert not report.whole
    with pytest.raises(UsageError, match="nosuch"):
        verify(dataset, parts=["nosuch"])


@pytest.mark.parametrize("text", ["", "0%", "101%", "5", "0/3", "4/3", "1/0", "-1%", "0G", "nan%"])
def test_other_samples_are_refused(dataset, text):
    with pytest.raises(UsageError, match="a share like"):
        verify(dataset, level="complete", sample=text)


@pytest.mark.parametrize("level", ["complete", "full"])
def test_a_short_limit_gets_there(dataset, tmp_path, level):
    options = {"level": level, "max_duration": timedelta(0), "state": tmp_path / "state"}
    store, runs = CountingStore(dataset), 0
    report = None
    while report is None or not report.whole:
        report, runs = verify(store, **options), runs + 1
        assert report.ok
        assert runs < 200
    assert runs == (n_slices(dataset) if level == "full" else len(shards(dataset)))
    assert store.read_bytes.keys() == shards(dataset).keys()
    if level == "complete":
        assert store.read_bytes == shards(dataset)
    assert not verify(store, **options).whole  # a new pass


def test_what_changed_is_read_again(dataset, tmp_path):
    options = {"level": "complete", "max_age": HOUR, "state": tmp_path / "state"}
    assert verify(dataset, **options).coverage.known_nbytes == 0
    store = CountingStore(dataset)
    report = verify(store, **options)
    assert store.read_bytes == {}
    assert report.whole
    path = max(shards(dataset))
    flip(dataset / path)
    for _ in range(2):
        report = verify(store, **options)
        assert [f.path for f in report.errors] == [path]
        assert set(store.read_bytes) == {path}


def test_records_that_do_not_count(dataset, tmp_path, monkeypatch, build_dataset):
    state = tmp_path / "state"
    options = {"level": "complete", "max_age": HOUR, "state": state}
    verify(dataset, **options)
    good = state.read_bytes()
    other = build_dataset(tmp_path / "other")
    assert verify(other, **options).coverage.known_nbytes == 0
    assert [f.code for f in verify(dataset, **options).problems] == ["records"]
    bad = [b"", b"{", b"[1]", b"\xff", good[:-9], good.replace(b'"time": 1', b'"time": 2', 1), b"[" * 100_000]
    body = json.loads(good)["body"]
    for change in ({"records": {"x": 1}}, {"records": []}, {"pass": 3}):
        changed = body | change
        bad.append(json.dumps({"body": changed, "digest": "0", "format": "hsfmt-verified-1"}).encode())
    for data in bad:
        state.write_bytes(data)
        report = verify(dataset, **options)
        assert report.ok
        assert report.coverage.known_nbytes == 0
        assert [(f.severity, f.code) for f in report.problems] == [("info", "records")]
    state.write_bytes(good)
    assert verify(dataset, **options).coverage.read_nbytes == 0
    assert verify(dataset, **options | {"level": "full"}).coverage.known_nbytes == 0
    state.write_bytes(good)
    now = work.time.time()
    for shift, known in ((-7200, 0), (7200, 0)):
        state.write_bytes(good)
        with monkeypatch.context() as patch:
            patch.setattr(work.time, "time", lambda shift=shift: now + shift)
            assert verify(dataset, **options).coverage.known_nbytes == known


@pytest.mark.parametrize("level", ["complete", "full"])
def test_a_second_read_that_is_fine_is_a_warning(dataset, tmp_path, level, monkeypatch):
    dropped = []
    for module in (objects, sys.modules["hsfmt.readers.verification.shards"]):
        monkeypatch.setattr(module, "forget_cached", lambda store, path: dropped.append(path))
    target = max(shards(dataset))

    class Shaky(LocalStore):
        n = 0

        def read_into(self, path, offset, buffer):
            super().read_into(path, offset, buffer)
            if path == target:
                self.n += 1
                if self.n == 1:
                    buffer[0] ^= 1

    options = {"level": level, "max_age": HOUR, "state": tmp_path / "state"}
    report = verify(Shaky(dataset), **options)
    assert [(f.severity, f.code, f.path) for f in report.problems] == [("warning", "unstable_read", target)]
    assert dropped[0] == target
    # It is not recorded: the next run reads it again.
    assert 0 < verify(dataset, **options).coverage.read_nbytes < sum(shards(dataset).values())


def test_a_remote_dataset(dataset, tmp_path):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(dataset), "/verify-selection", recursive=True)
    try:
        options = {"level": "complete", "state": tmp_path / "state"}
        store = open_store("memory://verify-selection")
        runs = [verify(store, sample=f"{n}/3", max_age=HOUR, **options).coverage.read_nbytes for n in (1, 2, 3)]
        assert sum(runs) == sum(shards(dataset).values())
        report = verify(store, max_age=HOUR, **options)
        assert (report.coverage.read_nbytes, report.whole) == (0, True)
    finally:
        memory.rm("/verify-selection", recursive=True)


def test_damage_of_a_replaced_part(dataset, add_part):
    add_part(dataset, "new")
    path = dataset / "hsfmt/manifests/new-0.json"
    old = parse_manifest((dataset / "hsfmt/manifests/part-0.json").read_bytes(), "part-0", "manifest")
    new = parse_manifest(path.read_bytes(), "new-0", "manifest")
    path.write_bytes(replace(new, replaces={"part-0": old.digest()}, stored=None).to_bytes())
    broken = next(p for p in sorted(shards(dataset)) if p.startswith("parts/part-0/"))
    flip(dataset / broken)
    for level in ("complete", "full"):
        assert [f.path for f in verify(dataset, level=level).errors] == [broken]  # still served
    seal(dataset)
    for level in ("complete", "full"):
        report = verify(dataset, level=level)
        assert report.ok, report.errors
        assert broken in {f.path for f in report.of("warning")}
        assert "superseded" in {f.code for f in report.of("info")}


def test_a_quarantined_part_is_an_info(dataset):
    (dataset / "hsfmt/quarantine").mkdir()
    (dataset / "hsfmt/manifests/part-0.json").rename(dataset / "hsfmt/quarantine/part-0.json")
    assert not verify(dataset, level="complete").ok
    seal(dataset, drop_missing=True)
    report = verify(dataset, level="complete")
    assert report.ok
    assert [(f.code, f.path) for f in report.of("info")] == [("quarantined", "hsfmt/quarantine/part-0.json")]


def test_what_no_sample_of_a_size_can_hold_is_said(tmp_path, build_dataset):
    """A share smaller than a shard of the states would else look, run after run, as if it got to them some day."""
    root = build_dataset(tmp_path / "d", n_parts=2, codec="none", shard_tokens=64)
    sizes = shards(root)
    large = {path for path, nbytes in sizes.items() if nbytes > 0.1 * sum(sizes.values())}
    assert large
    assert all("/hidden_states/" in path for path in large)
    store = CountingStore(root)
    for seed in range(20):
        coverage = verify(store, level="complete", sample="10%", seed=seed).coverage
        files, nbytes = coverage.skipped["in no sample of this size, being larger"]
        assert (files, nbytes) == (len(large), sum(sizes[path] for path in large))
        assert coverage.read_nbytes + nbytes + coverage.skipped["not in the sample"][1] == coverage.total_nbytes
    assert store.read_bytes.keys() == sizes.keys() - large
    assert len(verify(root, level="complete", sample="60%", seed=1).coverage.skipped) == 1
    assert (
        "in no sample of this size, being larger" not in verify(root, level="complete", sample="1/9").coverage.skipped
    )
