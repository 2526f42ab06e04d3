"""AzureStore against Azurite; and what each thing that is set up wrong is called."""

import functools
import gc
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from killing import kill_at_request
from servers.azurite import ACCOUNT
from servers.fault_proxy import Fault

from hsfmt.errors import CorruptionError, NotFoundError, ObjectChangedError, StorageError, UsageError
from hsfmt.storage import open_store, retries
from hsfmt.storage import uploads as streamed
from hsfmt.storage.clients.azure_account import AzureCredentialsError, connected, parse_azure_url
from hsfmt.storage.clients.azure_client import AzureClient

MIB = 1 << 20
DATA = os.urandom(20 * MIB)  # more than two parts
KEY = "c2VjcmV0c2VjcmV0"


@pytest.fixture(autouse=True)
def _no_azure(no_credentials):
    """Nothing of whoever runs the tests."""


@pytest.fixture
def url(azure_container):
    return f"az://{azure_container}/a folder/dataset"


@pytest.fixture
def store(azure_server, url):
    return open_store(url, azure_server.options())


@pytest.fixture
def disturbed(azure_server, azure_faults, url, monkeypatch):
    """The same place, by way of the proxy."""
    monkeypatch.setattr(retries, "pause_seconds", lambda attempts, at_least: 0.01)
    return open_store(url, azure_server.options(host=azure_faults.host))


def put(store, path, data):
    with store.open_object(path) as writer:
        for at in range(0, len(data), MIB):
            writer.write(memoryview(bytearray(data[at : at + MIB])))
        writer.commit()


def blobs(azure_server, container, *include):
    """All that the service has, by the SDK's own client."""
    with azure_server.service() as service:
        return {blob.name: blob for blob in service.get_container_client(container).list_blobs(include=list(include))}


def test_objects_and_ranges(store):
    put(store, "x", DATA)
    put(store, "empty", b"")
    store.write("y/z", DATA[: 3 * MIB])
    store.write("y/empty", b"")
    assert store.read("x", len(DATA)) == DATA
    assert store.read("y/z", len(DATA)) == DATA[: 3 * MIB]
    assert store.read("empty", 10) == store.read("y/empty", 10) == b""
    ranges = [("x", at, 1000) for at in range(0, len(DATA), 200_000)]
    assert store.read_ranges(ranges) == [DATA[at : at + 1000] for _, at, _ in ranges]
    assert [store.size(path) for path in ("x", "empty", "y", "nothing")] == [len(DATA), 0, None, None]
    assert store.list("") == ["empty", "x", "y"]
    assert store.list("y") == ["empty", "z"]
    assert store.list("nothing") == []
    sizes = [("empty", 0), ("x", len(DATA)), ("y/empty", 0), ("y/z", 3 * MIB)]
    assert list(store.walk("")) == sizes
    assert list(store.walk("y")) == sizes[2:]
    assert list(store.walk("nothing")) == []
    assert store.modified("x") > 1e9
    assert store.modified("nothing") is None


def test_the_root_of_a_container(azure_server, azure_container):
    store = open_store(f"az://{azure_container}", azure_server.options())
    store.write("a/b", b"1")
    store.write("c", b"2")
    assert store.list("") == ["a", "c"]
    assert list(store.walk("")) == [("a/b", 1), ("c", 1)]
    assert store.read("a/b", 1) == b"1"


@pytest.mark.parametrize("nbytes", [1, 8 * MIB - 1, 8 * MIB, 8 * MIB + 1, 16 * MIB])
def test_streamed_objects_are_what_was_written(store, nbytes):
    put(store, "x", DATA[:nbytes])
    assert store.read("x", len(DATA)) == DATA[:nbytes]


def test_parts_of_very_large_objects_grow(store, monkeypatch):
    monkeypatch.setattr(streamed, "PART_NBYTES", 2 * MIB)
    monkeypatch.setattr(streamed, "_PARTS_OF_A_SIZE", 1)
    put(store, "x", DATA)
    assert store.read("x", len(DATA)) == DATA


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
    with pytest.raises(NotFoundError, match="expected an object"):
        store.remove("x")


