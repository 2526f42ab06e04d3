"""Verification killed at every step: the records that are left never vouch for what was not read."""

import json
import subprocess
import sys

import pytest

# Each child is killed at its k-th step, for k = FIRST, FIRST + STEP, ... until one comes to its end. A step is a unit
# that was read, or a call that touches the file of records: open, write, fsync, rename, remove.
PROGRAM = """if True:
    import json, os, signal, sys, traceback
    from datetime import timedelta
    from pathlib import Path
    from hsfmt.readers.verification import records, verify, work

    dataset, level, folder, log, first, step = sys.argv[1:7]
    state, log, folder = Path(folder) / "state", Path(log), os.path.realpath(folder)
    work._SAVE_SECONDS = 0

    def child(k):
        left = [k]
        log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        def done():
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        def hook(event, args):
            if event in ("open", "os.rename", "os.remove") and str(args[0]).startswith(folder):
                done()
        def check_data(*args):
            result = check(*args)
            if result.is_fine:
                os.write(log_fd, (json.dumps(sorted(args[0].paths)) + chr(10)).encode())
            return result
        def add(self, unit, *args):
            records_add(self, unit, *args)
            done()
        def fsync(fd):
            done()
            real_fsync(fd)
        check, work.check_data = work.check_data, check_data
        records_add, records.Records.add = records.Records.add, add
        real_fsync, os.fsync = os.fsync, fsync
        sys.addaudithook(hook)
        report = verify(dataset, level=level, max_duration=timedelta(hours=1), state=state)
        errors = sorted({f.path for f in report.errors})
        print(json.dumps(["end", errors, report.whole, report.coverage.known_nbytes]), flush=True)

    k, ended = int(first), False
    while not ended:
        pid = os.fork()
        if pid == 0:
            try:
                child(k)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(9)
        _, status = os.waitpid(pid, 0)
        ended = not os.WIFSIGNALED(status)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
        # What the records vouch for now was read to its end by one that was killed, and found to be fine.
        read = {tuple(json.loads(line)) for line in log.read_text().splitlines()} if log.exists() else set()
        known = json.loads(state.read_bytes())["body"]["records"] if state.exists() else {}
        fine = {tuple(sorted(r["binding"]["paths"])) for r in known.values() if r["level"] == level}
        assert fine <= read, fine - read
        print(json.dumps(["killed" if not ended else "ended", k, len(fine)]), flush=True)
        if not ended and "fresh" in sys.argv:
            for path in Path(folder).iterdir():
                path.unlink()
            log.unlink(missing_ok=True)
        k += int(step)
"""


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def kill_loop(dataset, tmp_path, level, first, step, *more):
    """Return (kills, what was recorded after each, end) of children that are killed later and later."""
    (tmp_path / "records").mkdir()
    argv = [dataset, level, tmp_path / "records", tmp_path / "log", first, step, *more]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, argv)], check=False, text=True, capture_output=True, timeout=1800
    )
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    killed = [recorded for kind, _, recorded, *_ in lines if kind == "killed"]
    (end,) = [line[1:] for line in lines if line[0] == "end"]
    return killed, end


DAMAGED = "parts/part-0/hidden_states/c/0/0/0"


@pytest.mark.parametrize("level", ["complete", "full"])
def test_kill_after_kill_it_gets_there(dataset, tmp_path, level):
    """Each run goes on where the last was killed; the damage that one of them met is an error of the last."""
    flip(dataset / DAMAGED)
    killed, (errors, whole, known) = kill_loop(dataset, tmp_path, level, 5, 2)
    assert len(killed) > 3
    assert killed == sorted(killed)
    assert 0 < killed[-2] < killed[-1]
    assert errors == [DAMAGED]
    assert whole
    assert known > 0


@pytest.mark.deep
@pytest.mark.parametrize("level", ["complete", "full"])
def test_a_kill_at_every_step(dataset, tmp_path, level):
    """From nothing each time: k = 1, 2, ... until a run is clean."""
    flip(dataset / DAMAGED)
    killed, (errors, whole, _) = kill_loop(dataset, tmp_path, level, 1, 1, "fresh")
    assert len(killed) > {"complete": 100, "full": 20}[level]
    assert errors == [DAMAGED]
    assert whole
