"""The interface of a source: a folder that another program wrote, read strictly, one sample at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hsfmt.errors import HsfmtError, NotFoundError, Problem, SourceError, StorageError
from hsfmt.readers.sources.meaning import SourceMeaning, check_against, check_options
from hsfmt.readers.sources.sample_names import note_left_aside

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from hsfmt.readers.sources.folder import Folder
    from hsfmt.readers.sources.options import SourceOptions

T = TypeVar("T")


class AbsentSampleError(SourceError):
    """The source has no such sample and that is normal for its format: a hole under any policy, never a failure."""


@dataclass(frozen=True, slots=True)
class SourceItem:
    """One thing that should become a sample.

    Attributes
    ----------
    key
        What users are shown: the data file's path relative to the folder.
    index
        Place in the source's own order (natural: data_2 before data_10); becomes `source_index`.
    sample_id
        Id that the sample gets, the same on every run and machine. Each source documents its choice.
    paths
        Relative paths of the files that this item alone uses, the data file first; empty for a hole without files.
    nbytes
        Size of `paths` together.
    problem
        What listing the folder already showed to be wrong; loading the item raises it.
    normal_hole
        The problem is an absence that the format allows (`AbsentSampleError`).
    """

    key: str
    index: int
    sample_id: str
    paths: tuple[str, ...]
    nbytes: int
    problem: Problem | None = None
    normal_hole: bool = False


@dataclass(frozen=True, slots=True)
class SupportFile:
    """A file that goes with several or all samples; `role` says what it is: `arrow`, `token_freq` and so on."""

    path: str
    role: str


@dataclass(frozen=True, slots=True)
class Stray:
    """A file that the source does not read, and why."""

    path: str
    reason: str


@dataclass(slots=True)
class SourceSample:
    """A sample as the source has it, in memory of its own and free of views.

    Attributes
    ----------
    sample_id
        The item's.
    input_ids
        int64 [token].
    hidden_states
        [token, layer, hidden], C-contiguous, in the source's dtype (bfloat16 and float8_e4m3fn as ml_dtypes').
    loss_mask
        uint8 [token], 0 or 1, or None where the source has none.
    metadata
        JSON values that the source holds about this sample alone.
    extras
        Further columns, [token, …].
    """

    sample_id: str
    input_ids: NDArray[np.int64]
    hidden_states: NDArray[Any]
    loss_mask: NDArray[np.uint8] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, NDArray[Any]] = field(default_factory=dict)


class Source(ABC):
    """A folder of a foreign format.

    Constructing one reads names and small side files only. It holds no open file and pickles into worker processes.

    Parameters
    ----------
    folder
        The listed folder.
    options
        What the user said.

    Attributes
    ----------
    items, support, strays
        Every file under the folder is in the `paths` of exactly one item, or is a support file, or a stray.
        (`support` may also name files beside the folder, as `../name`.)
    notes
        What the user should know before converting.
    """

    name: ClassVar[str]
    summary: ClassVar[str]

    def __init__(self, folder: Folder, options: SourceOptions) -> None:
        self.root: Path = folder.root
        self.options = options
        self.items: list[SourceItem] = []
        self.support: list[SupportFile] = []
        self.strays: list[Stray] = list(folder.strays)
        self.notes: list[str] = []
        self._meaning: SourceMeaning | None = None
        self._list(folder)
        claimed = {path for item in self.items for path in item.paths}
        for file in folder.broken:
            if file.problem is not None and file.path not in claimed:
                self.strays.append(Stray(file.path, file.problem.got))
        self.notes.extend(note_left_aside(self.strays))

    @abstractmethod
    def _list(self, folder: Folder) -> None:
        """Fill `items`, `support` and `strays` from the names in the folder."""

    @abstractmethod
    def _look(self, item: SourceItem) -> SourceMeaning:
        """Find out what the format and this item fix."""

    @abstractmethod
    def _load(self, item: SourceItem) -> SourceSample:
        """Read one item."""

    def meaning(self) -> SourceMeaning:
        """Say what the data means, as far as the format fixes it, from the first item that can be read.

        Raises
        ------
        NotFoundError
            There is no item.
        SourceError
            No item can be read; all reasons at once.
        NotFoundError, UsageError
            The files can't be understood without something that only the user knows, or what the user said of the
            states (`--hidden-size`, `--model-config`) is not true of them.
        """
        if self._meaning is None:
            self._meaning = check_options(self._first_meaning(), self.options)
        return self._meaning

    def _first_meaning(self) -> SourceMeaning:
        problems: list[Problem] = []
        for item in self.items:
            try:
                self._raise_known(item)
                return self._guarded(self._look, item)
            except SourceError as error:
                problems.extend(error.problems)
        if not problems:
            raise NotFoundError.at(str(self.root), expected=f"samples that source {self.name!r} reads", got="none")
        raise SourceError(problems)

    def load(self, item: SourceItem) -> SourceSample:
        """Read one item, whole and checked against `meaning()`. Never executes a pickle.

        Raises
        ------
        AbsentSampleError
            The sample is absent, and may be in this format.
        SourceError
            The item can't be taken as it is: damaged, of other widths, ids or dtype than the rest, misaligned.
        UsageError
            The item shows that the source as a whole was understood wrongly: no item of it can be trusted.
        StorageError
            The storage failed (I/O error, permission, a file that vanished): nothing that the data is to blame for.
        """
        self._raise_known(item)
        sample = self._guarded(self._load, item)
        check_against(self.meaning(), sample, item.key)
        return sample

    def _guarded(self, read: Callable[[SourceItem], T], item: SourceItem) -> T:
        try:
            return read(item)
        except OSError as error:
            if isinstance(error, HsfmtError):
                raise
            remedy = "make the file readable for this user" if isinstance(error, PermissionError) else ""
            raise StorageError.at(item.key, expected="a readable file", got=str(error), remedy=remedy) from error

    @staticmethod
    def _raise_known(item: SourceItem) -> None:
        if item.problem is not None:
            raise (AbsentSampleError if item.normal_hole else SourceError)([item.problem])


def hole_reason(error: SourceError) -> str:
    """One line for the record of a hole: what was expected and what was there, without the remedy."""
    return "; ".join(f"expected {problem.expected}, got {problem.got}" for problem in error.problems)
