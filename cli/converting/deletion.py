"""`--delete-source`: which files may go, and when. A file goes once its samples are committed and were read again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hsfmt.cli.converting.rereading import Digests, reread
from hsfmt.errors import CorruptionError, HsfmtError, Problem, StorageError, UsageError
from hsfmt.header import Header
from hsfmt.readers.sources import Source, SourceItem, SourceSample
from hsfmt.storage import Store

Stamp = tuple[int, int, int, int, int, int]
# What no file has: for one that was not there yet when the folder was listed.
_NONE: Stamp = (-1, -1, -1, -1, -1, 0)
_SHOWN = 20


def check_deletable(source: Source, numbers: Iterable[int]) -> None:
    """Refuse, before anything is read, files that could not be deleted or whose deletion would not free the disk.

    Raises
    ------
    UsageError
        Links, or folders that can't be written to; the first ones by name.
    """
    problems: list[Problem] = []
    folders: dict[str, Problem | None] = {}
    for number in numbers:
        item = source.items[number]
        for path in (*item.paths, *item.shared):
            folder = path.rpartition("/")[0]
            if folder not in folders:
                folders[folder] = problem = _folder_problem(source.root, folder)
                problems += [problem] if problem else []
            if (source.root / path).is_symlink():
                remedy = "convert the folder that it leads to, or leave --delete-source out"
                problems.append(Problem(path, "a file of its own to delete (--delete-source)", "a link", remedy))
    if problems:
        raise UsageError(problems[:_SHOWN])


def _folder_problem(root: Path, folder: str) -> Problem | None:
    where = folder or str(root)
    path = root
    for name in folder.split("/") if folder else ():
        path /= name
        if path.is_symlink():
            remedy = "convert the folder that it leads to, or leave --delete-source out"
            return Problem(where, "a folder of its own to delete files from (--delete-source)", "a link", remedy)
    if os.access(path, os.W_OK | os.X_OK):
        return None
    remedy = "make it writable, or leave --delete-source out"
    return Problem(where, "a folder that files can be deleted from (--delete-source)", "one that can't be", remedy)


def stamps(root: Path, paths: Iterable[str]) -> dict[str, Stamp]:
    """Return what tells whether each file is still the same one; files that are not there are left out."""
    found: dict[str, Stamp] = {}
    for path in paths:
        with suppress(OSError):
            found[path] = _stamp(os.lstat(root / path))
    return found


def all_stamps(root: Path) -> dict[str, Stamp]:
    """Return the stamps of all files under a folder; folders that can't be listed, and links, are left to others.

    Taken before a source is listed: a file that changed since is not the one that was listed.
    """
    found: dict[str, Stamp] = {}
    folders = [""]
    while folders:
        prefix = folders.pop()
        with suppress(OSError), os.scandir(root / prefix) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{prefix}{entry.name}/")
                else:
                    found[prefix + entry.name] = _stamp(entry.stat(follow_symlinks=False))
    return found


def _stamp(status: os.stat_result) -> Stamp:
    # A copy may bring size and mtime along, but never ctime.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink


def _is_same(now: Stamp, seen: Stamp) -> bool:
    """Say whether a file is as it was. Deleting another link to it changes its ctime, and the number of its links."""
    return now == seen or (now[:4] == seen[:4] and now[5] < seen[5])


def has_files(source: Source, item: SourceItem) -> bool:
    """Say whether an item can be read, so that its files may be compared and deleted."""
    return item.problem is None and bool(stamps(source.root, (*item.paths, *item.shared)))


def load(source: Source, item: SourceItem, *, any_dtype: bool) -> SourceSample:
    """Read an item, as `Source.load` does.

    Raises
    ------
    StorageError
        Also where a file that was listed is gone, which says who deletes such files.
    SourceError, UsageError
        As `Source.load`.
    """
    try:
        return source.load(item, any_dtype=any_dtype)
    except HsfmtError as error:
        paths = (*item.paths, *item.shared)
        gone = [path for path in paths if path not in stamps(source.root, paths)]
        if not gone:
            raise
        expected, got = "a file, as it was listed", "none: deleted meanwhile, as another convert --delete-source does"
        remedy = "run this command again: it goes on from what is committed"
        raise StorageError.at(gone[0], expected=expected, got=got, remedy=remedy) from error


@dataclass(slots=True)
class Removed:
    """What became of files: paths relative to the source that were deleted, and that changed since they were read."""

    deleted: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def remove(self, root: Path, paths: Sequence[str], seen: Mapping[str, Stamp]) -> None:
        """Delete files that are as they were when `seen` was taken, before they were read.

        Those that go with a data file go before it, so that none is left that looks like a file whose data never came.
        What is gone already, another conversion has deleted.

        Raises
        ------
        StorageError
            One can't be deleted.
        """
        now = stamps(root, paths)
        if not all(_is_same(now.get(path, seen[path]), seen[path]) for path in paths if path in seen):
            self.changed.extend(paths)
            return
        for path in reversed(paths):
            if path not in seen:
                continue
            try:
                (root / path).unlink()
            except FileNotFoundError:
                continue
            except OSError as error:
                expected = "to delete the file, whose samples are committed and were read again"
                raise StorageError.at(path, expected=expected, got=error.strerror or str(error)) from error
            self.deleted.append(path)

    def add(self, other: Removed) -> None:
        """Add another's paths."""
        self.deleted += other.deleted
        self.changed += other.changed


