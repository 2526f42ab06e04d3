"""`hsfmt repair`: keep what can be proven of a damaged dataset, and say what is lost."""

from __future__ import annotations

import click

from hsfmt.cli import units
from hsfmt.cli.failures import dumps, one_line
from hsfmt.cli.opening import check_place
from hsfmt.cli.options import json_option, quiet_option
from hsfmt.cli.progress import open_progress
from hsfmt.cli.storage_options import dataset_argument, storage_option
from hsfmt.cli.warning_log import collected_warnings
from hsfmt.maintenance.repair import repair
from hsfmt.maintenance.repair_report import PartFate, RepairReport
from hsfmt.storage import Store

_SHOWN = 20


@click.command()
@dataset_argument
@click.option("--dry-run", is_flag=True, help="Only say what is broken and what would become of it.")
@storage_option
@json_option
@quiet_option
@click.pass_context
def command(ctx: click.Context, *, store: Store, dry_run: bool, as_json: bool, quiet: bool) -> None:
    """Repair the dataset at URL as far as its digests prove what it was; --dry-run first prints the plan.

    Every sample that still verifies is kept, bit for bit, in a new part that replaces the broken one; what can't be
    proven is not kept: it becomes a hole with the reason, which a resuming producer retries. Nothing is deleted, all
    that is committed is sealed. Exit code 1 when samples or attachments are lost, 0 when all were saved.
    """
    check_place(store)
    with (
        collected_warnings() as warnings,
        open_progress("examining", shown=not (as_json or quiet), noun="parts") as progress,
    ):

        def advance(done: int, total: int, part: str) -> None:
            progress.total = total
            progress.update(done, part)

        report = repair(store, dry_run=dry_run, progress=advance)
    click.echo(dumps({**report.to_json(), "warnings": [*report.warnings, *warnings]}) if as_json else _text(report))
    for warning in [*report.warnings, *warnings]:
        click.echo(f"warning: {one_line(warning)}", err=True)
    ctx.exit(0 if report.ok else 1)


def _text(report: RepairReport) -> str:
    lines = [line for fate in report.parts for line in _part_lines(fate)]
    lines += [f"{document.fate}: {one_line(document.problem)}" for document in report.documents]
    if not report.changed:
        return f"nothing to repair: {report.url}"
    lost = units.counted(report.n_lost, "sample")
    rows = [
        ("dataset", report.url),
        ("saved", f"{units.counted(report.n_saved, 'sample')} in new parts"),
        ("lost", lost),
        ("space", f"{units.nbytes(report.nbytes)} for new parts; the old ones stay until `hsfmt gc`"),
    ]
    if report.snapshot:
        rows.append(("snapshot", report.snapshot))
    rows.append(("next", _next(report)))
    head = "would be repaired" if report.dry_run else "repaired"
    return "\n".join(
        [*lines, f"{head}: {'all samples kept' if report.ok else f'{lost} lost'}", units.aligned(rows, "  ")]
    )


def _next(report: RepairReport) -> str:
    if report.dry_run:
        restore = "restore from a copy what is called broken, if you have one; else " if not report.ok else ""
        return f"{restore}`hsfmt repair URL` does it"
    again = "run the producer again, which makes lost samples anew; " if report.n_lost else ""
    attach = "attach again what was dropped; " if any(each.fate == "dropped" for each in report.documents) else ""
    return f"{again}{attach}`hsfmt verify --level full URL` ends with 0 now"


def _part_lines(fate: PartFate) -> list[str]:
    new = f", replaced by {fate.new_part}" if fate.new_part else ""
    lines = [f"{fate.fate}: part {fate.part}{new}: {fate.n_saved:,} saved, {len(fate.lost) + fate.n_unknown:,} lost"]
    lines += [f"  {one_line(problem)}" for problem in fate.problems[:_SHOWN]]
    lines += [f"  lost: {one_line(key)}: {one_line(reason)}" for key, reason in sorted(fate.lost.items())[:_SHOWN]]
    if len(fate.lost) > _SHOWN:
        lines.append(f"  and {len(fate.lost) - _SHOWN:,} more; --json lists all")
    if fate.n_unknown:
        lines.append(f"  lost: {units.counted(fate.n_unknown, 'sample')} whose ids nothing tells")
    return lines
