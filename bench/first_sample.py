"""Import, open and read one sample, then print the clock: a process by itself, started by measure.first_sample."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path

from peers import all_peers
from peers.base import Request


def main() -> None:
    name, folder, lengths, hidden = json.loads(sys.argv[1])
    with contextlib.redirect_stdout(sys.stderr):
        peer = all_peers()[name]()
        peer.open(Path(folder), lengths, hidden, 1)
        value = peer.read(Request(0, 0, lengths[0]))
        assert value is not None
    print(time.perf_counter())


if __name__ == "__main__":
    main()