def test_all_schemes_name_the_same(azure_server, azure_container, store, url):
    store.write("x", b"1")
    for scheme in ("abfs", "abfss", "AZ"):
        assert open_store(url.replace("az://", f"{scheme}://"), azure_server.options()).read("x", 1) == b"1"


def test_names_that_urls_have_to_quote(store, make_azure_container, azure_server):
    names = ("with space", "ü", "100%", "a+b", "what?", "c#1", "d[0]*", "e@f", "g?versionid=1", "h&i=j", "%41")
    other = open_store(f"az://{make_azure_container()}/d", azure_server.options())
    for name in names:
        store.write(f"f/{name}", name.encode())
        assert store.read(f"f/{name}", 20) == name.encode()
        assert other.link(store, f"f/{name}")
    assert sorted(store.list("f")) == sorted(other.list("f")) == sorted(names)
    assert [path for path, _ in other.walk("f")] == sorted(f"f/{name}" for name in names)
    for name in names:
        assert other.read(f"f/{name}", 20) == name.encode()
        store.remove(f"f/{name}")
    assert store.list("f") == []


def test_folders_whose_names_begin_alike_are_apart(azure_server, azure_container):
    store = open_store(f"az://{azure_container}/d", azure_server.options())
    beside = open_store(f"az://{azure_container}/d-other", azure_server.options())
    beside.write("zarr.json", b"1")
    assert store.list("") == []
    assert list(store.walk("")) == []
    store.write("parts/p-10/x", b"1")
    assert store.list("parts/p-1") == []
    assert list(store.walk("parts/p-1")) == []
    assert store.list("") == ["parts"]


def test_folders_are_no_objects(azure_server, azure_container):
    """Data Lake accounts and Hadoop have blobs for them, consoles empty ones with a slash at the end."""
    store = open_store(f"az://{azure_container}/d", azure_server.options())
    with azure_server.service() as service:
        container = service.get_container_client(azure_container)
        for name in ("d", "d/parts", "d/parts/p", "d/none"):
            container.upload_blob(name, b"", metadata={"hdi_isfolder": "true"})
        container.upload_blob("d/hsfmt/", b"")
    store.write("parts/p/x", b"1")
    assert store.list("") == ["hsfmt", "parts"]
    assert store.list("parts") == ["p"]
    assert list(store.walk("")) == [("parts/p/x", 1)]
    assert [store.size(path) for path in ("parts", "none", "parts/p/x")] == [None, None, 1]
    assert store.modified("parts") is None


def test_the_server_copies(azure_server, store, make_azure_container):
    put(store, "x", DATA)
    other = open_store(f"az://{make_azure_container()}/d", azure_server.options())
    assert other.shares_storage(store)
    assert other.link(store, "x")
    assert other.read("x", len(DATA)) == DATA
    with pytest.raises(NotFoundError):
        other.link(store, "nothing")
    assert not other.shares_storage(open_store(store.url, azure_server.options(sas=azure_server.token(read=True))))


def test_the_server_copies_for_who_has_a_token(azure_server, store, make_azure_container):
    store.write("x", DATA)
    options = azure_server.options(sas=azure_server.token(read=True, write=True, create=True))
    other = open_store(f"az://{make_azure_container()}/d", options)
    assert other.link(open_store(store.url, options), "x")
    assert other.read("x", len(DATA)) == DATA


class Copying:
    """What the SDK says of a copy that takes its time; the emulator's are over at once."""

    url = "http://source"

    def __init__(self, *statuses):
        self.statuses = list(statuses)

    async def start_copy_from_url(self, url):
        return {"copy_status": self.statuses.pop(0)}

    async def get_blob_properties(self):
        return SimpleNamespace(copy=SimpleNamespace(status=self.statuses.pop(0), status_description="500 injected"))


