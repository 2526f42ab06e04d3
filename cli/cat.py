"""`hsfmt cat`: show one sample, or write it to a .pt, .safetensors or .npz file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hsfmt.cli import sample_summary, units
from hsfmt.cli.failures import dumps
from hsfmt.cli.opening import snapshot_to_read
from hsfmt.cli.options import LocalFile, json_option, layer_ids, snapshot_option
from hsfmt.cli.storage_options import dataset_argument, storage_option
from hsfmt.columns import IDS, MASK, STATES
from hsfmt.errors import SampleNotFoundError, UsageError
from hsfmt.header import Header
from hsfmt.readers.part_cache import OpenPart
from hsfmt.readers.sample_arrays import SampleArrays
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.storage import Store
from hsfmt.writers.sample_files import SUFFIXES, FileTensor, file_name, write_sample_file

_FORMATS = tuple(suffix[1:] for suffix in SUFFIXES)
_DIGITS = 20  # no number of a sample has so many


@click.command()
@dataset_argument
@click.argument("sample_id", metavar="[ID]", required=False)
@click.option("--index", type=int, metavar="N", help="The sample's number in `hsfmt ls`, instead of its id.")
@click.option("-o", "--output", type=LocalFile(), metavar="FILE", help="In a folder, a name is made of the id.")
@click.option("--format", "format_", type=click.Choice(_FORMATS), help="Format, where FILE is a folder.")
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@click.option("--layers", metavar="IDS", callback=layer_ids, help="These layers only, by HF index: 2,8.")
@snapshot_option
@storage_option
@json_option
def command(  # noqa: PLR0913  each is an option of its own
    *,
    store: Store,
    sample_id: str | None,
    index: int | None,
    output: str | None,
    format_: str | None,
    force: bool,
    layers: tuple[int, ...] | None,
    snapshot: str | None,
    as_json: bool,
) -> None:
    """Show the sample ID of the dataset at URL, or write it to a file with -o.

    .safetensors and .pt hold real bfloat16. NumPy has none, so .npz holds its bit patterns as uint16, with the name of
    the type beside them in `hidden_states.dtype`.
    """
    if (sample_id is None) == (index is None):
        raise click.UsageError("name one sample: by its ID, or by --index N")
    reader = SampleReader(store, snapshot=snapshot_to_read(store, snapshot))
    number = _by_id(reader, sample_id) if sample_id is not None else _number(index or 0, len(reader))
    sample = reader.read(number, layers=layers)
    part, row = reader.locate(number)
    kept = layers or reader.header.layers
    if output is None:
        summary = sample_summary.summarize(sample, kept, reader.header.dtype)
        place = f"number {number}, part {part.name}, row {row}"
        document = {**summary, "index": number, "part": part.name, "row": row}
        click.echo(dumps(document) if as_json else sample_summary.text(summary, place))
        return
    target = _target(output, sample.sample_id, format_)
    _check_free(target, force=force)
    tensors = _tensors(sample, part, reader.header)
    attributes = {**_attributes(sample, part, reader, kept), "loss_mask_given": bool(part.index.loss_mask_given[row])}
    nbytes = write_sample_file(target, tensors, attributes, overwrite=force)
    facts: dict[str, Any] = {"id": sample.sample_id, "index": number, "nbytes": nbytes, "path": str(target)}
    click.echo(dumps(facts) if as_json else f"{target}: {units.nbytes(nbytes)}")


def _by_id(reader: SampleReader, sample_id: str) -> int:
    try:
        return reader.index_of(sample_id)
    except SampleNotFoundError as error:
        if not (sample_id.isdecimal() and len(sample_id) < _DIGITS and int(sample_id) < len(reader)):
            raise
        (problem,) = error.problems
        remedy = f"--index {sample_id} is the sample of that number; {problem.remedy}"
        raise SampleNotFoundError([replace(problem, remedy=remedy)]) from error


def _number(index: int, n: int) -> int:
    if not -n <= index < n:
        raise SampleNotFoundError.at("--index", expected=f"a number below {n}", got=str(index))
    return index % n


def _target(output: str, sample_id: str, format_: str | None) -> Path:
    target = Path(output)
    if output.endswith("/") or target.is_dir():
        if format_ is None:
            raise UsageError.at(output, expected=f"--format {'|'.join(_FORMATS)} with a folder", got="none")
        return target / file_name(sample_id, f".{format_}")
    if format_ is not None and target.suffix != f".{format_}":
        raise UsageError.at(output, expected=f"a name that ends in .{format_}, as --format says", got=target.suffix)
    return target


def _check_free(target: Path, *, force: bool) -> None:
    if target.exists() and not target.is_dir() and not force:
        remedy = "choose another name, or pass --force to replace it"
        raise UsageError.at(str(target), expected="a new file", got="a file that is there already", remedy=remedy)


def _tensors(sample: SampleArrays, part: OpenPart, header: Header) -> dict[str, FileTensor]:
    tensors = {
        STATES: FileTensor(header.dtype, sample.hidden_states),
        IDS: FileTensor("int64", sample.input_ids),
        MASK: FileTensor("bool", sample.loss_mask),
    }
    for name, value in sample.extras.items():
        if value is not None:
            tensors[name] = FileTensor(part.columns[name].dtype_name, value)
    return tensors


def _attributes(sample: SampleArrays, part: OpenPart, reader: SampleReader, layers: tuple[int, ...]) -> dict[str, Any]:
    header = reader.header
    return {
        "extras": {name: part.columns[name].declaration() for name in sample.extras},
        "final_norm": header.final_norm,
        "layers": list(layers),
        "metadata": sample.metadata,
        "model": dict(header.model) if header.model else None,
        "nulls": [name for name, value in sample.extras.items() if value is None],
        "sample_id": sample.sample_id,
        "scaling": dict(header.scaling) if header.scaling else None,
        "snapshot": reader.fingerprint,
        "tokenizer": dict(header.tokenizer) if header.tokenizer else None,
    }
