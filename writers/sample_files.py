"""One sample as a file of its own: .pt, .safetensors or .npz, for people who want to look at it elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hsfmt.errors import NotFoundError, StorageError, UsageError
from hsfmt.writers.targets.atomic import writing
from hsfmt.writers.targets.names import file_stem
from hsfmt.writers.tensor_files import FORMATS, FileTensor

__all__ = ["SUFFIXES", "FileTensor", "file_name", "write_sample_file"]

SUFFIXES = tuple(FORMATS)


def write_sample_file(
    path: str | os.PathLike[str],
    tensors: Mapping[str, FileTensor],
    attributes: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> int:
    """Write a file whose suffix says its format; it appears whole under its name or not at all.

    Parameters
    ----------
    path
        The file; its folder must exist.
    tensors
        By name.
    attributes
        What else is known: JSON values.
    overwrite
        Replace a file that is there.

    Returns
    -------
    int
        Its size in bytes.

    Raises
    ------
    UsageError
        Another suffix, or a file that is there and may not be replaced.
    NotFoundError, StorageError
        No such folder; the storage fails.
    """
    target = Path(path)
    write = FORMATS.get(target.suffix)
    if write is None:
        raise UsageError.at(str(target), expected=f"a name that ends in {', '.join(FORMATS)}", got=repr(target.suffix))
    if target.is_dir() or (target.exists() and not overwrite):
        got = "a folder" if target.is_dir() else "a file that is there already"
        raise UsageError.at(
            str(target), expected="a new file", got=got, remedy="choose another name, or say that it may be replaced"
        )
    if "hsfmt" in tensors and target.suffix != ".safetensors":
        got = "a column of that name, which is where the file says what else is known"
        raise UsageError.at("hsfmt", expected="no such column", got=got, remedy="write a .safetensors file")
    if not target.parent.is_dir():
        raise NotFoundError.at(str(target.parent), expected="a folder to write into", got="nothing")
    try:
        with writing(target) as file:
            write(file, tensors, attributes)
            nbytes = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise StorageError.at(str(target), expected="the storage to work", got=error.strerror or str(error)) from error
    return nbytes


def file_name(sample_id: str, suffix: str) -> str:
    """Return a file name for a sample that is safe in any folder: no path, nothing hidden, no more than 200 characters.

    >>> file_name("../etc/passwd", ".pt"), file_name("chat 7/é", ".npz")
    ('%2E.%2Fetc%2Fpasswd.pt', 'chat%207%2F%C3%A9.npz')
    """
    return file_stem(sample_id) + suffix
