"""What folders hold: listings of a local dataset."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress


def entries(directory: str) -> list[os.DirEntry[str]]:
    """Return what is in a folder, by name; nothing where there is none."""
    try:
        with os.scandir(directory) as found:
            return sorted(found, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def walked(directory: str, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield (path, nbytes) of every file below, by path segments."""
    # Names are given as they are, unchecked: a stray file of an odd name is to be reported, not to stop the walk.
    for entry in entries(directory):
        path = f"{prefix}/{entry.name}" if prefix else entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from walked(entry.path, path)
        else:
            with suppress(FileNotFoundError):  # a temporary file that was renamed meanwhile
                yield path, _listed_nbytes(entry)


def empty_folders(directory: str, prefix: str) -> tuple[bool, list[tuple[str, ...]]]:
    """Return whether there is any object below, and the empty folders in it."""
    has_objects, empty = False, []
    for entry in entries(directory):
        if not entry.is_dir(follow_symlinks=False):
            has_objects = True
            continue
        path = f"{prefix}/{entry.name}" if prefix else entry.name
        inner, found = empty_folders(entry.path, path)
        has_objects |= inner
        empty += found if inner else [(*(folder for folders in found for folder in folders), path)]
    return has_objects, empty


def _listed_nbytes(entry: os.DirEntry[str]) -> int:
    try:
        status = entry.stat()
    except OSError:  # a link to nowhere is listed, with the size of the link itself
        status = entry.stat(follow_symlinks=False)
    return status.st_size if stat.S_ISREG(status.st_mode) else entry.stat(follow_symlinks=False).st_size
