"""Real limits of a real file system: no space, no inodes, no files longer than so.

Run by itself, as test_full_disk.py does, in a mount namespace of its own: `full_disk.py KIND FOLDER STEP [SCENARIO...]`
with KIND one of size, inodes (FOLDER is a tmpfs) or length; prints what it did as JSON. Each scenario is run with
nothing free, with STEP more, and so on, until it ends well; each time it is run again without the limit.
"""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from conditions import Promises, copied, failure_text, temporaries, typed
from injection import learn, outcome, quick
from jobs import CommandError
from scenarios import SCENARIOS

from hsfmt.errors import HsfmtError

PAGE = 4096
AMPLE = {"size": 256 << 20, "inodes": 100_000, "length": resource.RLIM_INFINITY}
MEANS = {"size": (errno.ENOSPC,), "inodes": (errno.ENOSPC,), "length": (errno.EFBIG,)}


class Limit:
    """A limit on what can be written below a folder."""

    def __init__(self, kind, folder):
        self.kind, self.folder = kind, folder

    def leave(self, n):
        """Leave room for n pages, or inodes, or bytes in a file."""
        status = os.statvfs(self.folder)
        if self.kind == "length":
            self._set(n)
        elif self.kind == "size":
            # Nothing free can't be asked for: 0 means no limit.
            self._set((status.f_blocks - status.f_bfree) * status.f_frsize + n * PAGE)
        else:
            self._set(status.f_files - status.f_ffree + n)

    def lift(self):
        self._set(AMPLE[self.kind])

    def _set(self, value):
        if self.kind == "length":
            resource.setrlimit(resource.RLIMIT_FSIZE, (value, resource.RLIM_INFINITY))
            return
        option = {"size": "size", "inodes": "nr_inodes"}[self.kind]
        subprocess.run(["mount", "-o", f"remount,{option}={value}", self.folder], check=True, capture_output=True)


class Full:
    """Runs of one scenario under a limit, each in a fresh copy of its state."""

    def __init__(self, scenario, limit, folder):
        self.scenario, self.limit = scenario, limit
        self.template, self.work = folder / "template", folder / "work"
        scenario.before(self.work)
        self.promises = Promises(scenario, self.work)
        copied(self.work, self.template)
        scenario.step(self.work, set())
        self.wanted = outcome(scenario, self.work)
        self.counts = {"runs": 0, "refused": 0, "errno": 0}

    def run(self, room):
        """Run with this room, and again with ample; return whether the first one ended well."""
        folder, acknowledged, error = copied(self.template, self.work), set(), None
        self.limit.leave(room)
        try:
            self.scenario.step(folder, acknowledged)
        except (HsfmtError, CommandError) as caught:
            error = caught
        finally:
            self.limit.lift()
        self.counts["runs"] += 1
        self.promises.check(folder, acknowledged)
        if error is not None:
            assert typed(error) is None, typed(error)
            self.counts["refused"] += 1
            self.counts["errno"] += _says(error, MEANS[self.limit.kind])
            left = temporaries(folder) - temporaries(self.template)
            assert left == 0, f"{left} temporary files left"
            self.scenario.step(folder, acknowledged)
            self.promises.check(folder, acknowledged)
        assert outcome(self.scenario, folder) == self.wanted, "the next run made something else"
        return error is None


def _says(error, codes):
    return getattr(error, "errno", None) in codes or any(os.strerror(code) in str(error) for code in codes)


def main(kind, folder, step, *names):
    report = {}
    limit = Limit(kind, folder)
    limit.lift()
    with quick():
        learn(Path(folder) / "whole")
        for name in names or [name for name, each in SCENARIOS.items() if each.makes]:
            full, wrong, room, well = Full(SCENARIOS[name], limit, Path(folder) / name.replace(" ", "-")), [], 0, False
            while not well and not wrong:
                try:
                    well = full.run(room)
                except Exception as error:  # noqa: BLE001 - the other scenarios are run too
                    wrong.append(f"{name}: {failure_text(error)} | {kind}, room for {room}")
                room += int(step)
            report[name] = {**full.counts, "wrong": wrong}
            print(json.dumps({name: report[name]}), file=sys.stderr, flush=True)  # noqa: T201 - of long runs
    print(json.dumps(report))  # noqa: T201 - its result


if __name__ == "__main__":
    main(*sys.argv[1:])
