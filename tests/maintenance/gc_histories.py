"""Random histories of a dataset with collections in them, and what must hold after each; no plan is looked at."""

import itertools
import os
import random
import shutil
from datetime import timedelta

import ml_dtypes
import numpy as np
from repair_cases import contents, flip

from hsfmt import DatasetWriter, attachments, compact, layout, seal
from hsfmt.catalog import committed_parts, read_pointer, read_snapshot
from hsfmt.errors import HsfmtError
from hsfmt.maintenance.collect import collect
from hsfmt.maintenance.merge import merge
from hsfmt.maintenance.repair import repair
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store
from hsfmt.storage.local import LocalStore

HOUR = 3600.0
AGES = (0.0, HOUR, 30 * HOUR, 300 * HOUR)
WEIGHTS = {
    "write": 6, "open": 2, "go_on": 2, "commit": 3, "seal": 5, "retract": 2, "attach": 2, "detach": 1, "compact": 2,
    "supersede": 3, "merge": 2, "crash": 2, "foreign": 1, "spoil_snapshot": 1, "repair": 1, "wait": 6, "collect": 9,
}  # fmt: skip


class Clock:
    """The storage's time, which a history moves on: each file is as old as its last change by that clock."""

    def __init__(self):
        self.now = 1e9
        self._since = {}

    def install(self, monkeypatch):
        monkeypatch.setattr(LocalStore, "modified", lambda store, path: self.modified(store.local_path(path)))

    def modified(self, file):
        try:
            status = os.lstat(file)
        except FileNotFoundError:
            return None
        return self._since.setdefault((str(file), status.st_ino, status.st_ctime_ns), self.now)

    def keep(self, file, since):
        status = os.lstat(file)
        self._since[str(file), status.st_ino, status.st_ctime_ns] = since

    def note(self, root):
        """Give all that is new its time."""
        for path in (root, *root.rglob("*")):
            self.modified(path)


def open_writer(url, **settings):
    return DatasetWriter(
        url, layers=[1, 2], hidden_size=8, final_norm="pre", codec="none", seal=False, part_seconds=None, threads=1,
        **settings,
    )  # fmt: skip


def write_sample(writer, sample_id, value):
    writer.write(sample_id, np.arange(3), np.full((3, 2, 8), value, ml_dtypes.bfloat16))


def attached(store, snapshot):
    found = attachments.load(store, snapshot.attachments, "here")
    return {name: array.tobytes() for name, array in found.items()}


