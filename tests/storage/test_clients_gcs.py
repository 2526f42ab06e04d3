"""RemoteStore against a server that speaks GCS's JSON API; and what each thing that is set up wrong is called."""

import functools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers.fault_proxy import Fault

from hsfmt.errors import CorruptionError, NotFoundError, StorageError
from hsfmt.storage import open_store, retries

DATA = os.urandom(7_000_000)  # more than one step of an upload


@pytest.fixture(autouse=True)
def _no_google(monkeypatch, tmp_path):
    """Neither find credentials of whoever runs the tests nor ask a machine's metadata server for some."""
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "none"))
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def url(gcs_bucket):
    return f"gs://{gcs_bucket}/a folder/dataset"


@pytest.fixture
def store(gcs_server, url):
    return open_store(url, gcs_server.options())


@pytest.fixture
def disturbed(gcs_faults, url, monkeypatch):
    """The same place, by way of the proxy."""
    monkeypatch.setattr(retries, "pause_seconds", lambda attempts, at_least: 0.01)
    return open_store(url, {"token": "anon", "endpoint_url": gcs_faults.url})


def put(store, path, data):
    with store.open_object(path) as writer:
        for at in range(0, len(data), 1_000_000):
            writer.write(memoryview(bytearray(data[at : at + 1_000_000])))
        writer.commit()


def test_objects_and_ranges(store):
    import gcsfs.core

    put(store, "x", DATA)
    put(store, "empty", b"")
    store.write("y/z", DATA[:3_000_000])
    store.write("y/empty", b"")
    assert store.read("x", len(DATA)) == DATA
    assert store.read("y/z", len(DATA)) == DATA[:3_000_000]
    assert store.read("empty", 10) == store.read("y/empty", 10) == b""
    ranges = [("x", at, 1000) for at in range(0, len(DATA), 70_000)]
    assert store.read_ranges(ranges) == [DATA[at : at + 1000] for _, at, _ in ranges]
    assert [store.size(path) for path in ("x", "empty", "y", "nothing")] == [len(DATA), 0, None, None]
    assert store.list("") == ["empty", "x", "y"]
    assert store.list("y") == ["empty", "z"]
    assert store.list("nothing") == []
    sizes = [("empty", 0), ("x", len(DATA)), ("y/empty", 0), ("y/z", 3_000_000)]
    assert list(store.walk("")) == sizes
    assert list(store.walk("y")) == sizes[2:]
    assert list(store.walk("nothing")) == []
    assert store.modified("x") > 1e9
    assert store.modified("nothing") is None
    # Not the one that would ask for the kind of bucket by gRPC.
    assert type(store._fs()) is gcsfs.core.GCSFileSystem
    # Nor one whose threads would see each other's old listings.
    assert list(store._fs().dircache) == []


def test_what_is_not_there(store):
    store.write("x", b"12345")
    with pytest.raises(NotFoundError, match="nothing"):
        store.read("nothing", 10)
    with pytest.raises(NotFoundError, match="nothing"):
        store.read_ranges([("x", 0, 1), ("nothing", 0, 1)])
    with pytest.raises(CorruptionError, match="at most 4 bytes"):
        store.read("x", 4)
    for offset, nbytes in ((4, 2), (5, 1), (50, 5)):
        with pytest.raises(CorruptionError, match="an object of 5 bytes"):
            store.read_ranges([("x", offset, nbytes)])
    store.remove("x")
    with pytest.raises(NotFoundError, match="nothing of that name"):
        store.remove("x")


def test_both_schemes_name_the_same(gcs_server, store, url):
    store.write("x", b"1")
    assert open_store(url.replace("gs://", "gcs://"), gcs_server.options()).read("x", 1) == b"1"


def test_names_that_urls_have_to_quote(store):
    for name in ("with space", "ü", "100%", "a+b", "what?", "c#1", "d[0]*"):
        store.write(f"f/{name}", name.encode())
        assert store.read(f"f/{name}", 20) == name.encode()
    assert len(store.list("f")) == 7


