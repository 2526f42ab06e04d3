"""The parts of a snapshot, loaded when first asked for, each file compared with the digest that names it.

Spec: rule READ-3.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hsfmt.catalog import load_ref
from hsfmt.columns import Column
from hsfmt.errors import CorruptionError, HsfmtError, NotFoundError
from hsfmt.index import PartIndex
from hsfmt.layout import index_path, manifest_path
from hsfmt.manifest import PartManifest
from hsfmt.readers.local_cache import LocalCache
from hsfmt.readers.process_state import ForkAware
from hsfmt.readers.second_read import read_twice
from hsfmt.snapshot import PartRef, Snapshot
from hsfmt.snapshot_builder import LoadedPart
from hsfmt.storage import Reads, Store

# Who waits so long for another thread to load a part does it again: that thread may have been interrupted twice.
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class OpenPart:
    """A part that holds samples.

    Attributes
    ----------
    number
        Its place in the snapshot's parts table.
    manifest, index
        As committed.
    index_digest
        Of the index's file, as the snapshot names it; "" for a part out of no snapshot, which is not cached.
    """

    number: int
    manifest: PartManifest
    index: PartIndex
    index_digest: str = ""

    @property
    def name(self) -> str:
        """Name of the part."""
        return self.manifest.part

    @property
    def columns(self) -> Mapping[str, Column]:
        """Its arrays by name."""
        return self.manifest.columns


class _Fetched:
    """Files that were read already, some of them out of the local cache."""

    def __init__(self, store: Store, bodies: Mapping[str, bytes], cached: Collection[str]) -> None:
        self.url = store.url
        self._store = store
        self._bodies = bodies
        self._cached = cached

    def read(self, path: str, max_nbytes: int) -> bytes:
        body = self._bodies.get(path)
        return self._store.read(path, max_nbytes) if body is None or len(body) > max_nbytes else body

    def keep(self, ref: PartRef, cache: LocalCache) -> None:
        """Add the files of a part, which were compared with their digests, to the local cache."""
        for document in _documents(ref):
            if document.path in self._bodies and document.path not in self._cached:
                cache.add_document(document.what, self._bodies[document.path])

    def forget(self, ref: PartRef, cache: LocalCache) -> bool:
        """Remove what of a part came out of the local cache; say whether that was anything."""
        wrong = [document for document in _documents(ref) if document.path in self._cached]
        for document in wrong:
            cache.forget_document(document.what)
        return bool(wrong)


class _Document(NamedTuple):
    path: str
    what: tuple[str, str]
    nbytes: int


def _documents(ref: PartRef) -> list[_Document]:
    found = [_Document(manifest_path(ref.name), (f"manifest of {ref.name}", ref.manifest_digest), ref.manifest_nbytes)]
    if ref.index_digest:
        found.append(_Document(index_path(ref.name), (f"index of {ref.name}", ref.index_digest), ref.index_nbytes))
    return found


class PartCache(ForkAware):
    """The least recently used parts go when indexes and manifests in memory exceed `max_nbytes`; one always stays.

    Parameters
    ----------
    store, snapshot
        Where, and which parts.
    max_nbytes
        Bytes of index and manifest files.
    cache
        Of a remote store's files on a local disk.
    """

    def __init__(self, store: Store, snapshot: Snapshot, max_nbytes: int, cache: LocalCache | None = None) -> None:
        super().__init__()
        self._store = store
        self._snapshot = snapshot
        self._max_nbytes = max_nbytes
        self._cache = cache
        self._parts: OrderedDict[int, OpenPart] = OrderedDict()
        self.after_fork()

    def after_fork(self) -> None:
        """Take a new lock; what is loaded stays. Another thread may have been halfway through a change."""
        self._lock = threading.Lock()
        self._nbytes = sum(map(self._cost, self._parts))
        self._loading: dict[int, threading.Event] = {}

    def get(self, number: int) -> OpenPart:
        """Return a part by its place in the snapshot's parts table.

        Raises
        ------
        NotFoundError, CorruptionError, HeaderMismatchError
            A file of it is missing, or not the one that the snapshot names.
        """
        part = self._here(number)
        if part is not None:
            return part
        if self._store.is_local:
            part = self._load(number, self._store)
            self._keep(number, part)
            return part
        claimed: list[int] = []
        try:
            for loading in self._claim([number], claimed):
                loading.wait(_PATIENCE_SECONDS)
            part = self._here(number)  # else it could not be loaded, or was pushed out again
            if part is None:
                part = self._load(number, self._fetched([number]))
                self._keep(number, part)
            return part
        finally:
            self._loaded(claimed)

    def _here(self, number: int) -> OpenPart | None:
        with self._lock:
            part = self._parts.get(number)
            if part is not None:
                self._parts.move_to_end(number)
            return part

    def load(self, numbers: Iterable[int]) -> None:
        """Load those of these parts that are not here, from remote stores by one batch of requests; raises as `get`."""
        if self._store.is_local:
            return
        missing = [number for number in dict.fromkeys(numbers) if number not in self._parts]
        # One alone is loaded likewise by `get`; more than there is room for would push each other out.
        if len(missing) < 2 or sum(map(self._cost, missing)) > self._max_nbytes // 2:
            return
        claimed: list[int] = []
        try:
            others = self._claim(missing, claimed)
            missing = [number for number in claimed if number not in self._parts]  # nor came since
            if missing:
                fetched = self._fetched(missing)
                for number in missing:
                    self._keep(number, self._load(number, fetched))
        finally:
            self._loaded(claimed)
        for loading in others:
            loading.wait(_PATIENCE_SECONDS)

    def _claim(self, numbers: Iterable[int], claimed: list[int]) -> list[threading.Event]:
        """Take it on to load parts that no other thread is loading, into `claimed`; return what says that those are.

        Batches that are read ahead come to a part at the same time.
        """
        others = []
        for number in numbers:
            mine = threading.Event()
            claimed.append(number)  # before it is one: an interrupt in between must not leave others waiting
            loading = self._loading.setdefault(number, mine)
            if loading is not mine:
                claimed.pop()
                others.append(loading)
        return others

    def _loaded(self, claimed: Sequence[int]) -> None:
        for number in claimed:
            loading = self._loading.pop(number, None)
            if loading is not None:
                loading.set()

    def _fetched(self, numbers: Sequence[int]) -> Reads:
        """Return the files of parts, fetched together."""
        bodies: dict[str, bytes] = {}
        missing = []
        for document in (each for number in numbers for each in _documents(self._snapshot.parts[number])):
            body = None if self._cache is None else self._cache.get_document(document.what, document.nbytes)
            if body is None:
                missing.append((document.path, document.nbytes))
            else:
                bodies[document.path] = body
        cached = set(bodies)
        try:
            fetched = self._store.read_many(missing) if missing else []
        except (NotFoundError, CorruptionError):
            return self._store  # one by one: which of them it is decides what the error says
        bodies |= zip((path for path, _ in missing), fetched, strict=True)
        return _Fetched(self._store, bodies, cached)

    def _keep(self, number: int, part: OpenPart) -> None:
        with self._lock:
            if number not in self._parts:
                self._parts[number] = part
                self._nbytes += self._cost(number)
            self._trim()

    def _trim(self) -> None:
        while self._nbytes > self._max_nbytes and len(self._parts) > 1:
            oldest, _ = self._parts.popitem(last=False)
            self._nbytes -= self._cost(oldest)

    def _cost(self, number: int) -> int:
        ref = self._snapshot.parts[number]
        return ref.index_nbytes + ref.manifest_nbytes

    def _load(self, number: int, files: Reads) -> OpenPart:
        ref = self._snapshot.parts[number]
        sources = iter([files, self._store])  # what was fetched before is not read again by asking for it
        loaded = read_twice(self._store, lambda: self._load_from(next(sources), ref))
        if loaded.index is None:
            raise CorruptionError.at(index_path(ref.name), expected="a part with samples", got="a part of holes only")
        return OpenPart(number, loaded.manifest, loaded.index, ref.index_digest or "")

    def _load_from(self, files: Reads, ref: PartRef) -> LoadedPart:
        if self._cache is None or not isinstance(files, _Fetched):
            return load_ref(files, ref, self._snapshot.header)
        try:
            loaded = load_ref(files, ref, self._snapshot.header)
        except HsfmtError:
            if not files.forget(ref, self._cache):
                raise
            return load_ref(self._store, ref, self._snapshot.header)
        files.keep(ref, self._cache)
        return loaded

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("caches are made anew in each process")
