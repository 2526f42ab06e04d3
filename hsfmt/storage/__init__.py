"""Storage: the one place that reads and writes objects, locally or at any fsspec URL."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from hsfmt.errors import UsageError
from hsfmt.storage.base import BytesLike, ObjectWriter, Reads, Store, Upload
from hsfmt.storage.local import LocalStore

__all__ = ["BytesLike", "ObjectWriter", "Reads", "Store", "Upload", "open_store"]

_LOCAL_SCHEMES = ("file://", "local://")
# What becomes of a URL in a pathlib.Path, say: as a path it would be a folder of that name, here.
_MANGLED = re.compile(r"(s3a?|gc?s|az|abfss?|hf|https?|s?ftp|memory|file|local):(?!//|:)", re.IGNORECASE)
_BUCKETS = ("s3://", "s3a://", "gs://", "gcs://")
_AZURE = ("az://", "abfs://", "abfss://")
_AZURE_PLACE = re.compile(r"/*([a-z0-9$][a-z0-9-]*(@[\w.-]+\.[\w.-]+)?|[\w-]+\.[\w.-]+/+[a-z0-9$][a-z0-9-]*)(/|$)")


def open_store(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Store:
    """Return the store at `url`; nothing is read, and nothing need exist there yet.

    Parameters
    ----------
    url
        A path (`~` is expanded), a `file://` URL, or any URL that fsspec knows, chained ones included.
    storage_options
        Passed to fsspec's file system.

    Raises
    ------
    UsageError
        If `url` is empty, has a NUL in it, or is no URL but nearly one, or `storage_options` are given for a local path
        or are no dict.
    """
    text = _checked(os.fspath(url))
    if not isinstance(storage_options, Mapping | None):
        raise UsageError.at("storage_options", expected="a dict", got=type(storage_options).__name__)
    local = next((text.removeprefix(scheme) for scheme in _LOCAL_SCHEMES if text.startswith(scheme)), None)
    if local is None and "://" not in text and "::" not in text:
        local = text
    if local is None:
        return _remote_store(text, storage_options or {})
    if storage_options:
        raise UsageError.at(
            "storage_options",
            expected="none for a local path",
            got=", ".join(sorted(storage_options)),
            remedy="leave them out, or give a URL",
        )
    return LocalStore(local)


def _checked(text: str) -> str:
    """Return a path, or a URL with its scheme in lower case."""
    if not text:
        raise UsageError.at("url", expected="a path or URL", got="an empty string")
    if "\0" in text:
        raise UsageError.at("url", expected="a path or URL", got="a text with NUL in it")
    mangled = _MANGLED.match(text)
    if mangled is not None:
        remedy = f"write {mangled[0]}//… as text, since pathlib drops a slash; ./{mangled[0]}… is a local path"
        raise UsageError.at("url", expected=f"{mangled[0]}//…", got=f"{mangled[0]} without //", remedy=remedy)
    scheme, separator, rest = text.partition("://")
    text = f"{scheme.lower()}{separator}{rest}" if scheme.isalnum() else text
    if text.startswith(_BUCKETS):
        bucket = rest.lstrip("/").partition("/")[0]
        if not bucket or "@" in bucket or (":" in bucket and not bucket.startswith("arn:")):
            # It may be a password, and drivers show what they can't use.
            got = "something with @ or : in it" if bucket else "none"
            remedy = "write BUCKET/PREFIX; credentials and endpoint go into the environment, or storage_options"
            raise UsageError.at("url", expected="a bucket's name", got=got, remedy=remedy)
    if text.startswith(_AZURE) and not _AZURE_PLACE.match(rest):
        got = "something else before the first slash" if rest.strip("/") else "none"  # it may be a key
        remedy = (
            "write CONTAINER/PREFIX, or CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX; keys and tokens go into the "
            "environment, or storage_options"
        )
        raise UsageError.at("url", expected="a container's name", got=got, remedy=remedy)
    return text


def _remote_store(url: str, storage_options: Mapping[str, Any]) -> Store:
    # fsspec is imported only where it is needed.
    if url.startswith(("http://", "https://")):
        from hsfmt.storage.web import WebStore

        return WebStore(url, storage_options)
    if url.startswith("hf://"):
        from hsfmt.storage.hub import HubStore

        return HubStore(url, storage_options)
    if url.startswith(_AZURE):
        from hsfmt.storage.azure import AzureStore

        return AzureStore(url, storage_options)
    from hsfmt.storage.remote import RemoteStore

    return RemoteStore(url, storage_options)
