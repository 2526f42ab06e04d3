"""The writing thread: what is durable, what is lost and what is refused, whatever the storage does."""

import errno
import os
import threading
import time
import weakref

import ml_dtypes
import numpy as np
import pytest

from hsfmt import DatasetWriter, HiddenStateDataset, seal
from hsfmt.errors import StorageError
from hsfmt.writers.capturing.ask import Ask
from hsfmt.writers.capturing.assembler import Assembly
from hsfmt.writers.capturing.background import BackgroundWriter
from hsfmt.writers.capturing.counters import Counters
from hsfmt.writers.capturing.room import Room

HIDDEN = 4
PATIENCE = 60


class Gone:
    """Stands for an engine's request."""


class Storage:
    """A dataset that can be broken, or blocked, at will."""

    def __init__(self, url, **settings):
        self.url = url
        self.settings = {
            "layers": [1, 3, 8],
            "hidden_size": HIDDEN,
            "final_norm": "post",
            "dtype": "float32",
            **settings,
        }
        self.broken = False
        self.gate = threading.Event()
        self.gate.set()
        self.n_opened = 0

    def open(self):
        if self.broken:
            raise StorageError.at(self.url, expected="a disk", got="none")
        self.n_opened += 1
        writer = DatasetWriter(self.url, seal=False, **self.settings)
        write = writer.write

        def gated(*args, **kwargs):
            self.gate.wait(PATIENCE)
            return write(*args, **kwargs)

        writer.write = gated
        return writer


@pytest.fixture
def storage(tmp_path):
    return Storage(str(tmp_path / "states"))


@pytest.fixture
def background(storage):
    made = []

    def make(**settings):
        room = Room(1 << 20)
        made.append(BackgroundWriter(storage.open, room, Counters(), settings.get("retry_seconds", 0.05)))
        made[-1].room, made[-1].counters = room, made[-1]._counters
        return made[-1]

    yield make
    storage.broken = False
    storage.gate.set()
    for writer in made:
        writer.close(PATIENCE)
        writer._thread.join(PATIENCE)
        assert not writer._thread.is_alive()


def sample(sample_id, n_tokens=6, chunks=(4, 2), value=1.0, dtype=np.float32, **ask):
    """A whole sample in pieces of (captured [row, 2 x hidden], final [row, hidden])."""
    rows = np.arange(n_tokens, dtype=np.float32)[:, None]
    aux = (rows + value + np.repeat([0.0, 0.5], HIDDEN)).astype(dtype)
    final = (rows - value + np.zeros(HIDDEN)).astype(dtype)
    made = Assembly(weakref.ref(Gone()), sample_id, Ask(sample_id, **ask), np.arange(n_tokens), state="accepted")
    start = 0
    for n in chunks:
        made.pieces.append([aux[start : start + n], final[start : start + n]])
        start += n
    made.nbytes = n_tokens * 3 * HIDDEN * 4
    return made, np.stack([aux[:, :HIDDEN], aux[:, HIDDEN:], final], axis=1)


def submit(writer, made):
    assert writer.room.take(made.nbytes, time.monotonic() + PATIENCE)
    writer.counters.add(asked=1, accepted=1)
    writer.submit(made)


def stored(url):
    seal(url)
    dataset = HiddenStateDataset(url)
    return {dataset.sample_ids[i]: dataset[i] for i in range(len(dataset))}


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


@pytest.mark.torch
def test_what_is_flushed_is_in_the_dataset(storage, background):
    writer = background()
    made, states = sample("a", mask_runs=((1, 3),), metadata={"turn": 2}, source_index=7)
    submit(writer, made)
    report = writer.flush(PATIENCE)
    assert (report.ok, report.n_durable, report.problem) == (True, 1, "")
    item = stored(storage.url)["a"]
    np.testing.assert_array_equal(item["hidden_states"].numpy(), states)
    assert item["loss_mask"].tolist() == [False, True, True, False, False, False]
    assert writer.room.used == 0
    assert made.pieces == []


@pytest.mark.torch
def test_bfloat16_patterns_stay_as_they_are(tmp_path, background, storage):
    storage.settings["dtype"] = "bfloat16"
    writer = background()
    made, states = sample("a", dtype=ml_dtypes.bfloat16)
    made.pieces = [[array.view(np.uint16) for array in piece] for piece in made.pieces]
    submit(writer, made)
    assert writer.flush(PATIENCE).ok
    item = stored(storage.url)["a"]["hidden_states"]
    np.testing.assert_array_equal(item.float().numpy(), states.astype(np.float32))


def test_submitting_does_not_wait_for_the_storage(storage, background):
    writer = background()
    storage.gate.clear()
    for i in range(50):
        submit(writer, sample(str(i))[0])
    assert writer.counters.durable == 0
    assert writer.room.used > 0
    report = writer.flush(0.2)
    assert (report.ok, report.problem) == (False, "not done within 0.2 s; it goes on")
    storage.gate.set()
    wait_for(lambda: writer.counters.durable == 50)  # what the flush began went on
    assert writer.counters.pending == 0
    assert writer.room.used == 0


def test_parts_that_end_by_age_are_counted(storage, background):
    storage.settings["part_seconds"] = 0.05
    writer = background()
    submit(writer, sample("a")[0])
    wait_for(lambda: writer.counters.durable == 1)
    assert writer.counters.flushes == 0


def test_what_the_writer_refuses_is_counted_and_nothing_stops(storage, background):
    writer = background()
    nonfinite, _ = sample("nan", value=np.nan)
    too_long, _ = sample("mask", mask_runs=((0, 99),))
    for made in (nonfinite, too_long, sample("a")[0]):
        submit(writer, made)
    assert writer.flush(PATIENCE).ok
    assert dict(writer.counters.refused) == {"nonfinite": 1, "writer": 1}
    assert (writer.counters.durable, writer.counters.pending, writer.counters.lost) == (1, 0, 0)
    assert not writer.is_taken("nan"), "it may come again"
    assert writer.is_taken("a")
    with DatasetWriter(storage.url, **storage.settings) as reader:
        assert sorted(reader.committed_ids()) == ["a"]