@pytest.mark.parametrize("last", ["success", "failed", "aborted"])
def test_a_copy_is_waited_for(monkeypatch, last):
    """adlfs goes on as soon as it has begun."""
    import asyncio

    blob = Copying("pending", "pending", last)
    client = AzureClient(lambda: (None, None), "c", "d")
    monkeypatch.setattr(client, "_blob", lambda path: blob)
    if last == "success":
        assert asyncio.run(client.copy(client, "x"))
    else:
        with pytest.raises(OSError, match=f"ended as {last}: 500 injected"):
            asyncio.run(client.copy(client, "x"))
    assert blob.statuses == []


def test_of_creators_one_wins(azure_server, store, url):
    """By a condition of the request."""
    stores = [open_store(url, azure_server.options()) for _ in range(6)]
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
    assert store.create("large", DATA)
    assert not store.create("large", DATA[::-1])
    assert store.read("large", len(DATA)) == DATA


def test_a_creator_asks_for_one_thing(disturbed, azure_faults):
    assert disturbed.create("x", b"1")
    (request,) = azure_faults.requests
    assert request.method == "PUT"
    assert request.headers["if-none-match"] == "*"
    assert request.headers["content-md5"]


def test_a_creator_whose_answer_was_lost_has_won(disturbed, azure_faults):
    azure_faults.faults.append(Fault("lost", method="PUT"))
    assert disturbed.create("x", b"mine")
    assert [request.method for request in azure_faults.requests] == ["PUT", "PUT", "HEAD"]
    azure_faults.faults.append(Fault("lost", method="PUT"))
    assert not disturbed.create("x", b"other")
    assert disturbed.read("x", 9) == b"mine"


def test_removed_though_the_answer_was_lost(disturbed, azure_faults):
    disturbed.write("x", b"1")
    azure_faults.faults.append(Fault("lost", method="DELETE"))
    disturbed.remove("x")
    assert disturbed.size("x") is None


def test_nothing_appears_before_the_commit(azure_server, azure_container, store):
    writer = store.open_object("x")
    writer.write(DATA)
    assert store.size("x") is None
    writer.abort()
    assert store.size("x") is None
    assert store.list("") == []
    store.write("x", b"before")
    writer = store.open_object("x")
    writer.write(DATA)
    writer.abort()
    del writer
    assert store.read("x", 6) == b"before"
    assert list(store.unfinished_uploads()) == []
    assert [blob.size for blob in blobs(azure_server, azure_container).values()] == [6]


def test_blocks_that_others_left_do_not_matter(azure_server, azure_container, store):
    """Also those of ids of another length, which can't stand beside ours."""
    left = store.open_object("x")
    left.write(DATA)
    for number in (1, 2):
        with store.open_object("x") as writer:
            writer.write(DATA[number:])
            writer.commit()
        assert store.read("x", len(DATA)) == DATA[number:]
    left.abort()


WRITER = """
import os, sys
from hsfmt.storage import open_store
store = open_store(sys.argv[1])
data = open(sys.argv[2], "rb").read()
sys.stdout.write("go\\n"); sys.stdout.flush()
with store.open_object("parts/x") as writer:
    writer.write(data)
    writer.commit()
"""


@pytest.mark.slow
def test_a_killed_upload_is_no_object(azure_server, azure_container, azure_faults, store, url, repo_root, tmp_path):
    """Killed at each of its requests but the last, it leaves blocks that nobody sees; the next one is not disturbed."""
    (tmp_path / "data").write_bytes(DATA)
    env = os.environ | {
        "PYTHONPATH": str(repo_root),
        "AZURE_STORAGE_CONNECTION_STRING": azure_server.connection_string(host=azure_faults.host),
    }
    killed = 0
    for number in (1, 2, 3):
        azure_faults.reset()
        argv = [sys.executable, "-c", WRITER, url, tmp_path / "data"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env) as process:
            assert process.stdout.readline() == "go\n"
            killed += kill_at_request(process, azure_faults, number, 0.0)
        azure_faults.settle()
        size = store.size("parts/x")
        assert size in {None, len(DATA)}
        if size is None:
            assert list(store.walk("")) == []
        put(store, "parts/x", DATA[number:])
        assert store.read("parts/x", len(DATA)) == DATA[number:]
        store.remove("parts/x")
    assert killed >= 1


