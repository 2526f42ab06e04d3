"""`hsfmt verify`: check a dataset and report everything that is wrong with it."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any

import click

from hsfmt.cli import units
from hsfmt.cli.failures import dumps, one_line
from hsfmt.cli.opening import check_place
from hsfmt.cli.options import json_option, quiet_option, workers_option
from hsfmt.cli.progress import open_progress
from hsfmt.cli.storage_options import dataset_argument, storage_option
from hsfmt.readers.verification import LEVELS, Report, verify
from hsfmt.readers.verification.report import Coverage
from hsfmt.readers.verification.tiers import Level
from hsfmt.storage import Store

# A bar has to fit on a line of 80 characters.
_SHOWN_NAME = 9


_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_DURATION_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _duration(ctx: click.Context, param: click.Parameter, value: str | None) -> timedelta | None:
    if value is None:
        return None
    match = _DURATION.fullmatch(value.strip())
    try:
        if match:
            return timedelta(seconds=float(match[1]) * _DURATION_UNITS[match[2]])
    except OverflowError:
        pass
    raise click.BadParameter(f"{value!r} is not a time like 90s, 30m, 2h or 30d", ctx, param)


@click.command()
@dataset_argument
@click.option(
    "--level",
    type=click.Choice(LEVELS),
    default="complete",
    show_default=True,
    help="quick: manifests, counts, sizes. complete: every file there, nothing unexpected, all digests. "
    "full: every chunk decoded, ids, offsets, sample digests, NaN, Inf and all-zero states.",
)
@click.option("--sample", help="A share of the data: 5%, 5G, or 3/10, the third of ten subsets that cover all once.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Seed of the sample's choice; the report states it.")
@click.option("--part", "parts", multiple=True, metavar="NAME", help="Data of this part only; may be repeated.")
@click.option("--max-duration", callback=_duration, help="Stop after a time like 2h; the next run goes on from there.")
@click.option("--max-age", callback=_duration, help="Do not read again what was found fine within a time like 30d.")
@click.option(
    "--state",
    type=click.Path(dir_okay=False),
    help="File that keeps what was verified; by default one in the user's cache folder.",
)
@workers_option("Processes that check.")
@storage_option
@json_option
@quiet_option
@click.pass_context
def command(
    ctx: click.Context, /, *, store: Store, level: Level, workers: int, as_json: bool, quiet: bool, **limits: Any
) -> None:
    """Check the dataset at URL and report everything that is wrong with it, all at once.

    Exit code 1 when there is an error; warnings and infos (uncommitted parts, parts newer than the seal) leave it 0.
    """
    started = time.monotonic()
    check_place(store)
    with open_progress(f"verifying ({level})", shown=not (as_json or quiet)) as progress:

        def advance(done: int, total: int, what: str) -> None:
            progress.total = total
            progress.update(done, _short(what))

        report = verify(store, level=level, workers=workers, progress=advance, **limits)
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
    if report.coverage and report.coverage.selection:
        rows += _coverage(report.coverage)
    rows.append(("took", units.seconds(took)))
    return "\n".join([*lines, f"{report.verdict}: {found}", units.aligned(rows, "  ")])


def _coverage(coverage: Coverage) -> list[tuple[str, str]]:
    asked = ", ".join(f"{name} {value}" for name, value in coverage.selection.items())
    read = f"{units.nbytes(coverage.read_nbytes)} of {units.nbytes(coverage.total_nbytes)} read"
    if coverage.known_nbytes:
        read += f", {units.nbytes(coverage.known_nbytes)} known from earlier runs"
    skipped = [
        ("skipped", f"{units.counted(files, 'file')}, {units.nbytes(nbytes)}: {reason}")
        for reason, (files, nbytes) in coverage.skipped.items()
    ]
    return [("asked for", asked), ("data", read), *skipped]
