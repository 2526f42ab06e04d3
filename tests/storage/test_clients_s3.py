"""RemoteStore against a real S3 server, by both clients; and what each thing that is set up wrong is called."""

import functools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers.fault_proxy import Fault
from servers.seaweed import READER_KEY, READER_SECRET

from hsfmt.errors import CorruptionError, NotFoundError, StorageError, UsageError
from hsfmt.storage import open_store
from hsfmt.storage.clients.obstore_client import ObstoreClient

DATA = os.urandom(2_000_000)


@pytest.fixture(params=["obstore", "fsspec"])
def client(request, monkeypatch):
    monkeypatch.setenv("HSFMT_REMOTE", request.param)
    return request.param


@pytest.fixture
def store(s3_server, bucket, client):
    store = open_store(f"s3://{bucket}/a/dataset", s3_server.options())
    store.write("x", DATA)
    store.write("empty", b"")
    return store


def test_objects_and_ranges(store, client):
    assert store.read("x", len(DATA)) == DATA
    assert store.read("empty", 10) == b""
    ranges = [("x", at, 1000) for at in range(0, len(DATA), 20_000)]
    assert store.read_ranges(ranges) == [DATA[at : at + 1000] for _, at, _ in ranges]
    with store.read_each(ranges) as arrivals:
        for number, body in arrivals:
            assert bytes(body) == DATA[ranges[number][1] : ranges[number][1] + 1000]
    reader = store._reader()
    assert (reader._faster is not None and isinstance(reader._faster.result(), ObstoreClient)) == (client == "obstore")
    assert reader._versions["x"][0] == len(DATA)
    assert len(reader._versions["x"][1]) == 32
    with pytest.raises(NotFoundError, match="nothing"):
        store.read("nothing", 10)
    with pytest.raises(NotFoundError, match="nothing"):
        store.read_ranges([("x", 0, 1), ("nothing", 0, 1)])
    with pytest.raises(CorruptionError, match="at most 10 bytes"):
        store.read("x", 10)
    for offset, nbytes in ((len(DATA) - 1, 2), (len(DATA), 1), (10 * len(DATA), 5)):
        with pytest.raises(CorruptionError, match=f"an object of {len(DATA)} bytes"):
            store.read_ranges([("x", offset, nbytes)])


def test_what_we_write_ourselves_is_no_surprise(store):
    assert store.read_ranges([("x", 0, 3)]) == [DATA[:3]]
    store.write("x", b"other bytes")
    assert store.read_ranges([("x", 0, 3)]) == [b"oth"]
    store.remove("x")
    with store.open_object("x") as writer:
        writer.write(b"third")
        writer.commit()
    assert store.read_ranges([("x", 0, 3)]) == [b"thi"]


def test_a_server_that_ignores_ranges(s3_server, s3_faults, client):
    s3_server.file_system().pipe_file("public/whole/x", DATA)
    store = open_store("s3://public/whole", {"anon": True, "endpoint_url": s3_faults.url})
    s3_faults.faults.append(Fault("no range", "x$", None))
    assert store.read("x", len(DATA)) == DATA
    with pytest.raises(StorageError, match=f"answers ranges, got all {len(DATA)} bytes"):
        store.read_ranges([("x", 10, 5)])


def test_by_the_environment(s3_server, bucket, client, monkeypatch):
    open_store(f"s3://{bucket}/d", s3_server.options()).write("x", DATA)
    options = s3_server.options()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
    store = open_store(f"s3://{bucket}/d")
    assert store.read_ranges([("x", 5, 5)]) == [DATA[5:10]]
    assert store._reader()._faster_failures == (-1 if client == "obstore" else 0)


