"""What lies in a source folder: every file once, in natural order, and what a file that is no data looks like."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hsfmt.errors import NotFoundError, Problem, StorageError, UsageError
from hsfmt.readers.sources.base import SourceItem, Stray

_DIGITS = re.compile(r"([0-9]+)")
HEAD_NBYTES = 64


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A regular file: POSIX path relative to the folder, and its size in bytes."""

    path: str
    nbytes: int

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Folder:
    """A listed folder.

    Attributes
    ----------
    root
        Where it is.
    files
        Its regular files, in natural order.
    strays
        Entries that no source can read: links to folders, pipes, names that are no UTF-8.
    """

    root: Path
    files: tuple[SourceFile, ...]
    strays: tuple[Stray, ...]


def natural_key(path: str) -> tuple[tuple[tuple[str | int, ...], ...], str]:
    """Sort key that counts, folder by folder: data_2 before data_10. Equal numbers fall back on the text."""
    names = path.split("/")
    return tuple(tuple(int(p) if i % 2 else p for i, p in enumerate(_DIGITS.split(name))) for name in names), path


def stem(path: str) -> str:
    """The path without its last extension: the sample id of a file."""
    head, slash, name = path.rpartition("/")
    base = name.rpartition(".")[0] or name
    return head + slash + base


def file_items(files: Iterable[SourceFile]) -> list[SourceItem]:
    """Make one item of each file, its id the path without extension; files that claim one id are all refused."""
    files = list(files)
    claims = Counter(stem(file.path) for file in files)
    items = []
    for index, file in enumerate(files):
        sample_id, problem = stem(file.path), None
        if claims[sample_id] > 1:
            problem = Problem(
                file.path,
                f"one file for the sample {sample_id}",
                f"{claims[sample_id]} files of that name with different extensions",
                "move all but one away",
            )
        items.append(SourceItem(file.path, index, sample_id, (file.path,), file.nbytes, problem))
    return items


def list_folder(folder: str | os.PathLike[str]) -> Folder:
    """List a source folder and its subfolders.

    Raises
    ------
    NotFoundError
        There is no such folder, or no file in it.
    UsageError
        It is not a folder.
    StorageError
        A subfolder can't be listed: its files would be left out silently.
    """
    root = Path(folder)
    if not root.exists():
        raise NotFoundError.at(str(root), expected="a folder of files to convert", got="nothing")
    if not root.is_dir():
        raise UsageError.at(
            str(root), expected="a folder", got="a file", remedy=f"give the folder that it lies in: {root.parent}"
        )
    files: list[SourceFile] = []
    strays: list[Stray] = []
    try:
        _list_into(root, "", files, strays)
    except OSError as error:
        where = str(error.filename or root)
        raise StorageError.at(where, expected="a folder that can be listed", got=str(error)) from error
    if not files and not strays:
        raise NotFoundError.at(str(root), expected="files to convert", got="an empty folder")
    files.sort(key=lambda file: natural_key(file.path))
    strays.sort(key=lambda stray: natural_key(stray.path))
    return Folder(root, tuple(files), tuple(strays))


def _list_into(root: Path, prefix: str, files: list[SourceFile], strays: list[Stray]) -> None:
    with os.scandir(root / prefix) as entries:
        for entry in entries:
            path = prefix + entry.name
            shown = path.encode("utf-8", "backslashreplace").decode("ascii", "replace")
            if shown != path and not _is_utf8(path):
                strays.append(Stray(shown, "its name is not UTF-8"))
            elif entry.is_dir(follow_symlinks=False):
                _list_into(root, path + "/", files, strays)
            else:
                _take_entry(entry, path, files, strays)


def _take_entry(entry: os.DirEntry[str], path: str, files: list[SourceFile], strays: list[Stray]) -> None:
    try:
        status = entry.stat()
    except FileNotFoundError:
        strays.append(Stray(path, "a link to nothing"))
        return
    if stat.S_ISREG(status.st_mode):
        files.append(SourceFile(path, status.st_size))
    elif stat.S_ISDIR(status.st_mode):
        strays.append(Stray(path, "a link to a folder, which is not followed"))
    else:
        strays.append(Stray(path, "neither a file nor a folder"))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def describe_foreign(head: bytes, nbytes: int) -> str | None:
    """Say what a file is that is plainly not data, from its first bytes; None when nothing speaks against it."""
    if nbytes == 0:
        return "an empty file: a write that never happened"
    text = head.lstrip()[:64].lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page or XML document, probably the answer to a failed download"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer: the data was not fetched (git lfs pull)"
    if head.startswith(b"\x1f\x8b"):
        return "a gzip stream, which has to be unpacked first (gunzip)"
    if not any(head):
        return "zeros from the first byte on, as a crash leaves them"
    return None
