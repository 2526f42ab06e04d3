"""Which client reads a storage: the fastest that is installed, works in this process and can be set up alike."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import fsspec

from hsfmt.errors import StorageError, UsageError
from hsfmt.storage.clients import obstore_client
from hsfmt.storage.clients.base import Client
from hsfmt.storage.clients.fsspec_client import FsspecClient
from hsfmt.storage.clients.s3_client import S3Client
from hsfmt.storage.clients.web_address import RedirectPolicy
from hsfmt.storage.retries import timeout_seconds

if TYPE_CHECKING:
    from hsfmt.storage.clients.http_client import HttpClient

_SWITCH = "HSFMT_REMOTE"
_EXTRAS = {
    "s3": "hsfmt[s3]",
    "s3a": "hsfmt[s3]",
    "http": "hsfmt[http]",
    "https": "hsfmt[http]",
    "gs": "hsfmt[gcs]",
    "gcs": "hsfmt[gcs]",
    "az": "hsfmt[azure]",
    "abfs": "hsfmt[azure]",
    "abfss": "hsfmt[azure]",
    "hf": "huggingface_hub",
}
# botocore keeps 10 connections, and tries 5 times inside each of s3fs's own 5 attempts.
_S3_CONNECTIONS = 64
_S3_CONNECT_SECONDS = 5

Setting = Callable[[str], Any]
Faster = Callable[[], Awaitable[Client | None]]


def missing_driver(url: str, error: ImportError | str) -> StorageError:
    """Return the error of a package that a URL needs and that is not installed."""
    scheme = url.partition("://")[0].rpartition("::")[2]
    package = _EXTRAS.get(scheme)
    remedy = f"pip install '{package}'" if package else "install the package it names"
    return StorageError.at(url, expected=f"the driver of {scheme}://", got=str(error), remedy=remedy)


def client_of(fs: fsspec.AbstractFileSystem, root: str, url: str) -> tuple[Client, Faster | None]:
    """Return the client of a file system, and how to open a faster one for ranges, or None.

    Raises
    ------
    UsageError, StorageError
        HSFMT_REMOTE asks for what there is not.
    """
    chained = "::" in url
    if chained or not hasattr(fs, "_get_s3_method_kwargs"):
        return FsspecClient(fs, root, chained=chained), None

    async def faster() -> Client | None:
        return await obstore_client.connected(fs, root)

    return S3Client(fs, root), faster if _wants_obstore(url) else None


def _wants_obstore(url: str) -> bool:
    asked = os.environ.get(_SWITCH, "")
    if asked not in {"", "obstore", "fsspec"}:
        raise UsageError.at(_SWITCH, expected="obstore or fsspec", got=repr(asked)[:100])
    if asked == "obstore" and importlib.util.find_spec("obstore") is None:
        remedy = f"pip install 'hsfmt[fast]', or unset {_SWITCH}"
        raise StorageError.at(url, expected=f"obstore, as {_SWITCH} says", got="none installed", remedy=remedy)
    return asked != "fsspec" and obstore_client.is_usable()


def s3_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an s3fs file system: what is not said, set for many ranges at a time."""
    configured = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    config = {
        "connect_timeout": _S3_CONNECT_SECONDS,
        "max_pool_connections": _S3_CONNECTIONS,
        "read_timeout": timeout_seconds(),
        "retries": {"total_max_attempts": 1, "mode": "standard"},
    }
    mapping_option("client_kwargs", options.get("client_kwargs"))
    given = mapping_option("config_kwargs", options.get("config_kwargs"))
    # What one thread lists must not be what another one's look at an object is answered from.
    return {"use_listings_cache": False, **options, "config_kwargs": config | configured | given}


def mapping_option(name: str, value: Any) -> dict[str, Any]:
    """Return an option that is a dict, or empty.

    Raises
    ------
    UsageError
        It is something else, which is not shown: it may be a secret.
    """
    if not isinstance(value, Mapping | None):
        raise UsageError.at(f"storage_options: {name}", expected="a dict", got=type(value).__name__)
    return dict(value or {})


def http_client_class(url: str) -> type[HttpClient]:
    """Return HttpClient.

    Raises
    ------
    StorageError
        aiohttp is not installed.
    """
    if importlib.util.find_spec("aiohttp") is None:
        raise missing_driver(url, "no aiohttp")
    from hsfmt.storage.clients.http_client import HttpClient

    return HttpClient


def redirect_policy(setting: Setting, *always: str) -> RedirectPolicy:
    """Return which redirects may be followed, by the option `allow_redirects_to`.

    Raises
    ------
    UsageError
        It is no list of hosts.
    """
    hosts = setting("allow_redirects_to") or ()
    hosts = hosts.split(",") if isinstance(hosts, str) else hosts
    if not all(isinstance(host, str) and host.strip(".") for host in hosts):
        expected = 'a list of hosts; ".example.com" stands for all hosts below it'
        raise UsageError.at("allow_redirects_to", expected=expected, got=repr(hosts)[:100])
    return RedirectPolicy((*always, *(host.strip().lower() for host in hosts)))
