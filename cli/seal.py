"""`hsfmt seal`: make all that is committed the dataset's current snapshot."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import click

from hsfmt.catalog import read_pointer
from hsfmt.cli import units
from hsfmt.cli.failures import dumps, one_line
from hsfmt.cli.opening import check_place
from hsfmt.cli.options import json_option
from hsfmt.cli.storage_options import dataset_argument, storage_option
from hsfmt.cli.warning_log import collected_warnings
from hsfmt.errors import UsageError
from hsfmt.sealing import Sealed, seal
from hsfmt.storage import Store


@click.command()
@dataset_argument
@click.option("--expect", type=click.IntRange(1), metavar="N", help="Seal only if there are N samples.")
@click.option(
    "--expect-ids",
    type=click.File("r", encoding="utf-8"),
    metavar="FILE",
    help="Seal only if the samples are exactly these: an id a line, or a JSON list. - is stdin.",
)
@click.option(
    "--drop-missing", is_flag=True, help="Leave out parts that are gone although the current snapshot names them."
)
@click.option(
    "--drop-attachment",
    "drop_attachments",
    metavar="NAME",
    multiple=True,
    help="Let go of an attachment that the current snapshot lists, as d2t.",
)
@storage_option
@json_option
def command(
    *,
    store: Store,
    expect: int | None,
    expect_ids: Any,
    drop_missing: bool,
    drop_attachments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make all that is committed at URL the current snapshot, which readers then open.

    Nothing is replaced when the samples are not the expected ones, or when parts of the current snapshot are gone: the
    former snapshot stays.
    """
    wanted: int | Collection[str] | None = expect
    if expect_ids is not None:
        if expect is not None:
            raise UsageError.at("--expect-ids", expected="--expect or --expect-ids", got="both")
        wanted = read_ids(expect_ids.read(), "--expect-ids")
    check_place(store)
    pointer = read_pointer(store)
    before = pointer.samples if pointer else None
    with collected_warnings() as warnings:
        try:
            sealed = seal(store, expect=wanted, drop_missing=drop_missing, drop_attachments=drop_attachments)
        except UsageError as error:
            # What the function calls by its argument is an option here.
            names = {"drop_attachments": "--drop-attachment"}
            problems = [replace(each, where=names.get(each.where, each.where)) for each in error.problems]
            raise UsageError(problems) from error
    if as_json:
        click.echo(dumps({**_as_json(store.url, sealed), "samples_before": before, "warnings": warnings}))
    else:
        click.echo(_text(store.url, sealed, before))
    for warning in warnings:
        click.echo(f"warning: {one_line(warning)}", err=True)


def read_ids(text: str, option: str) -> list[str]:
    """Return the ids of a file: one a line, or a JSON list.

    Raises
    ------
    UsageError
        Another JSON document, or no id at all.
    """
    if text.lstrip().startswith("["):
        try:
            ids = json.loads(text)
        except (ValueError, RecursionError):
            ids = None
        if isinstance(ids, list) and all(isinstance(member, str) for member in ids):
            return ids
        raise UsageError.at(option, expected="an id a line, or a JSON list of ids", got="another JSON document")
    ids = [line for line in text.splitlines() if line]
    if not ids:
        raise UsageError.at(option, expected="at least one id", got="an empty file")
    return ids


def _as_json(url: str, sealed: Sealed) -> dict[str, Any]:
    snapshot = sealed.snapshot
    return {
        "changed": sealed.changed,
        "content_digest": snapshot.content_digest,
        "counts": dict(snapshot.counts),
        "rounds": sealed.rounds,
        "snapshot": snapshot.fingerprint,
        "url": url,
    }


def _text(url: str, sealed: Sealed, before: int | None) -> str:
    counts = sealed.snapshot.counts
    parts = [units.counted(counts["samples"], "sample"), units.counted(counts["tokens"], "token")]
    parts.append(units.counted(counts["parts"], "part"))
    parts += [f"{counts[key]:,} {key}" for key in ("shadowed", "retracted", "holes") if counts[key]]
    if before is not None and before > counts["samples"]:
        parts.append(f"{before - counts['samples']:,} samples fewer than in the snapshot before")
    rows = [
        ("samples", ", ".join(parts)),
        ("snapshot", sealed.snapshot.fingerprint),
        ("content", sealed.snapshot.content_digest),
    ]
    head = "sealed" if sealed.changed else "already sealed, nothing is newer"
    return f"{head}: {url}\n{units.aligned(rows, '  ')}"
