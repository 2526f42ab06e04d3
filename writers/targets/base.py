"""The interface of a target: a format of another program that a dataset is exported to, for `hsfmt export`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from hsfmt.dtypes import dtype as element

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from hsfmt.errors import Problem
    from hsfmt.header import Header


@dataclass(frozen=True, slots=True)
class ExportSample:
    """A sample to write, as the dataset has it, cut down to the layers asked for.

    Attributes
    ----------
    number
        Its place in the export, from 0.
    sample_id
        Its id in the dataset: any text. Names of files are made of it by `names`.
    input_ids
        int64 [token].
    hidden_states
        [token, layer, hidden], C-contiguous, of the job's dtype (bfloat16 and float8_e4m3fn as ml_dtypes'); the last
        one after the final norm where the job says so.
    loss_mask
        uint8 [token], 0 or 1.
    metadata
        JSON values.
    extras
        Further columns by name; None where this sample has none.
    mask_given
        Whether the loss mask was ever given, or is ones that nobody chose.
    """

    number: int
    sample_id: str
    input_ids: NDArray[np.int64]
    hidden_states: NDArray[Any]
    loss_mask: NDArray[np.uint8]
    metadata: Mapping[str, Any]
    extras: Mapping[str, NDArray[Any] | None]
    mask_given: bool = True


@dataclass(frozen=True, slots=True)
class ExportJob:
    """What is exported, known before anything is written. It pickles into worker processes.

    Attributes
    ----------
    folder
        Where the files go; it is made by the driver and lies on this machine.
    header
        What the samples mean as they are handed over: layers, final norm and dtype after all that the user asked for.
    url, fingerprint
        The dataset and its snapshot.
    n_tokens
        int64 [sample], in the order of the export.
    sample_ids
        By number.
    extras
        Dtype name of every extra column, by name.
    masks_given
        Whether any sample's loss mask was ever given.
    options
        What the user said for this target alone (`--option NAME=VALUE`), checked by `problems`.
    attachments
        Dataset-level arrays (d2t, t2d, token_freq …), by name.
    has_metadata
        Whether any sample has metadata.
    n_supervised
        int64 [sample], tokens with a loss, in the order of the export; None where the caller does not know them.
    extra_columns
        `kind`, `dtype` and `shape` of every extra column, by name, as `DatasetWriter` takes them.
    """

    folder: Path
    header: Header
    url: str
    fingerprint: str
    n_tokens: NDArray[np.int64]
    sample_ids: Sequence[str]
    extras: Mapping[str, str] = field(default_factory=dict)
    masks_given: bool = True
    options: Mapping[str, str] = field(default_factory=dict)
    attachments: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    has_metadata: bool = True
    n_supervised: NDArray[np.int64] | None = None
    extra_columns: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unit:
    """Files that are written together, by one call, in one process: one sample's, or a shard with many.

    Attributes
    ----------
    key
        Names the unit in the journal of a resumed export; the same on every run of the same job.
    numbers
        The samples, in order. A sample that lies across two files is in the units of both.
    paths
        The files, relative to the folder. No other unit writes them.
    """

    key: str
    numbers: Sequence[int]
    paths: tuple[str, ...]


class Target(ABC):
    """A format to export to.

    Attributes
    ----------
    name, summary
        What `--to` calls it, and a line for the help.
    final_norm
        What the program that reads the files takes the last state to be: "pre" or "post"; None where it takes either,
        or says in the files which it is.
    needs_final_state
        Whether the last stored layer has to be the model's last (the state that the verifier's head is applied to).
    dtypes
        Names of the state dtypes that the format can hold.
    option_help
        What `--option NAME=VALUE` the target takes, by name, with a line for the help.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    final_norm: ClassVar[str | None] = None
    needs_final_state: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16", "float32")
    option_help: ClassVar[Mapping[str, str]] = {}

    def __init__(self, job: ExportJob) -> None:
        self.job = job

    def problems(self) -> list[Problem]:
        """Say all that this format can't represent of the job, before anything is written.

        What `final_norm`, `needs_final_state`, `dtypes` and `option_help` rule out is the driver's to refuse.
        """
        return []

    def dropped(self) -> list[str]:
        """Say what of the job the format has no place for, for the report: "metadata", "extra column scores"."""
        return []

    def estimated_nbytes(self) -> int:
        """Return about how many bytes all files will have together: states, and ids and masks as int64."""
        header = self.job.header
        itemsize = element(header.dtype).itemsize
        return int(self.job.n_tokens.sum()) * (header.n_layers * header.hidden_size * itemsize + 16)

    @abstractmethod
    def units(self) -> Sequence[Unit]:
        """All units, in order, which hold every number."""

    @abstractmethod
    def write(self, unit: Unit, samples: Iterator[ExportSample]) -> None:
        """Write the files of a unit, whole, each by `atomic.replacing`; the same samples make the same bytes.

        Parameters
        ----------
        unit
            One of `units`. Files of it that an earlier run wrote are replaced.
        samples
            Its samples, each read when it is asked for. It is taken to its end; no more than a few are in memory.
        """

    def final_paths(self) -> tuple[str, ...]:
        """Return the paths, relative to the folder, that `finish` will write."""
        return ()

    def finish(self) -> tuple[str, ...]:
        """Write what goes with the whole, once every unit is there: indexes, configs, the manifest.

        Returns
        -------
        tuple[str, ...]
            The `final_paths` that were written, the one that makes the export complete for its readers last.
        """
        return ()
