"""Several writers, and several seals, on one dataset at once; there is no lock."""

import multiprocessing
import os
import threading
from pathlib import Path

import numpy as np
import part_oracles as oracles
import pytest

from hsfmt import DatasetWriter, seal
from hsfmt.catalog import committed_parts, read_pointer, read_snapshot
from hsfmt.errors import HeaderMismatchError, SampleNotFoundError
from hsfmt.layout import POINTER
from hsfmt.storage import open_store
from hsfmt.storage.local import LocalStore

N_PROCESSES, N_ROUNDS = 4, 60
SETTINGS = {"hidden_size": 4, "dtype": "float32", "seal": False}


def create_and_write(process, folder, same, barrier, results):
    os.fsync = lambda fd: None
    for number in range(N_ROUNDS):
        layers, norm = ([1, 2], "pre") if same else ([process, process + 5], ["pre", "post"][process % 2])
        barrier.wait(300)
        try:
            with DatasetWriter(f"{folder}/{number}", layers=layers, final_norm=norm, **SETTINGS) as writer:
                writer.write(f"p{process}", [1, 2], np.full((2, 2, 4), process, np.float32))
            results.put((number, process, None))
        except HeaderMismatchError as error:
            results.put((number, process, sorted(problem.where.rpartition(": ")[2] for problem in error.problems)))
        except BaseException as error:
            results.put((number, process, repr(error)))
            raise


def race(folder, *, same):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(N_PROCESSES), context.Queue()
    processes = [
        context.Process(target=create_and_write, args=(process, str(folder), same, barrier, results))
        for process in range(N_PROCESSES)
    ]
    for process in processes:
        process.start()
    rounds = [{} for _ in range(N_ROUNDS)]
    for _ in range(N_PROCESSES * N_ROUNDS):
        number, process, outcome = results.get(timeout=300)
        rounds[number][process] = outcome
    for process in processes:
        process.join()
    return rounds


def test_four_creators_with_equal_headers_all_join(tmp_path):
    for number, outcomes in enumerate(race(tmp_path, same=True)):
        assert outcomes == dict.fromkeys(range(N_PROCESSES))
        url = tmp_path / f"{number}"
        header = oracles.root_header(url).digest()
        parts = oracles.loaded_parts(url)
        assert [part.manifest.header.digest() for part in parts] == [header] * N_PROCESSES
        assert sorted(oracles.read_samples(url)) == [f"p{process}" for process in range(N_PROCESSES)]
        assert not [path for path in oracles.left_files(url) if path.endswith(".tmp")]


def test_of_four_creators_with_different_headers_one_wins(tmp_path):
    winners = set()
    for number, outcomes in enumerate(race(tmp_path, same=False)):
        (winner,) = (process for process, outcome in outcomes.items() if outcome is None)
        winners.add(winner)
        for process, outcome in outcomes.items():
            members = ["layers"] if (process - winner) % 2 == 0 else ["final_norm", "layers"]
            assert process == winner or outcome == sorted(members)
        url = tmp_path / f"{number}"
        assert oracles.root_header(url).layers == (winner, winner + 5)
        assert list(oracles.read_samples(url)) == [f"p{winner}"]
    assert len(winners) > 1, "it was a race"


