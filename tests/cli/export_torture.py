"""Kill an export again and again, and look what a re-run makes of it; run by test_cli_export_resume.py.

This process never starts a thread, so that it can fork its victims instead of paying for their imports.
"""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from export_sources import journal_of, tree
from killing import in_fork

from hsfmt.cli.main import main
from hsfmt.writers.targets.atomic import is_temporary

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.truncate")


def in_child(argv, hook=lambda: None, seconds=None):
    """Run a command in a fork, killed after `seconds`, if not None; return (its JSON or None, whether it died)."""

    def report(pipe):
        text = io.StringIO()
        hook()
        with contextlib.redirect_stdout(text):
            main([*argv, "--json"], standalone_mode=False)
        os.write(pipe, text.getvalue().encode())

    text, died = in_fork(report, seconds)
    return (None if died else json.loads(text)), died


def die_at(number, folder, seen=None):
    """Kill this process before its call of that number which touches the export; report each to `seen`."""
    count = 0
    fsync = os.fsync

    def touched():
        nonlocal count
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        if seen is not None:
            os.write(seen, b".")

    def audited(event, args):
        if event in EVENTS and any(str(arg).startswith(str(folder)) for arg in args[:2]):
            touched()

    def counted(fd):
        touched()
        fsync(fd)

    os.fsync = counted
    sys.addaudithook(audited)


def finished(argv, out, wanted):
    """Go on with an export to its end and compare; return its report."""
    report, _ = in_child(argv)
    found = tree(out)
    assert found == wanted, sorted(set(found.items()) ^ set(wanted.items()))[:4]
    assert not [path for path in out.rglob("*") if is_temporary(path.name)]
    counts = report["counts"]
    assert counts["written"] + counts["already_there"] == counts["asked"], counts
    assert report["complete"]
    return report


def fresh(out):
    shutil.rmtree(out, ignore_errors=True)
    journal_of(out).unlink(missing_ok=True)


def kill_at_random(argv, out, wanted, times):
    """Kill at random moments of a run, each time from nothing; some re-runs are killed too."""
    started = time.monotonic()
    in_child(argv)
    took = time.monotonic() - started
    moments = random.Random(0)
    result = {"killed": 0, "partly": 0}
    while result["killed"] < times:
        fresh(out)
        for _ in range(1 + result["killed"] % 3):
            _, died = in_child(argv, seconds=moments.random() * took)
            result["killed"] += died
        there = bool(tree(out)) if out.exists() else False
        report = finished(argv, out, wanted)
        result["partly"] += there and report["counts"]["written"] > 0
    return result


def kill_at_calls(argv, out, wanted, step):
    """Kill before every few calls that touch the export, one run for each."""
    read_end, write_end = os.pipe()
    fresh(out)
    in_child(argv, hook=lambda: die_at(-1, out, write_end))
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        calls = len(file.read())
    already = set()
    for number in range(0, calls, step):
        fresh(out)
        _, died = in_child(argv, hook=lambda number=number: die_at(number, out))
        assert died, number
        already.add(finished(argv, out, wanted)["counts"]["already_there"])
    return {"calls": calls, "already": sorted(already)}


def torture(how, dataset, folder, number, *flags):
    argv = ["export", dataset, str(Path(folder) / "out"), *flags]
    whole = Path(folder) / "whole"
    in_child(["export", dataset, str(whole), *flags])
    work = {"random": kill_at_random, "calls": kill_at_calls}[how]
    return work(argv, Path(folder) / "out", tree(whole), int(number))


if __name__ == "__main__":
    print(json.dumps(torture(*sys.argv[1:])))  # noqa: T201
