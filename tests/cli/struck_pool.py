"""Send Ctrl-C at one line after the other of what the main thread runs around a pool; run by test_cli_worker_pool.py.

    struck_pool.py POOL STRIDE    POOL is slices or verify; STRIDE n strikes at every n-th line, and at all that lock

Each place is struck once, the first time that the main thread comes by. Writes a JSON list of them; a pool that never
ends is found by the timeout of the caller.
"""

import json
import signal
import sys
import time
from pathlib import Path

from hsfmt.cli.worker_pool import run_slices
from hsfmt.readers.verification.work import spread

# The pool's own code, and that of what it locks; the start of its processes is not the loop.
FILES = {"sharedctypes.py", "synchronize.py", "_base.py", "threading.py", "worker_pool.py", "work.py"}
LOCKING = {"__enter__", "__exit__", "_acquire_restore"}
N_TASKS = 8


class Unshown:
    noun = "items"

    def update(self, *_):
        pass


class Whole:
    error = None


def a_slice(numbers, board):
    for _ in numbers:
        if board.order():
            raise KeyboardInterrupt
        time.sleep(0.02)
        board.advance(1)
    return Whole()


def a_task(number):
    time.sleep(0.1)
    return number


POOLS = {
    "slices": lambda: run_slices(a_slice, [[n] * 5 for n in range(N_TASKS)], 2, Unshown()),
    "verify": lambda: spread(a_task, list(range(N_TASKS)), 2),
}


def run(start, wanted):
    """Run a pool and strike at the first place that is `wanted`; return (the place or None, results that came)."""
    struck = []

    def trace(frame, event, _):
        name = Path(frame.f_code.co_filename).name
        if name not in FILES:
            return None
        place = (name, frame.f_code.co_name, frame.f_lineno)
        if event == "line" and not struck and wanted(place):
            struck.append(place)
            signal.raise_signal(signal.SIGINT)
        return trace

    results = start()
    n = 0
    try:
        for n, _ in enumerate(results, 1):
            if n == 1:  # all processes are there
                results.gi_frame.f_trace = trace
                sys.settrace(trace)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
        results.close()
    return (struck[0] if struck else None), n


def main(pool, stride):
    places = []

    def note(place):
        if place not in places:
            places.append(place)
        return False

    _, n = run(POOLS[pool], note)
    assert n == N_TASKS
    struck = []
    # Where locks are taken and given back, an exception does the most harm.
    chosen = dict.fromkeys([place for place in places if place[1] in LOCKING] + places[::stride])
    for target in chosen:
        place, _ = run(POOLS[pool], lambda place, target=target: place == target)
        if place is not None:
            struck.append(place)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    sys.stdout.write(json.dumps(struck))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
