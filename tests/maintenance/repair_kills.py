"""Kill a repair or a compaction at its k-th call of the system, and again; run by tests in a process of its own.

Arguments: kind ("repair" or "compact"), folder, first k, step, most rounds. The last line of stdout is a JSON object.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from killing import killing_at, no_fsync
from repair_cases import build, contents, empty, flip

from hsfmt import compact, repair
from hsfmt.errors import HsfmtError
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.verification import verify

CALLS = ("open", "write", "rename", "link", "unlink", "mkdir")


def damaged(folder):
    root = build(folder / "damaged", n_parts=4, n_samples=2, extras={})
    flip(root / "parts/part-0/hidden_states/c/0/0/0")
    flip(root / "hsfmt/manifests/part-1.json")
    (root / "hsfmt/manifests/part-2.json").unlink()
    empty(next((root / "hsfmt/snapshots").iterdir()) / "ids.safetensors")
    (root / "zarr.json").unlink()
    return root


def work(kind, root):
    no_fsync()
    if kind == "repair":
        repair(root)
    else:
        compact(root)


def killed(kind, root, k):
    child = os.fork()
    if child == 0:
        killing_at(k, CALLS)()
        try:
            work(kind, root)
        except BaseException:  # noqa: BLE001  the status tells
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, k
    return False


def readable(root):
    """Return id to the states of every sample that a reader gets now, of a dataset that may be damaged."""
    reader, found = SampleReader(root), {}
    for number in range(len(reader)):
        try:
            sample = reader.read(number)
        except HsfmtError:
            continue
        found[sample.sample_id] = sample.input_ids.tobytes(), sample.hidden_states.tobytes(), sample.meta
    return found


def in_fork(check, *args):
    """Return whether it holds, computed in a fork."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if check(*args) else 1)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def as_before(kind, root, source):
    """Say whether all that could be read still can, and whether nothing that was sound is called broken."""
    before, now = readable(source), readable(root)
    sound = kind == "repair" or (now == before and verify(root, level="full").ok)
    return sound and all(now.get(key) == value for key, value in before.items())


def same_end(root, clean):
    return verify(root, level="full").ok and kept(root) == kept(clean)


def kept(root):
    """Return what must not depend on the kills: not the time of the seal, nor what a killed one left unnamed."""
    parts = {path.name: path.read_bytes() for path in (root / "hsfmt/manifests").glob("*.json")}
    return parts, contents(root)


def main():
    kind, folder, first, step, most = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
    source = folder / "damaged"
    # All that starts threads runs in forks, so that this process can fork.
    child = os.fork()
    if child == 0:
        damaged(folder) if kind == "repair" else build(source, n_parts=4, n_samples=2, extras={})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    clean = Path(shutil.copytree(source, folder / "clean"))
    child = os.fork()
    if child == 0:
        work(kind, clean)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    rounds = kills = 0
    k = first
    while rounds < most:
        root = Path(shutil.copytree(source, folder / f"round-{k}"))
        stopped = killed(kind, root, k)
        again = killed(kind, root, k + 3) if stopped else False
        assert in_fork(as_before, kind, root, source) or not stopped, f"k = {k}"
        pid = os.fork()
        if pid == 0:
            work(kind, root)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0, k
        assert in_fork(same_end, root, clean), f"k = {k}"
        shutil.rmtree(root)
        rounds += 1
        kills += stopped + again
        if not stopped:
            break
        k += step
    sys.stdout.write(json.dumps({"rounds": rounds, "kills": kills, "finished": not stopped}) + "\n")


if __name__ == "__main__":
    main()
