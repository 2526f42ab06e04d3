"""`hsfmt info`: say what a dataset holds and means."""

from __future__ import annotations

from typing import Any

import click

from hsfmt.cli import units
from hsfmt.cli.failures import dumps, one_line
from hsfmt.cli.opening import open_dataset
from hsfmt.cli.options import json_option, snapshot_option
from hsfmt.cli.overview import overview
from hsfmt.cli.storage_options import dataset_argument, storage_option
from hsfmt.storage import Store

_NORMS = {
    "pre": "pre: a state after the last layer is taken before the model's final norm",
    "post": "post: a state after the last layer is taken after the model's final norm",
    "unknown": "unknown: nobody said whether a state after the last layer is normed",
}
_SHOWN = 20


@click.command()
@dataset_argument
@snapshot_option
@storage_option
@json_option
def command(*, store: Store, snapshot: str | None, as_json: bool) -> None:
    """Say what the dataset at URL holds and means.

    Layers are named in both conventions: as HF hidden_states index k, and as the output of a decoder layer, k - 1.
    """
    facts = overview(open_dataset(store, snapshot))
    click.echo(dumps(facts) if as_json else _text(facts))


def _text(facts: dict[str, Any]) -> str:
    sections = [facts["url"], units.aligned(_meaning(facts), "  "), "", units.aligned(_amounts(facts), "  ")]
    sections += ["", units.aligned(_state(facts), "  ")]
    if facts["holes"]:
        sections += ["", f"  holes ({len(facts['holes']):,})"]
        shown = [(one_line(hole["id"]), one_line(hole["reason"])) for hole in facts["holes"][:_SHOWN]]
        sections.append(units.aligned(shown, "    "))
        if len(facts["holes"]) > _SHOWN:
            sections.append(f"    and {len(facts['holes']) - _SHOWN:,} more: hsfmt ls --holes")
    for entry in facts["producers"]:
        sections += ["", f"  producer of {units.counted(entry['parts'], 'part')}"]
        sections.append(units.aligned(_producer(entry), "    "))
    return "\n".join(sections)


def _meaning(facts: dict[str, Any]) -> list[tuple[str, str]]:
    header = facts["header"]
    layers = ["HF index  position  state"]
    for layer in facts["layers"]:
        k = layer["hf_hidden_states_index"]
        state = f"output of decoder layer {k - 1}" if k else "embeddings"
        layers.append(f"{k:>8}  {layer['position']:>8}  {state}")
    rows = [
        ("model", _identity(header["model"])),
        ("tokenizer", _identity(header["tokenizer"])),
        ("layers", "\n".join(layers)),
        ("final norm", _NORMS[header["final_norm"]]),
        ("states", f"{header['dtype']}, hidden size {header['hidden_size']:,}"),
    ]
    if header["scaling"]:
        scaling = header["scaling"]
        rows.append(("scaling", f"{scaling['rule']} with column {scaling['column']}"))
    for name, column in facts["columns"].items():
        rows.append((name, f"{column['dtype']} {column['shape'] or ''} a {column['kind']}".replace("  ", " ")))
    if facts["attachments"]:
        entries = (f"{entry['name']} ({units.nbytes(entry['nbytes'])})" for entry in facts["attachments"])
        rows.append(("attachments", one_line(", ".join(entries))))
    rows.append(("format", f"{header['format']}, readable from {header['readable_from']}"))
    return rows


