"""How well the states of a source compress: some of its chunks, compressed as a writer would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import canonical
from hsfmt.cli.converting.reshaping import Reshaping, pieces
from hsfmt.cli.estimate import Known, implied_header, item_lengths
from hsfmt.codecs import encode
from hsfmt.column_plan import ColumnPlan, GridOptions, plan_columns
from hsfmt.columns import IDS, MASK, STATES
from hsfmt.dtypes import dtype
from hsfmt.errors import HsfmtError, SourceError
from hsfmt.readers.sources import Source, SourceItem, SourceMeaning, SourceSample

Array = npt.NDArray[Any]

# Chunk rows of the states, from places spread evenly over the source.
_PLACES = 12
_MAX_LENGTHS = 1000


def measure(source: Source, meaning: SourceMeaning, codec: str) -> Known:
    """Compress chunks from up to 12 places of the source; one chunk of all layers and one sample are in memory.

    Raises
    ------
    SourceError
        None of the items that were tried can be read; all reasons at once.
    StorageError
        A file can't be read.
    """
    plans = {plan.name: plan for plan in plan_columns(implied_header(meaning), codec, {}, GridOptions())}
    raw, stored = dict.fromkeys(plans, 0), dict.fromkeys(plans, 0)
    figures = _Figures()
    for run in _runs(source, meaning, plans[STATES].chunk_rows):
        samples = _until(figures.read(source, run), plans[STATES].chunk_rows)
        if not samples:
            continue
        for name, rows in _columns(samples, plans[STATES].chunk_rows).items():
            raw[name] += rows.nbytes
            stored[name] += sum(len(_encoded(plans[name], plane)) for plane in _planes(name, rows))
        figures.n_chunks += meaning.n_layers
    if not figures.n_samples:
        raise figures.error()
    ratios = {name: raw[name] / stored[name] for name in plans}
    return Known(
        ratios,
        figures.own_nbytes / figures.own_tokens if figures.own_tokens else None,
        figures.meta_nbytes / figures.n_samples,
        figures.n_samples,
        figures.n_chunks,
    )


class _Figures:
    """What the samples add up to."""

    def __init__(self) -> None:
        self.n_samples = self.n_chunks = self.meta_nbytes = self.own_nbytes = self.own_tokens = 0
        self._errors: list[HsfmtError] = []

    def read(self, source: Source, run: Sequence[SourceItem]) -> Iterator[SourceSample]:
        """Yield the samples of items, those that can't be read left out."""
        for item in run:
            try:
                sample = source.load(item)
            except SourceError as error:
                self._errors.append(error)
                continue
            self.n_samples += 1
            (piece,) = pieces(item, sample, Reshaping())
            self.meta_nbytes += len(canonical.dumps_metadata(piece.metadata))
            if item.paths and not item.shared:
                self.own_nbytes += item.nbytes
                self.own_tokens += len(sample.input_ids)
            yield sample

    def error(self) -> SourceError:
        """The error of a source that nothing was read of."""
        return SourceError(problem for error in self._errors for problem in error.problems)


def _runs(source: Source, meaning: SourceMeaning, chunk_rows: int) -> Iterator[Sequence[SourceItem]]:
    """Yield runs of items that follow each other, each to its end or until a chunk of it was taken."""
    good = [item for item in source.items if item.problem is None]
    lengths, _ = item_lengths(source, good[:_MAX_LENGTHS], meaning)
    n_chunks = int(lengths.mean() * len(good)) // chunk_rows if good else 0
    # In a small source every chunk holds several samples: shorter ones would compress less.
    n = min(_PLACES, len(good), max(1, n_chunks))
    for place in range(n):
        yield good[place * len(good) // n : (place + 1) * len(good) // n]


def _until(samples: Iterator[SourceSample], n_tokens: int) -> list[SourceSample]:
    """Take samples until they have a chunk's tokens; of the states of each only what the chunk takes is kept."""
    taken: list[SourceSample] = []
    left = n_tokens
    while left > 0 and (sample := next(samples, None)) is not None:
        if len(sample.hidden_states) > left:
            sample.hidden_states = sample.hidden_states[:left].copy()
        left -= len(sample.input_ids)
        taken.append(sample)
    return taken


def _columns(samples: Sequence[SourceSample], n_tokens: int) -> dict[str, Array]:
    """Return the rows of a chunk as one writes them, by column."""
    masks = [np.ones(len(s.input_ids), np.uint8) if s.loss_mask is None else s.loss_mask for s in samples]
    return {
        STATES: np.concatenate([sample.hidden_states for sample in samples])[:n_tokens],
        IDS: np.concatenate([sample.input_ids for sample in samples]).astype(np.int32),
        MASK: np.concatenate(masks),
    }


def _planes(name: str, rows: Array) -> Iterator[Array]:
    for plane in range(rows.shape[1] if name == STATES else 1):
        yield rows[:, plane] if name == STATES else rows


def _encoded(plan: ColumnPlan, rows: Array) -> bytes | memoryview:
    return encode(plan.codec, np.ascontiguousarray(rows).view(dtype(plan.dtype_name).storage))