def test_the_server_copies(gcs_server, store, make_gcs_bucket):
    put(store, "x", DATA)
    other = open_store(f"gs://{make_gcs_bucket()}/d", gcs_server.options())
    assert other.shares_storage(store)
    assert other.link(store, "x")
    assert other.read("x", len(DATA)) == DATA
    with pytest.raises(NotFoundError):
        other.link(store, "nothing")


def test_of_creators_one_wins(gcs_server, store, url):
    """By a condition of the request, which GCS has too."""
    stores = [open_store(url, gcs_server.options()) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        for number in range(5):
            bodies = [b"%d-%d" % (number, i) for i in range(6)]
            create = functools.partial(lambda n, store, body: store.create(f"x{n}", body), number)
            won = list(pool.map(create, stores, bodies))
            assert won.count(True) == 1
            assert store.read(f"x{number}", 10) == bodies[won.index(True)]
    assert not store.create("x0", b"later")
    assert store.read("x0", 10) != b"later"
    assert store.create("empty", b"")
    assert not store.create("empty", b"later")


def test_a_creator_asks_for_one_thing(disturbed, gcs_faults):
    assert disturbed.create("x", b"1")
    (request,) = gcs_faults.requests
    assert request.method == "POST"
    assert "ifGenerationMatch=0" in request.path


def test_a_creator_whose_answer_was_lost_has_won(disturbed, gcs_faults):
    gcs_faults.faults.append(Fault("reset", "/upload/", after=5, method="POST"))
    assert disturbed.create("x", b"mine")
    assert [request.method for request in gcs_faults.requests] == ["POST", "POST", "GET"]
    gcs_faults.faults.append(Fault("reset", "/upload/", after=5, method="POST"))
    assert not disturbed.create("x", b"other")
    assert disturbed.read("x", 9) == b"mine"


def test_nothing_appears_before_the_commit(store):
    writer = store.open_object("x")
    writer.write(DATA)
    assert store.size("x") is None
    writer.abort()
    assert store.size("x") is None
    store.write("x", b"before")
    writer = store.open_object("x")
    writer.write(DATA)
    writer.abort()
    del writer
    assert store.read("x", 6) == b"before"
    assert store.unfinished_uploads() == []


def test_what_is_altered_on_its_way_is_noticed(store):
    writer = store.open_object("x")
    file = writer._file
    sent = file.write
    file.write = lambda data: sent(bytes([data[0] ^ 1]) + bytes(data[1:]))
    writer.write(b"12345")
    with pytest.raises(StorageError, match=r"x: expected CRC-32C .*altered on the way"):
        writer.commit()


@pytest.mark.parametrize(
    "kind", [{"kind": "status", "status": 503}, {"kind": "status", "status": 429}, {"kind": "reset"}]
)
def test_what_passes_is_asked_for_again(disturbed, gcs_faults, kind):
    """Once for each failure: gcsfs does not do so too."""
    store = disturbed
    gcs_faults.faults.append(Fault(count=2, method="", **kind))
    store.write("x", DATA[:100])
    assert len(gcs_faults.requests) == 3
    gcs_faults.reset()
    gcs_faults.faults.append(Fault(count=2, method="", **kind))
    assert store.read_ranges([("x", 5, 5)]) == [DATA[5:10]]
    assert len(gcs_faults.requests) == 3
    gcs_faults.faults.append(Fault(count=1, method="", **kind))
    assert store.list("") == ["x"]


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_step_of_an_upload_is_made_again(disturbed, gcs_faults, step):
    gcs_faults.faults.append(Fault("status", "/upload/", count=2, skip=step, method="POST"))
    put(disturbed, "x", DATA)
    assert gcs_faults.faults[0].struck == 2
    assert gcs_faults.count("/upload/") == 5
    assert disturbed.read("x", len(DATA)) == DATA


def test_short_and_other_answers(disturbed, gcs_faults):
    disturbed.write("x", DATA[:1000])
    for kind in ("short", "reset"):
        gcs_faults.faults.append(Fault(kind, "/download/", after=20))
        assert disturbed.read_ranges([("x", 100, 500)]) == [DATA[100:600]]
        assert gcs_faults.faults[-1].struck == 1


def test_no_patience(disturbed, gcs_faults, monkeypatch):
    monkeypatch.setenv("HSFMT_RETRY_SECONDS", "0")
    gcs_faults.faults.append(Fault("status", count=None, method=""))
    for call in CALLS.values():
        gcs_faults.requests.clear()
        with pytest.raises(StorageError, match="run again"):
            call(disturbed)
        # A look at one object asks for an object and a folder at once.
        assert len(gcs_faults.requests) <= 2


def test_a_server_that_says_nothing(disturbed, gcs_faults, monkeypatch):
    disturbed.write("x", DATA[:1000])
    monkeypatch.setenv("HSFMT_TIMEOUT_SECONDS", "0.3")
    monkeypatch.setenv("HSFMT_RETRY_SECONDS", "0")
    gcs_faults.faults.append(Fault("stall", "/download/", after=20))
    with pytest.raises(StorageError, match="expected the storage to work"):
        open_store(disturbed.url, {"token": "anon", "endpoint_url": gcs_faults.url}).read("x", 1000)


CALLS = {
    "read": lambda store: store.read("x", 10),
    "ranges": lambda store: store.read_ranges([("x", 0, 5)]),
    "size": lambda store: store.size("x"),
    "list": lambda store: store.list(""),
    "walk": lambda store: list(store.walk("")),
    "write": lambda store: store.write("y", b"1"),
    "create": lambda store: store.create("y", b"1"),
    "stream": lambda store: put(store, "y", b"1"),
}


def assert_says(call, store, *words):
    with pytest.raises(StorageError) as caught:
        call(store)
    assert caught.value.exit_code == 3
    text = str(caught.value)
    assert "\n" not in text
    for word in (store.url, *words):
        assert word in text


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_wrong_bucket(gcs_server, call):
    store = open_store("gs://no-such-bucket/d", gcs_server.options())
    assert_says(call, store, "a bucket 'no-such-bucket'", "check the bucket's name")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("status", [401, 403])
def test_refused(disturbed, gcs_faults, call, status):
    """What GCS answers to those who may not, with wrong credentials and with none."""
    gcs_faults.faults.append(Fault("status", count=None, status=status, method=""))
    assert_says(call, disturbed, "to be let in", "gcloud auth application-default login", '"anon"')


def test_who_may_not_look_at_the_bucket_is_not_told_that_it_is_missing(disturbed, gcs_faults):
    gcs_faults.faults.append(Fault("status", r"/b/[^/]*$", count=None, status=403))
    with pytest.raises(NotFoundError, match="x: expected an object"):
        disturbed.read("x", 10)
    assert gcs_faults.faults[0].struck == 1


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_no_credentials(gcs_server, url, call):
    store = open_store(url, gcs_server.options() | {"token": "google_default"})
    assert_says(call, store, "expected credentials", "gcloud auth application-default login")


def test_refused_endpoint(gcs_server, monkeypatch):
    monkeypatch.setattr(retries, "_FIRST_CONTACT_SECONDS", 0.2)
    for call in (CALLS["read"], CALLS["list"], CALLS["stream"]):
        store = open_store("gs://bucket/d", gcs_server.options(endpoint="http://127.0.0.1:9"))
        assert_says(call, store, "a server that can be reached", "endpoint_url")


def test_no_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert_says(CALLS["read"], open_store("gs://bucket/d"), "the driver of gs://", "pip install 'hsfmt[gcs]'")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gs://no-such-bucket/d", "a bucket 'no-such-bucket'"),
        ("gs://ready/no-dataset", "expected an hsfmt dataset, got no zarr.json there"),
    ],
)
def test_a_line_on_the_command_line(gcs_server, url, words):
    done = subprocess.run(
        [sys.executable, "-m", "hsfmt.cli", "info", url],
        env=os.environ | {"STORAGE_EMULATOR_HOST": gcs_server.endpoint},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
