"""A dataset in a repository of the Hugging Face Hub: read by its resolve URLs, at one commit."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Mapping
from typing import Any, Self

import fsspec

from hsfmt.errors import NotFoundError
from hsfmt.storage.base import check_path
from hsfmt.storage.clients.choice import http_client_class, redirect_policy
from hsfmt.storage.process_state import abandoned_in_child
from hsfmt.storage.range_reader import RangeReader
from hsfmt.storage.remote import RemoteStore

_OWN_OPTIONS = ("allow_redirects_to", "whole_objects")


class HubStore(RemoteStore):
    """A dataset at an hf:// URL.

    The first read finds out which commit the revision names; from then on, in copies that are pickled too, all is read
    from that one. Listing and writing go through huggingface_hub.

    Parameters
    ----------
    url
        hf://datasets/OWNER/NAME[@REVISION][/PATH].
    storage_options
        `token`, `endpoint`, and as for web servers `allow_redirects_to` and `whole_objects`; others are given to
        `huggingface_hub.HfFileSystem`.
    pinned
        The URL with the commit, if it is known.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any], pinned: str | None = None) -> None:
        super().__init__(url, storage_options)
        self._pinned = pinned
        self._of_thread = threading.local()

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self._url, self._options, self._commit_url())

    @property
    def can_list(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        return importlib.util.find_spec("huggingface_hub") is not None

    def size(self, path: str) -> int | None:
        try:
            return self._reader().nbytes(check_path(path))
        except NotFoundError:
            return None

    def _commit_url(self) -> str | None:
        from hsfmt.storage.clients.hub_client import HubClient

        client = self._reading[1].client if self._reading is not None else None
        pinned = client.place.url if isinstance(client, HubClient) and client.place.commit else None
        return pinned or self._pinned

    def _open_reader(self) -> RangeReader:
        http_client_class(self.url)  # or it says what to install
        from hsfmt.storage.clients.hub_client import CDN_HOSTS, HubClient, endpoint_of, parse_hub_url, token_of

        client = HubClient(
            parse_hub_url(self._commit_url() or self._url),
            endpoint_of(self._setting("endpoint")),
            token_of(self._setting("token")),
            redirect_policy(self._setting, *CDN_HOSTS),
            whole_objects=bool(self._setting("whole_objects")),
        )
        return RangeReader(client, self._place)

    def _file_system(self) -> tuple[int, fsspec.AbstractFileSystem, str]:
        """Return the file system of this thread: what HfFileSystem remembers of listings is not made to be shared."""
        opened: tuple[int, fsspec.AbstractFileSystem, str] | None = getattr(self._of_thread, "opened", None)
        if opened is None or opened[0] != os.getpid():
            opened = self._of_thread.opened = (os.getpid(), *self._connected())
            abandoned_in_child(opened[1])
        return opened

    def _written(self, path: str) -> None:
        """Read what was written: a later commit than before."""
        super()._written(path)
        self._pinned, self._reading = None, None

    def _fs_options(self) -> dict[str, Any]:
        from hsfmt.storage.clients.hub_client import endpoint_of

        given = {name: value for name, value in super()._fs_options().items() if name not in _OWN_OPTIONS}
        # By itself it takes what HF_ENDPOINT was when it was imported.
        return {"endpoint": endpoint_of(self._setting("endpoint")), **given}
