"""The committed samples that have the ids of a source's items, and which of them were made of the items' files.

A copy made of the same file, which did not change since, is taken as it is, so that resuming reads nothing again. A
file is the same one if the folder that it lies in is: renaming a folder, or linking to another one, leaves no trace at
the files in it. What can't be shown to be the same is read and compared.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt.catalog import load_index, without_superseded
from hsfmt.cli.converting.reshaping import split_of, window_of
from hsfmt.errors import Problem, UsageError
from hsfmt.manifest import PartManifest
from hsfmt.readers.sources import Source, SourceItem
from hsfmt.snapshot_builder import LoadedPart
from hsfmt.storage import Store

# In the producer: the marks of the folders that a run reads. Beyond so many they are left out, and nothing is trusted.
FOLDERS = "source_folders"
_MAX_FOLDERS = 4096
_RENAME = "rename one of the two files, convert them into datasets of their own, or leave --split-long out"
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a conversion reads, and how: what tells its own earlier samples from those of others.

    Attributes
    ----------
    folder
        Absolute path of the source.
    kind
        Name of its format.
    options
        Those that decide what a file is read as.
    host
        Where that path is: folders of two machines are not the same for having the same path.
    """

    folder: str
    kind: str
    options: Mapping[str, Any]
    host: str

    def reads_as(self, producer: Mapping[str, Any]) -> bool:
        """Say whether a part was made on this host, and of files that were read in this way."""
        options = producer.get("options")
        return (
            (producer.get("host"), producer.get("source_kind")) == (self.host, self.kind)
            and isinstance(options, Mapping)
            and all(options.get(name) == value for name, value in self.options.items())
        )

    def is_of(self, item: SourceItem, producer: Mapping[str, Any], metadata: Mapping[str, Any]) -> bool:
        """Say whether a sample was made of this very file, whichever folder above it was converted."""
        return f"{producer.get('source')}/{metadata.get('source')}" == f"{self.folder}/{item.key}"


@dataclass(frozen=True, slots=True)
class Window:
    """A committed window of a sample that was split.

    Attributes
    ----------
    part, row
        As in `Copies`.
    n_windows
        Windows that the sample was split into.
    content
        Content digest.
    own, trusted
        As in `Copies`.
    """

    part: int
    row: int
    n_windows: int
    content: bytes
    own: bool
    trusted: bool


@dataclass(slots=True)
class Copies:
    """The committed samples that have the ids of a source's items.

    Attributes
    ----------
    parts
        Names of parts.
    part, row
        int32 [item]: where the copy is that readers get; number in `parts`, -1 where the id is not committed.
    trusted
        bool [item]: that copy was made of the item's file as it is now.
    own
        bool [item]: some copy was made of the item's file.
    clashing
        bool [item]: there are copies of different content, of which readers get one.
    windows
        Item number to window number to where that window is, of items that are committed in windows. An item counts
        as committed once all its windows are.
    window_like
        Item number to a committed id that one of its windows could have, and that another sample has.
    """

    parts: list[str]
    part: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]
    trusted: npt.NDArray[np.bool_]
    own: npt.NDArray[np.bool_]
    clashing: npt.NDArray[np.bool_]
    windows: dict[int, dict[int, Window]] = field(default_factory=dict)
    window_like: dict[int, str] = field(default_factory=dict)

    def missing(self) -> list[int]:
        """Return the items whose id is not committed."""
        numbers: list[int] = np.flatnonzero(self.part < 0).tolist()
        return numbers

    def elsewhere(self) -> list[int]:
        """Return the items whose copy has to be compared, part by part, so that each index is loaded once."""
        return self.by_part(np.flatnonzero((self.part >= 0) & ~self.trusted).tolist())

    def by_part(self, numbers: Sequence[int]) -> list[int]:
        """Return items that are committed in the order of their copies."""
        chosen = np.array(numbers, np.int64)
        order: list[int] = chosen[np.lexsort((self.row[chosen], self.part[chosen]))].tolist()
        return order

    def unfinished(self) -> dict[int, dict[int, Window]]:
        """Return the windows of items of which others are not committed."""
        return {number: windows for number, windows in self.windows.items() if self.part[number] < 0}

    def take_window(self, number: int, window: int, found: Window) -> None:
        """Take note of a committed window; the first one is what readers get."""
        first = self.windows.setdefault(number, {}).setdefault(window, found)
        self.clashing[number] |= first.content != found.content

    def settle_windows(self) -> None:
        """Count the items as committed of which all windows are."""
        for number, windows in list(self.windows.items()):
            if self.part[number] >= 0:
                del self.windows[number]
                continue
            if any(found.n_windows != len(windows) for found in windows.values()):
                continue
            self.part[number], self.row[number] = windows[0].part, windows[0].row
            self.trusted[number] = all(found.trusted for found in windows.values())
            self.own[number] = any(found.own for found in windows.values())

    def place(self, number: int, window: int | None) -> tuple[int, int] | None:
        """Return (part, row) of the copy of an item, or of one of its windows; None where it is committed otherwise."""
        windows = self.windows.get(number)
        if windows is None:
            return (int(self.part[number]), int(self.row[number])) if window is None else None
        found = windows.get(window) if window is not None else None
        return (found.part, found.row) if found else None


