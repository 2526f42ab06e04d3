"""What became of a slice's items: figures that add up over all slices, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt.cli.converting.deletion import Removed
from hsfmt.cli.converting.reshaping import Piece
from hsfmt.errors import HsfmtError, Problem
from hsfmt.readers.sources import SourceSample

_SHOWN_IDS = 20
_SUMMED = (
    "written", "samples", "already", "same", "masks", "all_zero", "all_one", "blank", "too_few", "trimmed",
    "trimmed_tokens", "split", "windows", "cast", "verified",
)  # fmt: skip


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
