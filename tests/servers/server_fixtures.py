"""Servers as fixtures: each is started once a process of the tests, when it is first asked for."""

import itertools
import os
import shutil

import pytest
from servers.azurite import Azurite
from servers.fault_proxy import FaultProxy
from servers.gcs import Gcs
from servers.hub import Hub
from servers.nginx import Nginx, TlsFront
from servers.seaweed import Seaweed

_NUMBERS = itertools.count()


@pytest.fixture
def no_credentials(monkeypatch, tmp_path):
    """Neither find those of whoever runs the tests nor ask a cloud for some."""
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "HF_TOKEN_PATH"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    """A `Seaweed`."""
    server = Seaweed(tmp_path_factory.mktemp("seaweed"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def gcs_server(tmp_path_factory):
    """A `Gcs`."""
    server = Gcs(tmp_path_factory.mktemp("gcs"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory):
    """An `Azurite`; tests that ask for it are left out where it is not installed, as tests/conftest.py says."""
    server = Azurite(tmp_path_factory.mktemp("azurite"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def web_server(tmp_path_factory):
    """An `Nginx`."""
    server = Nginx(tmp_path_factory.mktemp("nginx"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def s3_by_https(s3_server, tmp_path_factory):
    """A `TlsFront` of the S3 server."""
    server = TlsFront(tmp_path_factory.mktemp("tls-s3"), s3_server.host)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def web_by_https(web_server, tmp_path_factory):
    """A `TlsFront` of the web server."""
    server = TlsFront(tmp_path_factory.mktemp("tls-web"), web_server.host)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def make_bucket(s3_server):
    """Make an empty bucket; return its name."""

    def make():
        name = f"bucket-{next(_NUMBERS)}"
        s3_server.file_system().mkdir(name)
        return name

    return make


@pytest.fixture
def bucket(make_bucket):
    """The name of an empty bucket."""
    return make_bucket()


@pytest.fixture(scope="session")
def make_gcs_bucket(gcs_server):
    """Make an empty bucket of the GCS server; return its name."""

    def make():
        name = f"gcs-bucket-{next(_NUMBERS)}"
        gcs_server.file_system().mkdir(name)
        return name

    return make


@pytest.fixture
def gcs_bucket(make_gcs_bucket):
    """The name of an empty bucket of the GCS server."""
    return make_gcs_bucket()


@pytest.fixture(scope="session")
def make_azure_container(azure_server):
    """Make an empty container; return its name."""

    def make():
        name = f"container-{next(_NUMBERS)}"
        with azure_server.service() as service:
            service.create_container(name)
        return name

    return make


@pytest.fixture
def azure_container(make_azure_container):
    """The name of an empty container."""
    return make_azure_container()


@pytest.fixture(scope="session")
def azure_proxy(azure_server):
    proxy = FaultProxy(azure_server.host)
    yield proxy
    proxy.stop()


@pytest.fixture(scope="session")
def s3_proxy(s3_server):
    proxy = FaultProxy(s3_server.host)
    yield proxy
    proxy.stop()


@pytest.fixture(scope="session")
def web_proxy(web_server):
    proxy = FaultProxy(web_server.host)
    yield proxy
    proxy.stop()


@pytest.fixture
def long_timeout(monkeypatch):
    """A busy machine makes no request fail, and so none be made again where they are counted; tests may set another."""
    if "HSFMT_TIMEOUT_SECONDS" not in os.environ:
        monkeypatch.setenv("HSFMT_TIMEOUT_SECONDS", "100")


@pytest.fixture
def s3_faults(s3_proxy, long_timeout):
    """A `FaultProxy` before the S3 server, with nothing in its log."""
    s3_proxy.reset()
    yield s3_proxy
    s3_proxy.reset()


@pytest.fixture
def gcs_faults(gcs_server, long_timeout):
    """The `FaultProxy` before the GCS server."""
    gcs_server.proxy.reset()
    yield gcs_server.proxy
    gcs_server.proxy.reset()


@pytest.fixture
def azure_faults(azure_proxy, long_timeout):
    """A `FaultProxy` before the server of Azure's."""
    azure_proxy.reset()
    yield azure_proxy
    azure_proxy.reset()


@pytest.fixture
def web_faults(web_proxy, long_timeout):
    """A `FaultProxy` before the web server."""
    web_proxy.reset()
    yield web_proxy
    web_proxy.reset()


@pytest.fixture
def serve(web_server):
    """Copy a folder below the web server's root; return the path of its URL."""
    served = []

    def copy(folder):
        name = f"folder-{next(_NUMBERS)}"
        served.append(web_server.root / name)
        shutil.copytree(folder, served[-1])
        return name

    yield copy
    for folder in served:
        shutil.rmtree(folder)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A `Hub`, which HF_ENDPOINT names."""
    server = Hub(tmp_path / "hub")
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    yield server
    server.stop()