def test_what_is_altered_on_its_way_is_refused(store, monkeypatch):
    """Each body goes with a checksum, which the server compares."""
    import io

    class Altered(io.BytesIO):
        n_read = 0

        def read(self, *args):  # first for the checksum
            self.n_read += 1
            data = super().read(*args)
            return data if self.n_read < 3 or not data else bytes([data[0] ^ 1]) + data[1:]

    monkeypatch.setattr("hsfmt.storage.clients.azure_client.io.BytesIO", Altered)
    with pytest.raises(StorageError, match="Md5Mismatch"):
        put(store, "x", DATA)
    assert store.size("x") is None


def test_an_object_that_changed_is_noticed(azure_server, azure_container, store, url):
    store.write("x", b"12345")
    assert store.read_ranges([("x", 0, 2)]) == [b"12"]
    open_store(url, azure_server.options()).write("x", b"54321")
    with pytest.raises(ObjectChangedError, match="ETag"):
        store.read_ranges([("x", 0, 2)])


def test_stores_that_are_dropped_let_go_of_their_connections(azure_server, store, url):
    store.write("x", b"1")

    def n_sockets():
        found = 0
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # that of the listing itself
                found += str(descriptor.readlink()).startswith("socket:")
        return found

    before = n_sockets()
    for _ in range(20):
        assert open_store(url, azure_server.options()).read("x", 1) == b"1"
    gc.collect()
    deadline = time.monotonic() + 100
    while n_sockets() > before + 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert n_sockets() <= before + 2


KINDS = [{"kind": "status", "status": 503}, {"kind": "status", "status": 429}, {"kind": "reset"}, {"kind": "garbled"}]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.get("status", kind["kind"])))
def test_what_passes_is_asked_for_again(disturbed, azure_faults, kind):
    """Once for each failure: the SDK does not do so too."""
    store = disturbed
    azure_faults.faults.append(Fault(count=2, method="", **kind))
    store.write("x", DATA[:100])
    assert len(azure_faults.requests) == 3
    azure_faults.reset()
    azure_faults.faults.append(Fault(count=2, method="", **kind))
    assert store.read_ranges([("x", 5, 5)]) == [DATA[5:10]]
    azure_faults.faults.append(Fault(count=1, method="", **kind))
    assert store.list("") == ["x"]
    azure_faults.faults.append(Fault(count=1, method="", **kind))
    assert store.size("x") == 100


@pytest.mark.parametrize("match", ["comp=block&", "comp=blocklist"])
@pytest.mark.parametrize("kind", [{"kind": "status", "status": 503}, {"kind": "reset"}, {"kind": "lost"}], ids=str)
def test_a_step_of_an_upload_is_made_again(disturbed, azure_faults, match, kind):
    azure_faults.faults.append(Fault(match=match, count=2, method="PUT", **kind))
    put(disturbed, "x", DATA)
    assert azure_faults.faults[0].struck == 2
    assert disturbed.read("x", len(DATA)) == DATA


def test_short_and_other_answers(disturbed, azure_faults):
    disturbed.write("x", DATA[:1000])
    for kind in ("short", "reset", "wrong range"):
        azure_faults.reset()
        azure_faults.faults.append(Fault(kind, after=20 if kind != "wrong range" else 0))
        assert disturbed.read_ranges([("x", 100, 500)]) == [DATA[100:600]]
        assert azure_faults.faults[-1].struck == 1
        assert len(azure_faults.requests) == 2


CALLS = {
    "read": lambda store: store.read("x", 10),
    "ranges": lambda store: store.read_ranges([("x", 0, 5)]),
    "size": lambda store: store.size("x"),
    "list": lambda store: store.list(""),
    "walk": lambda store: list(store.walk("")),
    "modified": lambda store: store.modified("x"),
    "write": lambda store: store.write("y", b"1"),
    "create": lambda store: store.create("y", b"1"),
    "stream": lambda store: put(store, "y", b"1"),
    "remove": lambda store: store.remove("y"),
}


