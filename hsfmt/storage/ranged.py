"""Stores that are read through a client: what they share, whatever else they can do."""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Self

from fsspec.config import conf

from hsfmt.storage.base import Arrivals, Store, check_path, flat_view
from hsfmt.storage.failures import Place
from hsfmt.storage.process_state import abandoned_in_child
from hsfmt.storage.range_reader import RangeReader
from hsfmt.storage.redaction import redacted, secrets_in

_MOST_ABOVE = 2
_SAME_SCHEME = {"s3a": "s3", "https": "http", "gcs": "gs", "abfs": "az", "abfss": "az"}


class RangedStore(Store):
    """A dataset at a URL, read by ranges.

    Only the URL and the options are pickled; each process opens its own connections on first use, so that the store
    works after fork, whatever the parent did with it.

    Parameters
    ----------
    url
        Where.
    storage_options
        What the storage needs to know.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self._url = url.rstrip("/") if not url.endswith("://") else url
        self._options = dict(storage_options)
        scheme = self._url.partition("://")[0]
        self.url = redacted(self._url, secrets_in(self._options))
        secrets = secrets_in({**self._options, "configured": conf.get(scheme, {})})
        self._place = Place(self.url, _SAME_SCHEME.get(scheme, scheme), secrets)
        self._reading: tuple[int, RangeReader] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"  # options may hold secrets

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self._url, self._options)

    @abstractmethod
    def _open_reader(self) -> RangeReader:
        """Return what reads here, in this process."""

    def _reader(self) -> RangeReader:
        reading = self._reading
        if reading is not None and reading[0] == os.getpid():
            return reading[1]
        # No lock, which a fork could copy while it is held: two threads at most make a reader too many.
        reader = self._open_reader()
        abandoned_in_child(reader)
        self._reading = (os.getpid(), reader)
        return reader

    def _setting(self, name: str) -> Any:
        """Return an option of our own: as given, or of fsspec's configuration for the scheme (environment, files)."""
        configured = conf.get(self._url.partition("://")[0], {})
        return self._options.get(name, configured.get(name))

    @property
    def gap_nbytes(self) -> int:
        return self._reader().pace.gap_nbytes

    def above(self, names: Collection[str]) -> Iterator[Store]:
        front, separator, rest = self._url.rpartition("://")
        if "://" in front:
            return  # on top of a file in another storage
        # Behind ? or # of a web server's URL there is no path; of a bucket's it goes on.
        end = re.search(r"[?#]|$", rest) if front.endswith(("http", "https")) else None
        place, query = (rest, "") if end is None else (rest[: end.start()], rest[end.start() :])
        folders = place.split("/")
        found = [number for number, name in enumerate(folders) if number and name in names]
        for number in found[: -1 - _MOST_ABOVE : -1]:
            yield type(self)(f"{front}{separator}{'/'.join(folders[:number])}{query}", self._options)

    def read(self, path: str, max_nbytes: int) -> bytes:
        return self.read_many([(path, max_nbytes)])[0]

    def read_many(self, requests: Sequence[tuple[str, int]]) -> list[bytes]:
        checked = [(check_path(path), max_nbytes) for path, max_nbytes in requests]
        return [bytes(body) for body in self._reader().read_many(checked)]

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        check_path(path)
        view = flat_view(buffer)
        if len(view):
            with self.read_each([(path, offset, len(view))]) as arrivals:
                for _, body in arrivals:
                    view[:] = body

    def read_each(self, ranges: Sequence[tuple[str, int, int]]) -> Arrivals:
        return self._reader().read_each([(check_path(path), offset, nbytes) for path, offset, nbytes in ranges])
