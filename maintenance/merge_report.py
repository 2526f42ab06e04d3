"""What a merge did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did.

    Attributes
    ----------
    destination
        The dataset.
    parts
        Each part that was added, and the source that it came from.
    present, superseded
        Parts of the sources that were there already; that another part replaces, and that were left where they are.
    newer
        Source to its parts that are newer than its seal; they were taken too.
    same
        Samples that are there more than once with the same content.
    conflicts
        (id, part that is served, part that is not), different content.
    retracted, attachments
        Ids that stay retracted, and names of attachments, of all sources.
    linked_nbytes, copied_nbytes
        Bytes of linked (or server-side copied) and of copied files.
    emptied, left
        Sources that a move removed; that it left where they are, and why.
    fingerprint, content_digest, counts
        The new snapshot; None if it was not to be sealed.
    """

    destination: str
    parts: Mapping[str, str]
    present: tuple[str, ...]
    superseded: tuple[str, ...]
    newer: Mapping[str, tuple[str, ...]]
    same: int
    conflicts: tuple[tuple[str, str, str], ...]
    retracted: tuple[str, ...]
    attachments: tuple[str, ...]
    linked_nbytes: int
    copied_nbytes: int
    emptied: tuple[str, ...]
    left: Mapping[str, str]
    fingerprint: str | None
    content_digest: str | None
    counts: Mapping[str, int] | None

    def to_json(self) -> dict[str, Any]:
        """Return the report as one JSON document."""
        document: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        for name, value in document.items():
            if isinstance(value, tuple):
                document[name] = list(value)
        document["conflicts"] = [
            {"id": sample_id, "not_served": loser, "served": winner} for sample_id, winner, loser in self.conflicts
        ]
        document["newer"] = {source: list(parts) for source, parts in self.newer.items()}
        return document
