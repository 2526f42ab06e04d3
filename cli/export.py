"""`hsfmt export`: write a dataset in the format of another program."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import click

from hsfmt.cli import units
from hsfmt.cli.exporting import run as export_run
from hsfmt.cli.exporting.norm import STYLES
from hsfmt.cli.exporting.plan import Request, make_plan, parse_options
from hsfmt.cli.exporting.report import ExportReport
from hsfmt.cli.exporting.states import CASTS
from hsfmt.cli.failures import dumps, exit_code, show
from hsfmt.cli.options import json_option, layer_ids, quiet_option, snapshot_option, workers_option
from hsfmt.cli.storage_options import storage_option
from hsfmt.cli.termination import sigterm_interrupts
from hsfmt.writers.targets.registry import TARGET_NAMES

# Said here, since help imports no target.
_OPTION_NAMES = (
    "Settings for --option, by format: zarr: codec, patterns, chunk_tokens, shard_tokens; speculators and "
    "speculators-fp8: loss_mask; speculators-pt: aux; specforge-eagle3: rows, compression, aux; specforge-dflash and "
    "specforge-dspark: rows, compression, sparse_masks; angelslim-eagle3: rows, aux; deepspec: shard_size, "
    "target_model; the others: none."
)


class TargetName(click.Choice):  # type: ignore[type-arg] # click 8.1 has no parameter for it
    """A format's name; names that are like an unknown one are said."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the name, or fail as click does and with the close names."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            word = str(value).lower()
            close = [name for name in TARGET_NAMES if name.startswith(word)] or get_close_matches(word, TARGET_NAMES)
            if close:
                self.fail(f"{error.message} Did you mean {', '.join(close)}?", param, ctx)
            raise


@click.command(epilog=_OPTION_NAMES)
@click.argument("url")
@click.argument("dst")
@click.option("--to", required=True, type=TargetName(TARGET_NAMES), help="Format to write.")
@snapshot_option
@click.option("--layers", metavar="IDS", callback=layer_ids, help="These layers only, by HF index: 2,8.")
@click.option("--ids", metavar="FILE", help="These samples only: a file with an id a line.")
@click.option("--range", "span", metavar="A:B", help="These samples only: numbers A to B-1 of the snapshot's order.")
@click.option(
    "--norm-weight",
    metavar="FILE:KEY",
    help="Apply the model's final norm to the last layer: its weight, as model.safetensors:model.norm.weight.",
)
@click.option("--norm-eps", type=float, metavar="X", help="The norm's epsilon: rms_norm_eps in config.json.")
@click.option("--norm-style", type=click.Choice(STYLES), help="rms, or gemma for a weight of 1 + w. [default: rms]")
@click.option("--cast", type=click.Choice(CASTS), help="Convert the states; float8 is dequantised.")
@click.option("--model-config", metavar="PATH", help="The model's config.json: it checks layers, width and norm.")
@click.option(
    "--option", "options", metavar="NAME=VALUE", multiple=True, help="A setting of the format alone; see below."
)
@workers_option("Processes that write.")
@click.option("--resume/--no-resume", default=True, help="Go on with the export that is there, or refuse it.")
@click.option("--dry-run", is_flag=True, help="Say what would happen, with a size estimate; write nothing.")
@click.option("--force", is_flag=True, help="Start although the estimate does not fit.")
@click.option("--strict", is_flag=True, help="Refuse a format that has no place for all that the samples have.")
@storage_option
@json_option
@quiet_option
@click.pass_context
def command(ctx: click.Context, /, *, as_json: bool, quiet: bool, options: tuple[str, ...], **request: Any) -> None:
    """Write the dataset at URL into the folder DST, in the format of another program.

    Running the same command again goes on where an earlier run ended. Every file is whole or absent, and no file that
    another job or program wrote is replaced. The journal DST.hsfmt-export.jsonl beside DST says what is whole.

    Nothing about the meaning is guessed: states before the final norm are not written for a program that takes them
    to be after it, unless --norm-weight says how to norm them.
    """
    asked = Request(options=parse_options(options), **request)
    with sigterm_interrupts():
        report = export_run.run(make_plan(asked), show_progress=not (as_json or quiet))
        _print(report, as_json=as_json)
    ctx.exit(0 if report.error is None else exit_code(report.error))


def _print(report: ExportReport, *, as_json: bool) -> None:
    click.echo(dumps(report.to_json()) if as_json else report.text())
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    if report.error is not None:
        show(report.error)
        counts = report.counts()
        n = counts["written"] + counts["already_there"]
        if counts["not_reached"] < counts["asked"] and not report.plan.request.dry_run:
            click.echo(f"{units.counted(n, 'sample')} written, and kept.", err=True)
