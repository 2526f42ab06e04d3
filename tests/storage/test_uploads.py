"""Objects streamed to a real S3 server: whole or not at all, in bounded memory, and nothing left behind unseen."""

import base64
import functools
import gc
import json
import os
import random
import subprocess
import sys
import time
import zlib
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
from killing import kill_at_request
from servers.fault_proxy import Fault

from hsfmt.errors import HsfmtError, StorageError
from hsfmt.storage import open_store
from hsfmt.storage import uploads as streamed

MIB = 1 << 20
DATA = random.Random(7).randbytes(20 * MIB)


@pytest.fixture
def store(s3_server, bucket):
    return open_store(f"s3://{bucket}/a/dataset", s3_server.options())


@pytest.fixture
def faulty(s3_server, bucket, s3_faults):
    return open_store(f"s3://{bucket}/a/dataset", s3_server.options(endpoint=s3_faults.url))


@pytest.mark.parametrize("nbytes", [0, 1, 8 * MIB - 1, 8 * MIB, 8 * MIB + 1, 16 * MIB, len(DATA)])
@pytest.mark.parametrize("piece", [3 * MIB + 7, len(DATA)])
def test_streamed_objects_are_what_was_written(store, nbytes, piece):
    with store.open_object("parts/x") as writer:
        for at in range(0, nbytes, piece):
            block = bytearray(DATA[at : min(at + piece, nbytes)])
            writer.write(block)
            block[:] = bytes(len(block))  # a writer's caller may use its buffer again
        assert store.size("parts/x") is None
        writer.commit()
    assert writer.nbytes == nbytes
    assert store.read("parts/x", len(DATA)) == DATA[:nbytes]
    assert store.unfinished_uploads() == []


def test_parts_of_very_large_objects_grow(store, monkeypatch):
    monkeypatch.setattr(streamed, "PART_NBYTES", 5 * MIB)
    monkeypatch.setattr(streamed, "_PARTS_OF_A_SIZE", 1)
    with store.open_object("x") as writer:
        writer.write(DATA)
        assert writer._n_parts == 2
        assert writer._part_nbytes() == 20 * MIB
        writer.commit()
    assert store.read("x", len(DATA)) == DATA


@pytest.mark.parametrize("nbytes", [1000, len(DATA)])
def test_an_abort_leaves_what_was_there(store, nbytes):
    store.write("x", b"committed by somebody")
    for ends in ("by an error", "without a commit"):
        try:
            with store.open_object("x") as writer:
                writer.write(DATA[:nbytes])
                if ends == "by an error":
                    raise KeyError(ends)
        except KeyError:
            pass
        assert store.read("x", 100) == b"committed by somebody"
        assert store.unfinished_uploads() == []
    with pytest.raises(StorageError, match="still open"):
        writer.write(b"more")


def test_an_abort_of_another_file_system_leaves_no_half_object():
    store = open_store("memory://test-uploads")
    with store.open_object("x") as writer:
        writer.write(b"half")
    assert store.size("x") is None


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", "partNumber=2", method="PUT", status=503),
        Fault("status", "partNumber=1", method="PUT", status=500, count=3),
        Fault("reset", "partNumber=3", method="PUT", count=2),
        Fault("status", "uploads", method="POST", status=503, count=2),
        Fault("status", "uploadId=", method="POST", status=503, count=2),
        Fault("reset", "uploadId=", method="POST", after=10),
        Fault("status", "x$", method="HEAD", status=503),
    ],
    ids=lambda fault: f"{fault.kind} of {fault.method} {fault.match}",
)
def test_failures_that_pass_cost_a_request(faulty, s3_faults, fault):
    s3_faults.faults.append(fault)
    with faulty.open_object("x") as writer:
        writer.write(DATA)
        writer.commit()
    assert fault.struck >= 1
    s3_faults.faults.clear()
    assert faulty.read("x", len(DATA)) == DATA
    assert faulty.unfinished_uploads() == []


@pytest.mark.parametrize("match", ["partNumber=2", "uploadId=", "uploads"])
def test_failures_that_stay_leave_nothing(faulty, s3_faults, monkeypatch, match):
    monkeypatch.setenv("HSFMT_RETRY_SECONDS", "0.3")
    for method in ("PUT", "POST"):
        s3_faults.faults.append(Fault("status", match, method=method, status=503, count=None))
    with pytest.raises(StorageError, match="injected"), faulty.open_object("x") as writer:  # noqa: PT012 - both may fail
        writer.write(DATA)
        writer.commit()
    assert sum(fault.struck for fault in s3_faults.faults) >= 1
    s3_faults.faults.clear()
    monkeypatch.delenv("HSFMT_RETRY_SECONDS")
    assert faulty.size("x") is None
    assert faulty.unfinished_uploads() == []


