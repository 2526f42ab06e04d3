"""`gc`: the only thing that deletes from a dataset, and only what nothing needs.

Spec: rules GC-1 to GC-7. What is to go is planned from one listing; before each removal the listings that could save it
are made again, so that a commit or seal meanwhile keeps what is its own.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hsfmt import layout
from hsfmt.catalog import read_header, read_pointer
from hsfmt.errors import NotFoundError, UsageError
from hsfmt.maintenance.collect_groups import Group, is_part_file, plan_groups
from hsfmt.maintenance.collect_plan import Keep, Roots, damage_needs_repair, find_roots
from hsfmt.maintenance.collect_uploads import abort_uploads
from hsfmt.manifest import PartManifest
from hsfmt.storage import Store, open_store
from hsfmt.versions import check_writable

_LEAST = timedelta(days=1)
_MAX_GROUPS = 64
_MAX_HELD_NBYTES = 64 << 20
_RESTORABLE = re.compile(rf"({layout.SNAPSHOTS}|{layout.ATTACHMENTS})/")


@dataclass(frozen=True, slots=True)
class CollectReport:
    """What a collection removed, or would.

    Attributes
    ----------
    removed
        Each with its files (path and nbytes), the reason, and its age in seconds.
    spared
        Planned, and kept because a commit or seal came in between.
    young
        What would be collected but for its age.
    withheld
        What would be collected, if no damaged snapshot could name it.
    strays
        Files that are none of the format's; they are never removed.
    damaged
        Fingerprint to what is wrong, of the snapshots that can't be read and are kept.
    dry_run
        Whether nothing was removed.
    uploads, young_uploads
        (path, seconds since anything of it arrived) of uploads to object stores that were never completed: aborted, or
        too young for that.
    """

    removed: tuple[Group, ...]
    spared: tuple[Group, ...]
    young: tuple[Group, ...]
    withheld: tuple[Group, ...]
    strays: tuple[str, ...]
    damaged: Mapping[str, str]
    dry_run: bool
    uploads: tuple[tuple[str, float], ...] = ()
    young_uploads: tuple[tuple[str, float], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all removed files (with hard links elsewhere, less comes free)."""
        return sum(group.nbytes for group in self.removed)

    def to_json(self) -> dict[str, Any]:
        """Return the report as one JSON document."""
        names = ("removed", "spared", "young", "withheld")
        document: dict[str, Any] = {name: [group.to_json() for group in getattr(self, name)] for name in names}
        for name, uploads in (("uploads", self.uploads), ("young_uploads", self.young_uploads)):
            document[name] = [{"age_seconds": int(age), "path": path} for path, age in uploads]
        document |= {"damaged": dict(self.damaged), "strays": list(self.strays)}
        return document | {"dry_run": self.dry_run, "nbytes": self.nbytes}


