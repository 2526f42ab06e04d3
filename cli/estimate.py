"""How much a conversion will write, and whether there is room for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hsfmt.cli import units
from hsfmt.dtypes import dtype as element
from hsfmt.errors import SourceError, StorageError
from hsfmt.readers.sources import Source, SourceItem, SourceMeaning
from hsfmt.readers.sources.safetensors_file import read_entries
from hsfmt.storage import Store

# zstd reaches 1.42 to 1.46 on real bfloat16 states; other dtypes are taken as incompressible.
_RATIO = {("zstd", "bfloat16"): 1.4}
_TOKEN_NBYTES = 5  # an int32 id and a uint8 of mask
_FIXED_NBYTES = 1 << 20  # indexes, manifests and snapshots of a small dataset
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
        Compression assumed.
    stored_nbytes
        About what the dataset will grow by.
    free_nbytes
        Room at the destination, None where that is no number.
    """

    raw_nbytes: int
    exact: bool
    ratio: float
    stored_nbytes: int
    free_nbytes: int | None

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.free_nbytes is None or self.stored_nbytes <= self.free_nbytes

    def check(self, url: str) -> None:
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
                remedy="free space, choose another destination, or pass --force to start anyway",
            )


def estimate(source: Source, numbers: Sequence[int], meaning: SourceMeaning, codec: str, store: Store) -> Estimate:
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
        The destination.
    """
    raw, exact = 0, len(numbers) <= _MAX_HEADERS
    for number in numbers:
        item = source.items[number]
        if item.problem is not None:
            continue
        n_tokens = _n_tokens(source, item) if exact else None
        if n_tokens is None:
            exact = False
            raw += item.nbytes
        else:
            row = meaning.n_layers * meaning.hidden_size * element(meaning.dtype).itemsize + _TOKEN_NBYTES
            raw += n_tokens * (row + (4 if meaning.scaling else 0))
    ratio = _RATIO.get((codec, meaning.dtype), 1.0)
    stored = math.ceil(raw / ratio) + _FIXED_NBYTES if numbers else 0
    return Estimate(raw, exact, ratio, stored, store.free_nbytes())


def _n_tokens(source: Source, item: SourceItem) -> int | None:
    """Return the tokens of a safetensors file by its header; None for other files, 0 for a bad one."""
    if not item.paths[0].endswith(".safetensors"):
        return None
    try:
        states = read_entries(source.root / item.paths[0], item.key).get("hidden_states")
    except (SourceError, OSError):
        return 0
    return states.shape[0] if states is not None and states.shape else 0
