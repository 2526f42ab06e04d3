"""Objects changed twice within one tick of the storage's clock, at the same size, are read again."""

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from hsfmt.readers.verification import records, verify
from hsfmt.storage.local import LocalStore

DAY = timedelta(days=1)


class Clock:
    """One for all: time passes only where someone sleeps."""

    def __init__(self):
        self.now = 1_700_000_000.25
        self.slept = []

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


class Ticking(LocalStore):
    """Like an object store that keeps times of change in ticks, by a clock that may be off."""

    is_local = False

    def __init__(self, root, clock, tick, offset=0.0):
        super().__init__(root)
        self.clock, self.tick, self.offset = clock, tick, offset
        self.changed = {}
        self.first = clock.now

    def modified(self, path):
        at = self.changed.get(path, self.first) + self.offset
        return at // self.tick * self.tick

    def flip(self, path):
        file = Path(self.local_path(path))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        self.changed[path] = self.clock.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(records, "time", SimpleNamespace(time=lambda: clock.now, sleep=clock.sleep))
    return clock


@pytest.mark.parametrize("offset", [0.0, 600.0, -600.0], ids="{:+.0f}".format)
@pytest.mark.parametrize("tick", [2.0, 1.0, 1 / 64])
def test_a_change_right_after_the_reading_is_seen(dataset, tmp_path, clock, tick, offset):
    store = Ticking(dataset, clock, tick, offset)
    options = {"level": "complete", "max_age": DAY, "state": tmp_path / "state"}
    path = "parts/part-0/hidden_states/c/0/0/0"
    assert verify(store, **options).problems == ()
    assert clock.slept == [2.0 if tick >= 1 else 0.1]
    store.flip(path)
    report = verify(store, **options)
    assert [finding.path for finding in report.errors] == [path]
    assert report.coverage.read_files == 1


def test_what_is_old_is_not_waited_for(dataset, tmp_path, clock):
    store = Ticking(dataset, clock, 1.0)
    clock.now += 7200
    options = {"level": "full", "max_age": DAY, "state": tmp_path / "state"}
    assert verify(store, **options).ok
    assert verify(store, **options).coverage.read_files == 0
    assert clock.slept == []


def test_nor_is_what_is_known(dataset, tmp_path, clock):
    store = Ticking(dataset, clock, 1.0)
    options = {"level": "complete", "max_age": DAY, "state": tmp_path / "state"}
    for _ in range(3):
        assert verify(store, **options).ok
    assert clock.slept == [2.0]


def test_a_local_file_changed_in_place_again_and_again(dataset, tmp_path):
    """At once after each run, at the same size, with its old time of modification: its status change tells."""
    options = {"level": "complete", "max_age": DAY, "state": tmp_path / "state"}
    name = "parts/part-1/hidden_states/c/1/0/0"
    path = dataset / name
    before = path.stat()
    good = path.read_bytes()
    assert verify(dataset, **options).ok
    for turn in range(6):
        with path.open("r+b") as file:
            file.write(good if turn % 2 else good[:-1] + b"x")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        report = verify(dataset, **options)
        assert report.ok == bool(turn % 2)
        assert report.coverage.read_files == 1
