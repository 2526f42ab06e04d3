"""Which account, container and credentials a URL of Azure's means, by the names that adlfs has for them.

adlfs itself does nothing here. It takes another account's container for the URL's if a connection string says so, finds
an empty folder in a container that is not there, goes on before the server has made a copy, tries each request again by
itself for a minute, and lets go of no connection before the process ends: a forked child waits for that for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hsfmt.errors import UsageError
from hsfmt.storage.retries import timeout_seconds

OPTIONS = frozenset(
    {"account_host", "account_key", "account_name", "anon", "client_id", "client_secret", "connection_string"}
    | {"credential", "sas_token", "tenant_id"}
)
_IN_ENVIRONMENT = OPTIONS - {"account_host", "credential"}
_WITH_ACCOUNT = OPTIONS - {"anon", "connection_string"}
_CREDENTIALS = frozenset({"account_key", "client_secret", "credential", "sas_token"})
_CONNECT_SECONDS = 5
_BLOCK_NBYTES = 1 << 20
_UNSET = frozenset({"", "0", "f", "false"})


class AzureCredentialsError(OSError):
    """There are none, or such as no request can be made with."""


@dataclass(frozen=True)
class AzurePlace:
    """What a URL says.

    Attributes
    ----------
    host
        Of the account's blobs, or "".
    container
        The container.
    prefix
        What the names of all objects of the dataset begin with; no slash at its end.
    """

    host: str
    container: str
    prefix: str


def parse_azure_url(url: str) -> AzurePlace:
    """Return what a URL says: SCHEME://CONTAINER[@ACCOUNT.dfs.core.windows.net]/PREFIX, or the host before all."""
    first, _, rest = url.partition("://")[2].partition("/")
    container, at, host = first.partition("@")
    if not at and "." in first:  # which no container's name has
        host = first
        container, _, rest = rest.partition("/")
    return AzurePlace(host.replace(".dfs.", ".blob.", 1), container, rest.strip("/"))


def connected(place: AzurePlace, setting: Callable[[str], Any], url: str) -> tuple[Any, Any]:
    """Return a client of the account (azure-storage-blob's, for one event loop), and the credential to close with it.

    Parameters
    ----------
    place
        What the URL says.
    setting
        Options, by name; None where they are not set. What they don't say is looked for in the environment.
    url
        For errors, without secrets.

    Raises
    ------
    ImportError
        azure-storage-blob or azure-identity is not installed.
    AzureCredentialsError
        There are none that can be used.
    UsageError
        They are of another account than the URL names.
    """
    from azure.storage.blob.aio import BlobServiceClient

    said = _settings(place, setting)
    # Requests are made again by who makes them, who knows until when.
    fixed = {
        "connection_data_block_size": _BLOCK_NBYTES,
        "connection_timeout": _CONNECT_SECONDS,
        "read_timeout": timeout_seconds(),
        "retry_total": 0,
    }
    credential = None
    try:
        if said.get("connection_string"):
            service = BlobServiceClient.from_connection_string(said["connection_string"], **fixed)
            if _is_anonymous(said):
                service = BlobServiceClient(service.url.partition("?")[0], **fixed)
        else:
            host, credential = _host(place, said), _credential(said)
            token = str(said.get("sas_token") or "").lstrip("?")
            query = f"?{token}" if token and credential is None else ""
            service = BlobServiceClient(f"https://{host}{query}", credential=credential, **fixed)
    except (TypeError, ValueError) as error:  # as it calls what it can't read
        raise AzureCredentialsError(str(error)) from error
    if place.host and urlsplit(service.url).hostname != place.host.partition(":")[0].lower():
        got = f"credentials for {urlsplit(service.url).hostname}"
        remedy = "give those of the account that the URL names, or leave the account out of the URL"
        raise UsageError.at(url, expected=f"credentials for {place.host}", got=got, remedy=remedy)
    is_ours = credential is not said.get("credential") and hasattr(credential, "close")
    return service, credential if is_ours else None


def _settings(place: AzurePlace, setting: Callable[[str], Any]) -> dict[str, Any]:
    """Return what was said; of the environment nothing that would be used in its place."""
    said = {name: setting(name) for name in OPTIONS}
    said = {name: value for name, value in said.items() if value is not None}
    environment = {name: os.environ.get(f"AZURE_STORAGE_{name.upper()}") for name in _IN_ENVIRONMENT}
    found = {name: value for name, value in environment.items() if value}
    if "connection_string" in said:
        return said
    if said.keys() & _WITH_ACCOUNT:
        found.pop("connection_string", None)
    if said.keys() & _CREDENTIALS or _is_anonymous(said):
        found = {name: value for name, value in found.items() if name not in _CREDENTIALS}
    if place.host and "connection_string" not in found:
        found.pop("account_name", None)
    return found | said


def _host(place: AzurePlace, said: dict[str, Any]) -> str:
    if said.get("account_host"):
        return str(said["account_host"])
    if said.get("account_name"):
        return f"{said['account_name']}.blob.core.windows.net"
    if not place.host:
        raise AzureCredentialsError("no account is named")
    return place.host


def _credential(said: dict[str, Any]) -> Any:
    """Return what requests are signed with; None where the URL has it, or nothing is signed."""
    if said.get("credential"):
        return said["credential"]
    if said.get("account_key"):
        name = said.get("account_name") or str(said.get("account_host", "")).partition(".")[0]
        return {"account_name": name, "account_key": said["account_key"]}
    if said.get("client_id") and said.get("client_secret") and said.get("tenant_id"):
        from azure.identity.aio import ClientSecretCredential

        return ClientSecretCredential(said["tenant_id"], said["client_id"], said["client_secret"])
    if said.get("sas_token") or _is_anonymous(said):
        return None
    from azure.identity.aio import DefaultAzureCredential

    return DefaultAzureCredential()


def _is_anonymous(said: dict[str, Any]) -> bool:
    return str(said.get("anon", "")).lower() not in _UNSET
