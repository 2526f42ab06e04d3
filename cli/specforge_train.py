"""`hsfmt specforge-train`: the trainer of SpecForge on a dataset.

Under torchrun: `torchrun --nproc_per_node=8 -m hsfmt.cli.specforge_train ARGUMENTS`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import click

from hsfmt.cli.options import fingerprint, layer_ids
from hsfmt.errors import HsfmtError, NotFoundError, UsageError


@click.command("specforge-train", short_help="Train a drafter with SpecForge on a dataset.")
@click.option("-c", "--config", required=True, metavar="FILE", help="SpecForge's YAML or JSON configuration.")
@click.option(
    "--hsfmt-snapshot",
    metavar="FINGERPRINT",
    callback=fingerprint,
    help="Of the dataset, or 'live'. Default: the sealed one.",
)
@click.option(
    "--hsfmt-layers",
    metavar="IDS",
    callback=layer_ids,
    help="HF ids of the drafter's layers, where they are asked for.",
)
@click.option("--node-rank", type=int, help="Of this node, where deployment.trainer has several.")
@click.option("--plan", is_flag=True, help="Show the processes that would be started, and start none.")
# SpecForge's launcher says it to the processes that it starts.
@click.option("--role", type=click.Choice(["auto", "all"]), hidden=True, expose_value=False)
@click.argument("overrides", nargs=-1, metavar="[SECTION.FIELD=VALUE]...")
@click.pass_context
def command(
    ctx: click.Context,
    *,
    config: str,
    hsfmt_snapshot: str | None,
    hsfmt_layers: tuple[int, ...] | None,
    node_rank: int | None,
    plan: bool,
    overrides: tuple[str, ...],
) -> None:
    """Train a drafter with SpecForge on a dataset.

    As `specforge train`, with the dataset as data.hidden_states_path (and as data.eval_hidden_states_path). Models,
    order of samples, steps and checkpoints are SpecForge's; it starts a process for each GPU that the configuration
    names.
    """
    # The word that SpecForge's launcher puts before the options of the processes that it starts.
    words = overrides[1:] if overrides[:1] == ("train",) else overrides
    _check_words(config, words)
    from hsfmt.readers.specforge_training import Source, train

    try:
        code = train(config, words, source=Source(hsfmt_snapshot, hsfmt_layers), node_rank=node_rank, plan_only=plan)
    except HsfmtError:
        raise
    except Exception:  # noqa: BLE001  the trainer's own, which its users know by their traceback
        traceback.print_exc()
        sys.exit(1)
    ctx.exit(code)


def _check_words(config: str, overrides: Sequence[str]) -> None:
    """Refuse what is wrong whatever the file says, before SpecForge is loaded."""
    if not Path(config).is_file():
        got = "a folder" if Path(config).is_dir() else "no such file"
        raise NotFoundError.at(f"--config {config}", expected="SpecForge's YAML or JSON configuration", got=got)
    for word in overrides:
        name, equals, _ = word.partition("=")
        if not equals or not name:
            remedy = "as data.hidden_states_path=my-dataset"
            raise UsageError.at("command line", expected="SECTION.FIELD=VALUE", got=repr(word), remedy=remedy)


if __name__ == "__main__":
    from hsfmt.cli.main import main

    main(["specforge-train", *sys.argv[1:]], prog_name="hsfmt")