def find_copies(
    store: Store, manifests: Mapping[str, PartManifest], source: Source, origin: Origin, numbers: Iterable[int]
) -> Copies:
    """Look for the ids of some items in all committed parts; one index is in memory at a time.

    Raises
    ------
    NotFoundError, CorruptionError
        A part's index can't be read, or is not the one that was committed.
    """
    items, n = source.items, len(source.items)
    wanted: dict[str, list[int]] = {}
    for number in numbers:
        wanted.setdefault(items[number].sample_id, []).append(number)
    files = _Files(source, origin.folder)
    flags = [np.zeros(n, np.bool_) for _ in range(3)]
    parts = _in_order(manifests)
    copies = Copies(parts, np.full(n, -1, np.int32), np.zeros(n, np.int32), flags[0], flags[1], flags[2])
    content = np.zeros((n, 16), np.uint8)
    for place, part in enumerate(copies.parts):
        manifest = manifests[part]
        index = load_index(store, manifest)
        alike = origin.reads_as(manifest.producer)
        since, folders = _started(manifest.producer), _recorded_folders(manifest.producer)
        for row in range(index.n_samples):
            sample_id = index.sample_id(row)
            found, split = wanted.get(sample_id, ()), None
            if not found and (window := window_of(sample_id)) is not None and window[0] in wanted:
                split = split_of(index.metadata(row))
                found = wanted[window[0]] if split is not None and split[0] == window[1] else ()
                if not found:
                    copies.window_like |= dict.fromkeys(wanted[window[0]], sample_id)
            metadata = index.metadata(row) if found and alike else {}
            for number in found:
                own = alike and origin.is_of(items[number], manifest.producer, metadata)
                trusted = own and files.changed(items[number]) <= since and files.folders(items[number]) <= folders
                digest = index.content_digest[row]
                if split is not None:
                    window_copy = Window(place, row, split[1], digest.tobytes(), own=own, trusted=trusted)
                    copies.take_window(number, split[0], window_copy)
                    continue
                copies.own[number] |= own
                if copies.part[number] < 0:
                    copies.part[number], copies.row[number] = place, row
                    copies.trusted[number] = trusted
                    content[number] = digest
                elif not np.array_equal(content[number], digest):
                    copies.clashing[number] = True
    copies.settle_windows()
    return copies


