"""Ranges from S3 through obstore, which takes half the CPU time: connected as s3fs is, with the same credentials.

It runs threads that no fork survives: a child of a process that has used it must not.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from hsfmt.storage.clients.base import Body, Client, strong_version
from hsfmt.storage.retries import timeout_seconds

if TYPE_CHECKING:
    from obstore.store import S3Credential, S3Store

_CONNECT_TIMEOUT = "5s"
_LONGEST_REQUEST = "1day"
_PLAIN = re.compile(r"[A-Za-z0-9._=/-]+")  # obstore has its own mind about the encoding of other characters
_CREDENTIALS_KEPT = timedelta(minutes=5)
# What of s3fs's settings is translated below; with any other, s3fs reads.
_CONFIG = frozenset({"connect_timeout", "max_pool_connections", "read_timeout", "retries", "s3", "signature_version"})
_CLIENT = frozenset({"aws_access_key_id", "aws_secret_access_key", "aws_session_token", "endpoint_url", "region_name"})


class _Use:
    """Whether obstore was used in this process, or in one that it was forked from."""

    here = False
    before_fork = False


def _forked() -> None:
    _Use.before_fork = _Use.before_fork or _Use.here
    _Use.here = False


os.register_at_fork(after_in_child=_forked)


def is_usable() -> bool:
    """Say whether obstore is installed and works in this process."""
    return not _Use.before_fork and importlib.util.find_spec("obstore") is not None


class ObstoreClient(Client):
    """S3 through obstore.

    Parameters
    ----------
    store
        The bucket.
    prefix
        The dataset in it, without slashes around.
    """

    def __init__(self, store: S3Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    async def get(self, path: str, start: int, end: int) -> Body:
        """Return the bytes [start, end) of an object."""
        import obstore

        _Use.here = True
        began = time.monotonic()
        answer = await obstore.get_async(self._store, self._key(path), options={"range": (start, end)})
        first_byte = time.monotonic() - began
        version = strong_version(answer.meta["e_tag"])
        return Body(memoryview(await answer.bytes_async()), answer.meta["size"], version, first_byte)

    async def nbytes(self, path: str) -> int | None:
        """Return the size of an object."""
        import obstore

        _Use.here = True
        return (await obstore.head_async(self._store, self._key(path)))["size"]

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}" if self._prefix else path


async def connected(fs: Any, root: str) -> ObstoreClient | None:
    """Return a client that reaches S3 as an s3fs file system does, None where its settings can't be translated."""
    if set(fs.config_kwargs) - _CONFIG or set(fs.client_kwargs) - _CLIENT or fs.s3_additional_kwargs:
        return None
    if fs.requester_pays or fs.version_aware or not is_usable():
        return None
    bucket, prefix, version = fs.split_path(root)
    client = await fs.set_session()
    style = (getattr(client.meta.config, "s3", None) or {}).get("addressing_style")
    credentials = client._request_signer._credentials  # noqa: SLF001  the ones that it signs with, wherever from
    if version or style == "virtual" or not _PLAIN.fullmatch(root) or (credentials is None and not fs.anon):
        return None

    async def current() -> S3Credential:
        frozen = await credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_KEPT,
        }

    from obstore.store import S3Store

    store = S3Store(
        bucket,
        endpoint=client.meta.endpoint_url,
        region=client.meta.region_name or "us-east-1",
        skip_signature=bool(fs.anon),
        client_options={
            "allow_http": client.meta.endpoint_url.startswith("http://"),
            "connect_timeout": _CONNECT_TIMEOUT,
            "read_timeout": timedelta(seconds=fs.config_kwargs.get("read_timeout", timeout_seconds())),
            "timeout": _LONGEST_REQUEST,
        },
        retry_config={"max_retries": 0},
        credential_provider=None if fs.anon else current,
    )
    return ObstoreClient(store, prefix.strip("/"))
