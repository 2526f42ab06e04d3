"""What became of every file of a source: one word each, and the counts add up."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hsfmt.readers.sources import Source
from hsfmt.readers.sources.base import CONTAINER

# What can become of an item.
OUTCOMES = ("sample", "skipped", "hole", "failed", "not_reached")
# What can become of a file. A container holds several items and has no outcome of its own; a duplicate is the twin of
# another file, compared with it when that one was read.
FATES = (*OUTCOMES, "duplicate", "container", "support", "stray", "deleted")


def file_fates(source: Source, outcomes: Sequence[str], deleted: Collection[str]) -> dict[str, str]:
    """Return path to fate, one of FATES, of every file of the folder as it was listed.

    Parameters
    ----------
    source
        The source.
    outcomes
        For each of its items one of OUTCOMES.
    deleted
        Paths of the files that were deleted.
    """
    fates: dict[str, str] = {}
    n_files = 0
    for item, outcome in zip(source.items, outcomes, strict=True):
        fates.update(dict.fromkeys(item.paths, outcome))
        if outcome == "sample" and f"{item.paths[0] if item.paths else ''}.gz" in item.paths:
            fates[f"{item.paths[0]}.gz"] = "duplicate"
        n_files += len(item.paths)
    for support in source.support:
        if not support.path.startswith("../"):
            fates[support.path] = CONTAINER if support.role == CONTAINER else "support"
            n_files += 1
    fates.update((stray.path, "stray") for stray in source.strays)
    assert n_files + len(source.strays) == len(fates), "a source file is counted twice"
    fates.update(dict.fromkeys(deleted, "deleted"))
    assert n_files + len(source.strays) == len(fates), "a file was deleted that was not listed"
    return fates
