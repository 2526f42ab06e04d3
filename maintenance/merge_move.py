"""The end of a move: sources whose every object has its place in the destination are emptied.

Spec: rule MRG-7. A source that is killed on the way stays a sound dataset: former snapshots go first, then the pointer
and its snapshot, then part by part, manifest first; only when no part is left does the root document go.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from hsfmt import layout
from hsfmt.errors import CorruptionError, NotFoundError
from hsfmt.lost_parts import snapshots_to_keep
from hsfmt.maintenance.merge_plan import Source
from hsfmt.manifest import MAX_MANIFEST_NBYTES, FileEntry, parse_manifest
from hsfmt.readers.verification.objects import file_digest
from hsfmt.storage import Store

# Former snapshots, and what only they list, count no more.
_FORMER = (f"{layout.SNAPSHOTS}/", f"{layout.ATTACHMENTS}/")
_POINTER_TEMPORARY = re.compile(rf"{re.escape(layout.POINTER)}\.[0-9a-f]{{16}}\.tmp")


def is_emptied(source: Store) -> bool:
    """Say whether this is what a move leaves that was finished, or killed at the very end."""
    if source.size(layout.ROOT_METADATA) is not None:
        return False
    found = [path for path, _ in source.walk("") if layout.bystander(path) is None]
    folder = source.local_path("x")
    return found == [layout.PARTS_METADATA] or (not found and folder is not None and Path(folder).parent.is_dir())


def why_not_empty(store: Store, source: Source, compared: Collection[str]) -> str:
    """Return what speaks against emptying a source, "" if nothing does.

    Parameters
    ----------
    store
        The destination, sealed.
    compared
        Paths of files whose digests were compared when they were copied there.
    """
    for part, loaded in source.loaded.items():
        path, data = layout.manifest_path(part), loaded.manifest.to_bytes()
        try:
            if store.read(path, len(data)) != data:
                return f"part {part} is another one in the destination"
        except (NotFoundError, CorruptionError):
            return f"part {part} is not in the destination (superseded parts are not carried over)"
        for entry in loaded.manifest.files:
            if _leads_into(store, source.store, entry.path):
                return f"{entry.path} is a symbolic link into the source in the destination"
            if not _is_safe(store, source.store, entry, compared):
                return f"{entry.path} is missing or damaged in the destination"
    now = {each.fingerprint for each in snapshots_to_keep(source.store)} if source.snapshots else set()
    if now != {each.fingerprint for each in source.snapshots}:
        return "it was sealed meanwhile"
    left = _Leftovers(store)
    known = source.objects()
    for path, nbytes in source.store.walk(""):
        if path in known or path.startswith(_FORMER) or layout.bystander(path) is not None:
            continue
        if _POINTER_TEMPORARY.fullmatch(path):
            continue  # of a move that was killed
        if not left.has(path, nbytes):
            return f"{path} was not carried over: it is newer, or was never committed"
    return ""


def _leads_into(store: Store, source: Store, path: str) -> bool:
    """Say whether what the destination has is only a name for the source's own file."""
    here = store.local_path(path)
    if here is None or not source.is_local:
        return False
    return Path(here).resolve().is_relative_to(Path(source.url).resolve())


def _is_safe(store: Store, source: Store, entry: FileEntry, compared: Collection[str]) -> bool:
    if store.size(entry.path) != entry.nbytes:
        return False
    if entry.path in compared or (source.size(entry.path) is not None and store.is_same(source, entry.path)):
        return True
    # Of a former run, or a copy made by the server: it is about to be the only one.
    return file_digest(store, entry.path, entry.nbytes, lambda _: None) == entry.digest


class _Leftovers:
    """Files of parts whose manifests a killed move has removed from the source: the destination has those parts."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._files: dict[str, dict[str, int]] = {}

    def has(self, path: str, nbytes: int) -> bool:
        part = layout.part_of_path(path)
        if part is None:
            return False
        if part not in self._files:
            self._files[part] = {}
            manifest_path = layout.manifest_path(part)
            try:
                manifest = parse_manifest(self._store.read(manifest_path, MAX_MANIFEST_NBYTES), part, manifest_path)
            except NotFoundError:
                return False
            self._files[part] = {entry.path: entry.nbytes for entry in manifest.files}
        return self._files[part].get(path) == nbytes and self._store.size(path) == nbytes


def empty(source: Source) -> None:
    """Remove all objects of a source, so that a kill at any point leaves a dataset that verifies."""
    store = source.store
    current = {layout.snapshot_path(each.fingerprint, "index").split("/")[2] for each in source.snapshots}
    snapshots = sorted(_paths(store, layout.SNAPSHOTS), key=lambda path: path.endswith("/ids.safetensors"))
    # First those that would count without a pointer, and did not before.
    _remove(store, (path for path in snapshots if path.split("/")[2] not in current), durably=True)
    _remove(store, [layout.POINTER], durably=True)  # readers refuse from here on, and say why
    _remove(store, snapshots, durably=True)  # or they would name manifests that are gone
    for part, loaded in source.loaded.items():
        _remove(store, [layout.manifest_path(part)], durably=True)
        _remove(store, (entry.path for entry in loaded.manifest.files))
    _remove(store, (path for path in _paths(store, "parts", "hsfmt") if path != layout.PARTS_METADATA))
    # A power cut must not bring files back beside no root document, nor those that a killed run had removed.
    emptied = {each for prefix in ("parts", "hsfmt") for folders in store.empty_folders(prefix) for each in folders}
    store.sync(sorted(emptied | {"parts"}))
    empty_rest(store)


def empty_rest(store: Store) -> None:
    """Remove what is left of a source without parts."""
    _remove(store, [layout.ROOT_METADATA], durably=True)
    _remove(store, [layout.PARTS_METADATA])
    for prefix in ("parts", "hsfmt"):
        for folders in store.empty_folders(prefix):
            for folder in folders:
                store.remove_folder(folder)
        store.remove_folder(prefix)


def _paths(store: Store, *prefixes: str) -> list[str]:
    paths = [path for prefix in prefixes for path, _ in store.walk(prefix)]
    return [path for path in paths if layout.bystander(path) is None]


def _remove(store: Store, paths: Iterable[str], *, durably: bool = False) -> None:
    """Remove objects; those that are gone already are passed over."""
    folders = set()
    for path in paths:
        if store.size(path) is not None:
            store.remove(path)
            folders.add(path.rpartition("/")[0])
    if durably and folders:
        store.sync(sorted(folders))
