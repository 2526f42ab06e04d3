"""What a transfer did, or would do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What a transfer did, or would do.

    Attributes
    ----------
    source, destination
        From where to where.
    fingerprint, content_digest, counts
        The snapshot that the destination now has as its current one.
    parts, present
        Parts that were committed; that were there already.
    restored
        Parts that were there and lacked files, or had some of another size.
    files, missing_nbytes
        Files that the destination lacked, and their bytes.
    present_nbytes
        Bytes of files that were there already.
    copied_nbytes, server_copied_nbytes
        Bytes that were copied through this process, each digest compared; that the server copied by itself.
    read_back_nbytes, rewritten
        Bytes that were read back, and files that were there with other bytes and were copied anew.
    changed
        Whether the destination's pointer named another snapshot before, or none.
    warnings
        What should be known, if nothing forbids it.
    most_memory_nbytes
        What the copying holds in memory at most.
    dry_run
        Whether nothing was written.
    """

    source: str
    destination: str
    fingerprint: str
    content_digest: str
    counts: Mapping[str, int]
    parts: tuple[str, ...]
    present: tuple[str, ...]
    restored: tuple[str, ...]
    files: int
    missing_nbytes: int
    present_nbytes: int
    copied_nbytes: int
    server_copied_nbytes: int
    read_back_nbytes: int
    rewritten: int
    changed: bool
    warnings: tuple[str, ...]
    most_memory_nbytes: int
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        """Return the report as one JSON document."""
        document: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in document.items()}
