"""Kill exports at moments spread over all their work, and look what a re-run makes of each; for test_formats_kill.py.

As tests/cli/export_torture.py, whose parts it takes, for many exports in one process, so that torch is imported once.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch  # noqa: F401  the forks need not import it then
from export_sources import tree
from export_torture import die_at, finished, fresh, in_child


def killed(argv: list[str], folder: Path, n_moments: int) -> dict[str, object]:
    """Kill an export before calls that touch its files, from the first to the last, each time from nothing."""
    whole, out = folder / "whole", folder / "out"
    in_child([*argv[:2], str(whole), *argv[2:]])
    wanted, argv = tree(whole), [*argv[:2], str(out), *argv[2:]]
    read_end, write_end = os.pipe()
    in_child(argv, hook=lambda: die_at(-1, out, write_end))
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        calls = len(file.read())
    already = []
    for moment in range(n_moments):
        fresh(out)
        number = moment * (calls - 1) // (n_moments - 1)
        _, died = in_child(argv, hook=lambda number=number: die_at(number, out))
        assert died, number
        already.append(finished(argv, out, wanted)["counts"]["already_there"])
    return {"calls": calls, "already": already, "files": len(wanted)}


def main(folder: str, n_moments: str, jobs: str) -> None:
    """Print what became of each job, or why it failed."""
    results: dict[str, object] = {}
    for name, argv in json.loads(jobs).items():
        place = Path(folder) / name
        place.mkdir()
        try:
            results[name] = killed(argv, place, int(n_moments))
        except Exception:  # noqa: BLE001  the test says it of this export alone
            results[name] = {"failed": traceback.format_exc()}
    print(json.dumps(results))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