def collect(  # noqa: PLR0913  each is an option of the command
    url: str | os.PathLike[str] | Store,
    *,
    older_than: timedelta,
    dry_run: bool = False,
    keep_snapshots: int | None = None,
    drop_snapshots_older_than: timedelta | None = None,
    force: bool = False,
    progress: Callable[[Group], None] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> CollectReport:
    """Remove what no kept snapshot and no committed part needs, and what is old enough that nobody is writing it.

    Parameters
    ----------
    url
        The dataset.
    older_than
        The least age, by the storage's own clock, of the newest file of whatever is removed.
    dry_run
        Remove nothing (a probe file is written and removed all the same: it tells the storage's time).
    keep_snapshots
        Keep so many of the newest snapshots, the current one always among them. Without this or the next one all stay.
    drop_snapshots_older_than
        Do not keep snapshots of at least this age; the current one stays.
    force
        Allow an `older_than` under a day.
    progress
        Called after each removal.
    storage_options
        For fsspec URLs.

    Raises
    ------
    NotFoundError, CorruptionError
        There is no dataset, or a document that says what is needed can't be read: nothing was removed.
    UsageError
        Too small an age, or a storage that does not tell the time of its objects.
    """
    if older_than < (timedelta(0) if force else _LEAST):
        remedy = "a shorter age can hit what a writer is writing: `--force` (Python: force=True) if none is at work"
        raise UsageError.at("older_than", expected="at least a day", got=str(older_than), remedy=remedy)
    if keep_snapshots is not None and keep_snapshots < 1:
        raise UsageError.at("keep_snapshots", expected="1 or more", got=str(keep_snapshots))
    store = url if isinstance(url, Store) else open_store(url, storage_options)
    with damage_needs_repair():
        check_writable(read_header(store).to_json(), layout.ROOT_METADATA)
    now = _storage_time(store)
    keep = Keep(now, older_than.total_seconds(), keep_snapshots, drop_snapshots_older_than)
    # Files before documents: a part that is committed in between is then seen as one.
    listed = list(store.walk(""))
    roots = find_roots(store, keep)
    groups, strays = plan_groups(store, roots, listed, keep)
    withheld = tuple(group for group in groups if group.nameable) if roots.unclear else ()
    if roots.unclear:
        groups = [group for group in groups if not group.nameable]
    old = [group for group in groups if group.age >= keep.least_age]
    young = tuple(group for group in groups if group.age < keep.least_age)
    uploads = abort_uploads(store, keep, dry_run=dry_run)
    if dry_run:
        return CollectReport(tuple(old), (), young, withheld, tuple(strays), roots.unclear, True, *uploads)  # noqa: FBT003  dry_run
    removed: list[Group] = []
    spared: list[Group] = []
    while old:
        batch = _Batch(store, roots, keep)
        try:
            while old and not batch.is_full:
                group = old.pop(0)
                if batch.remove(group):
                    removed.append(group)
                    if progress is not None:
                        progress(group)
                else:
                    spared.append(group)
        finally:
            back = batch.put_back()
        spared += back
        removed = [each for each in removed if each not in back]
    _sweep_folders(store, keep)
    lists = tuple(removed), tuple(spared), young, withheld, tuple(strays)
    return CollectReport(*lists, roots.unclear, False, *uploads)  # noqa: FBT003  dry_run


def _storage_time(store: Store) -> float:
    """Return the storage's time: clocks of machines differ, and ages must not (rule GC-2)."""
    path = f"hsfmt/gc.{secrets.token_hex(8)}.tmp"
    store.write(path, b"")
    try:
        now = store.modified(path)
    finally:
        store.remove(path)
    if now is None:
        expected = "a storage that says when an object was written"
        raise UsageError.at(
            store.url, expected=expected, got="one that does not", remedy="collect on the storage itself"
        )
    return now


class _Batch:
    """Some groups that go after one look at all that could need them (rule GC-6)."""

    def __init__(self, store: Store, planned: Roots, keep: Keep) -> None:
        self._store = store
        self._keep = keep
        self._planned = planned
        self._now = find_roots(store, keep, known=planned)
        self._gone: set[str] = set()
        self._held: list[tuple[Group, dict[str, bytes]]] = []
        self._back: list[Group] = []
        self._whole: dict[str, bool] = {}
        self._n_groups = self._nbytes = 0

    @property
    def is_full(self) -> bool:
        """Whether it is time to look again."""
        return self._n_groups >= _MAX_GROUPS or self._nbytes >= _MAX_HELD_NBYTES

    def remove(self, group: Group) -> bool:
        """Remove the group if nothing has come to need it."""
        self._n_groups += 1
        pointer = read_pointer(self._store)
        if pointer is not None and pointer.fingerprint != self._now.current:
            self._now = self._look()
        if self._is_needed(group) or self._is_young(group):
            return False
        if _RESTORABLE.match(group.files[0][0]):
            # A seal may write such a file again under the same name, just before it goes.
            held = {}
            for path, nbytes in group.files:
                if self._store.size(path) is not None:
                    held[path] = self._store.read(path, nbytes)
                    self._nbytes += nbytes
            self._held.append((group, held))
        if group.part is not None and not group.committed and not self._claim(group):
            return False
        _remove(self._store, group)
        if group.committed and group.part is not None:
            self._gone.add(group.part)
        return True

    def _claim(self, group: Group) -> bool:
        """Take one file from an uncommitted part, and look whether its writer was at the end of it.

        A writer writes the index, then looks for all its files, then commits: one that looked before this file was gone
        has written its index, which is seen here; any other one finds that the part is not whole, and says so.
        """
        path, nbytes = min(group.files, key=lambda file: file[1])
        if nbytes > _MAX_HELD_NBYTES:
            return True
        try:
            data = self._store.read(path, nbytes)
            self._store.remove(path)
        except NotFoundError:  # another collection was faster, or the writer has renamed it
            return not self._is_being_committed(group)
        try:
            mine = not self._is_being_committed(group)
        except BaseException:
            self._write({path: data})
            raise
        if not mine:
            self._write({path: data})
        return mine

    def put_back(self) -> list[Group]:
        """Look again, and write what is needed after all; return those groups."""
        if self._held:
            now = self._look()
            for group, held in self._held:
                if group not in self._back and now.attachments & held.keys():
                    self._write(held)
                    self._back.append(group)
        return self._back

    def _look(self) -> Roots:
        try:
            pointer = read_pointer(self._store)
            for group, held in self._held:
                if pointer is not None and group.snapshot == pointer.fingerprint and group not in self._back:
                    self._write(held)
                    self._back.append(group)
            return find_roots(self._store, self._keep, known=self._planned)
        except BaseException:
            for _, held in self._held:  # what needs it can't be told
                self._write(held)
            raise

    def _write(self, held: Mapping[str, bytes]) -> None:
        # The index last: it is what makes a snapshot.
        for path in sorted(held):
            if self._store.size(path) is None:
                self._store.write(path, held[path])

    def _is_needed(self, group: Group) -> bool:
        now = self._now
        new = now.stored - self._planned.stored
        if group.snapshot is not None and (group.snapshot == now.current or group.snapshot in new):
            return True
        if now.unclear and group.nameable:
            return True
        if any(path in now.attachments for path, _ in group.files):
            return True
        if group.part is None:
            return False
        if group.part in now.named:
            return True
        if not group.committed:
            return self._is_being_committed(group)
        if group.part not in now.removable or now.frees(group.part, self._gone):
            return True
        return not all(self._is_whole(now.manifests[name]) for name in now.successors(group.part))

    def _is_being_committed(self, group: Group) -> bool:
        """Say whether this part is committed by now, or a writer has added to it since it was listed."""
        if self._store.size(layout.manifest_path(str(group.part))) is not None:
            return True
        part, known = str(group.part), {path for path, _ in group.files}
        found = [path for path, _ in self._store.walk(layout.part_folder(part))]
        if self._store.size(layout.index_path(part)) is not None:
            found.append(layout.index_path(part))
        return any(is_part_file(path) and path not in known for path in found)

    def _is_young(self, group: Group) -> bool:
        times = [at for path, _ in group.files if (at := self._store.modified(path)) is not None]
        return bool(times) and self._keep.now - max(times) < self._keep.least_age

    def _is_whole(self, manifest: PartManifest) -> bool:
        """Say whether all that a part names is there: what it replaces may be all that is left of the samples."""
        if manifest.part not in self._whole:
            found = all(self._store.size(entry.path) == entry.nbytes for entry in manifest.files)
            self._whole[manifest.part] = found
        return self._whole[manifest.part]


def _remove(store: Store, group: Group) -> None:
    """Remove the files in their order; the first one durably before the others, if it is what names them."""
    for i, (path, _) in enumerate(group.files):
        with suppress(NotFoundError):  # another collection was faster
            store.remove(path)
        if i == 0 and group.named_by_first:
            store.sync([path.rpartition("/")[0]])
    folders = set()
    for path, _ in group.files:
        folder = path.rpartition("/")[0]
        while folder.count("/") >= (1 if folder.startswith("parts/") else 2):
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    for folder in sorted(folders, key=len, reverse=True):
        store.remove_folder(folder)


def _sweep_folders(store: Store, keep: Keep) -> None:
    """Remove folders that killed writers left with nothing in them."""
    for prefix in ("parts", layout.SNAPSHOTS, layout.ATTACHMENTS, layout.QUARANTINE):
        for folders in store.empty_folders(prefix):
            times = [at for folder in folders if (at := store.modified(folder)) is not None]
            if len(times) == len(folders) and keep.now - max(times) >= keep.least_age:
                for folder in folders:
                    store.remove_folder(folder)
