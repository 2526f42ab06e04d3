"""One run of a scenario with one fault, and the hunt over all of them.

Run by itself, as test_fault_injection.py does: `injection.py some|main|all AMOUNT [SCENARIO...]`; prints what it did
as JSON. AMOUNT is how many faults, or at every how many-th call.
"""

import errno
import gc
import json
import os
import sys
import tempfile
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from conditions import EXPECTED, Promises, copied, digests, exported, failure_text, temporaries, typed
from faulty_calls import DIES, ERRORS, SHORT, DeadError, Faults, calls_that
from jobs import DATASET, JOB, put
from scenarios import SCENARIOS

from hsfmt import seal
from hsfmt.readers.verification import documents

# Once, and from then on; but for EINTR, after which Python itself calls again and again.
ALL = [(fault, False) for fault in (SHORT, DIES, *ERRORS)]
ALL += [(fault, True) for fault in ERRORS if fault != errno.EINTR]
# What the others are like: a disk that fails, one that is full, a signal, a call that comes short, a kill.
MAIN = [(errno.EIO, False), (errno.ENOSPC, True), (errno.EINTR, False), (SHORT, False), (DIES, False)]
_REMOVING = ("unlink", "remove")


def learn(folder):
    """Note what the undisturbed job's samples are."""
    put(folder / DATASET, range(JOB))
    EXPECTED.update(digests(folder / DATASET))


def outcome(scenario, folder):
    """Return content digest of what is there once sealed, the exported files, and what else is left."""
    if not scenario.makes:
        return None, {}, None
    return seal(folder / DATASET).snapshot.content_digest, exported(folder), scenario.left(folder)


@contextmanager
def quick():
    """Make fsync cheap (it counts, fails and is recorded), collect only what runs leave, and wait for no seal."""
    real, os.fsync = os.fsync, lambda fd: None
    documents._SEAL_SECONDS = 0
    gc.freeze()
    try:
        yield
    finally:
        os.fsync = real


class Hunt:
    """Runs of one scenario, each in a fresh copy of its state."""

    def __init__(self, scenario, folder):
        self.scenario = scenario
        self.folder = folder
        self.template = folder / "template"
        self.work = folder / "work"
        scenario.before(self.work)
        self.promises = Promises(scenario, self.work)
        copied(self.work, self.template)
        undisturbed = Faults(self.work)
        with undisturbed.active():
            scenario.step(self.work, set())
        self.seen = Counter(name for name, _ in undisturbed.seen)
        self.wanted = outcome(scenario, self.work)
        self.refused = 0
        self.met = Counter()

    def n_calls(self, fault):
        """Return how many calls of an undisturbed run such a fault can hit."""
        return sum(self.seen[name] for name in calls_that(fault))

    def run(self, k, fault, *, persistent=False):
        """Inject; return False once k is beyond the last call."""
        folder = copied(self.template, self.work)
        faults = Faults(folder, k, fault, persistent=persistent, calls=calls_that(fault))
        acknowledged = set()
        error = self.disturbed(faults, acknowledged)
        if faults.failed is None:
            assert error is None, error
            return False
        where = f"call {k} {faults.failed} fails with {name_of(fault)}, persistent={persistent}"
        try:
            if error is not None and fault != DIES:
                complaint = typed(error)
                assert complaint is None, complaint
            if fault == SHORT:
                assert error is None, error
            self.promises.check(folder, acknowledged)
            if fault != DIES:  # a killed process leaves all that it had open
                left = temporaries(folder) - temporaries(self.template)
                assert left <= (3 if faults.failed[0] in _REMOVING or persistent else 1), left
            if error is not None:
                self.refused += 1
                self.scenario.step(folder, acknowledged)
                self.promises.check(folder, acknowledged)
            assert outcome(self.scenario, folder) == self.wanted, "the retry made something else"
        except BaseException as wrong:
            wrong.add_note(f"{where}; ended with {type(error).__name__}: {error}")
            raise
        self.met[name_of(fault), faults.failed[0]] += 1
        return True

    def disturbed(self, faults, acknowledged):
        """Run the step with its fault; return what it raised."""
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        error = None
        try:
            with faults.active(), warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                try:
                    self.scenario.step(Path(faults.root), acknowledged)
                except (Exception, DeadError) as caught:  # noqa: BLE001 - which ones may come is what is looked at
                    error = caught.with_traceback(None)
                    error.__context__ = error.__cause__ = None
                gc.collect()
        finally:
            sys.unraisablehook = hook
        return error

    def some(self, amount):
        """Inject `amount` faults, in turn and spread over the calls; yield what went wrong."""
        # Where the scenario before it ended.
        first = amount * list(SCENARIOS).index(self.scenario.name)
        for i in range(amount):
            fault, persistent = ALL[(first + i) % len(ALL)]
            k = 1 + int((i + 0.5) * self.n_calls(fault) / amount)
            yield from self._tried(k, fault, persistent)[1]

    def main(self, stride):
        """Inject each of MAIN at every `stride`-th call, until a run is clean; yield what went wrong."""
        yield from self._each(MAIN, stride)

    def all(self, stride):
        """Inject each of ALL at every `stride`-th call, until a run is clean; yield what went wrong."""
        yield from self._each(ALL, stride)

    def _each(self, faults, stride):
        for fault, persistent in faults:
            k, more = 1, True
            while more:
                more, wrong = self._tried(k, fault, persistent)
                yield from wrong
                k += stride

    def _tried(self, k, fault, persistent):
        """Return whether the call was reached, and what went wrong."""
        try:
            return self.run(k, fault, persistent=persistent), []
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are tried too
            return True, [f"{self.scenario.name}: {failure_text(error)}"]


def name_of(fault):
    return errno.errorcode[fault] if isinstance(fault, int) else fault


def main(mode, amount, *names):
    report = {}
    with tempfile.TemporaryDirectory() as root, quick():
        learn(Path(root) / "whole")
        for name in names or SCENARIOS:
            hunt = Hunt(SCENARIOS[name], Path(root) / name.replace(" ", "-"))
            wrong = list(getattr(hunt, mode)(int(amount)))
            by_fault, by_call = Counter(), Counter()
            for (fault, call), n in hunt.met.items():
                by_fault[fault] += n
                by_call[call] += n
            report[name] = {
                "injected": hunt.met.total(), "refused": hunt.refused, "n_calls": hunt.n_calls(errno.EIO),
                "faults": by_fault, "calls": by_call, "warned": hunt.promises.warnings, "wrong": wrong,
            }  # fmt: skip
            print(json.dumps({name: report[name]}), file=sys.stderr, flush=True)  # noqa: T201 - of long runs
    print(json.dumps(report))  # noqa: T201 - its result


if __name__ == "__main__":
    main(*sys.argv[1:])
