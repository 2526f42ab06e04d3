"""The root document where it is missing: what it must have been, and whether a dataset may be made there.

Spec: rules WRITE-10, WRITE-11.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path

from hsfmt import layout
from hsfmt.errors import CorruptionError, FormatVersionError, HsfmtError, NotFoundError, UsageError
from hsfmt.header import MAX_HEADER_NBYTES, Header
from hsfmt.manifest import MAX_MANIFEST_NBYTES, parse_manifest
from hsfmt.naming import names_dataset
from hsfmt.pointer import MAX_POINTER_NBYTES, parse_pointer
from hsfmt.storage import Store
from hsfmt.zarr_metadata import parse_root

ROOT_REMEDY = (
    "open a DatasetWriter with the dataset's settings on it and close it: it writes the file back from the manifests"
)


@names_dataset
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
    file = next((place for place in places if _is_file(place)), None)
    if file is not None:
        raise UsageError.at(store.url, expected="a folder, or a name for one", got=f"a file: {file}")


def _is_file(place: Path) -> bool:
    """Say whether there is something, and no folder; of what can't be looked at, what is written next tells."""
    try:
        return not stat.S_ISDIR(place.stat().st_mode)
    except OSError:
        return False


def read_root(store: Store) -> Header:
    """Return the header that the root document holds; whether this is a folder of another dataset is not looked at.

    Raises
    ------
    NotFoundError
        There is no dataset, or its root document is gone.
    FormatError, FormatVersionError
        The root document is not one of this format, or needs a newer library.
    """
    try:
        data = store.read(layout.ROOT_METADATA, MAX_HEADER_NBYTES)
    except NotFoundError:
        names = store.list(layout.MANIFESTS) if store.can_list else []
        n_parts = sum(layout.part_of_manifest(name) is not None for name in names)
        if n_parts:
            raise NotFoundError.at(
                f"{store.url}: {layout.ROOT_METADATA}",
                expected="the root document of a dataset",
                got=f"nothing, beside {n_parts} committed parts",
                remedy=f"restore the file from a copy, or {ROOT_REMEDY}",
            ) from None
        remedy = "check the path; `hsfmt convert SRC DST` or DatasetWriter makes a dataset"
        raise NotFoundError.at(
            store.url, expected="an hsfmt dataset", got="no zarr.json there", remedy=remedy
        ) from None
    return parse_root(data, layout.ROOT_METADATA)


def enclosing_dataset(store: Store) -> str | None:
    """Return the dataset that a folder lies in, None if in none.

    Locally it takes a stat for each folder above; elsewhere a request or two, and none unless the URL has a folder of a
    dataset's own in it.
    """
    for above in store.above(layout.OWN_FOLDERS):
        try:
            if above.is_local and above.size(layout.ROOT_METADATA) is None:
                continue  # nothing outside is opened that is not there; elsewhere it would be a request more
            parse_root(above.read(layout.ROOT_METADATA, MAX_HEADER_NBYTES), layout.ROOT_METADATA)
        except FormatVersionError:
            return above.url
        except HsfmtError:
            continue  # nothing, a Zarr group of something else, or one that can't be read
        return above.url
    return None


def refuse_inner(store: Store, error: HsfmtError) -> None:
    """Refuse a folder within a dataset, by naming the dataset.

    Parameters
    ----------
    store
        Where no dataset can be read.
    error
        Why.

    Raises
    ------
    NotFoundError
        It lies in one.
    """
    outer = enclosing_dataset(store)
    if outer is not None:
        raise NotFoundError.at(
            store.url,
            expected="the folder of a dataset",
            got="a folder within one",
            remedy=f"name the dataset, which lies further up: {outer}",
        ) from error
