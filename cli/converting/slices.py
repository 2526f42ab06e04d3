"""Slices of a conversion: a pure function on some items of a source, run here or on a pool of processes.

A slice opens a writer of its own and commits parts of its own, so that slices need to know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from hsfmt import layout
from hsfmt.cli.boards import Board, until_told
from hsfmt.cli.converting.committed_copies import Window
from hsfmt.cli.converting.deletion import Batch, load
from hsfmt.cli.converting.rereading import Digests, digests_of
from hsfmt.cli.converting.reshaping import Piece, Reshaping, TooFewLossTokensError, pieces
from hsfmt.cli.converting.tally import Tally
from hsfmt.errors import FormatError, HsfmtError, NonFiniteError, Problem, SampleError, SourceError
from hsfmt.header import Header
from hsfmt.readers.sources import AbsentSampleError, Source, SourceItem, SourceSample
from hsfmt.storage import Store
from hsfmt.writers.dataset_writer import DatasetWriter
from hsfmt.writers.extras import Extra, check_scale, extra_values, parse_extras, with_scale
from hsfmt.writers.samples import make_sample, scan

BAD_FILE = (SourceError, SampleError, FormatError)
FIX = "fix or remove the file"


@dataclass(frozen=True, slots=True)
class Task:
    """What all slices of a conversion share.

    Attributes
    ----------
    source
        The foreign folder.
    store, header
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
    store: Store
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
        tally.verified += output.batch.delete(task.store, task.header, tally.removed)
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
            self._writer = DatasetWriter(self._task.store, **self._task.writer, part_names=self._part_name)
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