def test_an_id_that_another_writer_committed_before_is_taken(storage, background):
    with DatasetWriter(storage.url, **storage.settings) as other:
        made, states = sample("a")
        other.write("a", made.input_ids, states)
    writer = background()
    assert writer.is_taken("a")
    submit(writer, made)  # as by a race
    assert writer.flush(PATIENCE).ok
    assert dict(writer.counters.refused) == {"duplicate": 1}


@pytest.mark.torch
def test_a_disk_that_fails_and_comes_back(storage, background, monkeypatch):
    """What was accepted and not durable is lost, and said; what comes later is not."""
    writer = background()
    submit(writer, sample("durable")[0])
    assert writer.flush(PATIENCE).ok
    real, full = os.fsync, threading.Event()

    def fsync(fd):
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    full.set()
    submit(writer, sample("lost")[0])
    report = writer.flush(PATIENCE)
    assert not report.ok
    assert "No space left on device" in report.problem
    assert (writer.counters.lost, writer.counters.durable) == (1, 1)
    assert not writer.is_taken("lost")
    submit(writer, sample("kept")[0])
    wait_for(lambda: writer._stuck)
    stuck = writer.flush(PATIENCE)
    assert not stuck.ok, "at once, not after the patience of the caller"
    assert writer.counters.lost == 1, "it waits in memory"
    assert writer.room.used > 0
    full.clear()
    wait_for(lambda: writer.counters.durable == 2)
    submit(writer, sample("lost")[0])
    later = writer.flush(PATIENCE)
    assert later.n_durable == 3
    assert (writer.counters.pending, writer.counters.lost, writer.problem) == (0, 1, "")
    assert sorted(stored(storage.url)) == ["durable", "kept", "lost"]
    assert writer.flush(PATIENCE).ok


def test_a_loss_is_said_by_the_next_flush_that_somebody_waits_for(storage, background, monkeypatch):
    writer = background()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
        storage.gate.clear()
        submit(writer, sample("a")[0])
        assert not writer.flush(0.1).ok
        storage.gate.set()
        wait_for(lambda: writer.counters.flushes == 1)
    assert writer.counters.lost == 1
    assert writer.flush(PATIENCE).problem == "1 accepted samples were lost when the storage failed"
    assert writer.flush(PATIENCE).ok


@pytest.mark.torch
def test_a_commit_that_seemed_to_fail_and_did_not(storage, background, monkeypatch):
    """Its sample is durable, whatever the storage said: not written twice, not lost."""
    writer = background()
    writer.problem = "the storage failed"
    commit = DatasetWriter.commit

    def ambiguous(self):
        commit(self)
        self.take_durable()
        monkeypatch.undo()
        raise StorageError.at(self.url, expected="an answer", got="none")

    monkeypatch.setattr(DatasetWriter, "commit", ambiguous)
    submit(writer, sample("a")[0])
    wait_for(lambda: writer.counters.durable == 1)
    assert writer.flush(PATIENCE).ok
    assert (writer.counters.durable, writer.counters.lost, writer.counters.pending) == (1, 0, 0)
    assert sorted(stored(storage.url)) == ["a"]


def test_a_fault_in_the_thread_costs_a_sample_and_not_the_thread(storage, background):
    writer = background()
    broken, _ = sample("broken")
    broken.pieces = []
    submit(writer, broken)
    submit(writer, sample("a")[0])
    assert writer.flush(PATIENCE).ok
    counters = writer.counters
    assert (counters.errors, counters.durable, dict(counters.refused)) == (1, 1, {"error": 1})
    assert writer.room.used == 0


def test_a_storage_that_can_not_be_opened_again(storage, background, monkeypatch):
    writer = background()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
        submit(writer, sample("lost")[0])
        assert not writer.flush(PATIENCE).ok
        storage.broken = True
    submit(writer, sample("a")[0])
    wait_for(lambda: writer._stuck)
    assert "a disk, got none" in writer.problem
    storage.broken = False
    wait_for(lambda: writer.counters.durable == 1)
    assert storage.n_opened == 2


def test_closing_while_the_storage_is_down_counts_what_it_loses(storage, background, monkeypatch):
    writer = background(retry_seconds=PATIENCE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
        submit(writer, sample("a")[0])
        assert not writer.flush(PATIENCE).ok
        storage.broken = True
        submit(writer, sample("b")[0])
        wait_for(lambda: writer._stuck)
        assert not writer.close(PATIENCE).ok
        writer._thread.join(PATIENCE)
    assert writer.counters.lost == 2
    assert writer.counters.pending == 0
    assert writer.room.used == 0


def test_a_header_of_another_meaning_is_refused_at_the_start(storage, background):
    background()
    storage.settings["layers"] = [2, 4, 8]
    with pytest.raises(ValueError, match="layers"):
        background()


def test_the_counts_add_up_under_load(storage, background):
    writer = background()
    storage.settings["part_nbytes"] = 1000
    for i in range(200):
        submit(writer, sample(str(i % 190), value=np.nan if i % 40 == 3 else 1.0)[0])
    report = writer.flush(PATIENCE)
    counters = writer.counters
    assert report.ok
    assert counters.accepted == 200 == counters.durable + counters.dropped
    assert counters.to_json()["refused"] == {"duplicate": 9, "nonfinite": 5}
    assert writer.is_taken("0")
    assert writer.room.used == 0
