"""A sample that is there twice, as a file and as its twin in `.gz`: one sample if both hold the same, else refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hsfmt import canonical
from hsfmt.digests import SampleHasher, digest
from hsfmt.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hsfmt.readers.sources.base import SourceItem, SourceSample

_SHOWN = 5


def load_with_twin(item: SourceItem, read: Callable[[str], SourceSample]) -> SourceSample:
    """Read an item's first file; if it has a twin, that one before it, to compare. Holds one sample at a time.

    Raises
    ------
    SourceError
        As `read`, or the two differ.
    """
    if len(item.paths) == 1:
        return read(item.paths[0])
    path, twin = item.paths
    other = _content(read(twin))
    sample = read(path)
    if _content(sample) != other:
        raise SourceError.at(
            path,
            expected=f"the same sample as in {twin}, which has the same id",
            got="another one",
            remedy="move away the one that is not wanted, or rename it",
        )
    return sample


def _content(sample: SourceSample) -> tuple[object, ...]:
    states = sample.hidden_states
    hasher = SampleHasher(states.dtype.name, *states.shape)
    mask = sample.loss_mask
    hasher.tokens(sample.input_ids, np.zeros(0, np.uint8) if mask is None else mask)
    hasher.states(states)
    extras = [
        (name, value.dtype.name, value.shape, digest(np.ascontiguousarray(value).view(np.uint8).data))
        for name, value in sorted(sample.extras.items())
    ]
    return hasher.digest(), mask is None, canonical.dumps_metadata(sample.metadata), *extras


def twin_notes(items: Iterable[SourceItem]) -> list[str]:
    """Name the twins among the items: none or one line."""
    twins = [item.paths[1] for item in items if len(item.paths) > 1]
    if not twins:
        return []
    files = "1 file is a duplicate" if len(twins) == 1 else f"{len(twins)} files are duplicates"
    shown = ", ".join(twins[:_SHOWN]) + (" …" if len(twins) > _SHOWN else "")
    return [f"{files} of the one without .gz beside it: compared with it, and not converted again: {shown}"]
