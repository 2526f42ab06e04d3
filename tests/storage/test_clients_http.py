"""WebStore against nginx: ranges, redirects, credentials, and servers that can't do what is needed."""

import os

import pytest
from servers.fault_proxy import Fault

from hsfmt.errors import CorruptionError, NotFoundError, StorageError, UsageError
from hsfmt.storage import open_store
from hsfmt.storage.clients.web_address import RedirectPolicy, parse_address

DATA = os.urandom(300_000)
TOKEN = "secret-token-1"


@pytest.fixture(scope="module", autouse=True)
def files(web_server):
    folder = web_server.root / "files"
    (folder / "a folder").mkdir(parents=True, exist_ok=True)
    (folder / "x").write_bytes(DATA)
    (folder / "a folder" / "100% ä#?.bin").write_bytes(DATA[:100])
    (folder / "empty").write_bytes(b"")


@pytest.fixture
def url(web_server):
    return f"{web_server.url}/files"


def test_objects_and_ranges(url):
    store = open_store(url)
    assert store.read("x", len(DATA)) == DATA
    assert store.read("empty", 10) == b""
    assert store.read_ranges([("x", 7, 9), ("x", len(DATA) - 1, 1), ("x", 5, 0)]) == [DATA[7:16], DATA[-1:], b""]
    assert store.read("a folder/100% ä#?.bin", 100) == DATA[:100]
    assert store.size("x") == len(DATA)
    assert store.size("nothing") is None
    assert store.modified("x") is None
    with pytest.raises(NotFoundError, match="nothing"):
        store.read("nothing", 10)
    with pytest.raises(CorruptionError, match="at most 10 bytes"):
        store.read("x", 10)
    for offset, nbytes in ((len(DATA) - 1, 2), (len(DATA), 1), (10 * len(DATA), 5)):
        with pytest.raises(CorruptionError, match=f"an object of {len(DATA)} bytes"):
            store.read_ranges([("x", offset, nbytes)])


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.list(""),
        lambda store: list(store.walk("parts")),
    ],
)
def test_listing_is_refused(url, call):
    store = open_store(url)
    assert not store.can_list
    with pytest.raises(StorageError, match=r"can be listed, got a web server.*only sealed datasets"):
        call(store)


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.write("y", b""),
        lambda store: store.create("y", b""),
        lambda store: store.remove("x"),
        lambda store: store.open_object("y"),
    ],
)
def test_writing_is_refused(url, call):
    with pytest.raises(UsageError, match="a storage to write to"):
        call(open_store(url))


def test_a_server_without_ranges_is_found_out_before_the_body_is_read(web_server, web_faults):
    store = open_store(f"{web_faults.url}/without-ranges/files")
    assert store.read("x", len(DATA)) == DATA  # all of it is what was asked for
    with pytest.raises(StorageError, match=r"answers ranges, got all 300000 bytes of x.*whole_objects.*True") as caught:
        store.read_ranges([("x", 10, 5)])
    assert caught.value.exit_code == 3
    with pytest.raises(StorageError, match="answers ranges"):
        store.read_ranges([("x", 0, 5)])


def test_whole_objects_are_downloaded_once(web_faults, monkeypatch):
    for options, configured in (({"whole_objects": True}, {}), ({}, {"http": {"whole_objects": True}})):
        monkeypatch.setattr("hsfmt.storage.ranged.conf", configured)
        web_faults.reset()
        store = open_store(f"{web_faults.url}/without-ranges/files", options)
        web_faults.faults.append(Fault("short", "x$", after=1000))
        for at in range(0, 1000, 100):
            assert store.read_ranges([("x", at, 50)]) == [DATA[at : at + 50]]
        assert web_faults.count("x$") == 2  # the first of them was cut short
        with pytest.raises(CorruptionError, match="an object of 300000 bytes"):
            store.read_ranges([("x", 299_999, 2)])


def test_compression_is_not_asked_for(web_server):
    store = open_store(f"{web_server.url}/compressed/files")
    assert store.read_ranges([("x", 1, 5)]) == [DATA[1:6]]


