"""`push` and `pull` with real servers: S3 and a plain web server, on good and bad days."""

import json
import os
import random
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gc_merge_kills import write
from killing import kill_at_request
from servers.fault_proxy import Fault

from hsfmt import HiddenStateDataset, layout, merge, seal, transfer
from hsfmt.catalog import committed_parts, read_pointer
from hsfmt.cli.main import main
from hsfmt.errors import CorruptionError, HsfmtError, StorageError, UsageError
from hsfmt.maintenance.collect import collect
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@pytest.fixture
def no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def source(tmp_path, no_fsync):
    url = tmp_path / "source"
    write(url, ["a", "b"], "p-one")
    write(url, ["c"], "p-two")
    seal(url, retract=["b"], attachments={"d2t": np.arange(4)})
    return url


@pytest.fixture
def place(s3_server, bucket):
    """An empty place in a bucket: its store."""
    return open_store(f"s3://{bucket}/some/dataset", s3_server.options())


def same(store, source):
    """Whether the snapshot and all it needs are, byte for byte, what they are in the source."""
    assert read_pointer(store) == read_pointer(open_store(source))
    wanted = {
        str(path.relative_to(source)): path.read_bytes()
        for path in source.rglob("*")
        if path.is_file() and not path.is_relative_to(source / layout.SNAPSHOTS)
    }
    found = dict(store.walk(""))
    for name, data in wanted.items():
        assert store.read(name, len(data)) == data
    extra = {name for name in found if name not in wanted and not name.startswith(f"{layout.SNAPSHOTS}/")}
    assert extra == set()
    assert verify(store, level="full").ok


def test_there_and_back(tmp_path, source, place):
    report = transfer(source, place, verify="full")
    assert report.parts == ("p-one", "p-two")
    assert report.read_back_nbytes == report.copied_nbytes == report.missing_nbytes
    same(place, source)
    assert place.unfinished_uploads() == []
    assert transfer(source, place).files == 0
    assert transfer(place, tmp_path / "back", verify="full").copied_nbytes == report.copied_nbytes
    same(open_store(tmp_path / "back"), source)


@pytest.mark.torch
def test_what_was_pushed_is_read(source, place, s3_server):
    transfer(source, place)
    dataset = HiddenStateDataset(place.url, storage_options=s3_server.options())
    assert list(dataset.sample_ids) == ["a", "c"]
    assert dataset[1]["hidden_states"].shape == (3, 2, 8)


def test_between_buckets_the_server_copies(source, place, make_bucket, s3_server):
    transfer(source, place)
    other = open_store(f"s3://{make_bucket()}/copy", s3_server.options())
    report = transfer(place, other, verify="full")
    assert report.copied_nbytes == 0
    assert report.server_copied_nbytes == report.read_back_nbytes == report.missing_nbytes > 0
    same(other, source)
    with pytest.raises(UsageError, match="beside the source"):
        transfer(place, open_store(f"{place.url}/inner", s3_server.options()))
    # Another endpoint is another server, as far as anyone knows: the same names there are other places.
    elsewhere = open_store(place.url, s3_server.options(endpoint=s3_server.endpoint.replace("127.0.0.1", "localhost")))
    assert transfer(place, elsewhere).files == 0


@pytest.mark.parametrize("damage", ["short", "flipped"])
def test_what_the_server_copies_is_compared_too(source, place, make_bucket, s3_server, damage):
    transfer(source, place)
    other = open_store(f"s3://{make_bucket()}/copy", s3_server.options())
    path = next(path for path, _ in place.walk("parts/p-two/hidden_states/c"))
    data = place.read(path, MIB)
    place.write(path, data[:-1] if damage == "short" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptionError, match=path) as caught:
        transfer(place, other, verify="quick" if damage == "short" else "full")
    assert place.url in str(caught.value)
    assert "p-two" not in committed_parts(other)
    place.write(path, data)
    transfer(place, other, verify="full")
    same(other, source)


