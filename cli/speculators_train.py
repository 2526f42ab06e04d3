"""`hsfmt speculators-train`: the trainer of speculators with the backend `hsfmt`.

Under torchrun: `torchrun --nproc_per_node=8 -m hsfmt.cli.speculators_train ARGUMENTS`.
"""

from __future__ import annotations

import sys
import traceback

import click

from hsfmt.errors import HsfmtError


@click.command(
    "speculators-train",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Train a drafter with speculators on a dataset.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Train a drafter with speculators on a dataset.

    ARGUMENTS are those of `speculators train`, with --hidden-states-backend hsfmt --hsfmt-path DATASET among them; a
    fingerprint after --hsfmt-snapshot trains on that snapshot. What is stored is joined with the rows of --data-path
    by the token ids; rows without states follow --on-missing. `hsfmt speculators-train -- --help` lists all options.
    """
    from hsfmt.readers.speculators import train

    try:
        train(arguments)
    except HsfmtError:
        raise
    except Exception:  # noqa: BLE001  the trainer's own, which its users know by their traceback
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    from hsfmt.cli.main import main

    main(["speculators-train", *sys.argv[1:]], prog_name="hsfmt")
