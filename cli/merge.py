"""`hsfmt merge`: put the parts of several datasets into one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from hsfmt.cli import units
from hsfmt.cli.failures import dumps, one_line
from hsfmt.cli.options import json_option
from hsfmt.cli.storage_options import open_places, storage_option
from hsfmt.maintenance.merge import merge
from hsfmt.maintenance.merge_report import MergeReport

_SHOWN = 20


@click.command()
@click.argument("destination", metavar="DST")
@click.argument("sources", metavar="SRC...", nargs=-1, required=True)
@click.option("--link", "how", flag_value="link", help="Hard links (or copies made by the server), or nothing.")
@click.option("--copy", "how", flag_value="copy", help="Copy, comparing each digest on the way.")
@click.option("--move", "how", flag_value="move", help="Empty the sources when all of it is committed in DST.")
@click.option(
    "--on-duplicate",
    type=click.Choice(["refuse", "first"]),
    default="refuse",
    show_default=True,
    help="What to do about an id with different content: refuse, or serve that of the part with the smallest name.",
)
@click.option(
    "--verify",
    type=click.Choice(["quick", "full"]),
    default="quick",
    show_default=True,
    help="What to check of the sources before: documents and sizes, or the digest of every file.",
)
@click.option("--no-seal", is_flag=True, help="Leave sealing to `hsfmt seal`.")
@storage_option
@json_option
def command(
    *,
    destination: str,
    sources: tuple[str, ...],
    how: str | None,
    storage_options: Mapping[str, Any],
    as_json: bool,
    **options: Any,
) -> None:
    """Put all that is committed in the datasets SRC into DST, which may be new, and seal it.

    Files are linked where they can be and copied elsewhere. Datasets that mean different things are refused.
    """
    target, *origins = open_places([destination, *sources], storage_options)
    report = merge(
        target,
        origins,
        how=how or "auto",  # type: ignore[arg-type]  # one of its values
        on_duplicate=options["on_duplicate"],
        verify=options["verify"],
        seal=not options["no_seal"],
    )
    click.echo(dumps(report.to_json()) if as_json else _text(report))


def _text(report: MergeReport) -> str:
    rows = [("parts", f"{len(report.parts):,} added, {len(report.present):,} there already")]
    if report.superseded:
        rows.append(("superseded", f"{len(report.superseded):,} left where they are"))
    linked = "copied by the server itself" if "://" in report.destination else "linked"
    rows.append(("data", f"{units.nbytes(report.linked_nbytes)} {linked}, {units.nbytes(report.copied_nbytes)} copied"))
    rows += [("newer", f"{source}: {len(parts):,} parts newer than its seal") for source, parts in report.newer.items()]
    if report.same:
        rows.append(("duplicates", f"{report.same:,} with the same content, served once"))
    for sample_id, winner, loser in report.conflicts[:_SHOWN]:
        rows.append(("conflict", one_line(f"{sample_id}: of part {winner}, not of part {loser}")))
    if len(report.conflicts) > _SHOWN:
        rows.append(("conflicts", f"{len(report.conflicts):,} in all; --json lists them"))
    if report.retracted:
        rows.append(("retracted", units.counted(len(report.retracted), "sample")))
    if report.attachments:
        rows.append(("attachments", ", ".join(report.attachments)))
    rows += [("emptied", source) for source in report.emptied]
    rows += [("not emptied", one_line(f"{source}: {reason}")) for source, reason in report.left.items()]
    if report.fingerprint is not None and report.counts is not None:
        rows.append(("samples", f"{report.counts['samples']:,}, {report.counts['holes']:,} holes"))
        rows += [("snapshot", report.fingerprint), ("content", str(report.content_digest))]
    return f"merged: {report.destination}\n{units.aligned(rows, '  ')}"
