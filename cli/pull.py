"""`hsfmt pull`: bring a dataset here."""

from __future__ import annotations

from typing import Any

import click

from hsfmt.cli.transferring import run, transfer_options


@click.command()
@transfer_options
def command(**options: Any) -> None:
    """Copy what DST lacks of the sealed dataset SRC, and make its snapshot the current one of DST.

    The same as push; SRC may also be a plain web server, of which only files that are named are read.
    """
    run("pulling", **options)
