"""Ranges from the Hugging Face Hub: by its resolve URLs, at one commit."""

from __future__ import annotations

import asyncio
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from hsfmt.errors import StorageError, UsageError
from hsfmt.storage.base import check_path
from hsfmt.storage.clients.base import Body
from hsfmt.storage.clients.http_client import HttpClient
from hsfmt.storage.clients.web_address import RedirectPolicy, WebAddress
from hsfmt.storage.retries import StatusError

# Where the Hub's resolve URLs lead to: its own storage and its CDNs.
CDN_HOSTS = (".hf.co", ".huggingface.co", "huggingface.co")
_DEFAULT_ENDPOINT = "https://huggingface.co"
_DEFAULT_REVISION = "main"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_DOCUMENT_NBYTES = 32 << 20  # it lists all files of the repository
_URL = re.compile(
    r"hf://(?:(?P<kind>datasets|spaces|models)/)?(?P<name>(?!(?:datasets|spaces|models)/)[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/@]+|[^/@]+))?(?:/(?P<path>.*))?"
)


@dataclass(frozen=True)
class HubPlace:
    """A folder in a repository.

    Attributes
    ----------
    kind, name
        "datasets", "models" or "spaces"; and owner/name.
    revision
        Branch, tag or commit.
    path
        Inside the repository, or "".
    """

    kind: str
    name: str
    revision: str
    path: str

    @property
    def url(self) -> str:
        """The hf:// URL."""
        kind = "" if self.kind == "models" else f"{self.kind}/"
        path = f"/{self.path}" if self.path else ""
        return f"hf://{kind}{self.name}@{quote(self.revision, safe='')}{path}"

    @property
    def commit(self) -> str | None:
        """The commit, if that is what the revision names."""
        return self.revision if _COMMIT.fullmatch(self.revision) else None


def parse_hub_url(url: str) -> HubPlace:
    """Return the place that an hf:// URL names.

    Raises
    ------
    UsageError, FormatError
        It is none; or its path is unsafe.
    """
    match = _URL.fullmatch(url)
    if match is None:
        expected = "hf://datasets/OWNER/NAME[@REVISION][/PATH], or hf://OWNER/NAME… for a model repository"
        raise UsageError.at("url", expected=expected, got=repr(url)[:200])
    path = (match["path"] or "").strip("/")
    revision = unquote(match["revision"] or _DEFAULT_REVISION)
    return HubPlace(match["kind"] or "models", match["name"], revision, check_path(path) if path else "")


def endpoint_of(given: str | None) -> str:
    """Return the Hub's address: as given, else HF_ENDPOINT, else the public one."""
    endpoint = (given or os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")
    if urlsplit(endpoint).scheme not in {"http", "https"}:
        raise UsageError.at("HF_ENDPOINT", expected="an http or https URL", got=repr(endpoint)[:200])
    return endpoint


def token_of(given: object) -> str | None:
    """Return the token: as given (False: none), else of HF_TOKEN, else the one that `hf auth login` stored."""
    if given is False:
        return None
    if isinstance(given, str):
        return given
    environment = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if environment:
        return environment.strip()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    file = Path(os.environ.get("HF_TOKEN_PATH") or Path(home, "token")).expanduser()
    try:
        return file.read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


class HubClient(HttpClient):
    """A folder of a repository on the Hub, at the commit that its revision names when it is first read.

    Parameters
    ----------
    place, endpoint, token
        The folder; the Hub's address; None reads what is public.
    redirects, whole_objects
        As for `HttpClient`.

    Attributes
    ----------
    place
        As given, from the first read on with the commit as its revision.
    """

    def __init__(
        self,
        place: HubPlace,
        endpoint: str,
        token: str | None,
        redirects: RedirectPolicy,
        *,
        whole_objects: bool = False,
    ) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        super().__init__(WebAddress(endpoint, headers=headers), redirects, whole_objects=whole_objects)
        self.place = place
        self._pinning: asyncio.Task[None] | None = None

    async def address(self) -> WebAddress:
        """Return the folder's resolve URL."""
        if self.place.commit is None:
            if self._pinning is None or self._pinning.done():
                self._pinning = asyncio.ensure_future(self._pin())
            await asyncio.shield(self._pinning)
        place, endpoint = self.place, await super().address()
        kind = "" if place.kind == "models" else f"{place.kind}/"
        path = f"/{quote(place.path)}" if place.path else ""
        return replace(endpoint, url=f"{endpoint.url}/{kind}{place.name}/resolve/{place.revision}{path}")

    async def _pin(self) -> None:
        place, endpoint = self.place, await super().address()
        url = f"{endpoint.url}/api/{place.kind}/{place.name}/revision/{quote(place.revision, safe='')}"
        try:
            commit = _commit_in(await self.document(endpoint, url, _MAX_DOCUMENT_NBYTES))
        except (FileNotFoundError, StatusError) as error:
            if isinstance(error, StatusError) and error.status not in {401, 403, 404}:
                raise
            raise StorageError.at(
                place.url,
                expected=f"a repository {place.name!r} with the revision {place.revision!r} on {urlsplit(url).netloc}",
                got=str(error),
                remedy="check both names; a private or gated repository needs HF_TOKEN (or `hf auth login`)",
            ) from error
        if commit is None:
            got = "an answer without one"
            raise StorageError.at(place.url, expected=f"the commit of {place.revision!r}", got=got)
        self.place = replace(place, revision=commit)

    async def get(self, path: str, start: int, end: int) -> Body:
        """Return the bytes [start, end) of a file."""
        body = await super().get(path, start, end)
        # Another node of the CDN may have another ETag; at one commit a file is one file.
        return body._replace(version=None)


def _commit_in(document: bytes) -> str | None:
    try:
        sha: Any = json.loads(document)["sha"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return sha if isinstance(sha, str) and _COMMIT.fullmatch(sha) else None
