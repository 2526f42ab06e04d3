"""Ids that the dataset has already: the same sample, or another one that would be lost if it were skipped.

Copies that were not made of the very file, or of another state of it, are compared by content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hsfmt.catalog import load_index, load_manifest
from hsfmt.cli.boards import Board, until_told
from hsfmt.cli.converting.committed_copies import Copies
from hsfmt.cli.converting.deletion import Batch, load
from hsfmt.cli.converting.rereading import Digests
from hsfmt.cli.converting.reshaping import Piece, Reshaping, TooFewLossTokensError, pieces
from hsfmt.cli.converting.slices import BAD_FILE, FIX, naming, reason_of
from hsfmt.cli.converting.tally import Tally
from hsfmt.columns import CORE_COLUMNS
from hsfmt.digests import from_raw
from hsfmt.errors import Problem, SourceError
from hsfmt.header import Header
from hsfmt.index import PartIndex
from hsfmt.manifest import PartManifest
from hsfmt.readers.sources import AbsentSampleError, Source, SourceItem
from hsfmt.storage import Store
from hsfmt.writers.extras import Extra, digest_extras, extra_values, with_scale
from hsfmt.writers.samples import make_sample, scan


@dataclass(frozen=True, slots=True)
class Comparison:
    """What all slices of a comparison share.

    Attributes
    ----------
    source
        The foreign folder.
    store, header
        The dataset.
    copies
        Where its samples of the same ids are.
    reshaping
        What is changed about the source's samples before they are compared.
    on_bad
        "raise" to stop at the first conflict, "hole" to find all of them.
    remedy
        What the user can do about a conflict.
    delete
        Delete the files of samples that are the same, once their parts were read again.
    kept
        Numbers of the items whose files stay even so.
    """

    source: Source
    store: Store
    header: Header
    copies: Copies
    reshaping: Reshaping
    on_bad: str
    remedy: str
    delete: bool = False
    kept: frozenset[int] = frozenset()


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
    parts = _Parts(task)
    batch = Batch(task.source) if task.delete else None
    for number in until_told(numbers, board):
        item = task.source.items[number]
        with board.room(item.nbytes):
            problem = _compare_item(task, number, parts, tally, batch)
        if tally.error is not None:
            break
        if problem is None:
            tally.same.append(number)
        else:
            tally.conflicts[number] = problem
            if task.on_bad == "raise":
                tally.failed, tally.error = number, SourceError([problem])
                break
        board.advance(item.nbytes)
    if batch is not None:
        tally.verified += batch.delete(task.store, task.header, tally.removed)
    return tally


def _compare_item(task: Comparison, number: int, parts: _Parts, tally: Tally, batch: Batch | None) -> Problem | None:
    """Return how an item differs from what is committed; what ends the slice is put into the tally."""
    item = task.source.items[number]
    part, row = parts.get(int(task.copies.part[number])), int(task.copies.row[number])
    if batch is not None:
        batch.begin(item)
    expected: dict[str, Digests] = {}
    used: set[str] = set()
    try:
        for piece in pieces(item, load(task.source, item, any_dtype=task.reshaping.cast is not None), task.reshaping):
            place = task.copies.place(number, piece.window)
            if place is None:
                got = f"the sample {piece.sample.sample_id!r}, as --split-long makes it now"
                return Problem(item.key, part.describe(row), got, task.remedy, (item.sample_id,))
            part, row = parts.get(place[0]), place[1]
            problem = _difference(task, item, piece, part, row)
            if problem is not None:
                return problem
            if batch is not None:
                digests = part.index.content_digest[row].tobytes(), part.index.extra_digest[row].tobytes()
                expected[piece.sample.sample_id] = digests
                used.add(part.manifest.part)
    except (AbsentSampleError, TooFewLossTokensError):
        return None  # the source has no sample that could be lost
    except BAD_FILE as error:
        if task.on_bad == "raise":
            tally.failed, tally.error = number, naming(error, item)
            return None
        words = f"a sample to compare with {part.describe(row)}"
        return Problem(item.key, words, f"none: {reason_of(error)}", FIX, (item.sample_id,))
    if batch is not None and number not in task.kept:
        batch.take(number, expected, used)
    return None


class _Parts:
    """The committed parts that items are compared with; one is in memory at a time."""

    def __init__(self, task: Comparison) -> None:
        self._task = task
        self._store = task.store
        self._number = -1
        self._part: _Part | None = None

    def get(self, number: int) -> _Part:
        """Return a part by its number among the copies' parts."""
        if self._part is None or number != self._number:
            self._part = _Part.load(self._store, self._task.copies.parts[number], self._task.header)
            self._number = number
        return self._part


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


def _difference(task: Comparison, item: SourceItem, piece: Piece, part: _Part, row: int) -> Problem | None:
    """Return None where the source's sample has the content that is committed."""
    header, index, sample = task.header, part.index, piece.sample
    checked = make_sample(header, sample.sample_id, sample.input_ids, sample.hidden_states, sample.loss_mask)
    content, _ = scan(checked, header, count_nonfinite=False)
    committed = index.content_digest[row].tobytes()
    got = f"another sample: {checked.n_tokens} tokens, content {from_raw(content)}"
    if content == committed:
        if header.scaling is None and not task.delete:
            return None
        # The states mean nothing without their scales, which the content digest leaves out.
        declared = _extras(part.manifest) if task.delete else with_scale({}, header)
        values = extra_values(declared, sample.extras, checked.n_tokens, item.key)
        if digest_extras(index.meta_bytes(row), declared, values) == index.extra_digest[row].tobytes():
            return None
        got = "other scales or extra columns"
    expected = f"{part.describe(row)}: {int(index.lengths[row])} tokens, content {from_raw(committed)}"
    return Problem(item.key, expected, got, task.remedy, (item.sample_id,))


def _extras(manifest: PartManifest) -> dict[str, Extra]:
    """Return the extra columns of a part as they were declared."""
    return {
        name: Extra(column.kind, column.dtype_name, column.shape[1:])
        for name, column in sorted(manifest.columns.items())
        if name not in CORE_COLUMNS
    }


def clash(task: Comparison, number: int) -> Problem:
    """Return what is wrong with an item whose id another conversion committed at the same time, for another sample."""
    item, copies = task.source.items[number], task.copies
    part = _Part.load(task.store, copies.parts[copies.part[number]], task.header)
    expected = f"one sample of the id {item.sample_id!r}"
    got = f"two of different content, of which readers get {part.describe(int(copies.row[number]))}"
    return Problem(item.key, expected, got, task.remedy, (item.sample_id,))
