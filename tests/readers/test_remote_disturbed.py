"""Whatever network and server do to a request: the same data, or an error that is typed and names what it is about."""

import signal
import threading

import pytest
from servers.fault_proxy import Fault
from written import assert_same, write_dataset

from hsfmt.errors import CorruptionError, HsfmtError, ObjectChangedError, StorageError
from hsfmt.layout import POINTER
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.storage import retries

LENGTHS = (70, 130, 31, 90)
GRID = {"hidden": 256, "chunk_tokens": 64, "shard_tokens": 256, "layers": (1, 3, 5)}
SHARD = "hidden_states/c/"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("written") / "dataset", LENGTHS, **GRID)


@pytest.fixture(scope="module")
def in_s3(written, s3_server, make_bucket):
    """Its URL."""
    url = f"s3://{make_bucket()}/dataset"
    s3_server.upload(written.path, url)
    return url


@pytest.fixture(params=["obstore", "fsspec", "http"])
def disturbed(request, written, s3_server, monkeypatch):
    """Open a dataset behind a proxy: a function that returns a reader, and the proxy."""
    monkeypatch.setattr(retries, "pause_seconds", lambda attempts, at_least: 0.01)
    if request.param == "http":
        name = request.getfixturevalue("serve")(written.path)
        proxy = request.getfixturevalue("web_faults")
        return lambda: SampleReader(f"{proxy.url}/{name}"), proxy
    monkeypatch.setenv("HSFMT_REMOTE", request.param)
    url = request.getfixturevalue("in_s3")
    proxy = request.getfixturevalue("s3_faults")
    options = s3_server.options(endpoint=proxy.url)
    return lambda: SampleReader(url, storage_options=options), proxy


def read_all(reader, written):
    for got, wanted in zip(reader.read_many(range(len(LENGTHS))), written.content.values(), strict=True):
        assert_same(got, wanted)


PASSING = {
    "503": Fault("status", status=503),
    "429": Fault("status", status=429, retry_after=0),
    "500": Fault("status", status=500),
    "reset before the answer": Fault("reset"),
    "reset in the body": Fault("reset", after=100),
    "short body": Fault("short", after=100),
    "stall": Fault("stall", after=100),
    "stall before the body": Fault("stall", after=0),
    "wrong range": Fault("wrong range"),
    "garbled": Fault("garbled"),
    "flipped byte": Fault("flip", after=100),
}


@pytest.fixture
def fault(name, disturbed, monkeypatch):
    """The fault of that name; where a server falls silent, it is not waited for long."""
    if PASSING[name].kind == "stall":
        monkeypatch.setenv("HSFMT_TIMEOUT_SECONDS", "0.5")
    return PASSING[name]


ALTERED = ("flipped byte",)
WHERE = ("hsfmt/manifest.json", "snapshots/", "manifests/", "index/", SHARD)


@pytest.mark.parametrize("name", [name for name in PASSING if name not in ALTERED])
def test_what_passes_is_not_noticed(disturbed, written, name, fault):
    """Twice at each kind of object."""
    open_reader, proxy = disturbed
    proxy.faults += [
        Fault(fault.kind, match, 2, fault.after, status=fault.status, retry_after=fault.retry_after) for match in WHERE
    ]
    read_all(open_reader(), written)
    assert [fault.struck for fault in proxy.faults] == [2] * len(WHERE)


@pytest.mark.parametrize("match", WHERE)
def test_a_byte_that_flips_on_the_way_is_read_once_more(disturbed, written, match):
    open_reader, proxy = disturbed
    proxy.faults.append(Fault("flip", match, after=100))
    read_all(open_reader(), written)
    assert proxy.faults[0].struck == 1


def test_whichever_byte_of_the_pointer_flips_on_the_way(disturbed, written):
    """It may look like damage, like a later format's, or like another dataset's."""
    open_reader, proxy = disturbed
    for at in range(0, (written.path / POINTER).stat().st_size, 17):
        proxy.faults[:] = [Fault("flip", POINTER, after=at)]
        assert len(open_reader()) == len(LENGTHS)
        assert proxy.faults[0].struck == 1


