"""How much a conversion will write, and whether there is room for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import attachments
from hsfmt.cli import units
from hsfmt.column_plan import ColumnKind
from hsfmt.columns import IDS, MASK, STATES
from hsfmt.dataset_size import DatasetSize, SizePlan, dataset_size
from hsfmt.dtypes import dtype as element
from hsfmt.errors import SourceError, StorageError
from hsfmt.header import Header, make_header
from hsfmt.readers.sources import Source, SourceItem, SourceMeaning
from hsfmt.readers.sources.safetensors_file import read_entries
from hsfmt.readers.sources.vocabulary import read_vocabulary
from hsfmt.storage import Store

Int64 = npt.NDArray[np.int64]

PART_NBYTES = 32 << 30
# zstd reaches 1.42 to 1.46 on real bfloat16 states; other dtypes are taken as incompressible.
_RATIO = {("zstd", "bfloat16"): 1.4}
# Ids of real texts leave their upper bytes zero, and masks are long runs.
_SMALL_RATIOS = {"zstd": {IDS: 1.7, MASK: 20.0}}
# What a file has beside its states for each token: ids and a mask of int64.
_FILE_TOKEN_NBYTES = 16
# About what a command and its options take in the manifest of each part.
_PRODUCER = {"command": "." * 1000}
_META_NBYTES = len('{"source":""}')
# Beyond this many files their sizes must do: a header costs an open and a read each.
_MAX_HEADERS = 20_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """What will be written.

    Attributes
    ----------
    raw_nbytes
        Bytes of the states, ids and masks.
    exact
        Whether that is from the headers of all files, not from their sizes.
    ratio
        Compression assumed of the states.
    stored_nbytes
        About what the dataset will grow by.
    free_nbytes
        Room at the destination, None where that is no number.
    size
        All figures of a dataset of these samples alone.
    """

    raw_nbytes: int
    exact: bool
    ratio: float
    stored_nbytes: int
    free_nbytes: int | None
    size: DatasetSize = field(default_factory=DatasetSize)

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.free_nbytes is None or self.stored_nbytes <= self.free_nbytes

    def check(self, url: str, remedy: str = "pass --force to start anyway") -> None:
        """Refuse a conversion that there is no room for.

        Raises
        ------
        StorageError
            There is not.
        """
        if not self.fits:
            raise StorageError.at(
                url,
                expected=f"room for about {units.nbytes(self.stored_nbytes)}",
                got=f"{units.nbytes(self.free_nbytes or 0)} free",
                remedy=f"free space, choose another destination, or {remedy}",
            )


@dataclass(frozen=True, slots=True)
class Known:
    """What reading and compressing a part of the samples showed, or the user said.

    Attributes
    ----------
    ratios
        Raw to stored bytes by column.
    file_token_nbytes
        Bytes of the source's files for each token; None where that was not measured, or files hold many samples.
    meta_nbytes
        Bytes of a sample's metadata, None where that was not measured.
    n_samples, n_chunks
        Samples that were read, and chunks of the states that were compressed.
    """

    ratios: Mapping[str, float]
    file_token_nbytes: float | None = None
    meta_nbytes: float | None = None
    n_samples: int = 0
    n_chunks: int = 0


def estimate(
    source: Source,
    numbers: Sequence[int],
    meaning: SourceMeaning,
    codec: str,
    store: Store | None,
    *,
    part_nbytes: int = PART_NBYTES,
    known: Known | None = None,
) -> Estimate:
    """Estimate what the items of these numbers will take.

    Parameters
    ----------
    source, numbers
        What will be converted.
    meaning
        Shape and dtype of the states.
    codec
        The codec asked for.
    store
        The destination, if there is one.
    part_nbytes
        Raw bytes of states at which a part ends.
    known
        What was measured or said of it, instead of what is assumed.
    """
    free = store.free_nbytes() if store else None
    items = [item for item in (source.items[number] for number in numbers) if item.problem is None]
    lengths, exact = item_lengths(source, items, meaning, known)
    known = known or Known(assumed_ratios(codec, meaning.dtype))
    ratios = known.ratios
    ratio = 1.0 if codec == "none" else ratios.get(STATES, 1.0)
    kept = np.flatnonzero(lengths)
    if not len(kept):
        return Estimate(0, exact, ratio, 0, free)
    ids = np.array([len(item.sample_id.encode()) for item in items], np.int64)[kept]
    keys = np.array([len(item.key.encode()) for item in items], np.int64)[kept]
    plan = SizePlan(
        implied_header(meaning),
        codec,
        implied_extras(meaning),
        part_nbytes=part_nbytes,
        ratios=ratios,
        producer=_PRODUCER,
        attachments=_attachments(source),
    )
    meta = keys + _META_NBYTES if known.meta_nbytes is None else math.ceil(known.meta_nbytes)
    size = dataset_size(plan, lengths[kept], id_nbytes=ids, meta_nbytes=meta)
    return Estimate(size.raw_nbytes, exact, ratio, size.stored_nbytes, free, size)


def _attachments(source: Source) -> list[dict[str, Any]]:
    """Return the entries of what belongs to the dataset as a whole."""
    try:
        arrays, _ = read_vocabulary(source)
    except (SourceError, StorageError):
        return []  # as converting says
    return [attachments.encode(name, array)[0] for name, array in sorted(arrays.items())]


def assumed_ratios(codec: str, dtype: str, states: float | None = None) -> dict[str, float]:
    """Return what a codec is taken to reach by column, where nothing was measured; `states` if the user said."""
    return {STATES: states or _RATIO.get((codec, dtype), 1.0), **_SMALL_RATIOS.get(codec, {})}


def implied_header(meaning: SourceMeaning) -> Header:
    """Return a header of the size that the dataset's will have; what is not known yet is filled in."""
    return make_header(
        layers=meaning.layers or range(meaning.n_layers),
        hidden_size=meaning.hidden_size,
        final_norm=meaning.final_norm or "unknown",
        dtype=meaning.dtype,
        model=meaning.model,
        scaling=meaning.scaling,
    )


