"""What verification finds: findings, counts, and the report over all of it.

Spec: rules VFY-1 to VFY-3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hsfmt import layout
from hsfmt.errors import (
    AccessError,
    CorruptionError,
    FormatVersionError,
    HeaderMismatchError,
    HsfmtError,
    NotFoundError,
    StorageError,
)
from hsfmt.snapshot import RETRACT_AGAIN

SEVERITIES = ("error", "warning", "info")
_REPAIR = "`hsfmt repair URL --dry-run`"
_RESTORE = f"restore the file from a copy; or {_REPAIR} says which samples can be saved without it"
_OLD = f"nothing, unless it is read by its fingerprint: restore the file from a copy; or {_REPAIR}, which sets it aside"
_SUPERSEDED = "none: only older snapshots use it; `hsfmt gc` removes what nothing uses any more"
_RETRACT = "`hsfmt retract URL ID...`"
REMEDIES = {
    "missing": _RESTORE,
    "foreign": "none: file browsers, NFS, version control and dataset hubs leave such files, which touch no data",
    "unexpected": "move it out of the dataset, if nothing of yours needs it",
    "quarantined": "look at it, or let `hsfmt gc` remove it: nothing uses it",
    "temporary": "none while a writer runs; else `hsfmt gc` removes it: an interrupted write left it",
    "uncommitted": "none while a writer runs; else `hsfmt gc` removes it: no manifest or snapshot names it",
    "newer_parts": "run `hsfmt seal` to serve them",
    "never_sealed": 'run `hsfmt seal`, or read with snapshot="live"',
    "incomplete_snapshot": "none while a seal runs; else `hsfmt gc` removes it: a seal was cut, or its index lost",
    "no_pointer": f"run `hsfmt seal`; if it was sealed before, {RETRACT_AGAIN}",
    "old_snapshot": "nothing, unless it is read by its fingerprint; `hsfmt gc --keep-snapshots` removes it",
    "shadowed_different": "the first part's is served; compare the producers, or retract the ids if neither is right "
    f"({_RETRACT})",
    "size": _RESTORE,
    "digest": _RESTORE,
    "corrupt": _RESTORE,
    "malformed": _RESTORE,
    "newer_format": "install a newer hsfmt (pip install -U hsfmt)",
    "header": "move a part of another meaning, all files that its manifest lists, to a dataset of its own; if "
    f"zarr.json was changed: restore it from a copy, or {_REPAIR} says whether the manifests tell what it was",
    "unreadable": "check permissions, network and the device, then verify again",
    "unstable_read": "the data is fine, the way to it is not: check memory, disk and network of this machine",
    "zarr_json": f"hsfmt reads without it, other Zarr readers take shapes from it: {_REPAIR}, which writes it again",
    "replaces": f"restore the manifest that was replaced; or {_REPAIR} says what becomes of both",
    "attachment": "restore the file from a copy with this digest",
    "shard_index": f"other Zarr readers find the wrong chunks through it: {_RESTORE}",
    "chunk_digest": _RESTORE,
    "chunk_crc": f"other Zarr readers refuse this chunk: {_RESTORE}",
    "chunk_decode": _RESTORE,
    "padding": _RESTORE,
    "values": _RESTORE,
    "loss_mask": _RESTORE,
    "n_supervised": _RESTORE,
    "negative_ids": "check the producer: a model takes no negative token id",
    "sample_id": _RESTORE,
    "metadata": _RESTORE,
    "content_digest": _RESTORE,
    "extra_digest": _RESTORE,
    "nonfinite": f"look at the producer; retract these samples ({_RETRACT}) or leave them out of training",
    "all_zero": "look at the producer: a state that is zero throughout was never computed",
    "counts": "run `hsfmt seal` for a new snapshot",
    "snapshot_part": f"restore the part that the snapshot names; or {_REPAIR} says what can be served instead",
    "snapshot_rows": "run `hsfmt seal` for a new snapshot",
    "snapshot_order": "none if the order is meant; `hsfmt seal` makes the default one",
    "dataset_digest": "run `hsfmt seal` for a new snapshot",
    "too_large": "this library refuses to decode rows of this size",
    "superseded": "none: another part is served instead; `hsfmt gc` removes it once no kept snapshot names it",
    "records": "name another file (--state FILE): what it does not vouch for is read again",
    "not_checked": "repair the problem reported beside it and verify again",
}


# What is damaged tells more than how, for documents that hold no data.
_OF_DAMAGE = frozenset({"corrupt", "digest", "malformed", "missing", "size", "zarr_json"})
_DOCUMENT_REMEDIES = {
    layout.ROOT_METADATA: "restore it from a copy; or `hsfmt repair URL` writes it again from the manifests",
    layout.PARTS_METADATA: "`hsfmt repair URL` writes it again: it is the same in every dataset",
    layout.POINTER: f"restore it from a copy; or {_REPAIR}, which makes a new one; {RETRACT_AGAIN} if it says so",
    layout.SNAPSHOTS: f"restore it from a copy; or {_REPAIR}, which makes a new one; {RETRACT_AGAIN} if it says so",
}


def remedy(code: str, path: str) -> str:
    """Return what to do about a finding of this code about the object at `path`."""
    if code in _OF_DAMAGE:
        for place, text in _DOCUMENT_REMEDIES.items():
            if path == place or path.startswith(f"{place}/"):
                return text
        if path.endswith("/zarr.json"):
            code = "zarr_json"
    if code == "counts" and layout.part_of_path(path):
        code = "corrupt"
    part = layout.part_of_manifest(path.removeprefix(f"{layout.MANIFESTS}/")) or layout.part_of_path(path)
    return REMEDIES[code].replace("<part>", part or "<part>")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found.

    Attributes
    ----------
    severity
        "error", "warning" or "info".
    code
        Stable slug of its kind, a key of `REMEDIES`.
    where
        Path inside the dataset, with ": member" behind it where that is known.
    expected, got
        What should be there and what is.
    remedy
        What to do.
    samples
        Ids of the samples concerned, where they are known.
    """

    severity: str
    code: str
    where: str
    expected: str
    got: str
    remedy: str = ""
    samples: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The path alone."""
        return self.where.partition(": ")[0]

    def __str__(self) -> str:
        text = f"{self.severity}[{self.code}] {self.where}: expected {self.expected}, got {self.got}"
        if self.samples:
            shown = ", ".join(self.samples[:5]) + (" …" if len(self.samples) > 5 else "")
            text += f" [{len(self.samples)} sample(s): {shown}]"
        return f"{text} — {self.remedy}" if self.remedy else text


@dataclass(slots=True)
class Counts:
    """What was looked at.

    Attributes
    ----------
    parts, files, samples, tokens
        Committed parts, files that manifests and snapshots name, samples and tokens of the committed parts.
    nbytes
        Bytes of files whose digest was compared.
    chunks
        Chunks decoded.
    """

    parts: int = 0
    files: int = 0
    samples: int = 0
    tokens: int = 0
    nbytes: int = 0
    chunks: int = 0

    def add(self, other: Counts) -> None:
        """Add another's figures."""
        self.parts += other.parts
        self.files += other.files
        self.samples += other.samples
        self.tokens += other.tokens
        self.nbytes += other.nbytes
        self.chunks += other.chunks


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of the data (the shards of all committed parts) is vouched for; documents are read by every run.

    Attributes
    ----------
    selection
        What was asked for: sample, seed, parts, limits; {} if everything.
    total_files, total_nbytes
        Of the data.
    read_files, read_nbytes
        Read and judged by this run.
    skipped
        Reason to [files, nbytes] of what was not read now.
    known_nbytes
        Of what was skipped, what a record of an earlier run vouches for.
    """

    selection: dict[str, Any]
    total_files: int
    total_nbytes: int
    read_files: int
    read_nbytes: int
    skipped: dict[str, list[int]]
    known_nbytes: int

    @property
    def fraction(self) -> float:
        """Share of the bytes that was read now or is vouched for by a record."""
        return (self.read_nbytes + self.known_nbytes) / self.total_nbytes if self.total_nbytes else 1.0

    @property
    def whole(self) -> bool:
        """Whether nothing was left out but what a record vouches for."""
        return sum(nbytes for _, nbytes in self.skipped.values()) == self.known_nbytes and "parts" not in self.selection

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self) | {"fraction": self.fraction, "whole": self.whole}


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a verification.

    Attributes
    ----------
    url, level
        What was verified and how far.
    fingerprint
        Snapshot that the pointer names, or None.
    problems
        All findings: errors, then warnings, then infos, each by place.
    counts
        What was looked at.
    coverage
        How much of the data; None at tier quick of the whole dataset, which reads none.
    """

    url: str
    level: str
    fingerprint: str | None
    problems: tuple[Finding, ...]
    counts: Counts
    coverage: Coverage | None = None

    @property
    def whole(self) -> bool:
        """Whether everything that the level checks was checked: else `ok` speaks of a sample only."""
        return self.coverage is None or self.coverage.whole

    @property
    def verdict(self) -> str:
        """One phrase that can't mistake a part for the whole."""
        if not self.ok:
            return "DAMAGED"
        if self.whole or self.coverage is None:
            return "fine"
        if self.level == "quick":
            return "fine so far, of other parts than those asked for only the manifests and the sizes"
        if self.coverage.fraction == 1:
            return "fine so far, of parts without data only those that were asked for"
        share = f"{100 * self.coverage.fraction:.3g}"
        return f"fine so far, sample of {'more than 99.9' if share == '100' else share} % of the data"

    @property
    def ok(self) -> bool:
        """Whether there is no error; warnings and infos are allowed."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that are errors."""
        return self.of("error")

    def of(self, severity: str) -> tuple[Finding, ...]:
        """Return the findings of one severity."""
        return tuple(finding for finding in self.problems if finding.severity == severity)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "counts": asdict(self.counts),
            "coverage": None if self.coverage is None else self.coverage.to_json(),
            "fingerprint": self.fingerprint,
            "level": self.level,
            "ok": self.ok,
            "problems": [asdict(finding) for finding in self.problems],
            "url": self.url,
            "verdict": self.verdict,
            "whole": self.whole,
        }