def test_a_plain_web_server_is_a_source(tmp_path, source, serve, web_server, web_faults, place):
    path = serve(source)
    report = transfer(f"{web_faults.url}/{path}", tmp_path / "d", verify="full")
    assert report.parts == ("p-one", "p-two")
    same(open_store(tmp_path / "d"), source)
    assert all(request.method in {"GET", "HEAD"} and not request.path.endswith("/") for request in web_faults.requests)
    transfer(f"{web_server.url}/{path}", place)
    same(place, source)
    with pytest.raises(UsageError, match="a storage to write to, got a web server"):
        transfer(source, f"{web_server.url}/new")


def test_bad_days_cost_requests_and_no_bytes(tmp_path, source, bucket, s3_server, s3_faults):
    place = open_store(f"s3://{bucket}/d", s3_server.options(endpoint=s3_faults.url))
    for method in ("GET", "PUT", "HEAD"):
        s3_faults.faults += [
            Fault("status", "hidden_states/c", method=method, status=503, count=3, skip=1),
            Fault("reset", "loss_mask/c", method=method, count=1),
            Fault("status", "manifests/p-two", method=method, status=500, count=1),
        ]
    transfer(source, place)
    assert sum(fault.struck for fault in s3_faults.faults) >= 5
    s3_faults.faults[:] = [
        Fault("flip", "hidden_states/c", count=1, after=3),
        Fault("short", "input_ids/c", count=2, after=1),
        Fault("status", "hsfmt/index", status=429, count=2, retry_after=0),
    ]
    transfer(place, tmp_path / "d")
    assert [fault.struck for fault in s3_faults.faults] == [1, 2, 2]
    s3_faults.faults.clear()
    same(place, source)
    same(open_store(tmp_path / "d"), source)


def test_an_upload_that_fails_for_good_commits_nothing_and_goes_on_later(
    source, bucket, s3_server, s3_faults, monkeypatch
):
    monkeypatch.setenv("HSFMT_RETRY_SECONDS", "0.2")
    place = open_store(f"s3://{bucket}/d", s3_server.options(endpoint=s3_faults.url))
    s3_faults.faults.append(Fault("status", "p-two/hidden_states/c", method="PUT", status=503, count=None))
    with pytest.raises(StorageError):
        transfer(source, place)
    assert read_pointer(place) is None
    assert "p-two" not in committed_parts(place)
    assert place.unfinished_uploads() == []
    s3_faults.faults.clear()
    monkeypatch.delenv("HSFMT_RETRY_SECONDS")
    transfer(source, place)
    same(place, source)


def test_a_source_that_is_always_wrong_is_named(tmp_path, source, bucket, s3_server, s3_faults):
    place = open_store(f"s3://{bucket}/d", s3_server.options(endpoint=s3_faults.url))
    transfer(source, place)
    s3_faults.faults.append(Fault("flip", "p-two/hidden_states/c", count=None, after=3))
    with pytest.raises(CorruptionError, match="p-two/hidden_states/c") as caught:
        transfer(place, tmp_path / "d")
    assert s3_server.options()["secret"] not in str(caught.value)
    assert not (tmp_path / "d/hsfmt/manifests/p-two.json").exists()
    assert read_pointer(open_store(tmp_path / "d")) is None


def test_merge_into_a_bucket_keeps_both(tmp_path, source, place):
    write(tmp_path / "other", ["z"], "p-own")
    transfer(source, place)
    with pytest.raises(UsageError, match="hsfmt merge"):
        transfer(tmp_path / "other", place)
    merge(place, [tmp_path / "other"])
    assert read_pointer(place).samples == 3
    assert verify(place, level="full").ok