def test_four_writers_append_without_a_lock(tmp_path):
    url, failures = str(tmp_path / "dataset"), []

    def produce(process):
        try:
            with DatasetWriter(url, layers=[1, 2], final_norm="pre", part_nbytes=500, **SETTINGS) as writer:
                for number in range(40):
                    writer.write(f"{process}-{number}", [1, 2, 3], np.full((3, 2, 4), process * 100 + number, "f4"))
        except BaseException as error:  # noqa: BLE001 - the thread's error is the test's result
            failures.append(error)

    threads = [threading.Thread(target=produce, args=[process]) for process in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    read = oracles.read_samples(url)
    assert len(read) == 160
    for sample_id, found in read.items():
        process, number = map(int, sample_id.split("-"))
        assert set(found.states.ravel().tolist()) == {process * 100 + number}


def current(url):
    store = open_store(url)
    return read_snapshot(store, read_pointer(store).fingerprint)[0]


def commit(url, *ids, value=0.0, part=None, **settings):
    names = {"part_names": lambda: part} if part else {}
    with DatasetWriter(url, layers=[1, 2], final_norm="pre", **{**SETTINGS, **names, **settings}) as writer:
        writer.committed_ids()
        for sample_id in ids:
            writer.write(sample_id, [1, 2], np.full((2, 2, 4), value, np.float32))


@pytest.mark.parametrize("same", [True, False])
def test_the_same_id_by_two_writers_is_served_once(url, same):
    first = DatasetWriter(url, layers=[1, 2], final_norm="pre", part_names=lambda: "b-part", **SETTINGS)
    second = DatasetWriter(url, layers=[1, 2], final_norm="pre", part_names=lambda: "a-part", **SETTINGS)
    for writer, value in ((first, 1.0), (second, 1.0 if same else 2.0)):
        writer.committed_ids()
        writer.write("twice", [1, 2], np.full((2, 2, 4), value, np.float32))
    first.write("once", [1, 2], np.zeros((2, 2, 4), np.float32))
    second.close()
    first.close()
    snapshot = seal(url).snapshot
    assert snapshot.counts == {
        "samples": 2, "tokens": 4, "supervised_tokens": 4, "parts": 2, "holes": 0, "shadowed": 1, "retracted": 0,
    }  # fmt: skip
    assert [snapshot.parts[number].name for number in snapshot.part] == ["a-part", "b-part"]
    assert [snapshot.parts[number].name for number in snapshot.shadowed_part] == ["b-part"]
    assert snapshot.shadowed_row.tolist() == [0]
    assert snapshot.shadowed_same.tolist() == [int(same)]
    store = open_store(url)
    with DatasetWriter(url, layers=[1, 2], final_norm="pre", **SETTINGS) as writer:
        assert len(writer.committed_ids()) == 2
    assert len(committed_parts(store)) == 2


class HookedStore(LocalStore):
    """Calls back around the operations of a seal."""

    def __init__(self, url, **hooks):
        super().__init__(url)
        self.hooks = hooks

    def _call(self, name):
        hook = self.hooks.pop(name, None)
        if hook is not None:
            hook()

    def list(self, prefix):
        names = super().list(prefix)
        if prefix == "hsfmt/manifests":
            self._call("after_listing")
        return names

    def replace(self, path, data):
        if path == POINTER:
            self._call("before_pointer")
        super().replace(path, data)
        if path == POINTER:
            self._call("after_pointer")


def names_of(snapshot):
    return {part.name for part in snapshot.parts}


@pytest.mark.parametrize("moment", ["after_listing", "before_pointer", "after_pointer"])
def test_a_commit_during_a_seal_is_in_the_pointer(url, moment):
    commit(url, "a", part="first")
    sealed = seal(HookedStore(url, **{moment: lambda: commit(url, "b", part="second")}))
    assert sealed.rounds == 2
    assert names_of(current(url)) == names_of(sealed.snapshot) == {"first", "second"}


@pytest.mark.parametrize("moment", ["after_listing", "before_pointer", "after_pointer"])
def test_a_slow_seal_does_not_undo_a_fast_one(url, moment):
    """The slow one listed before the commit that the fast one sealed, and replaces the pointer after it."""
    commit(url, "a", part="first")

    def commit_and_seal():
        commit(url, "b", part="second")
        assert names_of(seal(url).snapshot) == {"first", "second"}

    sealed = seal(HookedStore(url, **{moment: commit_and_seal}))
    assert names_of(current(url)) == names_of(sealed.snapshot) == {"first", "second"}


@pytest.mark.parametrize("moment", ["after_listing", "before_pointer", "after_pointer"])
def test_a_retraction_survives_a_racing_seal(url, moment):
    commit(url, "a", "b", part="first")
    seal(url)
    commit(url, "c", part="second")
    seal(HookedStore(url, **{moment: lambda: seal(url, retract=["a"])}))
    snapshot = current(url)
    assert snapshot.counts["retracted"] == 1
    assert (snapshot.n_samples, names_of(snapshot)) == (2, {"first", "second"})


def test_two_racing_retractions_both_stay(url):
    commit(url, "a", "b", "c", part="first")
    seal(HookedStore(url, before_pointer=lambda: seal(url, retract=["a"])), retract=["b"])
    assert current(url).counts["retracted"] == 2


def test_a_commit_after_the_last_listing_waits_for_the_next_seal(url):
    commit(url, "a", part="first")
    listed = []

    class Late(LocalStore):
        def list(self, prefix):
            names = super().list(prefix)
            if prefix == "hsfmt/manifests":
                listed.append(names)
                if len(listed) == 2:
                    commit(url, "b", part="second")
            return names

    assert names_of(seal(Late(url)).snapshot) == {"first"}
    assert names_of(seal(url).snapshot) == {"first", "second"}


def test_two_seals_racing_with_commits_lose_nothing(url):
    """Each seal's pointer, or a later one, holds all that was committed before that seal began."""
    commit(url, "first")
    failures, stop = [], threading.Event()
    store = open_store(url)

    def commits():
        try:
            for number in range(25):
                commit(url, f"s{number}")
        except BaseException as error:  # noqa: BLE001 - the thread's error is the test's result
            failures.append(error)
        finally:
            stop.set()

    def seals():
        try:
            last = False
            while not last:
                last = stop.is_set()
                before = set(committed_parts(store))
                assert before <= names_of(seal(url).snapshot)
        except BaseException as error:  # noqa: BLE001 - the thread's error is the test's result
            failures.append(error)

    threads = [threading.Thread(target=target) for target in (commits, seals, seals)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    snapshot = current(url)
    assert names_of(snapshot) == set(committed_parts(store))
    assert snapshot.n_samples == 26


def test_retraction_is_carried_over_and_counts_as_present(url):
    commit(url, "a", "b", part="p1")
    first = seal(url, retract=["a"])
    assert first.snapshot.retracted_row.tolist() == [0]
    commit(url, "c", part="p2")
    snapshot = seal(url).snapshot
    assert (snapshot.n_samples, snapshot.counts["retracted"]) == (2, 1)
    with DatasetWriter(url, layers=[1, 2], final_norm="pre", **SETTINGS) as writer:
        assert "a" in writer.committed_ids()
    # An earlier part name with the same id makes another row the first: it is retracted all the same.
    commit(url, "z", part="p0")
    second = DatasetWriter(url, layers=[1, 2], final_norm="pre", part_names=lambda: "o0", **SETTINGS)
    second._committed = type("Nothing", (), {"__contains__": lambda *_: False, "next_source_index": 0})()
    second.write("a", [1, 2], np.zeros((2, 2, 4), np.float32))
    second.close()
    snapshot = seal(url).snapshot
    assert (snapshot.counts["retracted"], snapshot.counts["shadowed"], snapshot.n_samples) == (1, 1, 3)
    assert snapshot.parts[snapshot.retracted_part[0]].name == "o0"


def test_retraction_outlives_the_pointer(url):
    commit(url, "a", "b", part="p1")
    seal(url, retract=["a"])
    (Path(url) / POINTER).unlink()
    commit(url, "c", part="p2")
    snapshot = seal(url).snapshot
    assert (snapshot.n_samples, snapshot.counts["retracted"]) == (2, 1)


def test_an_unknown_id_cannot_be_retracted(url):
    commit(url, "a")
    with pytest.raises(SampleNotFoundError, match="retract: expected ids of samples, got 2 unknown"):
        seal(url, retract=["a", "A", "nope"])
    assert read_pointer(open_store(url)) is None


def test_a_pointer_is_always_whole(url, monkeypatch):
    """A reader that looks all the time sees one snapshot or the other, never neither."""
    commit(url, "a")
    seal(url)
    stop, failures = threading.Event(), []

    def look():
        try:
            while not stop.is_set():
                assert current(url).n_samples >= 1
        except BaseException as error:  # noqa: BLE001 - the thread's error is the test's result
            failures.append(error)

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(10):
        commit(url, f"s{number}")
        seal(url)
    stop.set()
    reader.join()
    assert failures == []
    assert len(list((Path(url) / "hsfmt/snapshots").iterdir())) == 11, "snapshots are kept"