def test_the_server_compares_what_arrives(s3_server, store):
    """Each part goes with a checksum; a server that got other bytes refuses them."""
    s3 = store._s3()

    def put(checksum):
        put_object = functools.partial(s3.call, Body=b"abc", ChecksumCRC32=base64.b64encode(checksum).decode())
        fsspec.asyn.sync(fsspec.asyn.get_loop(), put_object, "put_object", "y")

    with pytest.raises(OSError, match="did not match"):
        put(b"0000")
    put(zlib.crc32(b"abc").to_bytes(4))
    assert store.read("y", 3) == b"abc"


def test_each_part_goes_with_a_checksum(faulty, s3_faults):
    with faulty.open_object("x") as writer:
        writer.write(DATA)
        writer.commit()
    parts = [request for request in s3_faults.requests if "partNumber" in request.path]
    assert len(parts) == 3
    assert all("x-amz-checksum-crc32" in str(request.headers) for request in parts)


WRITER = """
import json, sys
from hsfmt.storage import open_store
store = open_store(sys.argv[1], json.loads(sys.argv[2]))
data = open(sys.argv[3], "rb").read()
sys.stdout.write("go\\n"); sys.stdout.flush()
with store.open_object("parts/x") as writer:
    for at in range(0, len(data), 1 << 20):
        writer.write(data[at : at + (1 << 20)])
    writer.commit()
sys.stdout.write("done\\n"); sys.stdout.flush()
"""


@contextmanager
def writer_process(url, options, path):
    root = Path(__file__).parents[2]
    argv = [sys.executable, "-c", WRITER, url, json.dumps(options), str(path)]
    environment = os.environ | {"PYTHONPATH": str(root)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment, cwd=path.parent) as process:
        assert process.stdout.readline() == "go\n"
        yield process


def kill_rounds(s3_server, proxy, url, tmp_path, rounds):
    """Kill a writer at all stages and random moments; return how often that hit, and how many uploads were left."""
    (tmp_path / "data").write_bytes(DATA)
    options, through = s3_server.options(), s3_server.options(endpoint=proxy.url)
    store = open_store(url, options)
    with writer_process(url, through, tmp_path / "data") as process:
        assert process.wait(300) == 0
    n_requests = len(proxy.requests)
    assert n_requests >= 6
    rng = random.Random(0)
    killed, left_over = 0, 0
    for number in range(rounds):
        store.remove("parts/x")
        proxy.reset()
        with writer_process(url, through, tmp_path / "data") as process:
            killed += kill_at_request(process, proxy, 1 + number % n_requests, 0.03 * rng.random())
        size = store.size("parts/x")
        assert size in {None, len(DATA)}
        if size is not None:
            assert store.read("parts/x", len(DATA)) == DATA
        uploads = store.unfinished_uploads()
        left_over += len(uploads)
        for upload in uploads:
            assert upload.path == "parts/x"
            assert abs(upload.at - time.time()) < 3600
            store.abort_upload(upload)
            store.abort_upload(upload)  # it has ended: nothing to do
        assert store.unfinished_uploads() == []
        with store.open_object("parts/x") as retry:
            retry.write(DATA)
            retry.commit()
        assert store.read("parts/x", len(DATA)) == DATA
    return killed, left_over


@pytest.mark.slow
def test_killed_at_random_it_leaves_nothing_or_a_whole_object(s3_server, bucket, s3_faults, tmp_path):
    killed, _ = kill_rounds(s3_server, s3_faults, f"s3://{bucket}/a/dataset", tmp_path, 4)
    assert killed >= 1


@pytest.mark.deep
def test_killed_at_random_many_times(s3_server, bucket, s3_faults, tmp_path, record_property):
    killed, left_over = kill_rounds(s3_server, s3_faults, f"s3://{bucket}/a/dataset", tmp_path, 60)
    record_property("counts", json.dumps({"killed": killed, "left over": left_over}))
    assert killed >= 20
    assert left_over >= 5


# Not ru_maxrss, which an exec inherits from the process that it was forked from.
PEAK = """
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
"""
MEMORY = (
    PEAK
    + """
import json, sys
from hsfmt.storage import open_store
store = open_store(sys.argv[1], json.loads(sys.argv[2]))
store.write("warm", b"1")
with store.open_object("warmer") as writer:
    writer.write(bytes(9 << 20)); writer.commit()
block, before = bytes(1 << 20), peak()
with store.open_object("x") as writer:
    for _ in range(int(sys.argv[3])):
        writer.write(block)
    writer.commit()
print(peak() - before)
"""
)


@pytest.mark.slow
def test_memory_of_a_large_upload_is_bounded(s3_server, make_bucket, tmp_path):
    url = f"s3://{make_bucket()}/d"
    argv = [sys.executable, "-c", MEMORY, url, json.dumps(s3_server.options()), "256"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout) << 10
    # What is on its way is held twice where an event loop copies it (Python 3.11); the rest is what fills, and slack.
    assert grown < 2 * streamed.MOST_IN_FLIGHT_NBYTES + 6 * streamed.PART_NBYTES, grown


def test_a_dropped_writer_commits_nothing(store):
    writer = store.open_object("x")
    writer.write(DATA)
    del writer
    gc.collect()
    assert store.size("x") is None
    with pytest.raises(HsfmtError):
        store.read("x", 10)
