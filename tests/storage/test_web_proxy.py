"""WebStore by way of the proxy that the environment names."""

import base64
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hsfmt.errors import StorageError
from hsfmt.storage import open_store

DATA = bytes(range(200))
NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "REQUEST_METHOD")


class _Proxy(BaseHTTPRequestHandler):
    """Answers for every host by itself."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.seen.append((self.path, self.headers.get("Proxy-Authorization"), self.headers.get("X-Own")))
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        body = DATA[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{len(DATA)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def proxy(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HSFMT_RETRY_SECONDS", "0")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Proxy)
    server.daemon_threads = True
    server.seen = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy"])
def test_requests_go_through_it(proxy, monkeypatch, name):
    monkeypatch.setenv(name, f"http://user:hunter2@127.0.0.1:{proxy.server_address[1]}")
    store = open_store("http://data.invalid/files", {"headers": {"X-Own": "1"}})
    assert store.read_ranges([("x", 7, 9)]) == [DATA[7:16]]
    login = f"Basic {base64.b64encode(b'user:hunter2').decode()}"
    assert proxy.seen == [("http://data.invalid/files/x", login, "1")]


@pytest.mark.parametrize("hosts", ["data.invalid", ".invalid", "*"])
def test_some_hosts_are_reached_without_it(proxy, monkeypatch, hosts):
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.server_address[1]}")
    monkeypatch.setenv("NO_PROXY", hosts)
    with pytest.raises(StorageError, match="expected a server that can be reached"):
        open_store("http://data.invalid/files").read("x", len(DATA))
    assert proxy.seen == []


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_one_that_is_not_there_is_named_as_the_reason(proxy, monkeypatch, scheme):
    monkeypatch.setenv("HTTP_PROXY", "http://user:hunter2@127.0.0.1:1")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:hunter2@127.0.0.1:1")
    with pytest.raises(StorageError, match=r"expected a proxy that can be reached.*check HTTP_PROXY") as caught:
        open_store(f"{scheme}://data.invalid/files").read("x", len(DATA))
    assert "hunter2" not in repr(caught.value)
