"""Seals that overlap in every order of their steps: what one was told to retract or attach stays, whoever ends last."""

import itertools
import threading
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from hsfmt import DatasetWriter, retractions, seal
from hsfmt.catalog import committed_parts, read_pointer, read_snapshot
from hsfmt.errors import CorruptionError
from hsfmt.layout import POINTER, manifest_path, snapshot_path
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.storage import open_store
from hsfmt.storage.local import LocalStore

PLACES = ("before pointer", "after pointer", "after listing", "before index")
ORDERS = [(early, late) for early in PLACES for late in PLACES]
SECONDS = [{}, {"retract": ["b"]}, {"attachments": {"t2d": np.arange(2)}}]
CASES = [(*order, number) for order in ORDERS for number in range(3)]


class Stopping(LocalStore):
    """Waits at one step of a seal until it is let go on."""

    def __init__(self, url, place, *, coarse=False):
        super().__init__(url)
        self.coarse, self.place, self.there, self.go = coarse, place, threading.Event(), threading.Event()

    def modified(self, path):
        moment = super().modified(path)
        return moment if moment is None or not self.coarse else float(int(moment))

    def pause(self, place):
        if place == self.place and not self.there.is_set():
            self.there.set()
            assert self.go.wait(300)

    def list(self, prefix):
        names = super().list(prefix)
        if prefix == "hsfmt/manifests":
            self.pause("after listing")
        return names

    def write(self, path, data):
        if path.endswith("index.safetensors"):
            self.pause("before index")
        super().write(path, data)

    def replace(self, path, data):
        if path == POINTER:
            self.pause("before pointer")
        super().replace(path, data)
        if path == POINTER:
            self.pause("after pointer")


def start(store, failures, **what):
    def work():
        try:
            seal(store, **what)
        except BaseException as error:  # noqa: BLE001 - the thread's error is the test's result
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def made(url):
    """Make a dataset of two parts, the first of them sealed."""
    for number, ids in enumerate(["abc", "d"]):
        with DatasetWriter(
            url, layers=[1], hidden_size=2, final_norm="pre", dtype="float32", seal=False, threads=1
        ) as writer:
            for sample_id in ids:
                writer.write(sample_id, [1], np.ones((1, 1, 2), np.float32))
        if number == 0:
            seal(url)
    return url


def current(url):
    store = open_store(url)
    return read_snapshot(store, read_pointer(store).fingerprint)[0]


def check(url, n_retracted, attachments):
    snapshot = current(url)
    assert {part.name for part in snapshot.parts} == set(committed_parts(open_store(url)))
    assert snapshot.counts["retracted"] == n_retracted
    assert {entry["name"] for entry in snapshot.attachments} == {f"{name}.npy" for name in attachments}


def run_over(url, early, late, second, *, coarse=False):
    """The second begins while the first is at one step, and is held at another until the first has ended."""
    failures = []
    first, other = Stopping(url, early, coarse=coarse), Stopping(url, late, coarse=coarse)
    threads = [start(first, failures, retract=["a"], attachments={"d2t": np.arange(3)})]
    assert first.there.wait(300)
    threads.append(start(other, failures, **second))
    while threads[1].is_alive() and not other.there.wait(0.01):
        pass  # one that finds nothing to do comes to no pointer
    first.go.set()
    threads[0].join()
    other.go.set()
    threads[1].join()
    assert failures == []
    check(url, 1 + len(second.get("retract", [])), ["d2t", *second.get("attachments", {})])


@pytest.mark.parametrize(("early", "late", "number"), CASES)
def test_what_two_overlapping_seals_were_told_stays(tmp_path, early, late, number):
    run_over(made(str(tmp_path / "dataset")), early, late, SECONDS[number])


def test_a_clock_of_whole_seconds_will_do(tmp_path):
    """As object stores have it; the second is one that wrote nothing of its own, and replaces the pointer last."""
    for place in ("before pointer", "before index"):
        run_over(made(str(tmp_path / place)), place, "before pointer", {}, coarse=True)


def test_three_overlapping_seals(tmp_path):
    """Each is held before its pointer until all have written their snapshots; any of them is the last one."""
    for order in itertools.permutations(range(3)):
        url, failures = made(str(tmp_path / "-".join(map(str, order)))), []
        stores = [Stopping(url, "before pointer") for _ in range(3)]
        told = [{"retract": ["a"]}, {"attachments": {"d2t": np.arange(3)}}, {}]
        threads = []
        for store, what in zip(stores, told, strict=True):
            threads.append(start(store, failures, **what))
            assert store.there.wait(300)
        for number in order:
            stores[number].go.set()
            threads[number].join()
        assert failures == []
        check(url, 1, ["d2t"])


