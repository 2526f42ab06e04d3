"""What the checks of one part share: its documents, where findings go, and which samples lie where."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from hsfmt.columns import Column
from hsfmt.index import PartIndex
from hsfmt.manifest import FileEntry, PartManifest
from hsfmt.readers.verification.report import Counts, Findings
from hsfmt.storage import Store

Advance = Callable[[int], None]


@dataclass(slots=True)
class PartContext:
    """A part under verification.

    Attributes
    ----------
    store, manifest
        The dataset, and the part's parsed manifest.
    findings, counts
        Where findings and figures go.
    advance
        Told the bytes of files as they are read.
    unusable
        Paths of files that are missing or can't be read at all: reported once, not tried again.
    index
        The part index once it has been parsed.
    """

    store: Store
    manifest: PartManifest
    findings: Findings
    counts: Counts
    advance: Advance
    unusable: set[str] = field(default_factory=set)
    index: PartIndex | None = None

    def entry(self, path: str) -> FileEntry:
        """Return the manifest's entry of a file."""
        return next(entry for entry in self.manifest.files if entry.path == path)

    def sample_ids(self, rows: Iterable[int]) -> list[str]:
        """Return the ids of samples; bytes that are not UTF-8 are shown as U+FFFD."""
        index = self.index
        return [] if index is None else [index.id_bytes(row).decode("utf-8", "replace") for row in rows]

    def samples_at(self, column: Column, start: int, stop: int) -> range:
        """Return the samples that own any of the rows [start, stop) of a column."""
        if self.index is None:
            return range(0)
        if column.kind == "sample":
            return range(start, min(stop, self.index.n_samples))
        offsets = self.index.token_offsets if column.kind == "token" else self.index.offsets[column.name]
        first = int(np.searchsorted(offsets, start, "right")) - 1
        end = int(np.searchsorted(offsets, min(stop, column.n_rows), "left"))
        return range(first, end)
