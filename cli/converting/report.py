"""What a conversion did: where every source file ended, as text and as JSON. The counts add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hsfmt.cli import units
from hsfmt.cli.converting.file_fates import FATES, OUTCOMES, file_fates
from hsfmt.cli.converting.tally import Tally
from hsfmt.cli.estimate import Estimate
from hsfmt.cli.failures import exit_code, json_problems, one_line
from hsfmt.header import Header
from hsfmt.readers.sources import Source
from hsfmt.snapshot import Snapshot

_SHOWN = 20


@dataclass(slots=True)
class Written:
    """What a run committed: figures of its parts, bytes of the states (raw) and of the parts' files (stored)."""

    parts: int = 0
    samples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    raw_nbytes: int = 0
    stored_nbytes: int = 0


@dataclass(slots=True)
class Report:
    """A conversion, planned or done.

    Attributes
    ----------
    source, url, header
        From what to where, and what the data means.
    dry_run
        Nothing was written.
    outcomes
        For each item of the source one of OUTCOMES.
    reasons
        Item number to reason, of holes.
    tally
        What the slices say of their items; those that were interrupted say nothing.
    written
        What is committed of this run.
    workers, workers_asked
        Processes that converted, and those asked for.
    estimate
        What it was expected to take.
    warnings
        What the user should know.
    snapshot
        The one sealed at the end, or None.
    error
        Why the conversion did not get to its end, or None.
    deletes
        Files of the source are deleted.
    deleted_before
        Ids of samples that earlier runs committed, and whose files they deleted.
    attachments
        Names of the arrays that belong to the dataset as a whole.
    """

    source: Source
    url: str
    header: Header
    dry_run: bool
    outcomes: list[str]
    reasons: dict[int, str] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    estimate: Estimate | None = None
    warnings: list[str] = field(default_factory=list)
    snapshot: Snapshot | None = None
    error: BaseException | None = None
    written: Written = field(default_factory=Written)
    workers: int = 1
    workers_asked: int = 1
    seconds: float = 0.0
    deletes: bool = False
    deleted_before: list[str] = field(default_factory=list)
    attachments: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Return the number of items by outcome."""
        counts = Counter(self.outcomes)
        assert set(counts) <= set(OUTCOMES)
        assert len(self.outcomes) == len(self.source.items)
        return {outcome: counts[outcome] for outcome in OUTCOMES}

    def fates(self) -> dict[str, str]:
        """Return path to fate of every file of the source, as it was listed when this run began."""
        return file_fates(self.source, self.outcomes, self.tally.removed.deleted)

    def files(self) -> dict[str, int]:
        """Return the number of source files by what became of them; each file of the folder is counted once."""
        counts = Counter(self.fates().values())
        return {**{fate: counts[fate] for fate in FATES}, "total": sum(counts.values())}

    def holes(self) -> list[dict[str, str]]:
        """Return the holes, in the source's order."""
        items = self.source.items
        return [{"id": items[n].sample_id, "file": items[n].key, "reason": r} for n, r in sorted(self.reasons.items())]

    def conflicts(self) -> list[dict[str, str]]:
        """Return the items whose id the dataset has for another sample, in the source's order."""
        items = self.source.items
        return [
            {"id": items[n].sample_id, "file": items[n].key, "reason": f"expected {p.expected}, got {p.got}"}
            for n, p in sorted(self.tally.conflicts.items())
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        document: dict[str, Any] = {
            "attachments": self.attachments,
            "conflicts": self.conflicts(),
            "counts": self.counts(),
            "dataset": self.url,
            "deleted_before": self.deleted_before,
            "dry_run": self.dry_run,
            "estimate": asdict(self.estimate) | {"fits": self.estimate.fits} if self.estimate else None,
            "fates": self.fates(),
            "files": self.files(),
            "header": self.header.to_json(),
            "holes": self.holes(),
            "seconds": round(self.seconds, 3),
            "snapshot": _snapshot_json(self.snapshot),
            "source": {"format": self.source.name, "path": str(self.source.root)},
            "strays": [asdict(stray) for stray in self.source.strays],
            "support": [asdict(support) for support in self.source.support],
            "warnings": self.warnings,
            "workers": self.workers,
            "written": {
                **asdict(self.written),
                "all_one_masks": self.tally.all_one,
                "all_zero_masks": self.tally.all_zero,
                "cast_samples": self.tally.cast,
                "masks": self.tally.masks,
                "split_samples": self.tally.split,
                "too_few_loss_tokens": self.tally.too_few,
                "trimmed_samples": self.tally.trimmed,
                "trimmed_tokens": self.tally.trimmed_tokens,
                "windows": self.tally.windows,
                "with_zero_states": self.tally.blank_ids,
                "without_supervised_tokens": self.tally.unsupervised,
            },
        }
        if self.error is not None:
            document |= {"error": json_problems(self.error), "exit_code": exit_code(self.error)}
        return document

    def text(self) -> str:
        """Return the report for people."""
        header = self.header
        rows = [
            ("source", f"{self.source.root} ({self.source.name})"),
            ("dataset", self.url),
            ("states", f"layers {','.join(map(str, header.layers))} of width {header.hidden_size}, {header.dtype}"),
            ("final norm", header.final_norm),
            ("samples", self._samples_text()),
            ("files", self._files_text()),
        ]
        if self.attachments:
            rows.append(("attachments", ", ".join(self.attachments)))
        if self.dry_run and self.estimate is not None:
            rows += _estimate_rows(self.estimate)
        rows += self._written_rows()
        if self.snapshot is not None:
            rows.append(
                ("snapshot", f"{self.snapshot.fingerprint}, {units.counted(self.snapshot.n_samples, 'sample')}")
            )
            rows.append(("content", self.snapshot.content_digest))
        head = "dry run, nothing was written" if self.dry_run else "converted"
        if self.deleted_before and not self.source.items:
            head = "everything is converted, and its files deleted"
        lines = [head if self.error is None or self.dry_run else "not finished", units.aligned(rows, "  ")]
        lines += _listed("holes", [(hole["file"], hole["reason"]) for hole in self.holes()])
        lines += _listed("conflicts", [(conflict["file"], conflict["reason"]) for conflict in self.conflicts()])
        lines += _listed("files not read", [(stray.path, stray.reason) for stray in self.source.strays])
        return "\n".join(lines)

    def _written_rows(self) -> list[tuple[str, str]]:
        rows, written = [], self.written
        if written.samples:
            rate = units.nbytes(written.raw_nbytes / self.seconds) if self.seconds else "?"
            took = f"{units.nbytes(written.raw_nbytes)} of states in {units.seconds(self.seconds)}, {rate}/s"
            rows.append(("tokens", f"{written.tokens:,}, {written.supervised_tokens:,} of them supervised"))
            rows.append(("read", took))
        if written.parts:
            size = units.nbytes(written.stored_nbytes)
            rows.append(("stored", f"{size} in {units.counted(written.parts, 'part')}"))
        rows += self._changed_rows()
        if self.workers < self.workers_asked:
            rows.append(("workers", f"{self.workers:,} of {self.workers_asked:,}: the files are too few for more"))
        return rows

    def _changed_rows(self) -> list[tuple[str, str]]:
        tally, rows = self.tally, []
        if tally.trimmed:
            samples = units.counted(tally.trimmed, "sample")
            rows.append(("padding", f"{tally.trimmed_tokens:,} tokens of {samples} left out"))
        if tally.split:
            windows = units.counted(tally.windows, "window")
            rows.append(("split", f"{units.counted(tally.split, 'sample')} into {windows}"))
        if tally.cast:
            rows.append(("cast", f"{units.counted(tally.cast, 'sample')} to {self.header.dtype}"))
        if tally.too_few:
            rows.append(("left out", f"{units.counted(tally.too_few, 'sample')} with too few supervised tokens"))
        if self.deletes and self.dry_run:
            rows.append(("deleted", "the files of committed samples would be, each after its samples were read again"))
        elif self.deletes:
            before = units.counted(len(self.deleted_before), "sample")
            before = f"; those of {before} by earlier runs" if self.deleted_before else ""
            n = units.counted(len(tally.removed.deleted), "file")
            rows.append(("deleted", f"{n}, whose samples were read again{before}"))
        return rows

    def _samples_text(self) -> str:
        words = {
            "sample": "to write" if self.dry_run else "written",
            "skipped": "there already",
            "hole": "holes",
            "failed": "failed",
            "not_reached": "not reached",
        }
        counts = self.counts()
        words["hole"] = "hole" if counts["hole"] == 1 else "holes"
        shown = [f"{counts[key]:,} {word}" for key, word in words.items() if counts[key] or key == "sample"]
        return f"{', '.join(shown)}; {sum(counts.values()):,} in the source"

    def _files_text(self) -> str:
        files = self.files()
        total = files.pop("total")
        shown = [f"{n:,} {name.replace('_', ' ')}" for name, n in files.items() if n]
        return f"{total:,}: {', '.join(shown)}"


def _estimate_rows(estimate: Estimate) -> list[tuple[str, str]]:
    how = "from the files' headers" if estimate.exact else "from the files' sizes"
    ratio = f"at an assumed ratio of {estimate.ratio}" if estimate.ratio != 1 else "taken as incompressible"
    free = "unknown" if estimate.free_nbytes is None else units.nbytes(estimate.free_nbytes)
    return [
        ("raw size", f"{units.nbytes(estimate.raw_nbytes)}, {how}"),
        ("stored size", f"about {units.nbytes(estimate.stored_nbytes)}, {ratio}"),
        ("free space", free if estimate.fits else f"{free}: NOT ENOUGH"),
    ]


def _listed(title: str, entries: list[tuple[str, str]]) -> list[str]:
    if not entries:
        return []
    alike: dict[str, list[str]] = {}
    for where, reason in entries:
        alike.setdefault(reason, []).append(where)
    lines = [f"  {title}:"]
    for reason, (first, *others) in list(alike.items())[:_SHOWN]:
        more = f" (and {len(others):,} more)" if others else ""
        lines.append(f"    {one_line(first)}{more}: {one_line(reason)}")
    rest = sum(map(len, list(alike.values())[_SHOWN:]))
    if rest:
        lines.append(f"    and {rest:,} more")
    if rest or len(alike) < len(entries):
        lines.append("    (--json lists all)")
    return lines


def _snapshot_json(snapshot: Snapshot | None) -> Mapping[str, Any] | None:
    if snapshot is None:
        return None
    return {
        "content_digest": snapshot.content_digest,
        "counts": dict(snapshot.counts),
        "fingerprint": snapshot.fingerprint,
    }