def test_gc_lists_and_aborts_what_killed_uploads_left(source, place, s3_server, monkeypatch):
    transfer(source, place)
    before = dict(place.walk(""))
    writer = place.open_object("parts/p-dead/hidden_states/c/0/0/0")
    writer.write(bytes(9 * MIB))
    writer._collect(wait_for_all=True)
    del writer  # as a killed process leaves it
    neighbour = open_store(f"{place.url}-2", s3_server.options()).open_object("parts/p/x")
    neighbour.write(bytes(9 * MIB))
    neighbour._collect(wait_for_all=True)
    report = collect(place, older_than=timedelta(days=1))
    assert [path for path, _ in report.young_uploads] == ["parts/p-dead/hidden_states/c/0/0/0"]
    assert report.uploads == ()
    assert len(place.unfinished_uploads()) == 1
    for dry_run in (True, False):
        report = collect(place, older_than=timedelta(0), force=True, dry_run=dry_run)
        assert [path for path, _ in report.uploads] == ["parts/p-dead/hidden_states/c/0/0/0"]
        assert report.to_json()["uploads"][0]["path"] == "parts/p-dead/hidden_states/c/0/0/0"
        assert len(place.unfinished_uploads()) == (1 if dry_run else 0)
    neighbour.commit()
    assert dict(place.walk("")) == before
    monkeypatch.setattr(
        type(place),
        "unfinished_uploads",
        lambda self: (_ for _ in ()).throw(StorageError.at("x", expected="permission", got="none")),
    )
    assert collect(place, older_than=timedelta(0), force=True).uploads == ()


def environment(s3_server):
    options = s3_server.options()
    return {
        "AWS_ACCESS_KEY_ID": options["key"],
        "AWS_SECRET_ACCESS_KEY": options["secret"],
        "AWS_ENDPOINT_URL": options["endpoint_url"],
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def test_the_commands_with_credentials_of_the_environment(tmp_path, source, place, s3_server, monkeypatch):
    for name, value in environment(s3_server).items():
        monkeypatch.setenv(name, value)

    def run(*argv, code=0):
        result = CliRunner().invoke(main, [str(word) for word in argv])
        assert result.exit_code == code, (result.output, result.exception)
        assert s3_server.options()["secret"] not in result.output
        return result.output

    assert "2 added" in run("push", source, place.url, "-q")
    assert json.loads(run("push", source, place.url, "--json"))["files"] == 0
    assert "2 added" in run("pull", place.url, tmp_path / "d", "--verify", "full")
    assert "# Hidden states" in run("card", place.url)
    run("push", source, "s3://no-such-bucket-at-all/d", code=3)
    run("pull", f"{place.url}/none", tmp_path / "e", code=3)
    assert "upload" not in run("gc", place.url, "--older-than", "7d")


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    """A dataset whose shards take several parts of an upload each."""
    import ml_dtypes

    from hsfmt import DatasetWriter

    url = tmp_path_factory.mktemp("large") / "source"
    rng = np.random.default_rng(0)
    for number in range(3):
        with DatasetWriter(
            url, layers=[1, 2], hidden_size=2048, final_norm="pre", codec="none", part_names=lambda n=number: f"p-{n}"
        ) as writer:
            for i in range(3):
                states = rng.integers(0, 1 << 15, (1000, 2, 2048)).astype(np.uint16).view(ml_dtypes.bfloat16)
                writer.write(
                    f"{number}-{i}", np.arange(1000), np.where(np.isfinite(states.astype(np.float32)), states, 0)
                )
    return url


def push_process(s3_server, source, url, endpoint=None):
    argv = [sys.executable, "-m", "hsfmt.cli.main", "push", str(source), url, "-q"]
    env = os.environ | environment(s3_server) | {"PYTHONPATH": str(ROOT)}
    env["AWS_ENDPOINT_URL"] = endpoint or s3_server.endpoint
    return subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, cwd=source.parent)


