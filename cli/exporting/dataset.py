"""What an export has to know of a dataset before it begins, from its part indexes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt.cli import units
from hsfmt.columns import CORE_COLUMNS
from hsfmt.readers.sample_reader import SampleReader

_EMPTY_META_NBYTES = 2  # {}


@dataclass(slots=True)
class Survey:
    """What the parts say of the samples.

    Attributes
    ----------
    n_supervised
        int64 [sample], tokens with a loss.
    mask_given
        bool [sample], whether it came with a loss mask.
    extras
        `kind`, `dtype` and `shape` of every extra column, by name.
    has_metadata
        Whether any sample has metadata.
    notes
        What the user should know.
    """

    n_supervised: npt.NDArray[np.int64]
    mask_given: npt.NDArray[np.bool_]
    extras: dict[str, dict[str, Any]] = field(default_factory=dict)
    has_metadata: bool = False
    notes: list[str] = field(default_factory=list)


def survey(reader: SampleReader, numbers: npt.NDArray[np.int64]) -> Survey:
    """Look through the indexes of the parts that hold these samples.

    Raises
    ------
    CorruptionError, NotFoundError
        An index is missing or damaged.
    """
    found, snapshot = Survey(np.zeros(len(numbers), np.int64), np.ones(len(numbers), bool)), reader.snapshot
    part_of, row_of = snapshot.part[numbers], snapshot.row[numbers]
    reader.parts.load(np.unique(part_of).tolist())
    for number in np.unique(part_of):
        part = reader.parts.get(int(number))
        here = part_of == number
        rows = row_of[here]
        for name, column in part.columns.items():
            if name not in CORE_COLUMNS:
                found.extras.setdefault(name, column.declaration())
        found.n_supervised[here] = part.index.n_supervised[rows]
        found.mask_given[here] = part.index.loss_mask_given[rows] != 0
        lengths = np.diff(part.index.meta_offsets)[rows]
        found.has_metadata |= bool(np.any(lengths > _EMPTY_META_NBYTES))
    found.extras = dict(sorted(found.extras.items()))
    unmasked = int(np.count_nonzero(~found.mask_given))
    if unmasked:
        found.notes.append(
            f"{units.counted(unmasked, 'sample')} came without a loss mask: every token of such a sample counts as "
            "supervised"
        )
    return found
