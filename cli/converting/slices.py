"""Slices of a conversion: a pure function on some items of a source, run here or on a pool of processes.

A slice opens a writer of its own and commits parts of its own, so that slices need to know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hsfmt import layout
from hsfmt.cli.boards import Board, until_told
from hsfmt.cli.converting.committed_copies import Window
from hsfmt.cli.converting.deletion import Batch, Removed, load
from hsfmt.cli.converting.rereading import Digests, digests_of
from hsfmt.cli.converting.reshaping import Piece, Reshaping, TooFewLossTokensError, pieces
from hsfmt.errors import FormatError, HsfmtError, NonFiniteError, Problem, SampleError, SourceError
from hsfmt.header import Header
from hsfmt.readers.sources import AbsentSampleError, Source, SourceItem, SourceSample
from hsfmt.storage import open_store
from hsfmt.writers.dataset_writer import DatasetWriter
from hsfmt.writers.extras import Extra, check_scale, extra_values, parse_extras, with_scale
from hsfmt.writers.samples import make_sample, scan

BAD_FILE = (SourceError, SampleError, FormatError)
FIX = "fix or remove the file"
_SHOWN_IDS = 20
_SUMMED = (
    "written", "samples", "already", "same", "masks", "all_zero", "all_one", "blank", "too_few", "trimmed",
    "trimmed_tokens", "split", "windows", "cast", "verified",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Task:
    """What all slices of a conversion share.

    Attributes
    ----------
    source
        The foreign folder.
    url, header
        The dataset, which is made with the first sample, and what it means.
    writer
        Keyword arguments of DatasetWriter.
    on_bad, nonfinite
        "raise" or "hole": what a file that can't be taken, and one with NaN or Inf, does; nonfinite also "keep".
    recorded_holes
        Id to reason, of holes that are committed already and need not be recorded again.
    reshaping
        What is changed about the samples.
    unfinished
        Item number to window number to window, of samples that were split of which other windows are not committed.
    remedy
        What the user can do about an id that the dataset has for another sample.
    delete
        Delete the files of what is committed, once it was read again.
    kept
        Numbers of the items whose files stay even so.
    """

    source: Source
    url: str
    header: Header
    writer: Mapping[str, Any]
    on_bad: str
    nonfinite: str
    recorded_holes: Mapping[str, str]
    reshaping: Reshaping = field(default_factory=Reshaping)
    unfinished: Mapping[int, Mapping[int, Window]] = field(default_factory=dict)
    remedy: str = ""
    delete: bool = False
    kept: frozenset[int] = frozenset()


@dataclass(slots=True)
class Tally:
    """What became of a slice's items, for the report.

    Attributes
    ----------
    written
        Numbers of items of which samples were written.
    samples
        Those samples: more where some were split.
    already
        Numbers of items whose id another writer committed since the conversion began.
    same
        Numbers of items whose content was compared with the committed sample's and found to be the same.
    conflicts
        Item number to what is wrong, of items whose id the dataset has for another sample.
    holes
        Item number to reason.
    failed
        Number of the item that stopped the slice, or None.
    error
        Why.
    masks, all_zero, all_one
        Samples with a loss mask of their own, those where it is 0, and 1, throughout.
    unsupervised
        Ids of the first samples without a supervised token.
    blank, blank_ids
        Samples with a state [token, layer] that is zero throughout, as a file cut or never filled leaves it, and the
        ids of the first of them.
    too_few
        Items with fewer supervised tokens than asked for; their numbers are among the holes.
    trimmed, trimmed_tokens
        Samples that lost padding, and the tokens of it.
    split, windows
        Samples that were split, and the windows that were written of them.
    cast
        Samples whose states were changed to another dtype.
    verified
        Numbers of items whose samples were read again from the dataset.
    removed
        What became of their files.
    """

    written: list[int] = field(default_factory=list)
    samples: int = 0
    already: list[int] = field(default_factory=list)
    same: list[int] = field(default_factory=list)
    conflicts: dict[int, Problem] = field(default_factory=dict)
    holes: dict[int, str] = field(default_factory=dict)
    failed: int | None = None
    error: HsfmtError | None = None
    masks: int = 0
    all_zero: int = 0
    all_one: int = 0
    unsupervised: list[str] = field(default_factory=list)
    blank: int = 0
    blank_ids: list[str] = field(default_factory=list)
    too_few: int = 0
    trimmed: int = 0
    trimmed_tokens: int = 0
    split: int = 0
    windows: int = 0
    cast: int = 0
    verified: list[int] = field(default_factory=list)
    removed: Removed = field(default_factory=Removed)

    def take(self, number: int, sample: SourceSample, written: Sequence[Piece], cast: str | None) -> None:
        """Count an item's sample, and what was written of it."""
        if not written:
            return
        self.written.append(number)
        self.samples += len(written)
        trimmed = sum(piece.trimmed for piece in written)
        self.trimmed += trimmed > 0
        self.trimmed_tokens += trimmed
        windows = sum(piece.window is not None for piece in written)
        self.split += windows > 0
        self.windows += windows
        self.cast += cast is not None and sample.hidden_states.dtype.name != cast
        if _has_zero_state(sample.hidden_states):
            self.blank += 1
            self.blank_ids = [*self.blank_ids, sample.sample_id][:_SHOWN_IDS]
        mask = sample.loss_mask
        if mask is not None:
            supervised = int(np.count_nonzero(mask))
            self.masks += 1
            self.all_zero += supervised == 0
            self.all_one += supervised == len(mask)
            if not supervised and len(self.unsupervised) < _SHOWN_IDS:
                self.unsupervised.append(sample.sample_id)

    def add(self, other: Tally) -> None:
        """Add another slice's figures."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.removed.add(other.removed)
        self.conflicts |= other.conflicts
        self.holes |= other.holes
        if self.error is None:
            self.failed, self.error = other.failed, other.error
        self.unsupervised = (self.unsupervised + other.unsupervised)[:_SHOWN_IDS]
        self.blank_ids = (self.blank_ids + other.blank_ids)[:_SHOWN_IDS]


def _has_zero_state(states: npt.NDArray[Any]) -> bool:
    """Say whether a state [token, layer] of states [T, L, H] is zero throughout."""
    # The first channel is hardly ever zero, and spares all the others.
    tokens, layers = np.nonzero(states[:, :, 0] == 0)
    return any(not states[token, layer].any() for token, layer in zip(tokens.tolist(), layers.tolist(), strict=True))


def convert_slice(task: Task, numbers: Sequence[int], board: Board) -> Tally:
    """Convert some items of the source into parts of their own; one sample is in memory at a time.

    A file that can't be taken ends the slice under on_bad="raise": what was taken before it is committed. With
    `task.delete`, the files of what was committed are deleted after their parts were read again.

    Raises
    ------
    StorageError, CorruptionError
        Source or dataset can't be read or written; the open part is not committed.
    KeyboardInterrupt
        The board says ABANDON.
    """
    tally = Tally()
    with _Output(task) as output:
        for number in until_told(numbers, board):
            item = task.source.items[number]
            with board.room(item.nbytes):
                tally.error = _convert_item(task, number, output, tally)
            if tally.error is not None:
                tally.failed = number
                for unrecorded in output.holes:
                    del tally.holes[unrecorded]
                break
            board.advance(item.nbytes)
        if output.holes and tally.error is None:
            output.open()
    if output.batch is not None:
        tally.verified += output.batch.delete(open_store(task.url), task.header, tally.removed)
    return tally


class _Output:
    """The slice's writer, opened for the first sample that it will take: bad files alone make no dataset.

    Attributes
    ----------
    holes
        Item number to (id, reason), until the writer is open.
    batch
        What is to be read again, and deleted; None where nothing is.
    """

    def __init__(self, task: Task) -> None:
        self.holes: dict[int, tuple[str, str]] = {}
        self.batch = Batch(task.source) if task.delete else None
        self._task = task
        self._writer: DatasetWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.__exit__(kind, error, trace)

    def check(self, piece: Piece) -> bytes | None:
        """Refuse what the writer would, as long as there is none, and in the windows of a sample before one is written.

        Returns
        -------
        bytes or None
            The content digest, if the piece was looked at.
        """
        if self._writer is not None and piece.window is None:
            return None
        header, sample = self._task.header, piece.sample
        given = (sample.input_ids, sample.hidden_states, sample.loss_mask)
        checked = make_sample(header, sample.sample_id, *given, piece.metadata)
        declared, count = _declared(self._task), self._task.nonfinite != "keep"
        values = extra_values(declared, sample.extras, checked.n_tokens, f"sample {sample.sample_id!r}")
        content, bad = scan(checked, header, count_nonfinite=count)
        bad += check_scale(header, values, sample.sample_id, count_nonfinite=count)
        if bad:
            got = f"{bad} NaN or Inf values in {checked.n_tokens} tokens"
            raise NonFiniteError.at(f"sample {sample.sample_id!r}", expected="finite states", got=got)
        return content

    def open(self) -> DatasetWriter:
        """Return the writer."""
        if self._writer is None:
            self._writer = DatasetWriter(self._task.url, **self._task.writer, part_names=self._part_name)
            # What is wrong with the dataset shows here, not as a fault of the first file.
            self._writer.committed_ids()
            while self.holes:
                self._writer.hole(*self.holes.popitem()[1])
        return self._writer

    def _part_name(self) -> str:
        name = layout.new_part_name()
        if self.batch is not None:
            self.batch.add_parts([name])
        return name

    def hole(self, number: int, sample_id: str, reason: str) -> None:
        """Record a hole, now or with the first sample."""
        if self._writer is None:
            self.holes[number] = sample_id, reason
        else:
            self._writer.hole(sample_id, reason)


def _convert_item(task: Task, number: int, output: _Output, tally: Tally) -> HsfmtError | None:
    """Convert one item, wholly or not at all; return why it ends the slice, or None."""
    item = task.source.items[number]
    if output.batch is not None:
        output.batch.begin(item)
    try:
        sample = load(task.source, item, any_dtype=task.reshaping.cast is not None)
        made, problem = _checked(task, number, sample, output)
    except (*BAD_FILE, TooFewLossTokensError) as error:
        return _refused(task, number, error, output, tally)
    if problem is not None:
        tally.conflicts[number] = problem
        return SourceError([problem]) if task.on_bad == "raise" else None
    writer = output.open()
    written: list[Piece] = []
    expected: dict[str, Digests] = {}
    n_pieces = 0
    try:
        for piece in made:
            n_pieces += 1
            if not _write(writer, item, piece):
                continue
            if output.batch is not None:
                declared = _declared(task)
                expected[piece.sample.sample_id] = digests_of(task.header, declared, piece.sample, piece.metadata)
            # Without its states, of which each window may be a copy.
            written.append(replace(piece, sample=replace(piece.sample, hidden_states=sample.hidden_states[:0])))
    except BAD_FILE as error:
        return _refused(task, number, error, output, tally)
    tally.take(number, sample, written, task.reshaping.cast)
    there = 0 if task.delete else len(task.unfinished.get(number, {}))
    if len(written) + there < n_pieces:
        tally.already.append(number)
    elif output.batch is not None and number not in task.kept:
        output.batch.take(number, expected)
    return None


def _checked(task: Task, number: int, sample: SourceSample, output: _Output) -> tuple[Iterable[Piece], Problem | None]:
    """Refuse a sample before anything of it is written; return its pieces, and what is wrong with committed windows."""
    item, there = task.source.items[number], task.unfinished.get(number, {})
    for piece in pieces(item, sample, task.reshaping):
        content = output.check(piece)
        if piece.window is None:
            return [piece], None
        found = there.get(piece.window)
        if found is not None and found.content != content:
            expected = f"the window {piece.sample.sample_id!r} as it is committed"
            return (), Problem(item.key, expected, "another one", task.remedy, (piece.sample.sample_id,))
    return pieces(item, sample, task.reshaping), None


def _write(writer: DatasetWriter, item: SourceItem, piece: Piece) -> bool:
    sample = piece.sample
    return writer.write(
        sample.sample_id,
        sample.input_ids,
        sample.hidden_states,
        sample.loss_mask,
        piece.metadata,
        source_index=item.index,
        **sample.extras,
    )


def _declared(task: Task) -> dict[str, Extra]:
    return with_scale(parse_extras(task.writer.get("extras")), task.header)


def _refused(task: Task, number: int, error: HsfmtError, output: _Output, tally: Tally) -> HsfmtError | None:
    item = task.source.items[number]
    nonfinite = isinstance(error, NonFiniteError)
    policy = task.nonfinite if nonfinite else task.on_bad
    if policy != "hole" and not isinstance(error, AbsentSampleError | TooFewLossTokensError):
        option = "--nonfinite" if nonfinite else "--on-bad"
        remedy = f"or pass {option} hole to record a hole for each such file"
        return naming(error, item, f"{remedy}, or --nonfinite keep to store it as it is" if nonfinite else remedy)
    reason = reason_of(error, item)
    tally.holes[number] = reason
    tally.too_few += isinstance(error, TooFewLossTokensError)
    if task.recorded_holes.get(item.sample_id) != reason:
        output.hole(number, item.sample_id, reason)
    return None


def reason_of(error: HsfmtError, item: SourceItem | None = None) -> str:
    """Return an error as the reason of a hole, naming its file where that is not the one the item is named by."""
    reasons = []
    for problem in error.problems:
        file = problem.where.partition("[")[0]
        known = item is None or file.startswith(item.key) or item.key.startswith(file)
        place = "" if known or not isinstance(error, SourceError) else f"{problem.where}: "
        reasons.append(f"{place}expected {problem.expected}, got {problem.got}")
    return "; ".join(reasons)


def naming(error: HsfmtError, item: SourceItem, remedy: str = "") -> HsfmtError:
    """Return the error as one about the item's file, whoever found the fault; it is a fault of the data.

    Parameters
    ----------
    error, item
        What is wrong, and with which item.
    remedy
        What else than mending the file can be done about it.
    """
    from_source = isinstance(error, SourceError)
    named = SourceError(
        replace(
            problem,
            where=problem.where if from_source else f"{item.key}: {problem.where}",
            # The writer's remedies are for those who call it.
            remedy=", ".join(filter(None, ((problem.remedy if from_source else "") or FIX, remedy))),
        )
        for problem in error.problems
    )
    named.__cause__ = error
    return named