def test_redirects_stay_on_the_server(web_server):
    assert open_store(f"{web_server.url}/moved/files").read_ranges([("x", 1, 5)]) == [DATA[1:6]]
    with pytest.raises(StorageError, match=r"no redirect to another host, got one to localhost:.*allow_redirects_to"):
        open_store(f"{web_server.url}/elsewhere/files").read("x", len(DATA))
    with pytest.raises(StorageError, match="at most 5 redirects"):
        open_store(f"{web_server.url}/in-circles/files").read("x", len(DATA))


def test_credentials_stay_with_their_server(web_server):
    """What is allowed to be redirected to still gets no credentials of another."""
    headers = {"headers": {"Authorization": f"Bearer {TOKEN}"}}
    assert open_store(f"{web_server.url}/private/files", headers).read("x", len(DATA)) == DATA
    with pytest.raises(StorageError, match="to be let in"):
        open_store(f"{web_server.url}/private/files").read("x", len(DATA))
    store = open_store(f"{web_server.url}/elsewhere/files", headers | {"allow_redirects_to": ["localhost"]})
    with pytest.raises(StorageError, match="401"):
        store.read("x", len(DATA))


def test_logins_in_urls_are_sent_and_not_shown(web_server):
    host = web_server.host
    store = open_store(f"http://user:hunter2@{host}/says?signature=abcdef")
    assert store.read("x", 100) == b"Basic dXNlcjpodW50ZXIy"
    assert store.url == f"http://…@{host}/says?…"
    store = open_store(f"http://user:hunter2@{host}/forbidden?signature=abcdef")
    with pytest.raises(StorageError) as caught:
        store.read("x", 100)
    for text in (str(caught.value), repr(store), repr(caught.value.__cause__)):
        assert "hunter2" not in text
        assert "abcdef" not in text


def test_wrong_options_are_refused(url):
    with pytest.raises(UsageError, match=r"options among .*got hedaers"):
        open_store(url, {"hedaers": {}}).read("x", 1)
    with pytest.raises(UsageError, match="allow_redirects_to"):
        open_store(url, {"allow_redirects_to": [5]}).read("x", 1)
    with pytest.raises(UsageError, match="a host"):
        open_store("http:///x").read("x", 1)


def test_a_server_that_is_not_there(monkeypatch):
    monkeypatch.setattr("hsfmt.storage.retries._FIRST_CONTACT_SECONDS", 0.2)
    with pytest.raises(StorageError, match=r"a server that can be reached.*check the address"):
        open_store("http://127.0.0.1:9/files").read("x", 1)


BASE = "https://example.org/a"


@pytest.mark.parametrize(
    ("location", "hosts", "expected"),
    [
        ("/b", (), ("https://example.org/b", True)),
        ("https://example.org:443/b", (), ("https://example.org:443/b", True)),
        ("https://cdn.example.com/b", ("cdn.example.com",), ("https://cdn.example.com/b", False)),
        ("https://eu.cdn.example.com/b", (".example.com",), ("https://eu.cdn.example.com/b", False)),
        ("https://example.org:8443/b", (), ("https://example.org:8443/b", False)),
        ("https://example.com/b", (".example.com",), None),
        ("https://notexample.com/b", (".example.com",), None),
        ("http://example.org/b", (), None),
        ("http://cdn.example.com/b", ("cdn.example.com",), None),
        ("file:///etc/passwd", ("",), None),
        ("ftp://example.org/b", (), None),
        ("https://user@example.org/b", (), None),
        ("//169.254.169.254/latest", (), None),
    ],
)
def test_where_redirects_may_lead(location, hosts, expected):
    policy = RedirectPolicy(hosts)
    if expected is None:
        with pytest.raises(StorageError):
            policy.follow(BASE, location)
    else:
        assert policy.follow(BASE, location) == expected


def test_addresses():
    address = parse_address("https://u%40x:p@example.org:8443/a%20b/ä/?sig=1#frag", {})
    assert address.of("c d/e%2F") == "https://example.org:8443/a%20b/%C3%A4/c%20d/e%252F?sig=1"
    assert address.headers == {"Authorization": "Basic dUB4OnA="}
    assert "sig" not in repr(address)
    assert "Basic" not in repr(address)
