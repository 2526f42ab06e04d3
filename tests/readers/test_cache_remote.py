"""The local cache before real servers: what is in it is asked for no more, by whatever kind of process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from servers.fault_proxy import Fault
from written import assert_same, write_dataset

from hsfmt.readers.sample_reader import ReadOptions, SampleReader

LENGTHS = (70, 3, 64, 130, 5, 31, 90)
SCRIPT = Path(__file__).parent / "remote_loader_script.py"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("written") / "dataset", LENGTHS, hidden=64)


@pytest.fixture(params=["obstore", "fsspec", "http"])
def place(request, written, s3_server, monkeypatch):
    """URL and storage options of the dataset behind a proxy, and the proxy."""
    if request.param == "http":
        proxy = request.getfixturevalue("web_faults")
        return f"{proxy.url}/{request.getfixturevalue('serve')(written.path)}", {}, proxy
    proxy = request.getfixturevalue("s3_faults")
    bucket = request.getfixturevalue("bucket")
    monkeypatch.setenv("HSFMT_REMOTE", request.param)
    s3_server.upload(written.path, f"s3://{bucket}/dataset")
    return f"s3://{bucket}/dataset", {**s3_server.options(), "endpoint_url": proxy.url}, proxy


def test_the_second_time_one_request_opens_and_none_reads(place, written, tmp_path):
    url, storage, proxy = place
    options = ReadOptions(cache_dir=tmp_path / "cache", cache_size="64MiB")
    counts = []
    for _ in range(3):
        proxy.reset()
        reader = SampleReader(url, storage_options=storage, options=options)
        for number, got in enumerate(reader.read_many(range(len(LENGTHS)))):
            assert_same(got, written.content[written.ids[number]])
        reader.cache.drain()
        counts.append((proxy.count(), proxy.count("/parts/")))
    assert counts[0][1] > 0
    assert counts[1:] == [(1, 0), (1, 0)]


def test_bytes_that_flip_on_the_way_are_not_kept(place, written, tmp_path):
    url, storage, proxy = place
    options = ReadOptions(cache_dir=tmp_path / "cache", cache_size="64MiB")
    # Of each column one: what is read again comes as it is.
    proxy.faults += [
        Fault("flip", match=f"/parts/.*/{name}/c/") for name in ("hidden_states", "input_ids", "loss_mask")
    ]
    for _ in range(2):
        reader = SampleReader(url, storage_options=storage, options=options)
        for number, got in enumerate(reader.read_many(range(len(LENGTHS)))):
            assert_same(got, written.content[written.ids[number]])
        reader.cache.drain()
    assert [fault.struck for fault in proxy.faults] == [1, 1, 1]
    assert reader.cache.n_damaged == 0
    proxy.faults.append(Fault("status", match="/parts/", count=1 << 30))
    reader = SampleReader(url, storage_options=storage, options=options)
    for number, got in enumerate(reader.read_many(range(len(LENGTHS)))):
        assert_same(got, written.content[written.ids[number]])


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("place", ["http"], indirect=True)
def test_workers_share_it(place, written, tmp_path, repo_root, method):
    """Also what was added last by workers that ended."""
    from test_loader_processes import expected_of

    url, storage, proxy = place
    environment = {
        "PYTHONPATH": str(repo_root),
        "OMP_NUM_THREADS": "1",
        "HSFMT_CACHE_DIR": str(tmp_path / "cache"),
        "HSFMT_CACHE_SIZE": "64MiB",
    }
    command = [sys.executable, SCRIPT, "workers", url, json.dumps(storage), expected_of(written, tmp_path), method]
    counts = []
    for _ in range(2):
        proxy.reset()
        done = subprocess.run(
            command, env=os.environ | environment, text=True, capture_output=True, check=False, timeout=1000
        )
        assert done.returncode == 0, done.stderr
        counts.append(proxy.count("/parts/"))
    assert counts[0] > 0
    assert counts[1] == 0
