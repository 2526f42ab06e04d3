"""`hsfmt compact`: few parts of many."""

from __future__ import annotations

import click

from hsfmt.cli import units
from hsfmt.cli.failures import dumps
from hsfmt.cli.opening import check_place
from hsfmt.cli.options import json_option, quiet_option, size
from hsfmt.cli.progress import open_progress
from hsfmt.cli.storage_options import dataset_argument, storage_option
from hsfmt.maintenance.compact import CompactReport, compact
from hsfmt.storage import Store


@click.command()
@dataset_argument
@click.option(
    "--target-size", default="32GiB", show_default=True, metavar="SIZE", callback=size, help="Most of a part, raw."
)
@click.option("--dry-run", is_flag=True, help="Only say which parts would become which.")
@storage_option
@json_option
@quiet_option
def command(*, store: Store, target_size: int, dry_run: bool, as_json: bool, quiet: bool) -> None:
    """Make few parts of many in the dataset at URL: same samples, same order, same content digest.

    The new parts replace the old ones, which stay until `hsfmt gc`, so that it takes their size once more. It seals
    first and last; when it is stopped, the same command goes on.
    """
    check_place(store)
    with open_progress("compacting", shown=not (as_json or quiet), noun="samples") as progress:

        def advance(done: int, total: int, part: str) -> None:
            progress.total = total
            progress.update(done, part)

        report = compact(store, target_nbytes=target_size, dry_run=dry_run, progress=advance)
    click.echo(dumps(report.to_json()) if as_json else _text(report))


def _text(report: CompactReport) -> str:
    if not report.groups:
        return f"nothing to compact, {units.counted(report.parts_before, 'part')}: {report.url}"
    lines = [
        f"{units.counted(len(group.parts), 'part')} to {group.new_part}: {units.counted(group.n_samples, 'sample')}"
        for group in report.groups
    ]
    left = f"{units.counted(report.n_left, 'copy', 'copies')} of ids that other parts serve: `hsfmt gc` takes them too"
    rows = [
        ("parts", f"{report.parts_before:,} before, {report.parts_after:,} after"),
        ("space", f"{units.nbytes(report.nbytes)} for new parts; the old ones stay until `hsfmt gc`"),
        *([("left behind", left)] if report.n_left else []),
        ("snapshot", report.snapshot),
        ("content", report.content_digest),
    ]
    head = "would be compacted" if report.dry_run else "compacted"
    return "\n".join([*lines, f"{head}: {report.url}", units.aligned(rows, "  ")])
