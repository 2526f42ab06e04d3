"""One of several processes on one dataset: writes, seals, collects, merges or reads, until it has done its rounds."""

import contextlib
import json
import os
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path

import ml_dtypes
import numpy as np
from repair_cases import contents

from hsfmt import DatasetWriter, compact, seal
from hsfmt.errors import HsfmtError, NotFoundError
from hsfmt.maintenance.collect import collect
from hsfmt.maintenance.merge import merge


def write(url, ids):
    with DatasetWriter(url, layers=[1, 2], hidden_size=8, final_norm="pre", codec="none", seal=False) as writer:
        for sample_id in ids:
            writer.write(sample_id, np.arange(3), np.full((3, 2, 8), 1, ml_dtypes.bfloat16))


def do(what, folder, name, number):
    """Do one round; return the ids that it made durable."""
    url = folder / "d"
    ids = [f"{name}-{number}-{i}" for i in range(3)]
    if what == "write":
        write(url, ids)
        return ids
    if what == "merge":
        source = folder / f"{name}-{number}"
        write(source, ids)
        merge(url, [source], how=("link", "copy", "move")[number % 3])
        shutil.rmtree(source)
        return ids
    if what == "seal":
        seal(url)
    elif what == "compact":
        compact(url)
    elif what == "gc":
        # No part and no snapshot here is as old as that: what is removed is what other processes are not at.
        collect(url, older_than=timedelta(seconds=3), force=True, keep_snapshots=1)
    elif what == "read":
        contents(url)
    return []


def main():
    what, folder, name, rounds = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    os.fsync = lambda fd: None
    durable, refused = [], []
    for number in range(rounds):
        try:
            durable += do(what, folder, name, number)
        except NotFoundError as error:
            refused.append(str(error))  # nothing sealed yet, or read while it was replaced
            time.sleep(0.05)
        except HsfmtError as error:
            refused.append(f"{type(error).__name__}: {error}")
        with contextlib.suppress(OSError):
            time.sleep(0.01)
    sys.stdout.write(json.dumps({"durable": durable, "refused": refused}) + "\n")


if __name__ == "__main__":
    main()