def test_by_a_profile(s3_server, bucket, client, monkeypatch, tmp_path):
    """Which obstore does not know, but is told the keys of."""
    open_store(f"s3://{bucket}/d", s3_server.options()).write("x", DATA)
    options = s3_server.options()
    (tmp_path / "credentials").write_text(
        f"[mine]\naws_access_key_id={options['key']}\naws_secret_access_key={options['secret']}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    store = open_store(f"s3://{bucket}/d", {"endpoint_url": options["endpoint_url"]})
    assert store.read_ranges([("x", 5, 5)]) == [DATA[5:10]]
    assert store._reader()._faster_failures == (-1 if client == "obstore" else 0)


def test_settings_that_obstore_can_not_have_are_s3fs_s(s3_server, bucket):
    open_store(f"s3://{bucket}/d d", s3_server.options()).write("x", DATA)
    for folder, options in (("d d", {}), ("d%20d", {"requester_pays": True})):
        open_store(f"s3://{bucket}/{folder}", s3_server.options()).write("x", DATA)
        store = open_store(f"s3://{bucket}/{folder}", s3_server.options() | options)
        assert store.read_ranges([("x", 5, 5)]) == [DATA[5:10]]
        assert store._reader()._faster.result() is None


CALLS = {
    "read": lambda store: store.read("x", 10),
    "ranges": lambda store: store.read_ranges([("x", 0, 5)]),
    "list": lambda store: store.list(""),
    "walk": lambda store: list(store.walk("")),
    "write": lambda store: store.write("y", b"1"),
}
READS = {name: CALLS[name] for name in ("read", "ranges")}


def assert_says(call, store, *words):
    with pytest.raises(StorageError) as caught:
        call(store)
    assert caught.value.exit_code == 3
    text = str(caught.value)
    assert "\n" not in text
    for word in (store.url, *words):
        assert word in text
    assert "test-secret-key" not in text
    assert "hunter2hunter2" not in text
    return text


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_wrong_bucket(s3_server, call):
    store = open_store("s3://no-such-bucket/d", s3_server.options())
    assert_says(call, store, "a bucket 'no-such-bucket'", "check the bucket's name", "AWS_ENDPOINT_URL")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("wrong", [{"key": "nobody"}, {"secret": "hunter2hunter2"}], ids=["key", "secret"])
def test_wrong_credentials(s3_server, bucket, call, wrong):
    store = open_store(f"s3://{bucket}/d", s3_server.options(**wrong))
    assert_says(call, store, "to be let in", "check the credentials", "AWS_PROFILE")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_forbidden(s3_server, bucket, call):
    store = open_store(f"s3://{bucket}/d", s3_server.options(key=READER_KEY, secret=READER_SECRET))
    assert_says(call, store, "to be let in", "may read (or write) this place")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_no_credentials(s3_server, bucket, call, no_credentials, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = open_store(f"s3://{bucket}/d", {"endpoint_url": s3_server.endpoint})
    assert_says(call, store, "expected credentials", "AWS_ACCESS_KEY_ID", "FSSPEC_S3_ANON")


@pytest.mark.parametrize("call", READS.values(), ids=READS.keys())
def test_refused_endpoint(s3_server, call, monkeypatch):
    monkeypatch.setattr("hsfmt.storage.retries._FIRST_CONTACT_SECONDS", 0.2)
    store = open_store("s3://bucket/d", s3_server.options(endpoint="http://127.0.0.1:9"))
    assert_says(call, store, "a server that can be reached", "check AWS_ENDPOINT_URL")


def test_unknown_client(s3_server, bucket, monkeypatch):
    monkeypatch.setenv("HSFMT_REMOTE", "boto")
    with pytest.raises(UsageError, match="HSFMT_REMOTE: expected obstore or fsspec"):
        open_store(f"s3://{bucket}/d", s3_server.options()).read("x", 1)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://no-such-bucket/d", "a bucket 'no-such-bucket'"),
        ("s3://public/no-dataset", "expected an hsfmt dataset, got no zarr.json there"),
        ("oci://bucket/d", "expected the driver of oci://"),
    ],
)
def test_on_the_command_line(s3_server, url, words):
    options = s3_server.options()
    environment = {
        "AWS_ACCESS_KEY_ID": options["key"],
        "AWS_SECRET_ACCESS_KEY": options["secret"],
        "AWS_ENDPOINT_URL": options["endpoint_url"],
    }
    done = subprocess.run(
        [sys.executable, "-m", "hsfmt.cli", "info", url],
        env=os.environ | environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_of_creators_one_wins(s3_server, bucket):
    stores = [open_store(f"s3://{bucket}/d", s3_server.options()) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        for number in range(5):
            bodies = [b"%d-%d" % (number, i) for i in range(6)]
            put = functools.partial(lambda n, store, body: store.create(f"x{n}", body), number)
            won = list(pool.map(put, stores, bodies))
            assert won.count(True) == 1
            assert stores[0].read(f"x{number}", 10) == bodies[won.index(True)]
    assert not stores[0].create("x0", b"later")
    assert stores[0].read("x0", 10) != b"later"
    assert stores[0].create("empty", b"")
    assert not stores[0].create("empty", b"later")


def test_a_creator_whose_answer_was_lost_has_won(s3_server, s3_faults, bucket):
    """aiohttp makes a PUT once more by itself, if its connection was used before: the object in the way is our own."""
    store = open_store(f"s3://{bucket}/d", s3_server.options(endpoint=s3_faults.url))
    store.write("before", b"1")
    for name, others in (("x", None), ("y", b"mine"), ("z", b"other")):
        if others is not None:
            open_store(store.url, s3_server.options()).write(name, others)
        s3_faults.reset()
        s3_faults.faults.append(Fault("lost", method="PUT"))
        assert store.create(name, b"mine") == (others is None)
        assert s3_faults.count() == 3
        assert store.read(name, 9) == (others or b"mine")


@pytest.mark.parametrize("cache", ["simplecache", "filecache"])
def test_caches_of_fsspec_are_read_through_and_not_written_through(s3_server, bucket, tmp_path, cache):
    """They drop the condition of a `create`, and keep what was there before a `write`."""
    behind = open_store(f"s3://{bucket}/d", s3_server.options())
    behind.write("x", DATA)
    options = {"s3": s3_server.options(), cache: {"cache_storage": str(tmp_path / "cache")}}
    store = open_store(f"{cache}::s3://{bucket}/d", options)
    assert store.read_ranges([("x", 5, 5), ("x", 1_000_000, 7)]) == [DATA[5:10], DATA[1_000_000:1_000_007]]
    assert store.read("x", len(DATA)) == DATA
    with pytest.raises(NotFoundError):
        store.read("y", 1)
    for call in (
        lambda: store.create("x", b"1"),
        lambda: store.write("x", b"1"),
        lambda: store.open_object("x"),
        lambda: store.remove("x"),
    ):
        with pytest.raises(
            UsageError, match=f"a place to write to, got a cache before it, {cache} — leave out {cache}::"
        ):
            call()
    assert behind.read("x", len(DATA)) == DATA


def test_what_is_committed_is_seen_by_who_listed_before(bucket, s3_server):
    store = open_store(f"s3://{bucket}/d", s3_server.options())
    store.write("folder/first", b"1")
    fs = store._fs()
    assert [name.rpartition("/")[2] for name in fs.ls(f"{bucket}/d/folder", detail=False)] == ["first"]
    open_store(store.url, s3_server.options()).write("folder/second", b"2")
    assert fs.info(f"{bucket}/d/folder/second")["size"] == 1


# What botocore and aiohttp refuse before anything is sent, and would each time.
UNUSABLE = {
    "an endpoint without a scheme": ({"endpoint_url": "localhost:9000"}, "the URL of an endpoint"),
    "an endpoint with a space": ({"endpoint_url": "http://a b:9000"}, "the URL of an endpoint"),
    "a port beyond all": ({"endpoint_url": "http://127.0.0.1:999999"}, "the URL of an endpoint"),
    "no region": ({"client_kwargs": {"region_name": "eu west 1!"}}, "settings that S3 can be asked with"),
    "a style of addresses": ({"config_kwargs": {"s3": {"addressing_style": "odd"}}}, "settings that S3 can"),
    "a way to retry": ({"config_kwargs": {"retries": {"mode": "odd"}}}, "settings that S3 can be asked with"),
    "a signature": ({"config_kwargs": {"signature_version": "odd"}}, "settings that S3 can be asked with"),
    "a time": ({"config_kwargs": {"connect_timeout": "soon"}}, "settings that S3 can be asked with"),
    "no such profile": ({"profile": "nobody-s"}, "expected credentials", "AWS_PROFILE"),
    "no such authority": ({"client_kwargs": {"verify": "/no/such/file"}}, "certificate authority", "AWS_CA_BUNDLE"),
    "a proxy that is no URL": ({"config_kwargs": {"proxies": {"http": "a b"}}}, "the URL of a proxy", "HTTP_PROXY"),
    "half a key": ({"secret": None}, "expected credentials", "AWS_SECRET_ACCESS_KEY"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize(("options", "words"), [(case[0], case[1:]) for case in UNUSABLE.values()], ids=UNUSABLE)
def test_settings_that_can_never_work_are_not_tried_again(s3_server, call, options, words, no_credentials, monkeypatch):
    monkeypatch.setenv("HSFMT_RETRY_SECONDS", "5")
    store = open_store("s3://bucket/d", {**s3_server.options(), **options})
    assert "attempts)" not in assert_says(call, store, *words, "—")


@pytest.mark.parametrize("name", ["AWS_CA_BUNDLE", "HTTP_PROXY", "AWS_DEFAULT_REGION"])
def test_nor_are_those_of_the_environment(s3_server, name, no_credentials, monkeypatch):
    monkeypatch.setenv("HSFMT_RETRY_SECONDS", "5")
    monkeypatch.setenv(name, "/no such/file")
    options = s3_server.options() | {"endpoint_url": "http://10.255.255.1:9000"}  # no proxy is used for this machine
    with pytest.raises(StorageError) as caught:
        open_store("s3://bucket/d", options).read("x", 1)
    assert name in str(caught.value) or "AWS_*" in str(caught.value)
    assert "attempts)" not in str(caught.value)