class History:
    """One dataset and what is known of it; `run` does a random step and checks."""

    def __init__(self, folder, seed, clock):
        self.folder, self.clock = folder, clock
        self.url = folder / "d"
        self.random = random.Random(seed)
        self.numbers = itertools.count()
        self.writer = None
        self.opened, self.touched, self.endangered = [], 0.0, False
        self.durable, self.retracted = set(), set()
        self.snapshots = {}
        self.until = {}
        self.spoiled = set()
        self.foreign_files = {}
        self.leftovers = {}
        self.trace = []
        self.counts = dict.fromkeys(["removed", "withheld", "spared", "unfinished", "snapshots_gone"], 0)
        self.write()
        self.seal()

    def close(self):
        if self.writer is not None:
            self.writer.abort()

    @property
    def store(self):
        return open_store(self.url)

    @property
    def current(self):
        return read_pointer(self.store).fingerprint

    def ids(self):
        return [f"s{next(self.numbers)}" for _ in range(self.random.randint(1, 3))]

    def step(self):
        name = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        self.trace.append(name)
        getattr(self, name)()
        self.clock.note(self.url)

    # What happens to a dataset.

    def write(self):
        ids = self.ids()
        with open_writer(self.url) as writer:
            for sample_id in ids:
                write_sample(writer, sample_id, 1)
            writer.hole(f"hole-{ids[0]}", "the engine gave nothing")
        self.durable |= set(ids)

    def open(self):
        """Leave a writer with an open part, some of whose shards are there already."""
        if self.writer is None:
            self.writer = open_writer(self.url, shard_tokens=4, chunk_tokens=2)
            self.opened, self.endangered = [], False
            self.go_on()

    def go_on(self):
        if self.writer is None:
            return
        for sample_id in self.ids():
            try:
                write_sample(self.writer, sample_id, 1)
            except HsfmtError:
                assert self.endangered
                return
            self.opened.append(sample_id)
        self.touched = self.clock.now

    def commit(self):
        if self.writer is None:
            return
        writer, self.writer = self.writer, None
        try:
            writer.commit()
        except HsfmtError:
            # A collection with a shorter age than it was idle: said so, and nothing of it counts.
            assert self.endangered
            self.counts["unfinished"] += 1
            writer.abort()
            return
        writer.close()
        self.durable |= set(self.opened)

    def seal(self, **options):
        before = self.current if (self.url / layout.POINTER).exists() else None
        found = seal(self.url, **options).snapshot
        self.sealed(before, found.fingerprint)

    def sealed(self, before, fingerprint):
        if before is not None and before != fingerprint:
            self.until[before] = self.clock.now
        self.until.pop(fingerprint, None)
        self.spoiled.discard(fingerprint)
        # A compaction seals before it begins, too.
        for found in set(self.stored()) - self.snapshots.keys() - self.spoiled:
            snapshot = read_snapshot(self.store, found)[0]
            self.snapshots[found] = contents(self.url, found), attached(self.store, snapshot)
            if found != fingerprint:
                self.until[found] = self.clock.now

    def retract(self):
        served = sorted(self.durable - self.retracted)
        if len(served) > 3:
            gone = self.random.sample(served, 1)
            self.seal(retract=gone)
            self.retracted |= set(gone)

    def attach(self):
        names = self.snapshots[self.current][1]
        name = self.random.choice("abc")
        if name not in names:
            self.seal(attachments={name: np.arange(self.random.randint(1, 3))})

    def detach(self):
        names = sorted(self.snapshots[self.current][1])
        if names:
            self.seal(drop_attachments=self.random.sample(names, 1))

    def compact(self):
        before = self.current
        compact(self.url)
        self.sealed(before, self.current)

    def supersede(self):
        from gc_merge_kills import supersede

        store = self.store
        parts = [name for name in committed_parts(store) if not self.is_superseded(name)]
        supersede(self.url, self.random.choice(parts), f"n-{next(self.numbers)}")

    def is_superseded(self, part):
        from hsfmt.catalog import load_manifest, read_header

        header = read_header(self.store)
        return any(part in load_manifest(self.store, name, header).replaces for name in committed_parts(self.store))

    def merge(self):
        source = self.folder / f"source-{next(self.numbers)}"
        ids = self.ids()
        known = self.random.sample(sorted(self.durable), 1)
        with open_writer(source) as writer:
            for sample_id in (*ids, *known):
                write_sample(writer, sample_id, self.random.choice([1, 2]))
        before = self.current
        merge(self.url, [source], how=self.random.choice(["link", "copy", "move"]), on_duplicate="first")
        shutil.rmtree(source)
        self.durable |= set(ids)
        self.sealed(before, self.current)

    def crash(self):
        """Leave what a killed writer leaves: a part without its manifest, or a temporary file."""
        part = f"dead-{next(self.numbers)}"
        if self.random.random() < 0.5:
            files = [self.url / f"parts/{part}/input_ids/c/0.{os.urandom(8).hex()}.tmp"]
        else:
            files = [
                self.url / f"parts/{part}/{name}" for name in ("zarr.json", "input_ids/zarr.json", "input_ids/c/0")
            ]
            files.append(self.url / f"hsfmt/index/{part}.safetensors")
        for file in files[: self.random.randint(1, len(files))]:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"left")
            self.leftovers[file] = part, self.clock.now

    def foreign(self):
        """Put a file of the user's own somewhere."""
        folders = [path for path in self.url.rglob("*") if path.is_dir() and "quarantine" not in path.parts]
        name = self.random.choice(["mine.txt", "a b", "x.tmp", "0.bak", "notes.npy.old"])
        file = self.random.choice([self.url, *folders]) / name
        file.write_bytes(b"mine")
        self.foreign_files[file] = b"mine"

    def spoil_snapshot(self):
        old = sorted(set(self.stored()) - {self.current} - self.spoiled)
        if old:
            fingerprint = self.random.choice(old)
            file = self.url / layout.snapshot_path(fingerprint, "index")
            since = self.clock.modified(file)
            flip(file)
            self.clock.keep(file, since)  # a disk that rots sets no time
            self.spoiled.add(fingerprint)

    def repair(self):
        before = self.current
        repair(self.url)
        for fingerprint in self.spoiled:
            if fingerprint not in self.stored():
                self.snapshots.pop(fingerprint)
        self.spoiled.clear()
        self.sealed(before, self.current)

    def wait(self):
        self.clock.now += self.random.choice([0.5, 2, 40, 400]) * HOUR

    def stored(self):
        names = self.store.list(layout.SNAPSHOTS)
        found = [f"xxh3_128:{name}" for name in names]
        return [name for name in found if self.store.size(layout.snapshot_path(name, "index")) is not None]

    # The collection, and what must hold.

    def collect(self):
        age = self.random.choice(AGES)
        n_kept = self.random.choice([None, None, 1, 2, 4])
        dropped_age = self.random.choice([None, None, *AGES[1:]])
        if self.writer is not None and self.clock.now - self.touched >= age:
            self.endangered = True
        stored, current = self.stored(), self.current
        live = contents(self.url, "live")
        options = {"keep_snapshots": n_kept}
        if dropped_age is not None:
            options["drop_snapshots_older_than"] = timedelta(seconds=dropped_age)
        report = collect(self.url, older_than=timedelta(seconds=age), force=True, **options)
        self.counts["removed"] += len(report.removed)
        self.counts["spared"] += len(report.spared)
        self.counts["withheld"] += len(report.withheld)
        assert self.current == current
        gone = set(stored) - set(self.stored())
        self.counts["snapshots_gone"] += len(gone)
        for fingerprint in gone:
            assert fingerprint != current
            assert n_kept is not None or dropped_age is not None
            assert self.clock.now - self.until[fingerprint] >= age
        assert n_kept is None or dropped_age is not None or len(set(stored) - gone) >= min(n_kept, len(stored))
        self.spoiled -= gone
        assert bool(report.damaged) == bool(self.spoiled)
        assert contents(self.url, "live") == live
        for file, (part, since) in list(self.leftovers.items()):
            newest = max(at for other, at in self.leftovers.values() if other == part)
            if self.clock.now - newest < age:
                assert file.exists()
            elif not self.spoiled:
                assert not file.exists(), (file, since)
                del self.leftovers[file]
            elif not file.exists():
                del self.leftovers[file]
        self.check()

    def check(self):
        """Look at every snapshot that is there, all foreign files and the durable samples."""
        for fingerprint in self.stored():
            if fingerprint in self.spoiled:
                continue
            samples, arrays = self.snapshots[fingerprint]
            assert contents(self.url, fingerprint) == samples
            assert attached(self.store, read_snapshot(self.store, fingerprint)[0]) == arrays
        for file, data in self.foreign_files.items():
            assert file.read_bytes() == data
        assert contents(self.url, "live").keys() == self.durable - self.retracted
        problems = [each for each in verify(str(self.url), level="quick").errors if "snapshots/" not in str(each)]
        assert [str(each) for each in problems] == []
