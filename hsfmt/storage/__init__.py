"""Storage: the one place that reads and writes objects, locally or at any fsspec URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hsfmt.errors import UsageError
from hsfmt.storage.base import BytesLike, ObjectWriter, Store
from hsfmt.storage.local import LocalStore

__all__ = ["BytesLike", "ObjectWriter", "Store", "open_store"]

_LOCAL_SCHEMES = ("file://", "local://")


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
        If `url` is empty, or `storage_options` are given for a local path.
    """
    text = os.fspath(url)
    if not text:
        raise UsageError.at("url", expected="a path or URL", got="an empty string")
    local = next((text.removeprefix(scheme) for scheme in _LOCAL_SCHEMES if text.startswith(scheme)), None)
    if local is None and "://" not in text and "::" not in text:
        local = text
    if local is None:
        from hsfmt.storage.remote import RemoteStore  # fsspec is imported only where it is needed

        return RemoteStore(text, storage_options or {})
    if storage_options:
        raise UsageError.at(
            "storage_options",
            expected="none for a local path",
            got=", ".join(sorted(storage_options)),
            remedy="leave them out, or give a URL",
        )
    return LocalStore(local)