def _amounts(facts: dict[str, Any]) -> list[tuple[str, str]]:
    samples, tokens, states = facts["samples"], facts["tokens"], facts["states"]
    share = f" ({100 * facts['supervised_tokens'] / tokens:.1f} %)" if tokens else ""
    lengths = facts["tokens_a_sample"]
    spread = f"; {lengths['min']:,} to {lengths['max']:,} a sample, median {lengths['median']:,}" if lengths else ""
    empty = facts["without_supervised_tokens"]
    rows = [
        ("samples", f"{samples:,}"),
        ("tokens", f"{tokens:,}{spread}"),
        ("supervised", f"{facts['supervised_tokens']:,}{share}"),
        ("loss masks", f"given for {facts['masks_given']:,} of {units.counted(samples, 'sample')}"),
    ]
    if empty:
        rows.append(("", f"{units.counted(empty, 'sample')} without a supervised token"))
    ratio = f", ratio {states['ratio']:.2f}" if states["ratio"] else ""
    rows += [
        ("states", f"{units.nbytes(states['raw_nbytes'])} raw, {units.nbytes(states['stored_nbytes'])} stored{ratio}"),
        *_unserved(states["unserved_raw_nbytes"]),
        ("everything", f"{units.nbytes(facts['raw_nbytes'])} raw, {units.nbytes(facts['stored_nbytes'])} stored"),
        ("parts", f"{facts['parts']:,} in {units.counted(facts['files'], 'file')}"),
    ]
    return rows


def _unserved(nbytes: int) -> list[tuple[str, str]]:
    return [("", f"{units.nbytes(nbytes)} raw of it in samples that are not served")] if nbytes else []


def _state(facts: dict[str, Any]) -> list[tuple[str, str]]:
    newer, shadowed = facts["newer"], facts["shadowed"]
    sealed = one_line(facts["sealed"] or "") or "never: run `hsfmt seal` to give readers a snapshot"
    if facts["live"] and facts["sealed"]:
        sealed += "; shown is what is committed now"
    rows = [
        ("sealed", sealed),
        ("snapshot", facts["snapshot"] + (" (live, not stored)" if facts["live"] else "")),
        ("content", facts["content_digest"]),
    ]
    if newer is not None and newer["parts"]:
        more = f", {units.counted(newer['holes'], 'hole')}" if newer["holes"] else ""
        text = f"{units.counted(len(newer['parts']), 'part')} with {units.counted(newer['samples'], 'sample')}{more}"
        rows.append(("newer", f"{text} committed since, not in the snapshot: run `hsfmt seal`"))
    if newer is not None and not newer["parts"]:
        rows.append(("newer", "nothing: all that is committed is in the snapshot"))
    if any(shadowed.values()):
        n = units.counted(sum(shadowed.values()), "later copy", "later copies")
        kinds = f"{shadowed['same']:,} of the same content, {shadowed['different']:,} of another"
        rows.append(("shadowed", f"{n} of an id, not served: {kinds}"))
    if facts["retracted"]:
        rows.append(("retracted", units.counted(facts["retracted"], "sample")))
    return rows


def _identity(value: dict[str, str] | None) -> str:
    if value is None:
        return "not said"
    rest = ", ".join(f"{key} {text}" for key, text in value.items() if key != "name")
    return one_line(", ".join(filter(None, (value.get("name"), rest))))


def _producer(entry: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(_name(key), _plain(value, key)) for key, value in entry["producer"].items()]
    rows += [("run", _run(run)) for run in entry["runs"][:3]]
    if len(entry["runs"]) > 3:
        rows.append(("", f"and {len(entry['runs']) - 3:,} more runs"))
    return rows


def _run(run: dict[str, Any]) -> str:
    """Say when, where, of how much, and by which command."""
    words = [_plain(run[key]) for key in ("started", "host") if key in run]
    if "source_files" in run:
        words.append(f"{_plain(run['source_files'])} files")
    if "source_nbytes" in run:
        words.append(_plain(run["source_nbytes"], "source_nbytes"))
    text = ", ".join(words)
    return f"{text}: {_plain(run['command'])}" if "command" in run else text


def _name(key: str) -> str:
    return key.replace("_nbytes", "_size").replace("_", " ")


def _plain(value: Any, key: str = "") -> str:
    if key.endswith("_nbytes") and isinstance(value, int):
        return units.nbytes(value)
    if isinstance(value, list):
        return one_line(" ".join(map(str, value)))
    if isinstance(value, dict):
        return one_line(
            ", ".join(
                f"{_name(name)} {_plain(member, name)}"
                for name, member in value.items()
                if member not in (None, {}, [])
            )
        )
    return one_line(str(value))
