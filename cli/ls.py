"""`hsfmt ls`: list the samples of a dataset, or its holes, line by line as they are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import click
import numpy as np

from hsfmt.catalog import load_listed
from hsfmt.cli.failures import exit_code, json_problems, one_line, show
from hsfmt.cli.opening import Opened, open_dataset
from hsfmt.cli.options import json_option, snapshot_option
from hsfmt.cli.storage_options import dataset_argument, storage_option
from hsfmt.errors import HsfmtError
from hsfmt.index import PartIndex
from hsfmt.snapshot import Snapshot
from hsfmt.storage import Reads, Store
from hsfmt.storage.read_together import read_together

# Samples of a part mostly lie together in a snapshot; with this many indexes at hand, mixed ones are no trouble either.
_CACHED_INDEXES = 64


@click.command()
@dataset_argument
@snapshot_option
@click.option("-l", "--long", "long", is_flag=True, help="Part, row and metadata of each sample too.")
@click.option("--limit", type=click.IntRange(0), metavar="N", help="The first N only.")
@click.option("--holes", is_flag=True, help="List the holes with their reasons instead.")
@storage_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    store: Store,
    snapshot: str | None,
    long: bool,
    limit: int | None,
    holes: bool,
    as_json: bool,
) -> None:
    """List the samples of the dataset at URL in order: number, tokens, supervised tokens, id."""
    opened = open_dataset(store, snapshot)
    if opened.is_live and snapshot is None:
        click.echo("never sealed: these are the samples committed now", err=True)
    rows = _holes(opened) if holes else _samples(opened, long=long)
    if limit is not None:
        rows = (row for _, row in zip(range(limit), rows, strict=False))
    if as_json:
        ctx.exit(_print_json(opened, "holes" if holes else "samples", rows))
    for line in map(_hole_line, rows) if holes else _lines(opened, rows, long=long):
        click.echo(line)


def _samples(opened: Opened, *, long: bool) -> Iterator[dict[str, Any]]:
    snapshot, ids = opened.snapshot, opened.ids()
    indexes: dict[int, PartIndex] = {}
    numbers, firsts = np.unique(snapshot.part, return_index=True)
    in_order = numbers[np.argsort(firsts)].tolist() if long else []
    files = read_together(opened.store, [each for number in in_order for each in snapshot.parts[number].documents])
    for i in range(snapshot.n_samples):
        row = {
            "id": ids[i],
            "index": i,
            "supervised_tokens": int(snapshot.n_supervised[i]),
            "tokens": int(snapshot.n_tokens[i]),
        }
        if long:
            number, place = int(snapshot.part[i]), int(snapshot.row[i])
            index = _index(files, snapshot, number, indexes)
            row |= {
                "loss_mask_given": bool(index.loss_mask_given[place]),
                "metadata": index.metadata(place),
                "part": snapshot.parts[number].name,
                "row": place,
                "source_index": int(index.source_index[place]),
            }
        yield row


def _index(files: Reads, snapshot: Snapshot, number: int, indexes: dict[int, PartIndex]) -> PartIndex:
    if number not in indexes:
        if len(indexes) >= _CACHED_INDEXES:
            del indexes[next(iter(indexes))]
        loaded = load_listed(files, snapshot, number).index
        assert loaded is not None, "a part that has the rows of samples has an index"
        indexes[number] = loaded
    return indexes[number]


def _holes(opened: Opened) -> Iterator[dict[str, Any]]:
    from hsfmt.cli.overview import overview

    yield from overview(opened)["holes"]


def _lines(opened: Opened, rows: Iterator[dict[str, Any]], *, long: bool) -> Iterator[str]:
    snapshot = opened.snapshot
    largest = int(snapshot.n_tokens.max()) if snapshot.n_samples else 0
    widths = max(5, len(str(snapshot.n_samples))), max(6, len(str(largest)))
    if sys.stdout.isatty():
        rest = "  part:row  metadata" if long else ""
        yield f"{'index':>{widths[0]}}  {'tokens':>{widths[1]}}  {'superv.':>{widths[1] + 1}}  id{rest}"
    for row in rows:
        counts = (
            f"{row['index']:>{widths[0]}}  {row['tokens']:>{widths[1]}}  {row['supervised_tokens']:>{widths[1] + 1}}"
        )
        line = f"{counts}  {one_line(row['id'])}"
        if long:
            metadata = json.dumps(row["metadata"], ensure_ascii=False, separators=(",", ":"))
            line += f"  {row['part']}:{row['row']}  {one_line(metadata)}"
        yield line


def _hole_line(row: dict[str, Any]) -> str:
    return f"{one_line(row['id'])}\t{one_line(row['reason'])}"


def _print_json(opened: Opened, name: str, rows: Iterator[dict[str, Any]]) -> int:
    """Print one document, a row a line, as the rows come; an error on the way becomes its last member."""
    head = {"live": opened.is_live, "snapshot": opened.snapshot.fingerprint, "url": opened.store.url}
    click.echo(json.dumps(head)[:-1] + f', "{name}": [', nl=False)
    failure: HsfmtError | None = None
    separator = "\n"
    try:
        for row in rows:
            click.echo(separator + json.dumps(row), nl=False)
            separator = ",\n"
    except HsfmtError as error:
        failure = error
        show(error)
    if failure is None:
        click.echo("\n]}")
        return 0
    code = exit_code(failure)
    click.echo(f'\n], "error": {json.dumps(json_problems(failure))}, "exit_code": {code}}}')
    return code