def test_no_patience(disturbed, azure_faults, monkeypatch):
    monkeypatch.setenv("HSFMT_RETRY_SECONDS", "0")
    azure_faults.faults.append(Fault("status", count=None, method=""))
    for call in CALLS.values():
        azure_faults.requests.clear()
        with pytest.raises(StorageError, match="run again"):
            call(disturbed)
        assert len(azure_faults.requests) == 1


def test_a_server_that_says_nothing(azure_server, disturbed, azure_faults, monkeypatch):
    disturbed.write("x", DATA[:1000])
    monkeypatch.setenv("HSFMT_TIMEOUT_SECONDS", "0.3")
    monkeypatch.setenv("HSFMT_RETRY_SECONDS", "0")
    azure_faults.faults.append(Fault("stall", after=20))
    with pytest.raises(StorageError, match="expected the storage to work"):
        open_store(disturbed.url, azure_server.options(host=azure_faults.host)).read("x", 1000)


def assert_says(call, store, *words):
    with pytest.raises(StorageError) as caught:
        call(store)
    assert caught.value.exit_code == 3
    text = str(caught.value)
    assert "\n" not in text
    for word in (store.url, *words):
        assert word in text


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_wrong_container(azure_server, call):
    store = open_store("az://no-such-container/d", azure_server.options())
    assert_says(call, store, "a container 'no-such-container'", "check the container's name")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("status", [401, 403])
def test_refused(disturbed, azure_faults, call, status):
    azure_faults.faults.append(Fault("status", count=None, status=status, method=""))
    assert_says(call, disturbed, "to be let in", "AZURE_STORAGE_CONNECTION_STRING", '"anon"')


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize(
    "options", [{}, {"connection_string": "nonsense"}, {"account_name": "a", "account_key": "abc"}]
)
def test_no_credentials(call, options):
    assert_says(call, open_store("az://container/d", options), "expected credentials", "AZURE_STORAGE_ACCOUNT_NAME")


def test_refused_endpoint(azure_server, monkeypatch):
    monkeypatch.setattr(retries, "_FIRST_CONTACT_SECONDS", 0.2)
    for call in (CALLS["read"], CALLS["list"], CALLS["stream"]):
        store = open_store("az://container/d", azure_server.options(host="127.0.0.1:9"))
        assert_says(call, store, "a server that can be reached", "check the account's name")


def test_no_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "azure.storage.blob.aio", None)
    assert_says(CALLS["read"], open_store("az://container/d"), "the driver of az://", "pip install 'hsfmt[azure]'")


def test_unknown_options_are_refused():
    with pytest.raises(UsageError, match=r"account_name.*got acount_name"):
        open_store("az://container/d", {"acount_name": "x"}).read("x", 1)


@pytest.mark.parametrize("secret", ["hunter2x", "hun/ter+2x", "hun@ter2x"])
@pytest.mark.parametrize("scheme", ["az", "abfs", "abfss", "AZ"])
def test_credentials_in_a_url_are_refused_and_not_shown(scheme, secret):
    with pytest.raises(UsageError, match="a container's name") as caught:
        open_store(f"{scheme}://KEY:{secret}@container/states")
    assert secret not in repr(caught.value) + str(caught.value.problems)


@pytest.mark.parametrize("url", ["az://", "abfs:///", "az://Upper/x", "abfs://account.dfs.core.windows.net/"])
def test_a_container_is_named(url):
    with pytest.raises(UsageError, match="a container's name"):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("az://c/a/b", ("", "c", "a/b")),
        ("abfs://c", ("", "c", "")),
        ("abfs://c@acc.dfs.core.windows.net/a/b", ("acc.blob.core.windows.net", "c", "a/b")),
        ("abfss://c@acc.blob.core.windows.net", ("acc.blob.core.windows.net", "c", "")),
        ("abfs://acc.dfs.core.windows.net/c/a?b#c", ("acc.blob.core.windows.net", "c", "a?b#c")),
    ],
)
def test_what_a_url_says(url, parsed):
    place = parse_azure_url(url)
    assert (place.host, place.container, place.prefix) == parsed
    assert open_store(url).url == url


