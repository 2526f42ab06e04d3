"""Items of a source whose ids are retracted in the dataset: no reader gets their samples, so that their files stay."""

from __future__ import annotations

from contextlib import suppress

from hsfmt.catalog import load_ids
from hsfmt.cli import units
from hsfmt.cli.converting.reshaping import window_of
from hsfmt.errors import NotFoundError
from hsfmt.lost_parts import snapshots_to_keep
from hsfmt.readers.sources import Source
from hsfmt.storage import Store

_SHOWN = 5


def retracted_items(store: Store, source: Source, *, deletes: bool) -> tuple[frozenset[int], list[str]]:
    """Return (numbers of the items that are retracted, wholly or in windows; what the user should know).

    Raises
    ------
    NotFoundError, CorruptionError
        The dataset's snapshot, or an index that it names, can't be used.
    """
    ids: set[str] = set()
    for snapshot in snapshots_to_keep(store):
        for number in set(snapshot.retracted_part.tolist()):
            with suppress(NotFoundError):  # a part that was dropped: nobody knows its ids any more
                known = load_ids(store, snapshot.parts[number])
                rows = snapshot.retracted_row[snapshot.retracted_part == number].tolist()
                ids |= {known[row] for row in rows if row < len(known)}
    ids |= {window[0] for window in map(window_of, ids) if window is not None}
    numbers = [n for n, item in enumerate(source.items) if item.sample_id in ids]
    if not numbers:
        return frozenset(), []
    shown = ", ".join(source.items[n].sample_id for n in numbers[:_SHOWN]) + (", …" if numbers[_SHOWN:] else "")
    stay = "; their files are kept" if deletes else ""
    text = f"{units.counted(len(numbers), 'sample')} of this source retracted in the dataset, where no reader gets them"
    return frozenset(numbers), [f"{text}{stay}: {shown}"]
