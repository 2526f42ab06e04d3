"""Slices of a conversion: a pure function on some items of a source, run here or on a pool of processes.

A slice opens a writer of its own and commits parts of its own, so that slices need to know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from hsfmt.cli.boards import Board, until_told
from hsfmt.errors import FormatError, HsfmtError, NonFiniteError, Problem, SampleError, SourceError
from hsfmt.header import Header
from hsfmt.readers.sources import AbsentSampleError, Source, SourceItem, SourceSample
from hsfmt.writers.dataset_writer import DatasetWriter
from hsfmt.writers.samples import make_sample, scan

BAD_FILE = (SourceError, SampleError, FormatError)
FIX = "fix or remove the file"
_SHOWN_IDS = 20


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
    """

    source: Source
    url: str
    header: Header
    writer: Mapping[str, Any]
    on_bad: str
    nonfinite: str
    recorded_holes: Mapping[str, str]


@dataclass(slots=True)
class Tally:
    """What became of a slice's items, for the report.

    Attributes
    ----------
    samples
        Samples written.
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
    """

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

    def take(self, sample: SourceSample) -> None:
        """Count a written sample."""
        self.samples += 1
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
        for name in ("samples", "already", "same", "masks", "all_zero", "all_one"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.conflicts |= other.conflicts
        self.holes |= other.holes
        if self.error is None:
            self.failed, self.error = other.failed, other.error
        self.unsupervised = (self.unsupervised + other.unsupervised)[:_SHOWN_IDS]


def convert_slice(task: Task, numbers: Sequence[int], board: Board) -> Tally:
    """Convert some items of the source into parts of their own; one sample is in memory at a time.

    A file that can't be taken ends the slice under on_bad="raise": what was taken before it is committed.

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
            tally.error = _convert_item(task, number, output, tally)
            if tally.error is not None:
                tally.failed = number
                for unrecorded in output.holes:
                    del tally.holes[unrecorded]
                return tally
            board.advance(item.nbytes)
        if output.holes:
            output.open()
    return tally


class _Output:
    """The slice's writer, opened for the first sample that it will take: bad files alone make no dataset.

    Attributes
    ----------
    holes
        Item number to (id, reason), until the writer is open.
    """

    def __init__(self, task: Task) -> None:
        self.holes: dict[int, tuple[str, str]] = {}
        self._task = task
        self._writer: DatasetWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.__exit__(kind, error, trace)

    def check(self, item: SourceItem, sample: SourceSample) -> None:
        """Refuse what the writer would, as long as there is none."""
        if self._writer is not None:
            return
        header, given = self._task.header, (sample.input_ids, sample.hidden_states, sample.loss_mask)
        checked = make_sample(header, item.sample_id, *given, _metadata(item, sample))
        _, bad = scan(checked, header, count_nonfinite=self._task.nonfinite != "keep")
        if bad:
            got = f"{bad} NaN or Inf values in {checked.n_tokens} tokens"
            raise NonFiniteError.at(f"sample {item.sample_id!r}", expected="finite states", got=got)

    def open(self) -> DatasetWriter:
        """Return the writer."""
        if self._writer is None:
            self._writer = DatasetWriter(self._task.url, **self._task.writer)
            # What is wrong with the dataset shows here, not as a fault of the first file.
            self._writer.committed_ids()
            while self.holes:
                self._writer.hole(*self.holes.popitem()[1])
        return self._writer

    def hole(self, number: int, sample_id: str, reason: str) -> None:
        """Record a hole, now or with the first sample."""
        if self._writer is None:
            self.holes[number] = sample_id, reason
        else:
            self._writer.hole(sample_id, reason)


def _convert_item(task: Task, number: int, output: _Output, tally: Tally) -> HsfmtError | None:
    """Convert one item; return why it ends the slice, or None."""
    item = task.source.items[number]
    try:
        sample = task.source.load(item)
        output.check(item, sample)
    except BAD_FILE as error:
        return _refused(task, number, error, output, tally)
    writer = output.open()
    try:
        written = writer.write(
            item.sample_id,
            sample.input_ids,
            sample.hidden_states,
            sample.loss_mask,
            _metadata(item, sample),
            source_index=item.index,
            **sample.extras,
        )
    except BAD_FILE as error:
        return _refused(task, number, error, output, tally)
    if written:
        tally.take(sample)
    else:
        tally.already.append(number)
    return None


def _refused(task: Task, number: int, error: HsfmtError, output: _Output, tally: Tally) -> HsfmtError | None:
    item = task.source.items[number]
    nonfinite = isinstance(error, NonFiniteError)
    policy = task.nonfinite if nonfinite else task.on_bad
    if policy != "hole" and not isinstance(error, AbsentSampleError):
        option = "--nonfinite" if nonfinite else "--on-bad"
        remedy = f"or pass {option} hole to record a hole for each such file"
        return naming(error, item, f"{remedy}, or --nonfinite keep to store it as it is" if nonfinite else remedy)
    reason = reason_of(error)
    tally.holes[number] = reason
    if task.recorded_holes.get(item.sample_id) != reason:
        output.hole(number, item.sample_id, reason)
    return None


def _metadata(item: SourceItem, sample: SourceSample) -> dict[str, Any]:
    if "source" in sample.metadata:
        return {"source": item.key, "columns": sample.metadata}
    return {"source": item.key, **sample.metadata}


def reason_of(error: HsfmtError) -> str:
    """Return an error as the reason of a hole."""
    return "; ".join(f"expected {problem.expected}, got {problem.got}" for problem in error.problems)


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
