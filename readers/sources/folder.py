"""What lies in a source folder, in natural order, and what a file that is no data looks like."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hsfmt.errors import Problem, SourceError
from hsfmt.readers.sources.base import SourceItem, Stray

_DIGITS = re.compile(r"([0-9]+)")
HEAD_NBYTES = 64
# The extension of a gzip stream, after that of the file in it.
PACKED = ".gz"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file: POSIX path relative to the folder, its size in bytes, and why it can't be read, if so."""

    path: str
    nbytes: int
    problem: Problem | None = None

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
    broken
        Entries that can't be read, whatever they were meant to be: links to nothing, pipes, names that are no UTF-8.
    strays
        Entries that no source reads: hidden files, links to folders that are listed already.
    """

    root: Path
    files: tuple[SourceFile, ...]
    broken: tuple[SourceFile, ...]
    strays: tuple[Stray, ...]

    def select(self, is_sample: Callable[[SourceFile], bool]) -> list[SourceFile]:
        """The files that are samples by their names, those that can't be read among them, in natural order."""
        return sorted(filter(is_sample, (*self.files, *self.broken)), key=lambda file: natural_key(file.path))

    def check(self, path: str) -> None:
        """Refuse an entry that can't be read.

        Raises
        ------
        SourceError
            It is among `broken`.
        """
        problems = [file.problem for file in self.broken if file.path == path and file.problem is not None]
        if problems:
            raise SourceError(problems)


def natural_key(path: str) -> tuple[tuple[tuple[str | tuple[int, str], ...], ...], str]:
    """Sort key that counts, folder by folder: data_2 before data_10. Equal numbers fall back on the text."""
    return tuple(
        tuple(_number(piece) if i % 2 else piece for i, piece in enumerate(_DIGITS.split(name)))
        for name in path.split("/")
    ), path


def _number(digits: str) -> tuple[int, str]:
    """A key that orders as int does, which refuses thousands of digits."""
    digits = digits.lstrip("0")
    return len(digits), digits


def stem(path: str) -> str:
    """The path without its last extension: the sample id of a file."""
    head, slash, name = path.rpartition("/")
    base = name.rpartition(".")[0] or name
    return head + slash + base


def file_items(files: Iterable[SourceFile]) -> list[SourceItem]:
    """Make one item of each file, its id the path without extension; files that claim one id are all refused.

    A file and its twin in `.gz` are one item: who loads it holds them to be of one content.
    """
    claims: dict[str, list[SourceFile]] = {}
    for file in files:
        claims.setdefault(stem(file.path.removesuffix(PACKED)), []).append(file)
    items: list[SourceItem] = []
    for sample_id, members in claims.items():
        if len(members) == 2 and members[1].path == members[0].path + PACKED:
            paths, problem = tuple(file.path for file in members), members[0].problem or members[1].problem
            nbytes = sum(file.nbytes for file in members)
            items.append(SourceItem(paths[0], len(items), sample_id, paths, nbytes, problem))
            continue
        for file in members:
            problem = file.problem
            if problem is None and len(members) > 1:
                problem = Problem(
                    file.path,
                    f"one file for the sample {sample_id}",
                    f"{len(members)} files of that name with different extensions",
                    "move all but one away",
                )
            items.append(SourceItem(file.path, len(items), sample_id, (file.path,), file.nbytes, problem))
    return items


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
