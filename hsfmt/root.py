"""The root document where it is missing: what it must have been, and whether a dataset may be made there.

Spec: rules WRITE-10, WRITE-11.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hsfmt import layout
from hsfmt.errors import CorruptionError, FormatVersionError, HsfmtError, NotFoundError, UsageError
from hsfmt.header import MAX_HEADER_NBYTES, Header
from hsfmt.manifest import MAX_MANIFEST_NBYTES, parse_manifest
from hsfmt.pointer import MAX_POINTER_NBYTES, parse_pointer
from hsfmt.storage import Store
from hsfmt.storage.local import LocalStore
from hsfmt.zarr_metadata import parse_root

ROOT_REMEDY = (
    "open a DatasetWriter with the dataset's settings on it and close it: it writes the file back from the manifests"
)


def header_of_manifests(store: Store, parts: Iterable[str]) -> Header | None:
    """Return the header that all these committed parts repeat; without any, that of the pointer, None without that.

    Raises
    ------
    CorruptionError
        They hold different ones, or one of them can't be used.
    """
    found: dict[str, tuple[str, Header]] = {}
    for part in parts:
        path = layout.manifest_path(part)
        header = parse_manifest(store.read(path, MAX_MANIFEST_NBYTES), part, path).header
        found.setdefault(header.digest(), (path, header))
    if len(found) > 1:
        paths = ", ".join(path for path, _ in found.values())
        raise CorruptionError.at(
            f"{store.url}: {layout.ROOT_METADATA}",
            expected="the root document, or one header in all manifests to write it from",
            got=f"none, and {len(found)} different headers, in {paths}",
            remedy="restore the file from a copy, or move parts of another meaning to a dataset of their own",
        )
    if found:
        return next(iter(found.values()))[1]
    try:
        return parse_pointer(store.read(layout.POINTER, MAX_POINTER_NBYTES)).header
    except NotFoundError:
        return None


def refuse_file(store: Store) -> None:
    """Refuse to make a dataset where there is a file, or below one.

    Raises
    ------
    UsageError
        There is.
    """
    path = Path(store.url).absolute()
    places = (path, *path.parents) if store.is_local else ()
    file = next((place for place in places if place.exists() and not place.is_dir()), None)
    if file is not None:
        raise UsageError.at(store.url, expected="a folder, or a name for one", got=f"a file: {file}")


def enclosing_dataset(store: Store) -> str | None:
    """Return the folder of the dataset that a local folder lies in, None if in none; one stat for each folder above."""
    if not store.is_local:
        return None
    for folder in Path(store.url).resolve().parents:
        above = LocalStore(folder)
        try:
            if above.size(layout.ROOT_METADATA) is None:
                continue
            parse_root(above.read(layout.ROOT_METADATA, MAX_HEADER_NBYTES), layout.ROOT_METADATA)
        except FormatVersionError:
            return str(folder)
        except HsfmtError:
            continue  # a Zarr group of something else, or one that can't be read
        return str(folder)
    return None
