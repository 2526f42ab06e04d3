"""The interface of a source: a folder that another program wrote, read strictly, one sample at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hsfmt.errors import HsfmtError, NotFoundError, Problem, SourceError, StorageError
from hsfmt.readers.sources.meaning import SourceMeaning, check_against, check_options
from hsfmt.readers.sources.remedies import naming_source, with_source
from hsfmt.readers.sources.sample_list import ROLE, SAMPLE_LIST, check_listed, read_sample_list, with_listed_ids
from hsfmt.readers.sources.sample_names import note_left_aside

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from hsfmt.readers.sources.folder import Folder
    from hsfmt.readers.sources.look import Look
    from hsfmt.readers.sources.options import SourceOptions

T = TypeVar("T")
# The role of a support file that holds the data of several samples.
CONTAINER = "container"


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
    shared
        Relative paths of the files that hold this item among others, as a shard does. Each is among the source's
        `support` with the role `CONTAINER`; `nbytes` has this item's share of them.
    """

    key: str
    index: int
    sample_id: str
    paths: tuple[str, ...]
    nbytes: int
    problem: Problem | None = None
    normal_hole: bool = False
    shared: tuple[str, ...] = ()


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
    whole_extras
        Names of those among them that are no row a token, but belong to the sample as a whole.
    """

    sample_id: str
    input_ids: NDArray[np.int64]
    hidden_states: NDArray[Any]
    loss_mask: NDArray[np.uint8] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, NDArray[Any]] = field(default_factory=dict)
    whole_extras: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Claim:
    """That a folder is of a source, as far as file names, key sets, ranks and widths show.

    Attributes
    ----------
    evidence
        What shows it, for messages: "data_0.ckpt with aux_hidden_state and hidden_state".
    certain
        No other known program writes files that look so; else the user has to choose among the claims.
    options
        What has to be said beside `--from NAME`, for messages: "--layer-ids 2,n//2,n-3,n".
    """

    evidence: str
    certain: bool
    options: str = ""


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
    needs_all_files
        The folder can't be listed any more once one of its containers is gone: they are deleted all together.
    numbered
        The format numbers its samples: an export keeps their ids in a list of its own (see `sample_list`).
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    needs_all_files: ClassVar[bool] = False
    numbered: ClassVar[bool] = False

    def __init__(self, folder: Folder, options: SourceOptions) -> None:
        self.root: Path = folder.root
        self.options = options
        self.items: list[SourceItem] = []
        self.support: list[SupportFile] = []
        self.strays: list[Stray] = list(folder.strays)
        self.notes: list[str] = []
        self._meaning: SourceMeaning | None = None
        self._listed: dict[str, int] = {}
        with naming_source(self.name):
            if self.numbered and any(file.path == SAMPLE_LIST for file in (*folder.files, *folder.broken)):
                self._list_numbered(folder)
            else:
                self._list(folder)
        claimed = {path for item in self.items for path in item.paths}
        for file in folder.broken:
            if file.problem is not None and file.path not in claimed:
                self.strays.append(Stray(file.path, file.problem.got))
        self.notes.extend(note_left_aside(self.strays))

    @classmethod
    def claim(cls, look: Look) -> Claim | None:
        """Say whether a folder is of this source; None where it is not. Reads little, and never raises for bad data."""
        del look
        return None

    @abstractmethod
    def _list(self, folder: Folder) -> None:
        """Fill `items`, `support` and `strays` from the names in the folder."""

    def _list_numbered(self, folder: Folder) -> None:
        """Fill them where an export's list of ids is there."""
        folder.check(SAMPLE_LIST)
        self._list(replace(folder, files=tuple(file for file in folder.files if file.path != SAMPLE_LIST)))
        listed = read_sample_list(self.root)
        self.items, self._listed = with_listed_ids(self.items, listed, self._sample_number, self._count_samples())
        self.support.append(SupportFile(SAMPLE_LIST, ROLE))

    def _sample_number(self, item: SourceItem) -> int | None:
        """Say which sample of an export an item is; None where it can't be one."""
        raise NotImplementedError

    def _count_samples(self) -> int | None:
        """Say how many samples there are, where the format says so apart from the files that may be deleted."""
        return None

    @abstractmethod
    def _look(self, item: SourceItem) -> SourceMeaning:
        """Find out what the format and this item fix."""

    @abstractmethod
    def _load(self, item: SourceItem) -> SourceSample:
        """Read one item."""

    def n_tokens(self, item: SourceItem) -> int | None:
        """Say how many tokens an item will have, where that is recorded apart from its data; never raises.

        None where it is not recorded, 0 for an item that can't be read.
        """
        del item
        return None

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
                return self.look(item)
            except SourceError as error:
                problems.extend(error.problems)
        if not problems:
            raise NotFoundError.at(str(self.root), expected=f"samples that source {self.name!r} reads", got="none")
        raise SourceError(problems)

    def assume(self, meaning: SourceMeaning) -> None:
        """Take the meaning from elsewhere, where no file is left that shows it."""
        self._meaning = meaning

    def look(self, item: SourceItem) -> SourceMeaning:
        """Say what the format and this item fix, without reading its states.

        Raises
        ------
        SourceError, StorageError
            As `load`.
        """
        self._raise_known(item)
        found = self._guarded(self._look, item)
        layers_from, norm_from = (with_source(text, self.name) for text in (found.layers_from, found.final_norm_from))
        return replace(found, layers_from=layers_from, final_norm_from=norm_from)

    def load(self, item: SourceItem, *, any_dtype: bool = False) -> SourceSample:
        """Read one item, whole and checked against `meaning()`. Never executes a pickle.

        Parameters
        ----------
        item
            Which one.
        any_dtype
            Take states of another dtype than the rest of the source has: the caller casts them.

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
        check_listed(len(sample.input_ids), self._listed.get(item.key), item.key)
        check_against(self.meaning(), sample, item.key, any_dtype=any_dtype)
        return sample

    def _guarded(self, read: Callable[[SourceItem], T], item: SourceItem) -> T:
        try:
            with naming_source(self.name):
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
