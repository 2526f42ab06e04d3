"""What a repair found and did, or would do: fates of parts and documents, samples saved and lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class PartFate:
    """What becomes of a broken part.

    Attributes
    ----------
    part
        Its name.
    problems
        What is wrong with it, a line each.
    fate
        "restored": its zarr.json files are written again; "replaced": a new part supersedes it; "quarantined": its
        manifest is set aside, and a new part supersedes it if `new_part` says so.
    new_part
        The part that supersedes it, or None.
    n_saved
        Samples that the new part holds.
    lost
        Id to reason of the samples that can't be proven.
    n_unknown
        Samples that are lost and whose ids nothing tells.
    nbytes
        Bytes that the new part takes, about.
    """

    part: str
    problems: tuple[str, ...]
    fate: str
    new_part: str | None = None
    n_saved: int = 0
    lost: Mapping[str, str] = field(default_factory=dict)
    n_unknown: int = 0
    nbytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fate as JSON values."""
        return {
            "part": self.part,
            "problems": list(self.problems),
            "fate": self.fate,
            "new_part": self.new_part,
            "saved": self.n_saved,
            "lost": [{"id": key, "reason": reason} for key, reason in sorted(self.lost.items())],
            "lost_unknown": self.n_unknown,
            "nbytes": self.nbytes,
        }


@dataclass(frozen=True, slots=True)
class DocumentFate:
    """What becomes of another object: "restored", "quarantined", "dropped" or "sealed anew"."""

    path: str
    problem: str
    fate: str

    def to_json(self) -> dict[str, str]:
        """Return the fate as JSON values."""
        return {"path": self.path, "problem": self.problem, "fate": self.fate}


@dataclass(frozen=True, slots=True)
class RepairReport:
    """A repair, or the plan of one.

    Attributes
    ----------
    url
        The dataset.
    dry_run
        Whether nothing was done.
    parts, documents
        What was broken and what became of it.
    warnings
        What could not be kept, and what to look at.
    snapshot
        Fingerprint of the snapshot that is current afterwards; None: none, or a dry run.
    """

    url: str
    dry_run: bool
    parts: tuple[PartFate, ...]
    documents: tuple[DocumentFate, ...]
    warnings: tuple[str, ...]
    snapshot: str | None

    @property
    def changed(self) -> bool:
        """Whether anything was broken."""
        return bool(self.parts or self.documents)

    @property
    def n_saved(self) -> int:
        """Samples that were carried into new parts."""
        return sum(fate.n_saved for fate in self.parts)

    @property
    def lost(self) -> tuple[str, ...]:
        """Ids of the samples that are lost, ascending."""
        return tuple(sorted({sample_id for fate in self.parts for sample_id in fate.lost}))

    @property
    def n_lost(self) -> int:
        """Samples that are lost, those without a known id too."""
        return len(self.lost) + sum(fate.n_unknown for fate in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes that the new parts take, about."""
        return sum(fate.nbytes for fate in self.parts)

    @property
    def ok(self) -> bool:
        """Whether no sample and no document was lost."""
        return not self.n_lost and not any(fate.fate == "dropped" for fate in self.documents)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "url": self.url,
            "dry_run": self.dry_run,
            "ok": self.ok,
            "changed": self.changed,
            "saved": self.n_saved,
            "lost": list(self.lost),
            "lost_count": self.n_lost,
            "extra_nbytes": self.nbytes,
            "parts": [fate.to_json() for fate in self.parts],
            "documents": [fate.to_json() for fate in self.documents],
            "warnings": list(self.warnings),
            "snapshot": self.snapshot,
        }
