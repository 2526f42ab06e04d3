"""How many cores there are for this process: what the default numbers of threads go by."""

from __future__ import annotations

import os


def n_cores() -> int:
    """Return the cores that this process may run on, at least 1; where the system can't say, those of the machine."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
