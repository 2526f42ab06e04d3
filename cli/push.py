"""`hsfmt push`: make another place hold the same dataset."""

from __future__ import annotations

from typing import Any

import click

from hsfmt.cli.transferring import run, transfer_options


@click.command()
@transfer_options
def command(**options: Any) -> None:
    """Copy what DST lacks of the sealed dataset SRC, and make its snapshot the current one of DST.

    Both may be folders or URLs of any storage. Run it again after an interruption: it goes on. A DST that holds
    another dataset, or samples that SRC lacks, is refused.
    """
    run("pushing", **options)
