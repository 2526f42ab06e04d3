"""`hsfmt retract`: take samples out of the snapshot; their data stays."""

from __future__ import annotations

from typing import Any

import click

from hsfmt.catalog import committed_parts, load_current, read_header, read_pointer, read_snapshot, without_superseded
from hsfmt.cli import units
from hsfmt.cli.failures import dumps
from hsfmt.cli.opening import check_place
from hsfmt.cli.options import json_option
from hsfmt.cli.seal import read_ids
from hsfmt.cli.storage_options import dataset_argument, storage_option
from hsfmt.errors import SampleNotFoundError, UsageError
from hsfmt.sealing import seal
from hsfmt.storage import Store

_SHOWN = 10


@click.command()
@dataset_argument
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option(
    "--ids",
    "ids_file",
    type=click.File("r", encoding="utf-8"),
    metavar="FILE",
    help="Also these: an id a line, or a JSON list. - is stdin.",
)
@click.option("--dry-run", is_flag=True, help="Only say whether all ids are known, and how many samples would be left.")
@storage_option
@json_option
def command(*, store: Store, ids: tuple[str, ...], ids_file: Any, dry_run: bool, as_json: bool) -> None:
    """Serve the samples of these ids no longer: seal the dataset at URL without them.

    They stay listed as retracted and count as present, so that no producer makes them again; their data stays where it
    is, and former snapshots serve them. An id of no sample is refused, and nothing is done then.
    """
    wanted = {*ids, *(read_ids(ids_file.read(), "--ids") if ids_file is not None else ())}
    if not wanted:
        raise UsageError.at("ID", expected="ids of samples, or --ids FILE", got="none")
    check_place(store)
    before = _retracted_now(store)
    if dry_run:
        _check_known(store, wanted)
        text = f"would retract {units.counted(len(wanted), 'sample')}: {store.url}"
        click.echo(dumps({"dry_run": True, "ids": sorted(wanted), "url": store.url}) if as_json else text)
        return
    sealed = seal(store, retract=wanted)
    counts = sealed.snapshot.counts
    new = counts["retracted"] - before
    if as_json:
        document = {
            "changed": sealed.changed,
            "counts": dict(counts),
            "dry_run": False,
            "ids": sorted(wanted),
            "retracted_now": new,
            "snapshot": sealed.snapshot.fingerprint,
            "url": store.url,
        }
        click.echo(dumps(document))
        return
    rows = [
        ("samples", f"{units.counted(counts['samples'], 'sample')} served, {counts['retracted']:,} retracted"),
        ("snapshot", sealed.snapshot.fingerprint),
    ]
    click.echo(f"retracted {units.counted(new, 'sample')}: {store.url}\n{units.aligned(rows, '  ')}")


def _retracted_now(store: Store) -> int:
    pointer = read_pointer(store)
    return len(read_snapshot(store, pointer.fingerprint)[0].retracted_row) if pointer else 0


def _check_known(store: Store, wanted: set[str]) -> None:
    missing = set(wanted)
    for part in without_superseded(load_current(store, committed_parts(store), read_header(store), {}).values()):
        if missing and part.index is not None:
            missing -= {part.index.sample_id(row) for row in range(part.index.n_samples)}
    if missing:
        shown = tuple(sorted(missing)[:_SHOWN])
        raise SampleNotFoundError.at("retract", expected="ids of samples", got=f"{len(missing)} unknown", samples=shown)
