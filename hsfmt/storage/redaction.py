"""What may be secret is taken out of every text that people see: errors, logs and reprs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

HIDDEN = "…"

# In front of an account of Azure's stands a container.
_CONTAINER = r"[a-z0-9$][a-z0-9-]{0,62}@[\w-]+\.(?:blob|dfs)\."
_NO_CONTAINER = "".join(rf"(?!(?<={scheme}://){_CONTAINER})" for scheme in ("az", "abfs", "abfss"))
# Also where the password has slashes, as those of S3 do: what follows a colon is then no port.
_USER_INFO = re.compile(
    rf"(?<=://){_NO_CONTAINER}" r"(?:[^/?#\s'\"<>]+|[^/?#\s'\"<>\[:]*:(?!\d+(?:[/?#]|$))[^\s'\"<>]*)@"
)
# In buckets, and in fsspec's memory, ? and # are characters of keys like any other.
_KEYED = "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"
_NO_KEY = "".join(rf"(?<!(?<![\w+.-]){scheme})" for scheme in _KEYED)
_QUERY = re.compile(_NO_KEY + r"(://[^?#\s'\"<>]*)[?#][^\s'\"<>]*")
# All the same, of what a signed URL was made into.
_SIGNED = re.compile(r"(?i)(?<=[?&#])([\w.-]*(?:sig|signature|token|secret|password|credential|key)=)[^\s'\"<>&]+")
# Of Azure: parts of a connection string, and what a request was signed with, which its server repeats.
_AZURE = re.compile(r"(?i)((?:AccountKey|SharedAccessSignature)=|signature found in the HTTP request ')[^;\s'\"]+")
_BEARER = re.compile(r"(?i)\b(bearer|basic) [a-z0-9._~+/=-]{8,}")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}")
_SECRETS_IN_ENVIRONMENT = (
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    *("AZURE_CLIENT_SECRET", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_CLIENT_SECRET"),
    *("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_SAS_TOKEN"),
)
# What is secret in a connection string or token of Azure's is so by itself too, in the spelling of URLs as well.
_INNER = re.compile(r"(?i)(?:AccountKey=|(?:^|[?&=])sig=)([^;&\s]+)")
# What storage options hold that is no secret; all other texts in them are taken for one.
_HARMLESS = frozenset(
    {"account_name", "addressing_style", "allow_redirects_to", "anon", "cache_type", "default_cache_type", "endpoint"}
    | {"endpoint_url", "host", "mode", "profile", "project", "protocol", "region", "region_name", "revision"}
    | {"account_host", "client_id", "target_protocol", "tenant_id"}
)
_SHORTEST_SECRET = 4
# Tokens of gcsfs that are no secrets, but say where to find one.
PUBLIC_TOKENS = frozenset({"anon", "browser", "cache", "cloud", "google_default"})


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a text without user info and query strings (which hold signatures) of URLs, tokens, and these secrets.

    Keys of buckets with ? and # in them are shown whole, but for what is named like a signature there.
    """
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    text = _USER_INFO.sub(f"{HIDDEN}@", text)
    text = _QUERY.sub(rf"\1?{HIDDEN}", text)
    text = _AZURE.sub(rf"\1{HIDDEN}", text)
    text = _SIGNED.sub(rf"\1{HIDDEN}", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    return _TOKEN.sub(f"hf_{HIDDEN}", text)


def secrets_in(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts in storage options and in the environment that must not be shown, longest first."""
    found = {os.environ.get(name, "") for name in _SECRETS_IN_ENVIRONMENT}
    _collect(options, found)
    for inner in [inner for text in found for inner in _INNER.findall(text)]:
        found |= {inner, unquote(inner)}
    return tuple(sorted((text for text in found if len(text) >= _SHORTEST_SECRET), key=len, reverse=True))


def _collect(value: object, found: set[str]) -> None:
    if isinstance(value, str):
        if value not in PUBLIC_TOKENS:
            found.add(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _HARMLESS:
                _collect(inner, found)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            _collect(inner, found)


def shows_nothing(error: BaseException, secrets: Iterable[str]) -> bool:
    """Say whether an error, and all that led to it, can be shown as it is."""
    secrets, seen = tuple(secrets), set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        if redacted(str(following), secrets) != str(following):
            return False
        following = following.__cause__ or following.__context__
    return True