def implied_extras(meaning: SourceMeaning) -> dict[str, ColumnKind]:
    """Return the extra columns that the samples will have."""
    extras = {name: (c["kind"], c["dtype"], tuple(c["shape"])) for name, c in meaning.extras.items()}
    return extras | ({meaning.scaling["column"]: ("token", "float32", ())} if meaning.scaling else {})


def item_lengths(
    source: Source, items: Sequence[SourceItem], meaning: SourceMeaning, known: Known | None = None
) -> tuple[Int64, bool]:
    """Return the tokens of items, int64 [item], 0 for one that can't be read, and whether all of them are exact."""
    exact = len(items) <= _MAX_HEADERS
    row = meaning.n_layers * meaning.hidden_size * element(meaning.dtype).itemsize + _FILE_TOKEN_NBYTES
    per_token = float(row + sum(_row_nbytes(extra) for extra in implied_extras(meaning).values()))
    if known is not None and known.file_token_nbytes:
        per_token = known.file_token_nbytes
    lengths = np.zeros(len(items), np.int64)
    for i, item in enumerate(items):
        n = n_tokens(source, item) if exact else None
        if n is None:
            exact = False
            n = max(1, round(item.nbytes / per_token))
        lengths[i] = n
    return lengths, exact


def _row_nbytes(column: ColumnKind) -> int:
    """Return the bytes that an extra column takes for each token; those of other kinds are few."""
    kind, dtype, shape = column
    return math.prod(shape) * element(dtype).itemsize if kind == "token" else 0


def n_tokens(source: Source, item: SourceItem) -> int | None:
    """Return the tokens of an item by its source or by a safetensors header; None for other files, 0 for a bad one."""
    known = source.n_tokens(item)
    if known is not None or not item.paths or not item.paths[0].endswith(".safetensors"):
        return known
    try:
        entries = read_entries(source.root / item.paths[0], item.key)
    except (SourceError, OSError):
        return 0
    named = (source.options.key_map.input_ids, "input_ids", "token_ids")
    ids = next((entries[name] for name in named if name in entries), None)
    return ids.shape[-1] if ids is not None and ids.shape else None