@pytest.mark.parametrize("name", PASSING)
def test_what_stays_is_a_typed_error_about_the_shard(disturbed, written, name, fault, monkeypatch):
    open_reader, proxy = disturbed
    reader = open_reader()
    proxy.faults.append(Fault(fault.kind, SHARD, None, fault.after, status=fault.status, retry_after=fault.retry_after))
    expected = CorruptionError if name in ALTERED else StorageError
    with monkeypatch.context() as patch:
        patch.setattr(retries, "ATTEMPTS", 2)
        with pytest.raises(expected) as caught:
            reader.read(1)
    (problem,) = caught.value.problems
    assert SHARD in problem.where
    assert problem.remedy
    if name in ALTERED:
        assert problem.samples == (written.ids[1],)
        assert "read twice from" in problem.got
        assert "://" in problem.got
        assert "bytes" in problem.where
    else:
        assert "attempts" in problem.got
    proxy.reset()
    read_all(reader, written)


@pytest.mark.parametrize("disturbed", ["fsspec", "http"], indirect=True)
@pytest.mark.parametrize(
    "name", ["503", "short body", "flipped byte", *(pytest.param(name, marks=pytest.mark.deep) for name in PASSING)]
)
def test_documents_that_stay_bad_are_typed_errors(disturbed, name, fault, monkeypatch):
    monkeypatch.setattr(retries, "ATTEMPTS", 2)
    open_reader, proxy = disturbed
    for match in WHERE:
        proxy.reset()
        proxy.faults.append(
            Fault(fault.kind, match, None, fault.after, status=fault.status, retry_after=fault.retry_after)
        )
        with pytest.raises(HsfmtError) as caught:
            open_reader().read(1)
        assert isinstance(caught.value, CorruptionError if name in ALTERED else StorageError), match


def test_an_object_that_changes_is_an_error_that_says_so(disturbed, written):
    open_reader, proxy = disturbed
    reader = open_reader()
    read_all(reader, written)
    proxy.faults.append(Fault("new etag", SHARD, None))
    with pytest.raises(ObjectChangedError, match=r"ETag.*as before.*0123456789abcdef.*never replaced"):
        read_all(reader, written)


def test_a_shard_replaced_by_a_shorter_one_is_an_error_that_says_so(written, s3_server, bucket):
    s3_server.upload(written.path, f"s3://{bucket}/dataset")
    reader = SampleReader(f"s3://{bucket}/dataset", storage_options=s3_server.options())
    read_all(reader, written)
    shard = written.shards()[0]
    key = f"{bucket}/dataset/{shard.relative_to(written.path)}"
    s3_server.file_system().pipe_file(key, shard.read_bytes()[:1000])
    with pytest.raises(ObjectChangedError, match=f"{shard.stat().st_size} bytes"):
        read_all(reader, written)
    with pytest.raises(CorruptionError):
        SampleReader(f"s3://{bucket}/dataset", storage_options=s3_server.options()).read_many(range(4))
    s3_server.file_system().rm(key)
    with pytest.raises(CorruptionError, match="expected a shard of the part"):
        SampleReader(f"s3://{bucket}/dataset", storage_options=s3_server.options()).read_many(range(4))


def test_a_wait_that_the_server_asks_for_is_kept(disturbed, written, monkeypatch):
    waits = []
    monkeypatch.setattr(retries, "pause_seconds", lambda attempts, at_least: waits.append(at_least) or 0.0)
    open_reader, proxy = disturbed
    reader = open_reader()
    # The first ones are obstore's, which does not say.
    proxy.faults.append(Fault("status", SHARD, 8, status=429, retry_after=7))
    read_all(reader, written)
    assert 7 in waits


def test_the_budget_ends_it(disturbed, written, monkeypatch):
    open_reader, proxy = disturbed
    reader = open_reader()
    monkeypatch.setenv("HSFMT_RETRY_SECONDS", "0")
    proxy.faults.append(Fault("status", SHARD, None, status=503))
    with pytest.raises(StorageError, match="njected"):
        reader.read(0)
    assert proxy.count(SHARD) <= 2


def test_ctrl_c_does_not_wait_for_the_server(disturbed, written, monkeypatch):
    """A server that is silent for ever: without giving up what is in flight this would not end."""
    monkeypatch.setenv("HSFMT_TIMEOUT_SECONDS", "100000")
    open_reader, proxy = disturbed
    reader = open_reader()
    proxy.faults.append(Fault("stall", SHARD, None, after=10))
    stop = threading.Event()

    def interrupt():
        while not proxy.faults[0].struck:
            stop.wait(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        reader.read(1)
    thread.join()
    proxy.reset()
    read_all(reader, written)
