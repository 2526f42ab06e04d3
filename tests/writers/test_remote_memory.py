"""What a writer into a bucket holds in memory, whatever the number of objects that it has open."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hsfmt.storage import uploads

MIB = 1 << 20
QUEUE_NBYTES = 32 * MIB
N_LARGE = 6
SCRIPT = """
import json, sys
import numpy as np
from hsfmt import DatasetWriter

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))

url, options, n_samples, queue = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
extras = {f"extra{i}": {"kind": "token", "dtype": "float32", "shape": [2048]} for i in range(5)}
n, before = 256, 0
with DatasetWriter(
    url, layers=[1], hidden_size=2048, final_norm="pre", dtype="float32", codec="none", extras=extras,
    queue_nbytes=queue, storage_options=options, part_nbytes=64 << 20, seal=False,
) as writer:
    states = np.ones((n, 1, 2048), np.float32)
    values = {name: np.ones((n, 2048), np.float32) for name in extras}
    for i in range(n_samples):
        writer.write(f"id-{i}", np.arange(n), states, **values)
        if i == 0:
            writer.commit()  # what is imported and connected for the first object is no part of it
            before = peak()
print(peak() - before)
"""


@pytest.mark.slow
def test_many_open_objects_share_what_is_on_its_way(s3_server, bucket):
    """576 MiB in parts of six large columns each, of which two or three are open at once."""
    argv = [f"s3://{bucket}/d", json.dumps(s3_server.options()), "48", str(QUEUE_NBYTES)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *argv], capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout) << 10
    # On its way, and once more where an event loop copies it (Python 3.11); a part of an upload for each column of
    # three parts, which is copied when it is sent; the queue.
    stated = 2 * uploads.MOST_IN_FLIGHT_NBYTES + 3 * N_LARGE * uploads.PART_NBYTES + QUEUE_NBYTES
    # What is sent piece by piece leaves holes that the allocator keeps, more of them the slower the server. Without a
    # bound for all objects together, three parts of each on their way would be 432 MiB, and their copies as much.
    assert grown < stated + 160 * MIB, grown
