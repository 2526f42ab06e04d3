"""Slices of an export: a pure function on some units of a target, run here or on a pool of processes."""

from __future__ import annotations

import errno
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing import parent_process

import numpy as np
import numpy.typing as npt

from hsfmt.cli.boards import ABANDON, Board, until_told
from hsfmt.cli.exporting.journal import FileRecord
from hsfmt.cli.exporting.places import Place
from hsfmt.cli.exporting.states import FLOAT8_SCALING, Float8Loss, StateChange, native
from hsfmt.errors import HsfmtError, StorageError
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.writers.targets.base import ExportSample, Target, Unit

_REMEDIES = {
    errno.ENOSPC: "free space on this file system",
    errno.EDQUOT: "your quota is used up: free space",
    errno.EACCES: "check owner and permissions of the folder",
    errno.EPERM: "check owner and permissions of the folder",
    errno.EROFS: "the file system is mounted read-only",
    errno.EMFILE: "raise the limit of open files (ulimit -n) or use fewer --workers",
    errno.EIO: "the device or network file system reports an I/O error: look at the kernel's log (dmesg)",
}


_prepared: list[bool] = []


@dataclass(frozen=True, slots=True)
class Task:
    """What all slices of an export share.

    Attributes
    ----------
    target, units
        How to write, and what.
    reader, numbers, layers
        Where the samples are: the snapshot's number of each, int64 [sample].
    mask_given
        bool [sample]: whether it came with a loss mask.
    change
        What is done to their states.
    place
        Where the files go, and whose journal the processes share.
    torch_threads
        Threads of torch in a worker, None to leave them.
    """

    target: Target
    units: Sequence[Unit]
    reader: SampleReader
    numbers: npt.NDArray[np.int64]
    mask_given: npt.NDArray[np.bool_]
    layers: tuple[int, ...]
    change: StateChange
    place: Place
    torch_threads: int | None = None

    def sample_nbytes(self, number: int) -> int:
        """Return the bytes of a sample's states as they are read."""
        header = self.change.stored
        row = len(self.layers) * header.hidden_size * native(header.dtype).itemsize
        return row * int(self.target.job.n_tokens[number])

    def sample(self, number: int, loss: Float8Loss) -> ExportSample:
        """Read the sample of that number in the export, as it is to be written; add what a cast to float8 lost.

        Raises
        ------
        HsfmtError
            It can't be read, or not be written as the user wishes.
        """
        read = self.reader.read(int(self.numbers[number]), layers=self.layers)
        extras = {
            name: None if value is None else value.view(native(read.extra_dtypes[name]))
            for name, value in read.extras.items()
            if name in self.target.job.extras
        }
        written = self.change.apply(read)
        loss.add(written.loss)
        if written.scales is not None:
            extras[FLOAT8_SCALING["column"]] = written.scales
        return ExportSample(
            number=number,
            sample_id=read.sample_id,
            input_ids=read.input_ids,
            hidden_states=written.states,
            loss_mask=read.loss_mask.view(np.uint8),
            metadata=read.metadata,
            extras=extras,
            mask_given=bool(self.mask_given[number]),
        )


@dataclass(slots=True)
class UnitTally:
    """What became of a slice's units.

    Attributes
    ----------
    done
        Number of a unit to its files, in the order of writing.
    failed
        Number of the one that stopped the slice, or None.
    error
        Why.
    loss
        What a cast to float8 lost.
    """

    done: dict[int, tuple[FileRecord, ...]] = field(default_factory=dict)
    failed: int | None = None
    error: HsfmtError | None = None
    loss: Float8Loss = field(default_factory=Float8Loss)


def export_slice(task: Task, numbers: Sequence[int], board: Board) -> UnitTally:
    """Write some units; a sample is in memory while it is written, and the next one while it is read.

    Raises
    ------
    KeyboardInterrupt
        The board says ABANDON.
    """
    _prepare(task.place, task.torch_threads)
    tally = UnitTally()
    wanted = chain.from_iterable(task.units[n].numbers for n in numbers)
    with closing(_read_ahead(task, wanted, tally.loss)) as stream:
        for n in until_told(numbers, board):
            unit = task.units[n]
            samples = _counted(islice(stream, len(unit.numbers)), task, board)
            try:
                task.target.write(unit, samples)
                assert next(samples, None) is None, f"{task.target.name} left samples of {unit.key}"
                tally.done[n] = task.place.settle(unit.paths)
            except (HsfmtError, OSError) as error:
                tally.failed, tally.error = n, failure(error, task.place.name)
                break
    return tally


def _counted(samples: Iterable[ExportSample], task: Task, board: Board) -> Iterator[ExportSample]:
    for sample in samples:
        if board.order() == ABANDON:  # a unit may have very many samples
            raise KeyboardInterrupt
        yield sample
        board.advance(task.sample_nbytes(sample.number))


def _read_ahead(task: Task, numbers: Iterable[int], loss: Float8Loss) -> Generator[ExportSample, None, None]:
    """Yield samples, reading the next one meanwhile."""
    with ThreadPoolExecutor(1, "hsfmt-export") as thread:
        waiting: Future[ExportSample] | None = None
        for number in numbers:
            ready, waiting = waiting, thread.submit(task.sample, number, loss)
            if ready is not None:
                yield ready.result()
                del ready
        if waiting is not None:
            yield waiting.result()


def _prepare(place: Place, torch_threads: int | None) -> None:
    """Set up a worker process, once."""
    if parent_process() is None or _prepared:
        return
    _prepared.append(True)
    place.hold()
    if torch_threads is not None:
        import torch

        torch.set_num_threads(torch_threads)


def failure(error: Exception, place: str) -> HsfmtError:
    """Return an error of writing there as one of this package."""
    if isinstance(error, HsfmtError):
        return error
    assert isinstance(error, OSError)
    reason = error.strerror or str(error) or type(error).__name__
    remedy = _REMEDIES.get(error.errno or 0, "")
    again = "then run the same command again: it goes on from what is whole"
    where = str(error.filename or place)
    typed = StorageError.at(
        where, expected="the storage to work", got=reason, remedy=f"{remedy}, {again}" if remedy else ""
    )
    typed.errno = error.errno
    typed.__cause__ = error
    return typed
