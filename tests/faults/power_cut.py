"""A disk that forgets: what a run did to files is recorded, and every prefix of it is what a power cut may leave.

Of a file, what was written since its last fsync is gone, zeros, half there or torn at a block. Of a folder, each name
that was made, moved or removed since its last fsync is there or not, independently of the others.

Run by itself, as test_power_cut.py does: `power_cut.py prefixes|kills|lies AMOUNT [SCENARIO...]`; prints what it did
as JSON. AMOUNT is about how many moments are chosen, spread evenly; 0 for every one.
"""

import errno
import json
import random
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from conditions import Promises, as_new_process, copied, exported, failure_text
from faulty_calls import DIES, DeadError, Faults, calls_that
from injection import learn, outcome, quick
from jobs import CommandError
from recorder import Recorder
from scenarios import SCENARIOS

from hsfmt.errors import HsfmtError

BLOCK = 512
PAGE = 4096
DATA = ("dropped", "zeroed", "half", "torn", "whole")
NAMES = ("none", "all", "some")


class _File:
    def __init__(self, data=b""):
        self.synced = bytes(data)
        self.data = bytearray(data)
        self.lost = set()  # pages that the system took for clean when an fsync failed, and that were not written since

    def write(self, at, written):
        self.data.extend(bytes(max(0, at - len(self.data))))
        self.data[at : at + len(written)] = written
        self.lost -= set(range(at // PAGE, (at + len(written)) // PAGE + 1))

    def sync(self):
        synced = bytearray(self.data)
        for page in self.lost:
            old = self.synced[page * PAGE : (page + 1) * PAGE]
            new = synced[page * PAGE : (page + 1) * PAGE]
            synced[page * PAGE : (page + 1) * PAGE] = old[: len(new)] + bytes(max(0, len(new) - len(old)))
        self.synced = bytes(synced)

    def sync_failed(self):
        pages = range(len(self.data) // PAGE + 1)
        here = [page for page in pages if self._page(self.data, page) != self._page(self.synced, page)]
        self.lost |= set(here)

    @staticmethod
    def _page(data, page):
        return bytes(data[page * PAGE : (page + 1) * PAGE])

    def after(self, how, rng):
        """Return the bytes that are left of it."""
        old, new = self.synced, bytes(self.data)
        if old == new or how == "whole":
            return new
        if how == "dropped":
            return old
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        if how == "zeroed":
            return new[:same] + bytes(len(new) - same)
        if how == "half":
            return new[: same + (len(new) - same) // 2]
        cut = same + BLOCK * rng.randrange(1 + (len(new) - same) // BLOCK)
        return new[:cut] + bytes(max(0, min(BLOCK, len(new) - cut))) + new[cut + BLOCK :]


class Disk:
    """What is durable, and what is not, while the events of a trace happen one by one.

    Parameters
    ----------
    template
        The state before the run, all of it durable.
    """

    def __init__(self, template):
        paths = {path.relative_to(template).as_posix(): path for path in template.rglob("*")}
        self.folders = {"."} | {name for name, path in paths.items() if path.is_dir()}
        self.space = {name: _File(path.read_bytes()) for name, path in paths.items() if path.is_file()}
        self.acknowledged = set()
        self._files = dict(self.space)  # by number, or path where they were there before
        self._named = dict(self.space)  # what each name was last given to, whether or not that is durable
        self._pending = []

    def happen(self, event):
        kind, *rest = event
        if kind == "acknowledged":
            self.acknowledged |= rest[0]
        elif kind == "write":
            self._files[rest[0]].write(rest[1], rest[2])
        elif kind == "truncate":
            del self._files[rest[0]].data[rest[1] :]
        elif kind == "sync":
            self._files[rest[0]].sync()
        elif kind == "lost":
            self._files[rest[0]].sync_failed()
        elif kind == "lost folder":
            self._pending = [e for e in self._pending if _parent(e[1]) != rest[0]]
        elif kind == "sync folder":
            mine = [e for e in self._pending if _parent(e[1]) == rest[0]]
            self._pending = [e for e in self._pending if _parent(e[1]) != rest[0]]
            for e in mine:
                self._apply(e)
        else:
            if kind == "create":
                self._files[rest[1]] = self._named[rest[0]] = _File()
            elif kind in ("rename", "link") and rest[0] in self._named:
                self._named[rest[1]] = self._named[rest[0]]
            self._pending.append(event)

    def _apply(self, event):
        kind, path, *rest = event
        if kind == "create":
            self.space[path] = self._files[rest[0]]
        elif kind == "mkdir":
            self.folders.add(path)
        elif kind == "rmdir":
            self.folders.discard(path)
        elif kind == "unlink":
            self.space.pop(path, None)
        elif path in self._named:
            self.space[rest[0]] = self._named[path]
            if kind == "rename":
                self.space.pop(path, None)

    def leave(self, target, how, names, rng):
        """Write what a power cut now leaves into a new folder. `how` and `names` are one of DATA and NAMES."""
        for event in self._pending:
            if names == "all" or (names == "some" and rng.random() < 0.5):
                self._apply(event)
        # Names in a folder may be durable before its own name is; without that they can't be reached.
        target.mkdir()
        for folder in sorted(self.folders - {"."}, key=lambda folder: folder.count("/")):
            if (target / folder).parent.is_dir():
                (target / folder).mkdir(exist_ok=True)
        for path, file in self.space.items():
            if (target / path).parent.is_dir():
                (target / path).write_bytes(file.after(how, rng))


def _parent(path):
    return str(Path(path).parent)


class Cuts:
    """Power cuts of one scenario's runs. All runs are in one place, since datasets name the source's folder."""

    def __init__(self, scenario, folder):
        self.scenario, self.work = scenario, folder / "work"
        self.template = folder / "template"
        scenario.before(self.work)
        shutil.copytree(self.work, self.template)
        self.promises = Promises(scenario, self.work)
        undisturbed = Faults(self.work)
        self.trace = self.record(undisturbed)
        self.seen = [name for name, _ in undisturbed.seen]
        self.wanted = outcome(scenario, self.work)
        self.counts = {"events": len(self.trace), "cuts": 0, "partly": 0, "killed": 0, "lied": 0, "lost": 0}

    def record(self, faults, *, lies=False):
        """Return the trace of a run; of one that is stopped by a fault, and of the one that follows it."""
        copied(self.template, self.work)
        recorder = Recorder(self.work)
        acknowledged = _Acknowledged(recorder)
        if lies:
            faults.on_failure = recorder.sync_failed
        with recorder.active():
            inner = Faults(self.work, faults.k, faults.fault, calls=faults.calls)
            inner.on_failure, inner.seen = faults.on_failure, faults.seen
            with inner.active(), suppress(DeadError, HsfmtError, CommandError):
                self.scenario.step(self.work, acknowledged)
            if faults.k is None:
                return recorder.trace
            faults.failed = inner.failed
            as_new_process()
            self.scenario.step(self.work, acknowledged)
        return recorder.trace

    def left_by(self, trace, n, how, names, seed=""):
        """Make what a cut after `n` events leaves; return what was acknowledged before."""
        disk = Disk(self.template)
        for event in trace[:n]:
            disk.happen(event)
        shutil.rmtree(self.work)
        disk.leave(self.work, how, names, random.Random(f"{seed}-{n}"))
        as_new_process()
        return disk.acknowledged

    def cut(self, trace, n, how, names, seed):
        """Cut after `n` events; hold what is left to what was acknowledged, and go on from it."""
        acknowledged = self.left_by(trace, n, how, names, seed)
        found = self.promises.check(self.work, acknowledged)
        there = {path: data for path, data in exported(self.work).items() if not path.endswith(".tmp")}
        assert there.items() <= self.wanted[1].items(), "an exported file is not whole"
        if n == len(trace):
            assert there == self.wanted[1], "an export that ended lost files"
        again = set(acknowledged)
        self.scenario.step(self.work, again)
        self.promises.check(self.work, again)
        assert outcome(self.scenario, self.work) == self.wanted, "the next run made something else"
        self.counts["cuts"] += 1
        self.counts["partly"] += 0 < n < len(trace) and bool(found)

    def prefixes(self, amount):
        """Cut after `amount` of the events, and after the last; yield what went wrong."""
        n_all = len(self.trace)
        step = stride(n_all, amount)
        for n in sorted({*range(n_all % step, n_all, step), n_all}):
            for at, how in enumerate(DATA):
                turn = n // step
                if amount and turn % len(DATA) != at:
                    continue
                for names in [NAMES[turn % len(NAMES)]] if amount else NAMES:
                    yield from self._tried(self.trace, n, how, names)

    def kills(self, amount):
        """Kill at `amount` of the calls, run again, and cut the power once that run was acknowledged."""
        calls = calls_that(DIES)
        n_all = sum(name in calls for name in self.seen)
        step = stride(n_all, amount)
        for k in range(1 + step // 2, n_all + 1, step):
            faults = Faults(self.work, k, DIES, calls=calls)
            trace = self.record(faults)
            self.counts["killed"] += faults.failed is not None
            yield from self._tried(trace, len(trace), "dropped", "none", f"killed at call {k}")

    def lies(self, amount):
        """Let `amount` of the fsyncs fail, and later ones of the same file or folder lie; run again, and cut.

        Of a file nothing may be lost by that: it is never relied on again. A folder has no other name that could be
        made instead, so that what later runs put into it depends on the lie; what was committed before does not.
        """
        n_all = self.seen.count("fsync")
        step = stride(n_all, amount)
        for k in range(1 + step // 2, n_all + 1, step):
            faults = Faults(self.work, k, errno.EIO, calls=("fsync",))
            trace = self.record(faults, lies=True)
            self.counts["lied"] += faults.failed is not None
            if any(event[0] == "lost" for event in trace):
                yield from self._tried(trace, len(trace), "dropped", "none", f"fsync {k} fails, then lies")
                continue
            try:
                self.counts["lost"] += len(self._kept_at_least(trace))
            except Exception as error:  # noqa: BLE001 - whatever it is, the others are tried too
                yield f"{self.scenario.name}: {failure_text(error)} | fsync {k} of a folder fails, then lies"

    def _kept_at_least(self, trace):
        """Hold what is left to what was committed before the run; return what the run acknowledged and is lost."""
        acknowledged = self.left_by(trace, len(trace), "dropped", "none")
        for path, data in self.promises.kept.items():
            assert (self.work / path).read_bytes() == data, f"{path} was changed"
        new = not self.promises.kept  # then even the dataset's own document is of this run
        found = set() if new else set(self.promises.found(self.work))
        left = {path.stem for path in (self.work / "source").glob("*.safetensors")}
        assert new or left | found >= self.promises.owed - acknowledged, "what was committed before is lost"
        return (acknowledged | self.promises.owed) - found - left

    def _tried(self, trace, n, how, names, more=""):
        try:
            self.cut(trace, n, how, names, more)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are tried too
            last = trace[n - 1][:3] if n else "nothing"
            place = f"cut after {n} of {len(trace)} events, the last {last}, {how}, {names} {more}"
            yield f"{self.scenario.name}: {failure_text(error)} | {place}"


def stride(n, amount):
    return max(1, n // amount) if amount else 1


class _Acknowledged(set):
    """A set of ids that tells the recorder when it grows."""

    def __init__(self, recorder):
        super().__init__()
        self._recorder = recorder

    def __ior__(self, ids):
        self._recorder.note("acknowledged", set(ids))
        return super().__ior__(ids)


def main(mode, amount, *names):
    report = {}
    with tempfile.TemporaryDirectory() as root, quick():
        learn(Path(root) / "whole")
        for name in names or [name for name, scenario in SCENARIOS.items() if scenario.makes]:
            cuts = Cuts(SCENARIOS[name], Path(root) / name.replace(" ", "-"))
            wrong = list(getattr(cuts, mode)(int(amount)))
            report[name] = {**cuts.counts, "wrong": wrong}
            print(json.dumps({name: report[name]}), file=sys.stderr, flush=True)  # noqa: T201 - of long runs
    print(json.dumps(report))  # noqa: T201 - its result


if __name__ == "__main__":
    main(*sys.argv[1:])
