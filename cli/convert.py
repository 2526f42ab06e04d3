"""`hsfmt convert`: turn a folder that another program wrote into a dataset."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from hsfmt.cli import units
from hsfmt.cli.converting import run as conversion
from hsfmt.cli.converting.plan import Request, make_plan
from hsfmt.cli.converting.report import Report
from hsfmt.cli.converting.reshaping import CAST_DTYPES, RESHAPING_OPTIONS, Reshaping
from hsfmt.cli.failures import dumps, exit_code, show
from hsfmt.cli.options import json_option, layer_ids, quiet_option, size, workers_option
from hsfmt.cli.storage_options import shown_command, storage_option
from hsfmt.cli.termination import sigterm_interrupts
from hsfmt.codecs import CODECS
from hsfmt.errors import SourceError, UsageError
from hsfmt.header import NORMS
from hsfmt.readers.sources import SOURCE_NAMES, SourceOptions, parse_key_map

_BARE_NBYTES = 1 << 20
_MOST_GIB = 256


def size_or_none(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return bytes as `size` does, None where the option was not given."""
    return None if value is None else size(ctx, param, value)


def part_size_or_none(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return bytes as `size_or_none` does; a small number without a unit, which nobody means, is refused."""
    n = size_or_none(ctx, param, value)
    if value is not None and n is not None and n < _BARE_NBYTES and not value.strip()[-1].isalpha():
        unit = "GiB" if n <= _MOST_GIB else "MiB"
        raise click.BadParameter(f"{value} is {n} bytes: did you mean {n}{unit}? Say {n}B for bytes", ctx, param)
    return n


@click.command()
@click.argument("src")
@click.argument("dst")
@click.option("--from", "from_", type=click.Choice(SOURCE_NAMES), help="Format of SRC. [default: found by looking]")
@click.option(
    "--layer-ids",
    "layers",
    metavar="IDS",
    callback=layer_ids,
    help="HF hidden_states indices of the stored layers, as 2,4,5,8.",
)
@click.option(
    "--final-norm", type=click.Choice(NORMS), help="Whether the last state is before or after the final norm."
)
@click.option("--model", metavar="NAME", help="Model that made the states.")
@click.option("--tokenizer", metavar="NAME", help="Tokenizer of the token ids.")
@click.option(
    "--map",
    "key_map",
    metavar="ROLE=KEY",
    multiple=True,
    help="Where the tensors are, for pt, safetensors, npz, transformers, saelens; most others take ignore=KEY alone.",
)
@click.option("--hidden-size", type=click.IntRange(1), metavar="N", help="Width of one state, to split [T, L*H].")
@click.option("--model-config", metavar="PATH", help="The model's config.json, to tell its number of layers.")
@click.option("--loss-weights", is_flag=True, help="Keep loss masks that hold weights, as the column loss_weight.")
@click.option(
    "--id-prefix", metavar="TEXT", help="Put TEXT before every sample id, as rank1/ for one folder of several."
)
@click.option("--codec", type=click.Choice(CODECS), default="zstd", show_default=True, help="Lossless, or none.")
@click.option(
    "--part-size",
    "part_nbytes",
    metavar="SIZE",
    callback=part_size_or_none,
    help="Raw bytes of a part, with a unit. [default: 32GiB; 4GiB with --delete-source]",
)
@workers_option("Processes that convert.")
@click.option(
    "--memory",
    "memory_nbytes",
    metavar="SIZE",
    callback=size_or_none,
    help="What the samples that all processes hold at once may take together. [default: no bound]",
)
@click.option(
    "--delete-source",
    is_flag=True,
    help="Delete each file once its samples are committed and were read again from the dataset.",
)
@click.option("--trim-padding", is_flag=True, help="Leave out padding at the end of samples.")
@click.option(
    "--pad-id",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="ID",
    help="Token id of padding for --trim-padding, where the source has no attention mask.",
)
@click.option(
    "--min-loss-tokens",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Record samples with fewer supervised tokens as holes.",
)
@click.option(
    "--split-long",
    type=click.IntRange(1),
    metavar="N",
    help="Cut longer samples into windows of N tokens, ID#0, ID#1.",
)
@click.option("--cast", type=click.Choice(CAST_DTYPES), help="Change the states to this dtype; recorded.")
@click.option("--resume/--no-resume", default=True, help="Skip what is committed, or refuse a dataset with samples.")
@click.option("--dry-run", is_flag=True, help="Say what would happen, with a size estimate; write nothing.")
@click.option("--force", is_flag=True, help="Start although the estimate does not fit.")
@click.option(
    "--on-bad",
    type=click.Choice(["raise", "hole"]),
    default="raise",
    show_default=True,
    help="Stop at a file that can't be taken, or record a hole with its reason and go on.",
)
@click.option(
    "--nonfinite", type=click.Choice(["raise", "hole", "keep"]), help="The same for NaN and Inf. [default: as --on-bad]"
)
@click.option("--seal/--no-seal", default=True, help="Make what is committed the current snapshot at the end.")
@click.option("--expect", type=click.IntRange(1), metavar="N", help="Do not seal unless there are N samples.")
@storage_option
@json_option
@quiet_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    as_json: bool,
    quiet: bool,
    layers: tuple[int, ...] | None,
    key_map: tuple[str, ...],
    hidden_size: int | None,
    model_config: str | None,
    **request: Any,
) -> None:
    """Turn the folder SRC, which another program wrote, into the dataset DST.

    Every file of SRC ends as a sample, a hole with its reason, a support file or a stray, and the report counts them.
    Running the same command again goes on where an earlier run ended. What was committed stays, whatever happens.

    Layer ids are HF hidden_states indices: 0 is the embeddings, k the output of decoder layer k-1. Layers and final
    norm are asked for only where the format of SRC does not fix them.
    """
    options = SourceOptions(
        key_map=parse_key_map(",".join(key_map)),
        hidden_size=hidden_size,
        layer_ids=layers,
        model_config=model_config,
        loss_weights=request.pop("loss_weights"),
    )
    if not request["trim_padding"] and ctx.get_parameter_source("pad_id") is ParameterSource.COMMANDLINE:
        remedy = "it goes with --trim-padding, and changes nothing by itself"
        raise UsageError.at("--pad-id", expected="--trim-padding beside it", got="none", remedy=remedy)
    reshaping = Reshaping(**{name: request.pop(name) for name in RESHAPING_OPTIONS})
    typed = ("hsfmt", *shown_command(ctx.find_root().obj or ()))
    asked = Request(options=options, reshaping=reshaping, command=typed, **request)
    with sigterm_interrupts():
        report = conversion.run(make_plan(asked), show_progress=not (as_json or quiet))
        _print(report, as_json=as_json)
    ctx.exit(_exit_code(report))


def _print(report: Report, *, as_json: bool) -> None:
    if as_json:
        click.echo(dumps(report.to_json()))
    else:
        click.echo(report.text())
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    if report.error is not None:
        show(report.error)
        counts = report.counts()
        n = counts["sample"] + counts["skipped"]
        if report.tally.conflicts:
            # The same command would meet the same conflicts.
            n = counts["sample"]
            kept = f"{units.counted(n, 'sample')} committed beside what was there" if n else "nothing was committed"
            twice = report.written.samples - n
            if twice > 0:
                # Another run committed these ids while this one did; the part is there, whatever the report calls them.
                kept = f"{units.counted(n + twice, 'sample')} committed, {twice} of them under an id of another's"
            click.echo(f"{kept}; not sealed.", err=True)
        elif counts["failed"] or counts["not_reached"]:
            kept = f"{units.counted(n, 'sample')} committed, and kept; not sealed" if n else "nothing was committed"
            # The same command would meet the same file.
            again = "Once the file is settled, the same command goes on" if n else ""
            if not isinstance(report.error, SourceError):
                again = "Run the same command again to go on"
            click.echo(". ".join(filter(None, (kept, again))) + ".", err=True)


def _exit_code(report: Report) -> int:
    return 0 if report.error is None else exit_code(report.error)
