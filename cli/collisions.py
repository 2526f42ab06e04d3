"""Ids that the dataset has already: the same sample, or another one that would be lost if it were skipped.

A copy made of the same file, which did not change since, is taken as it is, so that resuming reads nothing again. Any
other is compared by content.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt.catalog import load_index, load_manifest, without_superseded
from hsfmt.cli.boards import Board, until_told
from hsfmt.cli.slices import BAD_FILE, FIX, Tally, naming, reason_of
from hsfmt.digests import from_raw
from hsfmt.errors import Problem, SourceError
from hsfmt.header import Header
from hsfmt.index import PartIndex
from hsfmt.manifest import PartManifest
from hsfmt.readers.sources import AbsentSampleError, Source, SourceItem, SourceSample
from hsfmt.snapshot_builder import LoadedPart
from hsfmt.storage import Store, open_store
from hsfmt.writers.extras import digest_extras, extra_values, with_scale
from hsfmt.writers.samples import make_sample, scan


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
    """

    parts: list[str]
    part: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]
    trusted: npt.NDArray[np.bool_]
    own: npt.NDArray[np.bool_]
    clashing: npt.NDArray[np.bool_]

    def missing(self) -> list[int]:
        """Return the items whose id is not committed."""
        numbers: list[int] = np.flatnonzero(self.part < 0).tolist()
        return numbers

    def elsewhere(self) -> list[int]:
        """Return the items whose copy has to be compared, part by part, so that each index is loaded once."""
        numbers = np.flatnonzero((self.part >= 0) & ~self.trusted)
        order: list[int] = numbers[np.lexsort((self.row[numbers], self.part[numbers]))].tolist()
        return order


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
    flags = (np.zeros(n, np.bool_) for _ in range(3))
    copies = Copies(_in_order(manifests), np.full(n, -1, np.int32), np.zeros(n, np.int32), *flags)
    content = np.zeros((n, 16), np.uint8)
    for place, part in enumerate(copies.parts):
        manifest = manifests[part]
        index = load_index(store, manifest)
        alike = origin.reads_as(manifest.producer)
        since = _started(manifest.producer)
        for row in range(index.n_samples):
            found = wanted.get(index.sample_id(row), ())
            metadata = index.metadata(row) if found and alike else {}
            for number in found:
                own = alike and origin.is_of(items[number], manifest.producer, metadata)
                copies.own[number] |= own
                if copies.part[number] < 0:
                    copies.part[number], copies.row[number] = place, row
                    copies.trusted[number] = own and _changed(source, items[number]) <= since
                    content[number] = index.content_digest[row]
                elif not np.array_equal(content[number], index.content_digest[row]):
                    copies.clashing[number] = True
    return copies


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


def _changed(source: Source, item: SourceItem) -> float:
    """Return when the newest of the files that hold an item was changed, in seconds since 1970."""
    paths = [*item.paths[:1], *(support.path for support in source.support if support.role == "arrow")]
    times = []
    for path in paths:
        with suppress(OSError):  # loading the item says it, where it is loaded
            for status in ((source.root / path).stat(), (source.root / path).lstat()):
                # mtime is what cp -a and rsync -a copy; ctime says when this file, or this link, came to be what it is.
                times += [status.st_mtime, status.st_ctime]
    return max(times, default=0.0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What all slices of a comparison share.

    Attributes
    ----------
    source
        The foreign folder.
    url, header
        The dataset.
    copies
        Where its samples of the same ids are.
    on_bad
        "raise" to stop at the first conflict, "hole" to find all of them.
    remedy
        What the user can do about a conflict.
    """

    source: Source
    url: str
    header: Header
    copies: Copies
    on_bad: str
    remedy: str


def compare_slice(task: Comparison, numbers: Sequence[int], board: Board) -> Tally:
    """Compare some items with their committed copies; one sample and one index are in memory at a time.

    Raises
    ------
    StorageError, CorruptionError
        Source or dataset can't be read.
    KeyboardInterrupt
        The board says ABANDON.
    """
    tally = Tally()
    store = open_store(task.url)
    part: _Part | None = None
    for number in until_told(numbers, board):
        item = task.source.items[number]
        name = task.copies.parts[task.copies.part[number]]
        if part is None or part.manifest.part != name:
            part = _Part.load(store, name, task.header)
        row = int(task.copies.row[number])
        try:
            problem = _difference(task, item, task.source.load(item), part, row)
        except AbsentSampleError:
            problem = None  # the source has no sample that could be lost
        except BAD_FILE as error:
            if task.on_bad == "raise":
                tally.failed, tally.error = number, naming(error, item)
                break
            expected = f"a sample to compare with {part.describe(row)}"
            problem = Problem(item.key, expected, f"none: {reason_of(error)}", FIX, (item.sample_id,))
        if problem is None:
            tally.same.append(number)
        else:
            tally.conflicts[number] = problem
            if task.on_bad == "raise":
                tally.failed, tally.error = number, SourceError([problem])
                break
        board.advance(item.nbytes)
    return tally


@dataclass(frozen=True, slots=True)
class _Part:
    """A committed part that items are compared with."""

    manifest: PartManifest
    index: PartIndex

    @classmethod
    def load(cls, store: Store, name: str, header: Header) -> _Part:
        manifest = load_manifest(store, name, header)
        return cls(manifest, load_index(store, manifest))

    def describe(self, row: int) -> str:
        """Say which sample a row is and where it came from."""
        producer, file = self.manifest.producer, self.index.metadata(row).get("source")
        folder = producer.get("source")
        origin = f"{folder}/{file}" if isinstance(folder, str) and isinstance(file, str) else "an unknown origin"
        return f"the committed sample {self.index.sample_id(row)!r} (from {origin} on {producer.get('host')})"


def _difference(task: Comparison, item: SourceItem, sample: SourceSample, part: _Part, row: int) -> Problem | None:
    """Return None where the source's sample has the content that is committed."""
    header, index = task.header, part.index
    checked = make_sample(header, item.sample_id, sample.input_ids, sample.hidden_states, sample.loss_mask)
    content, _ = scan(checked, header, count_nonfinite=False)
    committed = index.content_digest[row].tobytes()
    got = f"another sample: {checked.n_tokens} tokens, content {from_raw(content)}"
    if content == committed:
        if header.scaling is None:
            return None
        # The states mean nothing without their scales, which the content digest leaves out.
        declared = with_scale({}, header)
        values = extra_values(declared, sample.extras, checked.n_tokens, item.key)
        if digest_extras(index.meta_bytes(row), declared, values) == index.extra_digest[row].tobytes():
            return None
        got = "other scales or extra columns"
    expected = f"{part.describe(row)}: {int(index.lengths[row])} tokens, content {from_raw(committed)}"
    return Problem(item.key, expected, got, task.remedy, (item.sample_id,))


def clash(task: Comparison, number: int) -> Problem:
    """Return what is wrong with an item whose id another conversion committed at the same time, for another sample."""
    item, copies = task.source.items[number], task.copies
    part = _Part.load(open_store(task.url), copies.parts[copies.part[number]], task.header)
    expected = f"one sample of the id {item.sample_id!r}"
    got = f"two of different content, of which readers get {part.describe(int(copies.row[number]))}"
    return Problem(item.key, expected, got, task.remedy, (item.sample_id,))