class Killed(BaseException):
    pass


class DyingStore(LocalStore):
    """Dies once it has replaced the pointer, before it looks at what others did."""

    def __init__(self, url, before):
        super().__init__(url)
        self.before = before

    def replace(self, path, data):
        self.before()
        super().replace(path, data)
        raise Killed


def test_a_seal_killed_before_it_looked_again_undoes_no_retraction_for_good(tmp_path):
    url = made(str(tmp_path / "dataset"))
    with pytest.raises(Killed):
        seal(DyingStore(url, lambda: seal(url, retract=["a"])))
    assert current(url).counts["retracted"] == 0, "its pointer was the last one"
    assert seal(url).snapshot.counts["retracted"] == 1
    check(url, 1, [])


def test_an_old_pointer_put_back_retracts_no_less(tmp_path):
    url = made(str(tmp_path / "dataset"))
    pointer = Path(url) / POINTER
    old = pointer.read_bytes()
    seal(url, retract=["a"])
    seal(url, retract=["b"])
    pointer.write_bytes(old)
    assert seal(url).snapshot.counts["retracted"] == 2


@pytest.mark.parametrize("whole_nbytes", [0, 1 << 20])
@pytest.mark.parametrize("damage", ["truncated", "header", "part index"])
def test_a_damaged_snapshot_that_is_not_the_current_one_is_named(tmp_path, caplog, monkeypatch, damage, whole_nbytes):
    monkeypatch.setattr(retractions, "_WHOLE_NBYTES", whole_nbytes)
    url = made(str(tmp_path / "dataset"))
    pointer = Path(url) / POINTER
    old = pointer.read_bytes()
    retracting = seal(url, retract=["a"]).snapshot
    pointer.write_bytes(old)
    index = Path(url) / snapshot_path(retracting.fingerprint, "index")
    whole = index.read_bytes()
    part = retracting.parts[retracting.retracted_part[0]]
    if damage == "part index":
        # Of the part only the index is lost: it is replaced by another part, as repairing does.
        folder = Path(url) / "hsfmt"
        (folder / f"index/{part.name}.safetensors").unlink()
        (folder / f"manifests/{part.name}.json").unlink()
        for ids in (folder / "snapshots").glob("*/ids.safetensors"):
            ids.unlink()  # which would tell
    elif damage == "truncated":
        index.write_bytes(whole[: len(whole) // 3])
    else:
        index.write_bytes(whole[:9] + bytes([whole[9] ^ 1]) + whole[10:])
    with caplog.at_level("WARNING", "hsfmt"):
        sealed = seal(url, drop_missing=damage == "part index")
    assert sealed.snapshot.counts["retracted"] == 0
    if damage == "part index":
        assert f"of the missing part {part.name}, 1 retracted sample(s) are not known" in caplog.text
    else:
        assert f"what snapshot {retracting.fingerprint} retracts is not known, it is damaged" in caplog.text


def test_only_a_few_ranges_of_large_older_snapshots_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(retractions, "_WHOLE_NBYTES", 0)
    url = made(str(tmp_path / "dataset"))
    fingerprints = [seal(url, retract=[sample_id]).snapshot.fingerprint for sample_id in "abc"]

    class Counting(LocalStore):
        whole: ClassVar = []

        def read(self, path, max_nbytes):
            self.whole.append(path)
            return super().read(path, max_nbytes)

    assert not seal(Counting(url)).changed
    read = {fingerprint for fingerprint in fingerprints if snapshot_path(fingerprint, "index") in Counting.whole}
    assert read == {fingerprints[-1]}


def test_a_live_snapshot_never_passes_over_a_part_that_is_gone(tmp_path):
    """As a seal does not: a reader would see fewer samples, and no one would say so."""
    url = made(str(tmp_path / "dataset"))
    manifest = Path(url) / manifest_path(current(url).parts[0].name)
    assert len(SampleReader(url, snapshot="live")) == 4
    manifest.unlink()
    with pytest.raises(CorruptionError, match=r"1 without one, with 3 of its 3 sample\(s\)"):
        SampleReader(url, snapshot="live")
