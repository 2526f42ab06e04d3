"""Listing a source folder: every file once, links followed without a cycle, and nothing left out in silence."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from hsfmt.errors import NotFoundError, Problem, StorageError, UsageError
from hsfmt.readers.sources.base import Stray
from hsfmt.readers.sources.folder import Folder, SourceFile, natural_key
from hsfmt.readers.sources.sample_names import HIDDEN
from hsfmt.storage.redaction import redacted


def list_folder(folder: str | os.PathLike[str]) -> Folder:
    """List a source folder and its subfolders; links to folders are followed, and each folder is listed once.

    Raises
    ------
    NotFoundError
        There is no such folder, or no file in it.
    UsageError
        It is not a folder of this machine, or holds one whose name is not UTF-8.
    StorageError
        A subfolder can't be listed: its files would be left out silently.
    """
    root = Path(folder)
    if not root.exists() and "://" in os.fspath(folder):
        # Files are mapped into memory, and looked at in many places, before any of them is read.
        remedy = "copy it here first, as `aws s3 sync` does it, or mount it; the dataset may be at a URL"
        raise UsageError.at(redacted(os.fspath(folder)), expected="a local folder of files", got="a URL", remedy=remedy)
    if not root.exists():
        raise NotFoundError.at(str(root), expected="a folder of files to convert", got="nothing")
    if not root.is_dir():
        raise UsageError.at(
            str(root), expected="a folder", got="a file", remedy=f"give the folder that it lies in: {root.parent}"
        )
    lister = _Lister(root)
    try:
        lister.list_all()
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        where = str(error.filename or root)
        raise StorageError.at(where, expected="a folder that can be listed", got=str(error)) from error
    if not (lister.files or lister.broken or lister.strays):
        raise NotFoundError.at(str(root), expected="files to convert", got="an empty folder")
    for found in (lister.files, lister.broken, lister.strays):
        found.sort(key=lambda entry: natural_key(entry.path))
    return Folder(root, tuple(lister.files), tuple(lister.broken), tuple(lister.strays))


class _Lister:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: list[SourceFile] = []
        self.broken: list[SourceFile] = []
        self.strays: list[Stray] = []
        self._links: list[str] = []
        self._listed: set[tuple[int, int]] = set()

    def list_all(self) -> None:
        self._first_visit("")
        self._list("", hidden=False)
        above = {_identity(parent) for parent in self.root.resolve().parents}
        # Links come last, so that a file which a real path leads to has that one.
        while self._links:
            links, self._links = sorted(self._links, key=natural_key), []
            for path in links:
                if _identity(self.root / path) in above:
                    self.strays.append(Stray(path, "a link to a folder around this one, which is not followed"))
                elif self._first_visit(path):
                    self._list(path + "/", hidden=False)
                else:
                    self.strays.append(Stray(path, "a link to a folder whose files are read already"))

    def _first_visit(self, path: str) -> bool:
        identity = _identity(self.root / path)
        first = identity not in self._listed
        self._listed.add(identity)
        return first

    def _list(self, prefix: str, *, hidden: bool) -> None:
        with os.scandir(self.root / prefix) as entries:
            for entry in entries:
                path = prefix + entry.name
                inside = hidden or entry.name.startswith(".")
                if not _is_utf8(path):
                    self._take_unnamable(entry, path, hidden=inside)
                elif not entry.is_dir(follow_symlinks=False):
                    self._take(entry, path, hidden=inside)
                elif self._first_visit(path):
                    self._list(path + "/", hidden=inside)
                else:
                    self.strays.append(Stray(path, "a folder whose files are read already, under another path"))

    def _take(self, entry: os.DirEntry[str], path: str, *, hidden: bool) -> None:
        if hidden:
            self.strays.append(Stray(path, HIDDEN))
            return
        try:
            status = entry.stat()
        except FileNotFoundError:
            self._break(path, "a link to nothing", "restore what it leads to, or remove the link")
            return
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            self._break(path, "a link that leads back to itself", "remove the link")
            return
        if stat.S_ISREG(status.st_mode):
            self.files.append(SourceFile(path, status.st_size))
        elif stat.S_ISDIR(status.st_mode):
            self._links.append(path)
        else:
            self._break(path, "neither a file nor a folder", "move it away")

    def _take_unnamable(self, entry: os.DirEntry[str], path: str, *, hidden: bool) -> None:
        shown = path.encode("utf-8", "backslashreplace").decode("ascii", "replace")
        if hidden:
            self.strays.append(Stray(shown, HIDDEN))
        elif entry.is_dir():
            raise UsageError.at(shown, expected="folder names in UTF-8", got="another name", remedy="rename the folder")
        else:
            self._break(shown, "a file whose name is not UTF-8", "rename it")

    def _break(self, path: str, got: str, remedy: str) -> None:
        self.broken.append(SourceFile(path, 0, Problem(path, "a file", got, remedy)))


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
