"""Addresses of objects on web servers: what is sent where, and which redirects are followed."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit, urlunsplit

from hsfmt.errors import StorageError, UsageError

_PORTS = {"http": 80, "https": 443}
_SAFE = "/-._~"


@dataclass(frozen=True)
class WebAddress:
    """The root of a dataset on a web server.

    Attributes
    ----------
    url
        Without user info, query and fragment, and without a slash at the end.
    query
        Goes behind each object's path.
    headers
        Sent to this server alone.
    """

    url: str
    query: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def of(self, path: str) -> str:
        """Return the URL of an object, percent-encoded; `path` went through `check_path`."""
        return f"{self.url}/{quote(path, safe=_SAFE)}{self.query}"


def parse_address(url: str, headers: Mapping[str, str]) -> WebAddress:
    """Return the address that a URL names; its user info becomes a header.

    Raises
    ------
    UsageError
        It is no http or https URL with a host.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # its text may have a password in it
        got = "one whose host or port can't be read"
        remedy = "percent-encode what is special in a user's name or password (/ is %2F, @ is %40)"
        raise UsageError.at("url", expected="an http or https URL", got=got, remedy=remedy) from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise UsageError.at("url", expected="an http or https URL with a host", got=f"the scheme {parts.scheme!r}")
    sent = dict(headers)
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        sent.setdefault("Authorization", f"Basic {base64.b64encode(login).decode()}")
    # A path that is encoded already stays as it is.
    path = quote(parts.path.rstrip("/"), safe=f"{_SAFE}%!$&'()*+,;=:@")
    base = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], path, "", ""))
    return WebAddress(base, f"?{parts.query}" if parts.query else "", sent)


@dataclass(frozen=True)
class RedirectPolicy:
    """Where redirects may lead: to the same host, and to those that are named.

    Attributes
    ----------
    hosts
        Names of hosts; one that begins with a dot stands for all below it.
    """

    hosts: tuple[str, ...] = ()

    def follow(self, url: str, location: str | None) -> tuple[str, bool]:
        """Return (where a redirect leads, whether that is the same server).

        Raises
        ------
        StorageError
            It leads where it may not.
        """
        target = urljoin(url, location or "")
        before, after = urlsplit(url), urlsplit(target)
        if after.scheme not in _PORTS or not after.hostname or after.username is not None:
            raise StorageError.at(_host(before), expected="a redirect to a web server", got="one to something else")
        if before.scheme == "https" and after.scheme == "http":
            got = f"one to http://{_host(after)}, which is not encrypted"
            raise StorageError.at(_host(before), expected="a redirect that stays encrypted", got=got)
        same = _origin(before) == _origin(after)
        if not same and before.hostname != after.hostname and not self._allows(after.hostname):
            raise StorageError.at(
                _host(before),
                expected="no redirect to another host",
                got=f"one to {_host(after)}",
                remedy=f'if that is right, allow it: storage_options={{"allow_redirects_to": ["{after.hostname}"]}} '
                f"(--storage-option allow_redirects_to={after.hostname})",
            )
        return target, same

    def _allows(self, host: str) -> bool:
        return any(host == allowed or (allowed.startswith(".") and host.endswith(allowed)) for allowed in self.hosts)


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)


def _host(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]