def kill_rounds(s3_server, proxy, make_bucket, source, tmp_path, rounds):
    """Kill pushes at random moments and run them again; return what was seen on the way."""
    seen = {"killed": 0, "uploads": 0, "part-way": 0}
    rng = random.Random(1)
    with push_process(s3_server, source, f"s3://{make_bucket()}/d", proxy.url) as process:
        assert process.wait(300) == 0
    n_requests = len(proxy.requests)
    for number in range(rounds):
        url = f"s3://{make_bucket()}/d"
        store = open_store(url, s3_server.options())
        for _ in range(2):
            proxy.reset()
            with push_process(s3_server, source, url, proxy.url) as process:
                at = rng.randrange(1, n_requests) if number else n_requests // 2
                seen["killed"] += kill_at_request(process, proxy, at, 0.05 * rng.random())
            check_after_kill(store, source, seen)
        if number % 2 and store.size(layout.ROOT_METADATA) is not None:
            collect(store, older_than=timedelta(0), force=True)
            assert store.unfinished_uploads() == []
        transfer(source, store)
        same_snapshot(store, source)
        if number == 0:
            transfer(store, tmp_path / "back", verify="full")
            same_snapshot(open_store(tmp_path / "back"), source)
            shutil.rmtree(tmp_path / "back")
    return seen


def check_after_kill(store, source, seen):
    """Nothing is committed but whole parts, and no pointer but to a whole snapshot."""
    sizes = dict(store.walk(""))
    for part in committed_parts(store):
        manifest = json.loads((source / layout.manifest_path(part)).read_bytes())
        assert store.read(layout.manifest_path(part), 1 << 20) == (source / layout.manifest_path(part)).read_bytes()
        for entry in manifest["files"]:
            assert sizes[entry["path"]] == entry["nbytes"]
    seen["part-way"] += 0 < len(committed_parts(store)) < 3
    seen["uploads"] += len(store.unfinished_uploads())
    for path, nbytes in sizes.items():
        if path.startswith("parts/"):
            assert nbytes == (source / path).stat().st_size, "objects are whole or not there"
    if read_pointer(store) is not None:
        assert verify(store, level="complete").ok


def same_snapshot(store, source):
    assert read_pointer(store) == read_pointer(open_store(source))
    assert verify(store, level="complete").ok


@pytest.mark.slow
def test_killed_at_random_a_push_goes_on(s3_server, s3_faults, make_bucket, large, tmp_path):
    seen = kill_rounds(s3_server, s3_faults, make_bucket, large, tmp_path, 2)
    assert seen["killed"] >= 1


@pytest.mark.deep
def test_killed_at_random_many_times_a_push_goes_on(
    s3_server, s3_faults, make_bucket, large, tmp_path, record_property
):
    seen = kill_rounds(s3_server, s3_faults, make_bucket, large, tmp_path, 20)
    record_property("counts", json.dumps(seen))
    assert seen["killed"] >= 20
    assert seen["uploads"] >= 5
    assert seen["part-way"] >= 3


def test_two_pushes_at_once_make_one_dataset(s3_server, place, large):
    processes = [push_process(s3_server, large, place.url) for _ in range(2)]
    codes = [process.wait(300) for process in processes]
    assert min(codes) == 0
    transfer(large, place)
    same_snapshot(place, large)


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
from hsfmt import transfer
source, target, options, connections = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
transfer(sys.argv[5], target + "-small", destination_options=options)
before = peak()
report = transfer(source, target, destination_options=options, connections=connections)
assert report.parts
print(json.dumps([peak() - before, report.most_memory_nbytes]))
"""
)


@pytest.mark.slow
def test_memory_is_what_is_stated(s3_server, make_bucket, large, source):
    argv = [sys.executable, "-c", MEMORY, str(large), f"s3://{make_bucket()}/d", json.dumps(s3_server.options()), "2"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*argv, str(source)], env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    grown, stated = json.loads(done.stdout)
    assert grown << 10 < stated + 64 * MIB, (grown >> 10, stated >> 20)


def test_errors_are_of_this_package(source, bucket, s3_server):
    wrong = open_store(f"s3://{bucket}/d", s3_server.options(secret="wrong-secret-key"))
    with pytest.raises(HsfmtError) as caught:
        transfer(source, wrong)
    assert "wrong-secret-key" not in str(caught.value)