@dataclass(slots=True)
class Findings:
    """Collects findings."""

    items: list[Finding] = field(default_factory=list)

    def add(
        self, severity: str, code: str, where: str, *, expected: str, got: str, samples: Iterable[str] = ()
    ) -> None:
        """Add a finding with the remedy of its code."""
        what_to_do = remedy(code, where.partition(": ")[0])
        self.items.append(Finding(severity, code, where, expected, got[:1000], what_to_do, tuple(samples)))

    def error(self, code: str, where: str, *, expected: str, got: str, samples: Iterable[str] = ()) -> None:
        """Add an error."""
        self.add("error", code, where, expected=expected, got=got, samples=samples)

    def raised(self, error: HsfmtError, path: str, corrupt: str = "corrupt") -> None:
        """Add what an error of this package says, as findings about the file at `path`.

        `corrupt` is the code for a CorruptionError.

        Raises
        ------
        AccessError
            It is one: whoever is not let in has found nothing out.
        """
        if isinstance(error, AccessError):
            raise error
        code = _code(error)
        code = corrupt if code == "corrupt" else code
        for problem in error.problems:
            where = problem.where if problem.where.startswith(path) else f"{path}: {problem.where}"
            # To run verification is no advice from verification, and repair is better than to remove documents by hand,
            # after a look at what it would do.
            ours = ("hsfmt verify", "hsfmt repair", "remove hsfmt/")
            own = not problem.remedy or any(text in problem.remedy for text in ours)
            what_to_do = remedy(code, path) if own else problem.remedy
            self.items.append(Finding("error", code, where, problem.expected, problem.got, what_to_do, problem.samples))

    def about_old_snapshot(self) -> None:
        """Advise what helps a snapshot that is not the current one: a seal makes no such one again."""
        self.items = [replace(item, remedy=_OLD) for item in self.items]

    def about_superseded(self) -> None:
        """Make warnings of errors in what only older snapshots use."""
        self.items = [
            replace(item, severity="warning", remedy=_SUPERSEDED) if item.severity == "error" else item
            for item in self.items
        ]

    def fill_samples(self, path: str, samples: Iterable[str]) -> None:
        """Give the errors about the file at `path` the samples concerned, where they have none."""
        ids = tuple(samples)
        for i, item in enumerate(self.items):
            if item.severity == "error" and item.path == path and not item.samples:
                self.items[i] = replace(item, samples=ids)

    def has_error(self, path: str) -> bool:
        """Say whether there is an error about the file at `path`."""
        return any(item.severity == "error" and item.path == path for item in self.items)

    def items_of(self, severity: str) -> list[Finding]:
        """Return the findings of one severity."""
        return [item for item in self.items if item.severity == severity]

    def ordered(self) -> tuple[Finding, ...]:
        """Return all findings, errors first, then by place; the order does not depend on how the work was spread."""
        rank = {severity: number for number, severity in enumerate(SEVERITIES)}
        return tuple(sorted(self.items, key=lambda item: (rank[item.severity], item.where, item.code, item.got)))


def _code(error: HsfmtError) -> str:
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return code
    return "malformed"


_CODES: dict[type[HsfmtError], str] = {
    NotFoundError: "missing",
    StorageError: "unreadable",
    FormatVersionError: "newer_format",
    HeaderMismatchError: "header",
    CorruptionError: "corrupt",
}
