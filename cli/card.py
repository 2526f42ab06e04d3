"""`hsfmt card`: the dataset card that the Hub shows."""

from __future__ import annotations

from pathlib import Path

import click

from hsfmt.catalog import load_manifest
from hsfmt.cli.card_escapes import public_text
from hsfmt.cli.dataset_card import StoredSums, dataset_card
from hsfmt.cli.failures import dumps
from hsfmt.cli.opening import check_place
from hsfmt.cli.options import LocalFile, json_option, stored_fingerprint
from hsfmt.cli.storage_options import dataset_argument, storage_option
from hsfmt.errors import UsageError
from hsfmt.readers.open_snapshot import LIVE, choose_snapshot
from hsfmt.storage import Store
from hsfmt.storage.read_together import read_together


@click.command()
@dataset_argument
@click.option(
    "--output",
    type=LocalFile(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where to write it, as README.md in the dataset's own folder. [default: stdout]",
)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@click.option(
    "--snapshot",
    metavar="FINGERPRINT",
    callback=stored_fingerprint,
    help="A stored snapshot's fingerprint. [default: the sealed one]",
)
@storage_option
@json_option
def command(*, store: Store, output: Path | None, force: bool, snapshot: str | None, as_json: bool) -> None:
    """Write a card of the sealed dataset at URL for the Hub: what it means and holds, how to load and verify it.

    It is made of the header and the snapshot alone: nothing of machines, folders and commands of those who made it.
    """
    if snapshot == LIVE:
        remedy = f"run `hsfmt seal {store.url}`"
        raise UsageError.at("snapshot", expected="a sealed snapshot", got="live", remedy=remedy)
    check_place(store)
    chosen = choose_snapshot(store, snapshot, sealed_only=True)[1]
    stored = StoredSums()
    files = read_together(store, [ref.documents[0] for ref in chosen.parts])
    for ref in chosen.parts:
        stored.add(load_manifest(files, ref.name, chosen.header, ref.manifest_digest))
    card = dataset_card(chosen, stored)
    if output is not None:
        _write(output, card, force=force)
    if as_json:
        model = chosen.header.model or {}
        facts = {"fingerprint": chosen.fingerprint, "model": public_text(model["name"]) if "name" in model else None}
        click.echo(dumps({**facts, "card": card, "output": str(output) if output else None}))
    elif output is None:
        click.echo(card, nl=False)
    else:
        click.echo(f"{output}: {len(card.encode()):,} bytes")


def _write(output: Path, card: str, *, force: bool) -> None:
    try:
        with output.open("w" if force else "x", encoding="utf-8", newline="\n") as file:
            file.write(card)
    except FileExistsError as error:
        remedy = "add --force to replace it, or name another file"
        raise UsageError.at(str(output), expected="a file that is not there yet", got="one", remedy=remedy) from error
