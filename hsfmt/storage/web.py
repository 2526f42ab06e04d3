"""A dataset on a web server: read-only, and only what is named can be read, since there is nothing to list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NoReturn

from hsfmt.errors import NotFoundError, StorageError, UsageError
from hsfmt.storage.base import BytesLike, ObjectWriter, check_path, check_prefix
from hsfmt.storage.clients.choice import http_client_class, mapping_option, redirect_policy
from hsfmt.storage.clients.web_address import parse_address
from hsfmt.storage.range_reader import RangeReader
from hsfmt.storage.ranged import RangedStore

_SEALED_ONLY = (
    'a web server lists nothing, so that only sealed datasets can be read there: snapshot="live", sealing and '
    "`hsfmt verify` need a listing; run them where the files are, or on a copy"
)
_OPTIONS = frozenset({"allow_redirects_to", "client_kwargs", "headers", "whole_objects"})


class WebStore(RangedStore):
    """A dataset at an http or https URL.

    Parameters
    ----------
    url
        The dataset; user info becomes a header, and a query goes behind every object's path.
    storage_options
        `headers`: sent along to this server; `client_kwargs`: for `aiohttp.ClientSession`; `allow_redirects_to`: hosts
        beside the URL's own that redirects may lead to; `whole_objects`: download objects as a whole from a server that
        ignores ranges.
    """

    can_list = False

    def _open_reader(self) -> RangeReader:
        unknown = sorted(set(self._options) - _OPTIONS)
        if unknown:
            expected = f"options among {', '.join(sorted(_OPTIONS))}"
            raise UsageError.at("storage_options", expected=expected, got=", ".join(unknown))
        session = mapping_option("client_kwargs", self._setting("client_kwargs"))
        inner = mapping_option("headers", session.pop("headers", None))
        headers = inner | mapping_option("headers", self._setting("headers"))
        auth = session.pop("auth", None)
        if auth is not None:  # of the session it would be sent to every host
            headers.setdefault("Authorization", auth.encode())
        http_client = http_client_class(self.url)
        client = http_client(
            parse_address(self._url, headers),
            redirect_policy(self._setting),
            whole_objects=bool(self._setting("whole_objects")),
            session_options=session,
        )
        return RangeReader(client, self._place)

    def size(self, path: str) -> int | None:
        try:
            return self._reader().nbytes(check_path(path))
        except NotFoundError:
            return None

    def list(self, prefix: str) -> list[str]:
        check_prefix(prefix)
        expected = "a storage that can be listed"
        raise StorageError.at(self.url, expected=expected, got="a web server", remedy=_SEALED_ONLY)

    def walk(self, prefix: str) -> Iterator[tuple[str, int]]:
        self.list(prefix)
        return iter(())

    def modified(self, path: str) -> float | None:
        check_path(path)
        return None

    def create(self, path: str, data: BytesLike) -> bool:  # noqa: ARG002  nothing is written
        self._refuse(path)

    def write(self, path: str, data: BytesLike) -> None:  # noqa: ARG002  nothing is written
        self._refuse(path)

    def open_object(self, path: str) -> ObjectWriter:
        self._refuse(path)

    def remove(self, path: str) -> None:
        self._refuse(path)

    def sync(self, directories: Iterable[str]) -> None:
        for directory in directories:
            check_prefix(directory)

    def _refuse(self, path: str) -> NoReturn:
        remedy = "write to a folder or a bucket, and serve that"
        raise UsageError.at(
            f"{self.url}: {check_path(path)}", expected="a storage to write to", got="a web server", remedy=remedy
        )