class Batch:
    """The items of a slice whose files may be deleted once their parts were read again.

    Parameters
    ----------
    source
        The source.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._seen: dict[str, Stamp] = {}
        self._numbers: list[int] = []
        self._expected: dict[str, Digests] = {}
        self._parts: set[str] = set()

    def begin(self, item: SourceItem) -> None:
        """Take note of an item's files before they are read."""
        self._seen |= stamps(self._source.root, item.paths)

    def take(self, number: int, expected: Mapping[str, Digests], parts: Iterable[str] = ()) -> None:
        """Take note of an item's samples by id, and of the parts that they are in."""
        self._numbers.append(number)
        self._expected |= expected
        self.add_parts(parts)

    def add_parts(self, parts: Iterable[str]) -> None:
        """Take note of parts that hold samples of the slice."""
        self._parts.update(parts)

    def delete(self, store: Store, header: Header, removed: Removed) -> list[int]:
        """Read the parts again, and delete the files of all items that were taken; return the items' numbers.

        Raises
        ------
        CorruptionError
            A sample is not what was read from the source; no file was deleted.
        NotFoundError, StorageError
            A part can't be read, or a file not be deleted.
        """
        if not self._numbers:
            return []
        found: set[str] = set()
        for part in sorted(self._parts):
            found |= reread(store, part, header, self._expected)
        lost = sorted(self._expected.keys() - found)
        if lost:
            raise CorruptionError.at(
                store.url, expected="the samples that were converted", got="none of these", samples=tuple(lost)
            )
        for number in self._numbers:
            removed.remove(self._source.root, self._source.items[number].paths, self._seen)
        return self._numbers


def delete_left_over(
    source: Source, paths: Sequence[str], parts: Iterable[str], store: Store, header: Header, removed: Removed
) -> None:
    """Delete what a run left that was killed while it deleted files that go together; the parts are read again before.

    Raises
    ------
    CorruptionError, NotFoundError, StorageError
        As `Batch.delete`.
    """
    seen = stamps(source.root, paths)
    for part in sorted(parts):
        reread(store, part, header, {})
    removed.remove(source.root, paths, seen)


class Containers:
    """The files that hold samples of several items: one goes when all of its items are committed and were read again.

    Where the source can't be listed without one of them, all go together, after the last item.

    Parameters
    ----------
    source
        The source as it was listed.
    listed
        Stamps of its files from before it was listed: what it has of a file's samples is true of that file alone.
    """

    def __init__(self, source: Source, listed: Mapping[str, Stamp]) -> None:
        self._root = source.root
        self._items = source.items
        self._left: dict[str, set[int]] = {}
        for number, item in enumerate(source.items):
            for path in item.shared:
                self._left.setdefault(path, set()).add(number)
        self._seen = {path: listed.get(path, _NONE) for path in self._left}
        self._together = source.needs_all_files
        self._ready: list[str] = []

    def settle(self, numbers: Iterable[int], removed: Removed) -> None:
        """Take note that items are committed and were read again; delete the files that were waiting for them alone.

        Raises
        ------
        StorageError
            One can't be deleted.
        """
        for number in numbers:
            for path in self._items[number].shared:
                left = self._left.get(path)
                if left is None:
                    continue
                left.discard(number)
                if not left:
                    del self._left[path]
                    self._ready.append(path)
        if self._left and self._together:
            return
        while self._ready:
            removed.remove(self._root, [self._ready.pop()], self._seen)
