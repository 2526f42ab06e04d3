"""SIGKILL at random moments of runs on a real file system; some of the killed runs are killed again.

Run by itself, as test_sigkill.py does: `sigkill.py KILLS [SCENARIO...]`; prints what it did as JSON. The processes are
forks, which spares their imports.
"""

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from conditions import Promises, copied, failure_text
from injection import learn, outcome, quick
from killing import in_fork
from scenarios import SCENARIOS

AGAIN = 0.3  # of the killed ones


class Told(set):
    """A set of ids that tells another process when it grows."""

    def __init__(self, pipe):
        super().__init__()
        self._pipe = pipe

    def __ior__(self, ids):
        os.write(self._pipe, "".join(f"{sample_id}\n" for sample_id in sorted(ids)).encode())
        return super().__ior__(ids)


def run(scenario, folder, seconds=None):
    """Fork a run and kill it after `seconds`; return the ids it acknowledged, and whether it was killed."""
    text, died = in_fork(lambda pipe: scenario.step(folder, Told(pipe)), seconds)
    return set(text.decode().rpartition("\n")[0].split()), died


def state(folder):
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


class Kills:
    """Killed runs of one scenario, each in a fresh copy of its state."""

    def __init__(self, scenario, folder):
        self.scenario, self.template, self.work = scenario, folder / "template", folder / "work"
        scenario.before(self.work)
        self.promises = Promises(scenario, self.work)
        copied(self.work, self.template)
        start = time.monotonic()
        acknowledged, killed = run(scenario, self.work)
        self.duration = time.monotonic() - start
        assert not killed
        self.promises.check(self.work, acknowledged)
        self.wanted = outcome(scenario, self.work)
        self.counts = {"runs": 0, "killed": 0, "half way": 0, "ended before": 0}

    def round(self, rng):
        """Kill a run, perhaps a second one, look, and let the next one end."""
        folder = copied(self.template, self.work)
        before, acknowledged, again = state(folder), set(), True
        while again:
            more, killed = run(self.scenario, folder, rng.uniform(0, self.duration))
            acknowledged |= more
            self.counts["runs"] += 1
            self.counts["killed" if killed else "ended before"] += 1
            self.counts["half way"] += killed and state(folder) != before
            self.promises.check(folder, acknowledged)
            again = killed and rng.random() < AGAIN
        if killed:
            more, killed = run(self.scenario, folder)
            assert not killed
            self.promises.check(folder, acknowledged | more)
        assert outcome(self.scenario, folder) == self.wanted, "the last run made something else"


def main(kills, *names):
    report = {}
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as root, quick():
        learn(Path(root) / "whole")
        for at, name in enumerate(names):
            each = Kills(SCENARIOS[name], Path(root) / name.replace(" ", "-"))
            wrong = []
            wanted = int(kills) * (at + 1) // len(names) - int(kills) * at // len(names)
            while each.counts["killed"] < wanted and not wrong:
                try:
                    each.round(rng)
                except Exception as error:  # noqa: BLE001 - the other scenarios are run too
                    wrong.append(f"{name}: {failure_text(error)} | {each.counts}")
            report[name] = {**each.counts, "wrong": wrong}
            print(json.dumps({name: report[name]}), file=sys.stderr, flush=True)  # noqa: T201 - of long runs
    print(json.dumps(report))  # noqa: T201 - its result


if __name__ == "__main__":
    main(*sys.argv[1:])
