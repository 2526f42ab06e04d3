"""Reading datasets in a real S3 server and behind a real web server: the same data, in few requests."""

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from servers.fault_proxy import Fault
from written import assert_same, write_dataset

from hsfmt import HiddenStateDataset, open_zarr
from hsfmt.errors import StorageError
from hsfmt.readers.sample_reader import SampleReader, SampleRequest

# Large enough for several ranges a sample, and samples that lie in two shards.
LENGTHS = (70, 3, 64, 130, 5, 31, 90, 16, 33, 200)
GRID = {"hidden": 256, "chunk_tokens": 64, "shard_tokens": 256, "layers": (1, 3, 5, 8)}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("written") / "dataset", LENGTHS, **GRID)


@pytest.fixture(scope="module")
def in_s3(written, s3_server, make_bucket):
    """The bucket."""
    bucket = make_bucket()
    for url in (f"s3://{bucket}/in a folder/dataset", f"s3://{bucket}/dataset", f"s3://public/{bucket}/dataset"):
        s3_server.upload(written.path, url)
    return bucket


@pytest.fixture(params=["s3-obstore", "s3-fsspec", "s3-folder", "s3-anonymous", "http", "http-whole", "memory"])
def place(request, written, s3_server, web_server, monkeypatch):
    """URL and storage options."""
    kind, _, how = request.param.partition("-")
    if kind == "s3":
        bucket = request.getfixturevalue("in_s3")
        monkeypatch.setenv("HSFMT_REMOTE", "fsspec" if how == "fsspec" else "obstore")
        if how == "anonymous":
            return f"s3://public/{bucket}/dataset", {"anon": True, "endpoint_url": s3_server.endpoint}
        folder = "in a folder/dataset" if how == "folder" else "dataset"
        return f"s3://{bucket}/{folder}", s3_server.options()
    if kind == "http":
        name = request.getfixturevalue("serve")(written.path)
        if how == "whole":
            return f"{web_server.url}/without-ranges/{name}", {"whole_objects": True}
        return f"{web_server.url}/{name}/", {}
    from hsfmt.storage import open_store

    url = f"memory://{written.path.name}"
    for file in written.path.rglob("*"):
        if file.is_file():
            open_store(url).write(file.relative_to(written.path).as_posix(), file.read_bytes())
    return url, {}


def test_every_read_path_gives_what_was_written(place, written):
    url, options = place
    reader = SampleReader(url, storage_options=options)
    assert list(reader.sample_ids) == written.ids
    for number, wanted in enumerate(written.content.values()):
        assert_same(reader.read(number), wanted)
    for got, number in zip(reader.read_many([9, 0, 3, 3, 6]), [9, 0, 3, 3, 6], strict=True):
        assert_same(got, written.content[written.ids[number]])
    assert_same(reader.read(9, 70, 131), written.content[written.ids[9]], 70, 131)
    assert_same(reader.read(3, layers=[3, 8]), written.content[written.ids[3]], planes=[1, 3])
    out = np.zeros((130, 4, 256), np.uint16)
    reader.read_requests([SampleRequest(3, None, None, out)])
    assert out.tobytes() == written.content[written.ids[3]].states.tobytes()
    assert_same(pickle.loads(pickle.dumps(reader)).read(5), written.content[written.ids[5]])


@pytest.mark.parametrize("place", ["s3-obstore", "http"], indirect=True)
def test_zarr_arrays(place, written):
    url, options = place
    dataset = open_zarr(url, storage_options=options)
    for number in (0, 3, 9):
        wanted = written.content[written.ids[number]]
        assert dataset.hidden_states[dataset.sample_tokens(number)].tobytes() == wanted.states.tobytes()


@pytest.fixture(params=["s3", "http"])
def counted(request, written, s3_server):
    """URL, storage options, and the proxy that counts."""
    if request.param == "s3":
        bucket = request.getfixturevalue("in_s3")
        proxy = request.getfixturevalue("s3_faults")
        return f"s3://{bucket}/dataset", s3_server.options(endpoint=proxy.url), proxy
    name = request.getfixturevalue("serve")(written.path)
    proxy = request.getfixturevalue("web_faults")
    return f"{proxy.url}/{name}", {}, proxy


def test_opening_takes_two_requests(counted):
    url, options, proxy = counted
    dataset = HiddenStateDataset(url, storage_options=options)
    assert len(dataset) == len(LENGTHS)
    assert dataset.lengths.tolist() == list(LENGTHS)
    assert len(proxy.requests) == 2


def test_a_cold_sample_takes_two_round_trips(counted, written):
    """Manifest and index of its part together, then a range of each column together."""
    url, options, proxy = counted
    reader = SampleReader(url, storage_options=options)
    proxy.reset()
    proxy.expect_groups(2, 3)
    assert_same(reader.read(2), written.content[written.ids[2]])
    assert len(proxy.requests) == 5
    assert proxy.rounds == 2


def test_a_cold_batch_is_in_flight_together(counted, written):
    """Of both parts at once; and as few requests as there are runs of samples."""
    url, options, proxy = counted
    reader = SampleReader(url, storage_options=options)
    proxy.reset()
    numbers = [0, 1, 2, 5, 6, 7]
    proxy.expect_groups(4, 6)
    for got, number in zip(reader.read_many(numbers), numbers, strict=True):
        assert_same(got, written.content[written.ids[number]])
    assert proxy.rounds == 2
    assert proxy.most_in_flight == len(proxy.requests) - 4 == 6


def test_a_layer_is_read_by_its_share(counted, written):
    """Where a gap costs more than a request."""
    url, options, _ = counted
    reader = SampleReader(url, storage_options=options)
    reader.read(0)
    reader.store._reader().pace._latency_seconds = 1e-9
    reader.store._reader().pace._nbytes_a_second = 1.0
    before = reader._state.fetcher.nbytes_read
    assert_same(reader.read(9, layers=[3]), written.content[written.ids[9]], planes=[1])
    assert 0 < reader._state.fetcher.nbytes_read - before < 4 * 200 * 4 * 256 * 2


def test_live_and_listing_need_a_storage_that_lists(serve, web_server, written):
    url = f"{web_server.url}/{serve(written.path)}"
    with pytest.raises(StorageError, match=r"can be listed.*only sealed datasets"):
        SampleReader(url, snapshot="live")


def test_a_reader_reads_on_while_the_storage_restarts(counted, written):
    """A sample that no server answers for at first arrives once it does."""
    url, options, proxy = counted
    reader = SampleReader(url, storage_options=options)
    proxy.faults.append(Fault("status", match="/c/", count=6, status=503))
    for got, wanted in zip(reader.read_many(range(10)), written.content.values(), strict=True):
        assert_same(got, wanted)
    assert proxy.faults[0].struck == 6


def on_command_line(*argv):
    return subprocess.run(
        [sys.executable, "-m", "hsfmt.cli", *argv], capture_output=True, text=True, check=False, timeout=300
    )


def test_the_command_line_over_http(serve, web_server, written):
    """A sealed dataset is described; what needs a listing says so, and a folder without a dataset is none."""
    url = f"{web_server.url}/{serve(written.path)}"
    done = on_command_line("info", url, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["samples"], facts["newer"]) == (len(LENGTHS), None)
    done = on_command_line("verify", url)
    assert done.returncode == 3
    assert "only sealed datasets can be read there" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    done = on_command_line("info", f"{web_server.url}/nothing-here")
    assert done.returncode == 3
    assert "expected an hsfmt dataset, got no zarr.json there" in done.stderr