def check_windows(source: Source, split_long: int | None, copies: Copies) -> None:
    """Refuse ids that a sample and a window of another one would share, before anything is written.

    Raises
    ------
    UsageError
        The source has such ids, or the dataset has; the first ones by name.
    """
    if split_long is None:
        return
    numbers = {item.sample_id: number for number, item in enumerate(source.items)}
    taken = {number: f"the sample {sample_id!r} of the dataset" for number, sample_id in copies.window_like.items()}
    for item in source.items:
        window = window_of(item.sample_id)
        if window is not None and window[0] in numbers:
            taken.setdefault(numbers[window[0]], f"the sample {item.sample_id!r} of {item.key}")
    problems = []
    for number in sorted(taken):
        item = source.items[number]
        n_tokens = source.n_tokens(item)
        # What is committed as a whole is not cut any more.
        if (copies.part[number] < 0 or number in copies.windows) and (n_tokens is None or n_tokens > split_long):
            expected = f"ids for the windows of {item.sample_id!r} that nothing else has (--split-long)"
            problems.append(Problem(item.key, expected, taken[number], _RENAME, (item.sample_id,)))
    if problems:
        raise UsageError(problems[:_SHOWN])


def _in_order(manifests: Mapping[str, PartManifest]) -> list[str]:
    """Return the parts with samples so that the first copy of an id is the one that readers get."""
    live = {part.manifest.part for part in without_superseded(LoadedPart(m, None) for m in manifests.values())}
    return sorted(
        (name for name, m in manifests.items() if m.counts.samples), key=lambda name: (name not in live, name)
    )


def _started(producer: Mapping[str, Any]) -> float:
    try:
        return datetime.fromisoformat(producer["started"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0.0


def folders_of(source: Source, folder: str, numbers: Iterable[int]) -> list[str]:
    """Return the marks of the folders that some items are read from, for the producer; none where they are too many.

    Parameters
    ----------
    source, folder
        The source, and its absolute path.
    numbers
        Which items.
    """
    files = _Files(source, folder)
    marks: set[str] = set()
    for number in numbers:
        marks |= files.folders(source.items[number])
    marks.discard(_UNKNOWN)
    return sorted(marks) if len(marks) <= _MAX_FOLDERS else []


def _recorded_folders(producer: Mapping[str, Any]) -> frozenset[str]:
    recorded = producer.get(FOLDERS)
    return frozenset(filter(lambda mark: isinstance(mark, str), recorded if isinstance(recorded, list) else ()))


# The mark of a folder that can't be looked at, which is never recorded.
_UNKNOWN = ""


class _Files:
    """What the file system tells of the files that items are read from.

    Parameters
    ----------
    source, folder
        The source, and its absolute path.
    """

    def __init__(self, source: Source, folder: str) -> None:
        self._root = Path(folder)
        self._deciding = [support.path for support in source.support if support.role in ("arrow", "index")]
        self._marks: dict[Path, str] = {}

    def changed(self, item: SourceItem) -> float:
        """Return when the newest of the files that hold an item was changed, in seconds since 1970."""
        times = []
        for path in self._paths(item):
            with suppress(OSError):  # loading the item says it, where it is loaded
                for status in ((self._root / path).stat(), (self._root / path).lstat()):
                    # mtime is what cp -a and rsync -a copy; ctime says when this file, or this link, came to be so.
                    times += [status.st_mtime, status.st_ctime]
        return max(times, default=0.0)

    def folders(self, item: SourceItem) -> set[str]:
        """Return the marks of the folders that an item's files lie in, and of those that links lead to."""
        marks = set()
        for path in self._paths(item):
            file = Path(os.path.normpath(self._root / path))
            marks.add(self._mark(file.parent))
            if file.is_symlink():
                marks.add(self._mark(Path(os.path.realpath(file)).parent))
        return marks

    def _paths(self, item: SourceItem) -> list[str]:
        return [*item.paths[:1], *item.shared, *self._deciding]

    def _mark(self, folder: Path) -> str:
        """Return 16 hex digits of a folder's path and of what tells it from another folder of that path."""
        if folder not in self._marks:
            self._marks[folder] = _UNKNOWN
            with suppress(OSError):
                status, system = folder.stat(), os.statvfs(folder)
                # Device numbers alone are given again, to the next disk that is mounted.
                identity = f"{system.f_fsid}/{status.st_dev}/{status.st_ino}/{folder}"
                self._marks[folder] = hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()[:16]
        return self._marks[folder]
