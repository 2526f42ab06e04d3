"""What an export did: how many samples went into which files, and what was done to them. The counts add up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np

from hsfmt.cli import units
from hsfmt.cli.exporting.journal import FileRecord
from hsfmt.cli.exporting.plan import Plan
from hsfmt.cli.exporting.states import Float8Loss
from hsfmt.cli.failures import exit_code, json_problems


@dataclass(slots=True)
class ExportReport:
    """An export, planned or done.

    Attributes
    ----------
    plan
        What was to be done.
    written
        Files by the number of their unit, of those that this run wrote.
    final
        Files of `finish`, None where it has not come to its end.
    finished_before
        An earlier run had done all.
    estimated_nbytes, free_nbytes
        Of what is still to be written, and the room for it.
    workers
        Processes that wrote.
    warnings
        What the user should know.
    error
        Why the export did not get to its end, or None.
    loss
        What a cast to float8 lost, in the samples that this run wrote.
    """

    plan: Plan
    written: dict[int, tuple[FileRecord, ...]] = field(default_factory=dict)
    final: tuple[FileRecord, ...] | None = None
    finished_before: bool = False
    estimated_nbytes: int = 0
    free_nbytes: int | None = None
    workers: int = 1
    warnings: list[str] = field(default_factory=list)
    error: BaseException | None = None
    seconds: float = 0.0
    loss: Float8Loss = field(default_factory=Float8Loss)

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.free_nbytes is None or self.estimated_nbytes <= self.free_nbytes

    def counts(self) -> dict[str, int]:
        """Return the number of samples by what became of them."""
        planned, done = self.plan.units, self.plan.destination.done
        asked = len(self.plan.numbers)
        # A sample may lie across units.
        missing, new = np.zeros(asked, bool), np.zeros(asked, bool)
        for n, unit in enumerate(planned):
            if n in self.written:
                new[list(unit.numbers)] = True
            elif unit.key not in done:
                missing[list(unit.numbers)] = True
        counts = {
            "already_there": int(np.count_nonzero(~missing & ~new)),
            "asked": asked,
            "not_reached": int(np.count_nonzero(missing)),
            "written": int(np.count_nonzero(new & ~missing)),
        }
        assert 2 * asked == sum(counts.values()), counts
        return counts

    def files(self) -> dict[str, int]:
        """Return files and bytes: those that this run wrote, and all of the export."""
        new = [file for files in self.written.values() for file in files]
        old = [file for files in self.plan.destination.done.values() for file in files]
        final = list(self.final or ())
        (old if self.finished_before else new).extend(final)
        return {
            "files": len(new) + len(old),
            "files_written": len(new),
            "nbytes": _nbytes(new) + _nbytes(old),
            "nbytes_written": _nbytes(new),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        plan, change = self.plan, self.plan.change
        header = plan.target.job.header
        cast: dict[str, Any] | None = None
        if change.dtype != change.stored.dtype:
            cast = {"from": change.stored.dtype, "to": change.dtype}
        if cast is not None and change.quantizes and self.written:
            # JSON has no NaN.
            cast["max_error"], cast["max_relative_error"] = (
                x if isfinite(x) else None for x in (self.loss.max_error, self.loss.max_relative_error)
            )
        norm = change.norm and {
            "checked_against": change.norm.checked_against,
            "eps": change.norm.eps,
            "layer": header.layers[-1],
            "style": change.norm.style,
            "weight": change.norm.source,
        }
        document: dict[str, Any] = {
            **self.files(),
            "cast": cast,
            "complete": self.final is not None,
            "counts": self.counts(),
            "dataset": plan.target.job.url,
            "dequantized": change.dequantizes,
            "dropped": plan.target.dropped(),
            "dry_run": plan.request.dry_run,
            "estimate": {"fits": self.fits, "free_nbytes": self.free_nbytes, "nbytes": self.estimated_nbytes},
            "folder": plan.place.name,
            "format": plan.target.name,
            "header": header.to_json(),
            "journal": plan.place.journal_name,
            "norm": norm,
            "options": dict(plan.request.options),
            "seconds": round(self.seconds, 3),
            "snapshot": plan.reader.fingerprint,
            "tokens": int(plan.target.job.n_tokens.sum()),
            "warnings": self.warnings,
            "workers": self.workers,
        }
        if self.error is not None:
            document |= {"error": json_problems(self.error), "exit_code": exit_code(self.error)}
        return document

    def text(self) -> str:
        """Return the report for people."""
        plan, change = self.plan, self.plan.change
        header = plan.target.job.header
        norm = header.final_norm
        if change.norm is not None:
            norm += f": {change.norm.style}, eps {change.norm.eps:g}, applied to layer {header.layers[-1]}"
            checked = change.norm.checked_against
            norm += f"; style and eps as in {checked}" if checked else "; nothing checked style and eps"
        dtype = header.dtype
        if change.dtype != change.stored.dtype:
            dtype += f", {'dequantised' if change.dequantizes else 'cast'} from {change.stored.dtype}"
        rows = [
            ("dataset", plan.target.job.url),
            ("snapshot", plan.reader.fingerprint),
            ("folder", f"{plan.place.name} ({plan.target.name})"),
            ("states", f"layers {','.join(map(str, header.layers))} of width {header.hidden_size}, {dtype}"),
            ("final norm", norm),
            ("samples", self._samples_text()),
        ]
        if change.quantizes and self.written:
            text = f"float8 is off by up to {self.loss.max_error:.4g} once restored"
            rows.append(("lossy", f"{text}, {self.loss.max_relative_error:.2%} of its token's largest value"))
        if plan.target.dropped():
            rows.append(("not kept", f"{', '.join(plan.target.dropped())}: the format has no place for it"))
        if plan.request.dry_run:
            free = "unknown" if self.free_nbytes is None else units.nbytes(self.free_nbytes)
            rows.append(("size", f"about {units.nbytes(self.estimated_nbytes)} to write"))
            rows.append(("free space", free if self.fits else f"{free}: NOT ENOUGH"))
        else:
            rows.append(("files", self._files_text()))
        if self.workers < plan.request.workers and not plan.request.dry_run and self.written:
            rows.append(("workers", f"{self.workers:,} of {plan.request.workers:,}: there is too little for more"))
        head = "dry run, nothing was written" if plan.request.dry_run else "exported"
        return "\n".join(
            [head if self.error is None or plan.request.dry_run else "not finished", units.aligned(rows, "  ")]
        )

    def _samples_text(self) -> str:
        counts = self.counts()
        if self.plan.request.dry_run:
            shown = [f"{counts['not_reached']:,} to write"]
        else:
            shown = [f"{counts['written']:,} written"]
            shown += [f"{counts['not_reached']:,} not reached"] if counts["not_reached"] else []
        shown += [f"{counts['already_there']:,} there already"] if counts["already_there"] else []
        of = f"{counts['asked']:,} asked for of {len(self.plan.reader):,}"
        return f"{', '.join(shown)}; {of}"

    def _files_text(self) -> str:
        files = self.files()
        text = f"{units.counted(files['files'], 'file')}, {units.nbytes(files['nbytes'])}"
        if files["files_written"] < files["files"]:
            text += f"; of these written now {files['files_written']:,}, {units.nbytes(files['nbytes_written'])}"
        if files["nbytes_written"] and self.seconds:
            text += f", in {units.seconds(self.seconds)}, {units.nbytes(files['nbytes_written'] / self.seconds)}/s"
        return text


def _nbytes(files: Iterable[FileRecord]) -> int:
    return sum(file.nbytes for file in files)
