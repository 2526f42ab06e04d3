"""Files that appear whole under their names or not at all: temporary file, fsync, rename, fsync of the folder."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_durable: set[Path] = set()  # folders that this process made, or found, and whose entry it made durable
_PREFIX, _SUFFIX = ".hsfmt-", ".tmp"


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a temporary file beside `path`, which takes that name once the block has written it.

    What the block leaves under the temporary name is fsynced before the rename, and the folder after it. Missing
    folders above `path` are made. If the block raises, the temporary file is removed, and what was under `path` stays.

    Parameters
    ----------
    path
        The file to write, or to replace.

    Yields
    ------
    Path
        A name in the same folder that no reader's pattern for data files matches; nothing is there yet.

    Raises
    ------
    OSError
        The storage fails; FileNotFoundError if the block wrote nothing.
    """
    final = Path(path)
    make_folder(final.parent)
    temporary = final.with_name(f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(final)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(final.parent)


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Yield a file open for binary writing, which takes the name `path` once the block has written it: see `replacing`.

    Raises
    ------
    OSError
        The storage fails.
    """
    with replacing(path) as temporary, temporary.open("xb") as file:
        yield file


def is_temporary(name: str) -> bool:
    """Say whether a file's name is one that `replacing` makes up."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def remove_temporaries(folder: str | os.PathLike[str]) -> int:
    """Remove the temporary files that processes which were killed left anywhere under a folder; return their number.

    Nobody may be writing there.

    Raises
    ------
    OSError
        The storage fails.
    """
    removed = 0
    for place, _, names in os.walk(folder):
        for name in filter(is_temporary, names):
            Path(place, name).unlink(missing_ok=True)
            removed += 1
    return removed


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, durably.

    Raises
    ------
    OSError
        The storage fails.
    """
    folder = folder.absolute()
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    if folder not in _durable:
        # Whoever made it may have been killed before its entry was durable.
        sync_folder(folder.parent)
        _durable.add(folder)
    for new in reversed(missing):
        new.mkdir(exist_ok=True)  # another process may make it meanwhile
        sync_folder(new.parent)
        _durable.add(new)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the file system can.

    Raises
    ------
    OSError
        The storage fails.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # a folder that may be searched but not read
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # some network file systems know no fsync of folders
            raise
    finally:
        os.close(fd)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
