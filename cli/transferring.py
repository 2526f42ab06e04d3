"""What `hsfmt push` and `hsfmt pull` share: all but their names."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from hsfmt.cli import units
from hsfmt.cli.failures import dumps, one_line
from hsfmt.cli.options import json_option, quiet_option, stored_fingerprint
from hsfmt.cli.progress import open_progress
from hsfmt.cli.storage_options import open_sides, side_options
from hsfmt.cli.termination import sigterm_interrupts
from hsfmt.maintenance.transfer import transfer
from hsfmt.maintenance.transfer_report import TransferReport

F = TypeVar("F", bound=Callable[..., Any])

_SHOWN_NAME = 9
_SIDES = ("source", "destination", "storage_options", "source_options", "destination_options")


def transfer_options(function: F) -> F:
    """Add the arguments and options of both commands."""
    for add in reversed(
        (
            click.argument("source", metavar="SRC"),
            click.argument("destination", metavar="DST"),
            click.option(
                "--snapshot",
                metavar="FINGERPRINT",
                callback=stored_fingerprint,
                help="A stored snapshot's fingerprint. [default: the sealed one]",
            ),
            click.option(
                "--verify",
                type=click.Choice(["quick", "full"]),
                default="quick",
                show_default=True,
                help="After each digest was compared on the way: sizes, or read all of DST back and compare again.",
            ),
            click.option(
                "--connections",
                type=click.IntRange(1, 64),
                default=4,
                show_default=True,
                metavar="N",
                help="Files at a time; each takes up to 40 MiB of memory, and all uploads together 64 MiB.",
            ),
            click.option("--dry-run", is_flag=True, help="Only say what would be copied."),
            side_options,
            json_option,
            quiet_option,
        )
    ):
        function = add(function)
    return function


def run(label: str, *, as_json: bool, quiet: bool, **options: Any) -> None:
    """Transfer, and say what was done."""
    source, destination = open_sides(*(options.pop(name) for name in _SIDES))
    started = time.monotonic()
    with sigterm_interrupts(), open_progress(label, shown=not (as_json or quiet)) as progress:

        def advance(done: int, total: int, part: str) -> None:
            progress.total = total
            progress.update(done, part if len(part) <= _SHOWN_NAME else f"…{part[1 - _SHOWN_NAME :]}")

        report = transfer(source, destination, progress=advance, **options)
    seconds = time.monotonic() - started
    click.echo(dumps({**report.to_json(), "seconds": round(seconds, 3)}) if as_json else _text(report, seconds))


def _text(report: TransferReport, seconds: float) -> str:
    n_files = units.counted(report.files, "file")
    rows = [("from", report.source), ("parts", f"{len(report.parts):,} added, {len(report.present):,} there already")]
    if report.restored:
        rows.append(("restored", f"{len(report.restored):,} of those that were there lacked files"))
    if report.dry_run:
        rows.append(("to copy", f"{n_files}, {units.nbytes(report.missing_nbytes)}"))
    else:
        rows.append(("copied", f"{n_files}, {units.nbytes(report.copied_nbytes)}"))
    if report.server_copied_nbytes:
        rows.append(("", f"{units.nbytes(report.server_copied_nbytes)} copied by the server itself"))
    rows.append(("there already", units.nbytes(report.present_nbytes)))
    if report.read_back_nbytes:
        again = f", {units.counted(report.rewritten, 'file')} copied anew" if report.rewritten else ""
        rows.append(("read back", f"{units.nbytes(report.read_back_nbytes)}{again}"))
    rows += [("warning", one_line(warning)) for warning in report.warnings]
    rows.append(("samples", f"{report.counts['samples']:,}"))
    rows += [("snapshot", report.fingerprint), ("content", report.content_digest)]
    if not report.dry_run:
        rows.append(("took", units.seconds(seconds)))
    verb = "would be" if report.dry_run else "is"
    state = "up to date already" if not (report.changed or report.files or report.parts) else f"{verb} up to date"
    return f"{one_line(report.destination)}: {state}\n{units.aligned([(k, one_line(v)) for k, v in rows], '  ')}"
