"""`merge`: committed parts of several datasets in one, as they are; no tensor is written anew.

Spec: rules MRG-1 to MRG-8. All that can be refused is refused before the first byte is written. Then part by part:
data, folders, manifest; then the seal; and only then, for a move, the sources are emptied.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from hsfmt import layout
from hsfmt.catalog import ensure_dataset, find_dataset, read_header
from hsfmt.errors import CorruptionError, NotFoundError, UsageError
from hsfmt.maintenance.merge_move import empty, empty_rest, is_emptied, why_not_empty
from hsfmt.maintenance.merge_plan import MergePlan, Source, plan_merge, read_source
from hsfmt.maintenance.merge_report import MergeReport
from hsfmt.manifest import FileEntry
from hsfmt.readers.verification.objects import file_digest
from hsfmt.sealing import Wishes, seal_as
from hsfmt.storage import Store, open_store
from hsfmt.storage.local import LocalStore

How = Literal["auto", "link", "copy", "move"]
Progress = Callable[[int, int, str], None]
_RESERVE_NBYTES = 64 << 20


def merge(  # noqa: PLR0913  each is an option of the command
    destination: str | os.PathLike[str] | Store,
    sources: Sequence[str | os.PathLike[str] | Store],
    *,
    how: How = "auto",
    on_duplicate: Literal["refuse", "first"] = "refuse",
    verify: Literal["quick", "full"] = "quick",
    seal: bool = True,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> MergeReport:
    """Put the committed parts of `sources` into `destination`, which may be new.

    Parameters
    ----------
    destination, sources
        Datasets of one meaning. Whatever the order of sources, and however often they are merged, the result is the
        same snapshot.
    how
        "link": hard links (on object stores copies made by the server); "copy": through this process, each digest
        compared; "auto": link where that works, else copy; "move": like "auto", and then the sources are emptied.
    on_duplicate
        What to do about an id that is served with one content and comes with another: "refuse", or take the "first":
        the sample of the part with the smallest name (rule SNAP-3). Equal content is no conflict.
    verify
        "quick" checks manifests, indexes and the sizes of all files before anything is written; "full" also reads all
        files and compares their digests, those of copies made by a server too.
    seal
        Whether to seal the result.
    progress
        Called as (bytes done, bytes in all, part).
    storage_options
        For fsspec URLs.

    Raises
    ------
    HeaderMismatchError
        The datasets mean different things; each member that differs is named.
    CorruptionError, NotFoundError
        A source is damaged, or has lost parts.
    UsageError
        Different content under one id, part name or attachment name; not enough space; a source that is the
        destination.
    """
    _check_choices(how, on_duplicate, verify)
    if how == "move" and not seal:
        remedy = "leave out --no-seal (Python: seal=False), or --move"
        raise UsageError.at(
            "no-seal", expected="a seal before sources are emptied", got="none asked for", remedy=remedy
        )
    opened = [
        each if isinstance(each, Store) else open_store(each, storage_options) for each in (destination, *sources)
    ]
    store = opened[0]
    stores = list({_place(each): each for each in reversed(opened[1:])}.values())[::-1]
    _check_places(store, stores)
    # Of a move that is run again some are done already.
    done = [each for each in stores if how == "move" and is_emptied(each)]
    read = [read_source(each) for each in stores if each not in done]
    header = read[0].header if read else read_header(store)
    found = find_dataset(store, header)
    if found is not None:
        _check_other_place(store, [source.store for source in read])
    plan = plan_merge(store, found, read, on_duplicate=on_duplicate)
    if not seal and (plan.retracted or plan.absent or plan.attachments):
        n_retracted = len(plan.retracted) + len(plan.absent)
        got = f"{n_retracted} retracted ids and {len(plan.attachments)} attachments in the sources"
        remedy = "leave out --no-seal (Python: seal=False)"
        raise UsageError.at("no-seal", expected="nothing that only a snapshot can hold", got=got, remedy=remedy)
    run = _Merge(store, plan, how, progress or (lambda *_: None), full=verify == "full")
    run.check_sources()
    run.check_space()
    ensure_dataset(store, header)
    for part in plan.taken:
        run.take(part)
    sealed = None
    if seal:
        sealed = seal_as(store, Wishes(retract=plan.retracted, attachments=plan.attachments, gone=plan.absent))
    emptied, left = run.empty_sources(read) if how == "move" else ([], {})
    for each in done:
        empty_rest(each)
    emptied = [each.url for each in stores if each in done or each.url in emptied]
    return MergeReport(
        destination=store.url,
        parts={part: source.store.url for part, (_, source) in sorted(plan.taken.items())},
        present=tuple(sorted(plan.present)),
        superseded=tuple(sorted(plan.superseded)),
        newer=plan.newer,
        same=plan.same,
        conflicts=plan.conflicts,
        retracted=tuple(sorted(plan.retracted)),
        attachments=tuple(sorted(plan.attachments)),
        linked_nbytes=run.linked,
        copied_nbytes=run.copied,
        emptied=tuple(emptied),
        left=left,
        fingerprint=sealed.snapshot.fingerprint if sealed else None,
        content_digest=sealed.snapshot.content_digest if sealed else None,
        counts=dict(sealed.snapshot.counts) if sealed else None,
    )


def _check_choices(how: str, on_duplicate: str, verify: str) -> None:
    choices = {"auto", "link", "copy", "move"}, {"refuse", "first"}, {"quick", "full"}
    values = {"how": how, "on_duplicate": on_duplicate, "verify": verify}
    for (name, value), allowed in zip(values.items(), choices, strict=True):
        if value not in allowed:
            raise UsageError.at(name, expected=" or ".join(sorted(allowed)), got=repr(value)[:60])


def _check_places(store: Store, sources: Sequence[Store]) -> None:
    if not sources:
        raise UsageError.at("sources", expected="one dataset or more", got="none")

    for source in sources:
        if _place(source).startswith(_place(store)) or _place(store).startswith(_place(source)):
            got = "the destination itself, or one inside the other"
            raise UsageError.at(source.url, expected="a source beside the destination", got=got)


def _place(store: Store) -> str:
    return (os.path.realpath(store.url) if isinstance(store, LocalStore) else store.url).rstrip("/") + "/"


def _check_other_place(store: Store, sources: Sequence[Store]) -> None:
    """Refuse the destination itself under another URL or mount: a move would empty it."""
    probe = f"{layout.POINTER}.{secrets.token_hex(8)}.tmp"
    store.write(probe, b"")
    try:
        same = [source.url for source in sources if source.size(probe) is not None]
    finally:
        store.remove(probe)
    if same:
        got = "the destination itself by another name"
        raise UsageError.at(same[0], expected="a source beside the destination", got=got)


class _Merge:
    def __init__(self, store: Store, plan: MergePlan, how: How, progress: Progress, *, full: bool) -> None:
        self.linked = self.copied = 0
        self._full = full
        self._compared: set[str] = set()
        self._store = store
        self._plan = plan
        self._how = how
        self._progress = progress
        self._total = sum(entry.nbytes for manifest, _ in plan.taken.values() for entry in manifest.files)

    def check_sources(self) -> None:
        for manifest, source in self._plan.taken.values():
            _check_files(source.store, manifest.files, full=self._full)

    def check_space(self) -> None:
        free = self._store.free_nbytes()
        copied = sum(
            entry.nbytes
            for manifest, source in self._plan.taken.values()
            for entry in manifest.files
            if self._how == "copy" or not self._store.shares_storage(source.store)
        )
        if free is not None and copied and free < copied + _RESERVE_NBYTES:
            expected, got = f"{copied + _RESERVE_NBYTES} bytes of free space", f"{free}"
            raise UsageError.at(
                self._store.url, expected=expected, got=got, remedy="free space, or link on one file system"
            )

    def take(self, part: str) -> None:
        """Commit one part here: data, folders, and the manifest last (rules WRITE-3 to WRITE-5)."""
        store, (manifest, source) = self._store, self._plan.taken[part]
        for entry in manifest.files:
            self._take_file(source.store, entry)
            self._progress(self.linked + self.copied, self._total, part)
        store.sync(sorted({entry.path.rpartition("/")[0] for entry in manifest.files}))
        _check_files(store, manifest.files, full=False)
        path, data = layout.manifest_path(part), manifest.to_bytes()
        if not store.create(path, data) and store.read(path, len(data) + 1) != data:
            raise UsageError.at(path, expected="a part name that is free", got="another part, committed meanwhile")

    def _take_file(self, source: Store, entry: FileEntry) -> None:
        if self._how != "copy" and self._store.link(source, entry.path):
            self.linked += entry.nbytes
            if self._full and not self._store.is_same(source, entry.path):
                _check_files(self._store, [entry], full=True)  # a copy, of which only the server knows how it was made
                self._compared.add(entry.path)
            return
        if self._how == "link":
            remedy = "leave out --link (Python: how='auto') to copy"
            raise UsageError.at(source.url, expected="the file system of the destination", got="another", remedy=remedy)
        self._store.copy_from(source, entry.path, entry.nbytes, entry.digest)
        self.copied += entry.nbytes
        self._compared.add(entry.path)

    def empty_sources(self, sources: Sequence[Source]) -> tuple[list[str], dict[str, str]]:
        """Remove the sources whose every object has its place in the destination by now (rule MRG-7)."""
        emptied, left = [], {}
        for source in sources:
            reason = why_not_empty(self._store, source, self._compared)
            if reason:
                left[source.store.url] = reason
            else:
                empty(source)
                emptied.append(source.store.url)
        return emptied, left


def _check_files(store: Store, entries: Sequence[FileEntry], *, full: bool) -> None:
    for entry in entries:
        nbytes = store.size(entry.path)
        if nbytes is None:
            remedy = f"`hsfmt verify {store.url}` lists all that is damaged, `hsfmt repair` saves what can be saved"
            where = f"{store.url}: {entry.path}"
            raise NotFoundError.at(where, expected=f"{entry.nbytes} bytes", got="nothing", remedy=remedy)
        if nbytes != entry.nbytes:
            where = f"{store.url}: {entry.path}"
            raise CorruptionError.at(where, expected=f"{entry.nbytes} bytes", got=f"{nbytes} bytes")
        if full and (found := file_digest(store, entry.path, nbytes, lambda _: None)) != entry.digest:
            raise CorruptionError.at(f"{store.url}: {entry.path}", expected=entry.digest, got=found)
