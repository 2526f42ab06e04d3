"""`hsfmt verify`: check a dataset and report everything that is wrong with it."""

from __future__ import annotations

import time

import click

from hsfmt.cli import units
from hsfmt.cli.failures import dumps, one_line
from hsfmt.cli.opening import check_place
from hsfmt.cli.options import json_option, quiet_option, workers_option
from hsfmt.cli.progress import open_progress
from hsfmt.readers.verification import LEVELS, Report, verify
from hsfmt.readers.verification.tiers import Level
from hsfmt.storage import open_store

# A bar has to fit on a line of 80 characters.
_SHOWN_NAME = 9


@click.command()
@click.argument("url")
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default="complete",
    show_default=True,
    help="quick: manifests, counts, sizes. complete: every file there, nothing unexpected, all digests. "
    "full: every chunk decoded, ids, offsets, sample digests, NaN, Inf and all-zero states.",
)
@workers_option("Processes that check.")
@json_option
@quiet_option
@click.pass_context
def command(ctx: click.Context, *, url: str, level: Level, workers: int, as_json: bool, quiet: bool) -> None:
    """Check the dataset at URL and report everything that is wrong with it, all at once.

    Exit code 1 when there is an error; warnings and infos (uncommitted parts, parts newer than the seal) leave it 0.
    """
    started = time.monotonic()
    store = open_store(url)
    check_place(store)
    with open_progress(f"verifying ({level})", shown=not (as_json or quiet)) as progress:

        def advance(done: int, total: int, what: str) -> None:
            progress.total = total
            progress.update(done, _short(what))

        report = verify(store, level=level, workers=workers, progress=advance)
    click.echo(dumps(report.to_json()) if as_json else _text(report, time.monotonic() - started))
    ctx.exit(0 if report.ok else 1)


def _short(part: str) -> str:
    return part if len(part) <= _SHOWN_NAME else f"…{part[1 - _SHOWN_NAME :]}"


def _text(report: Report, took: float) -> str:
    lines = [one_line(str(finding)) for finding in report.problems]
    n = {severity: len(report.of(severity)) for severity in ("error", "warning", "info")}
    found = ", ".join(units.counted(count, severity) for severity, count in n.items() if count) or "no problems"
    counts = report.counts
    looked = f"{units.counted(counts.samples, 'sample')} in {units.counted(counts.parts, 'part')}"
    rows = [
        ("dataset", report.url),
        ("level", report.level),
        ("snapshot", report.fingerprint or "never sealed"),
        ("checked", f"{looked}, {units.counted(counts.files, 'file')}, {units.nbytes(counts.nbytes)} compared"),
    ]
    if counts.chunks:
        rows.append(("decoded", units.counted(counts.chunks, "chunk")))
    rows.append(("took", units.seconds(took)))
    verdict = "fine" if report.ok else "DAMAGED"
    return "\n".join([*lines, f"{verdict}: {found}", units.aligned(rows, "  ")])