def connect(url, options):
    """(URL that requests go to, what they are signed with)."""
    service, ours = connected(parse_azure_url(url), options.get, url)
    credential = service.credential
    return service.url, getattr(credential, "account_key", None) or (type(credential).__name__ if ours else None)


OF_ENVIRONMENT = f"DefaultEndpointsProtocol=https;AccountName=env;AccountKey={KEY};EndpointSuffix=core.windows.net"
ENV, ACC = "https://env.blob.core.windows.net/", "https://acc.blob.core.windows.net/"


@pytest.mark.parametrize(
    ("url", "options", "environment", "wanted"),
    [
        ("az://c/d", {}, {"CONNECTION_STRING": OF_ENVIRONMENT}, (ENV, KEY)),
        ("az://c/d", {"anon": True}, {"CONNECTION_STRING": OF_ENVIRONMENT}, (ENV, None)),
        ("az://c/d", {}, {"ACCOUNT_NAME": "acc", "ACCOUNT_KEY": KEY}, (ACC, KEY)),
        ("az://c/d", {}, {"ACCOUNT_NAME": "acc", "SAS_TOKEN": "?sv=1&sig=2"}, (f"{ACC}?sv=1&sig=2", None)),
        ("az://c/d", {}, {"ACCOUNT_NAME": "acc", "ANON": "true"}, (ACC, None)),
        ("az://c/d", {}, {"ACCOUNT_NAME": "acc", "ANON": "false"}, (ACC, "DefaultAzureCredential")),
        ("az://c/d", {"account_name": "acc", "sas_token": "sig=2"}, {"ACCOUNT_KEY": KEY}, (f"{ACC}?sig=2", None)),
        ("az://c/d", {"account_name": "acc", "anon": True}, {"ACCOUNT_KEY": KEY}, (ACC, None)),
        ("az://c/d", {"account_name": "acc"}, {"CONNECTION_STRING": OF_ENVIRONMENT, "ACCOUNT_KEY": KEY}, (ACC, KEY)),
        ("abfs://c@acc.dfs.core.windows.net/d", {}, {"ACCOUNT_NAME": "acc", "ACCOUNT_KEY": KEY}, (ACC, KEY)),
        ("abfs://c@env.dfs.core.windows.net/d", {}, {"CONNECTION_STRING": OF_ENVIRONMENT}, (ENV, KEY)),
        ("az://c/d", {"account_name": "acc", "client_id": "i", "client_secret": "s", "tenant_id": "t"}, {},
         (ACC, "ClientSecretCredential")),
        ("az://c/d", {"account_name": "acc", "account_host": "h.example.org", "account_key": KEY}, {},
         ("https://h.example.org/", KEY)),
    ],
)  # fmt: skip
def test_which_credentials_are_used(monkeypatch, url, options, environment, wanted):
    """What is nearest to the call, and never more than it says."""
    for name, value in environment.items():
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
    assert connect(url, options) == wanted


def test_credentials_of_another_account_than_the_urls_are_refused(monkeypatch):
    """adlfs reads the container of that name of theirs."""
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", OF_ENVIRONMENT)
    url = "abfs://c@acc.dfs.core.windows.net/d"
    with pytest.raises(UsageError, match=r"credentials for acc\.blob.*got credentials for env\.blob"):
        connect(url, {})
    with pytest.raises(UsageError, match="got credentials for other"):
        connect(url, {"account_name": "other", "account_key": KEY})
    with pytest.raises(AzureCredentialsError):
        connect("az://c/d", {"connection_string": "nonsense"})


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("az://no-such-container/d", "a container 'no-such-container'"),
        ("az://READY/no-dataset", "expected an hsfmt dataset, got no zarr.json there"),
    ],
)
def test_a_line_on_the_command_line(azure_server, azure_container, url, words):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "hsfmt.cli", "info", url.replace("READY", azure_container)],
        env=os.environ | {"AZURE_STORAGE_CONNECTION_STRING": azure_server.connection_string()},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert ACCOUNT not in done.stderr
    assert done.stdout == ""
