"""`hsfmt gc`: remove what nothing needs any more."""

from __future__ import annotations

import re
from datetime import timedelta

import click

from hsfmt.cli import units
from hsfmt.cli.failures import dumps, one_line
from hsfmt.cli.options import json_option
from hsfmt.cli.storage_options import dataset_argument, storage_option
from hsfmt.maintenance.collect import CollectReport, collect
from hsfmt.storage import Store

_DAMAGED_REMEDY = (
    "`hsfmt repair` restores it or sets it aside; --keep-snapshots and --drop-snapshots-older-than do without it"
)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def duration(ctx: click.Context, param: click.Parameter, value: str | None) -> timedelta | None:
    """Return a time given as 7d, 36h, 90m or 30s: the callback of such options."""
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]{1,6})([smhdw])", value.strip().lower())
    if match is None:
        raise click.BadParameter(f"{value!r} is not a time like 7d, 36h or 90m", ctx, param)
    return timedelta(seconds=int(match[1]) * _UNITS[match[2]])


@click.command()
@dataset_argument
@click.option(
    "--older-than", required=True, metavar="AGE", callback=duration, help="Least age of what is removed, as 7d or 36h."
)
@click.option("--dry-run", is_flag=True, help="Only list what would be removed, and why.")
@click.option("--keep-snapshots", type=click.IntRange(1), metavar="N", help="Keep only the N newest snapshots.")
@click.option(
    "--drop-snapshots-older-than", metavar="AGE", callback=duration, help="Keep no snapshots that old but the current."
)
@click.option("--force", is_flag=True, help="Allow an age under a day, where no writer is at work.")
@storage_option
@json_option
def command(
    *,
    store: Store,
    older_than: timedelta,
    dry_run: bool,
    keep_snapshots: int | None,
    drop_snapshots_older_than: timedelta | None,
    force: bool,
    as_json: bool,
) -> None:
    """Remove from the dataset at URL what no kept snapshot and no committed part needs.

    That is what killed writers left (unfinished uploads to object stores too), parts that others replace, what repair
    set aside, attachments that are listed no longer, and old snapshots if asked for. Files that are none of the
    format's are listed and left. If a snapshot that stays is damaged, all that it could name stays too, and the exit
    code is 1.
    """
    report = collect(
        store,
        older_than=older_than,
        dry_run=dry_run,
        keep_snapshots=keep_snapshots,
        drop_snapshots_older_than=drop_snapshots_older_than,
        force=force,
    )
    click.echo(dumps({"url": store.url, **report.to_json()}) if as_json else _text(store.url, report))
    if report.damaged:
        click.get_current_context().exit(1)


def _text(url: str, report: CollectReport) -> str:
    lines = []
    for title, groups in (("removed", report.removed), ("kept, needed by now", report.spared), ("young", report.young)):
        word = "to remove" if title == "removed" and report.dry_run else title
        for group in groups:
            lines.append(f"{word}: {group.why} ({units.nbytes(group.nbytes)}, {units.seconds(group.age)} old)")
            lines += [f"  {one_line(path)}" for path, _ in group.files]
    verb = "to abort" if report.dry_run else "aborted"
    for title, uploads in ((verb, report.uploads), ("young", report.young_uploads)):
        lines += [
            f"{title}: upload that was never completed ({units.seconds(age)} old)\n  {one_line(path)}"
            for path, age in uploads
        ]
    for fingerprint, problem in report.damaged.items():
        lines.append(f"damaged snapshot, kept with all that it could name: {fingerprint}: {one_line(problem)}")
    if report.damaged:
        size = units.nbytes(sum(group.nbytes for group in report.withheld))
        lines.append(f"  {units.counted(len(report.withheld), 'item')} kept for it, {size} — {_DAMAGED_REMEDY}")
    lines += [f"unknown, left there: {one_line(path)}" for path in report.strays]
    n_files = sum(len(group.files) for group in report.removed)
    verb = "would be removed" if report.dry_run else "removed"
    lines.append(f"{units.counted(n_files, 'file')}, {units.nbytes(report.nbytes)} {verb}: {url}")
    return "\n".join(lines)
