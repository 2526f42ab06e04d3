"""`hsfmt estimate`: say how large a dataset will be, from its shape or from the folder that it will be made of."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from hsfmt.cli import measured_ratio, units
from hsfmt.cli.convert import size_or_none
from hsfmt.cli.estimate import PART_NBYTES, Estimate, Known, assumed_ratios, estimate
from hsfmt.cli.failures import dumps, exit_code, json_problems, show
from hsfmt.cli.options import json_option, layer_ids
from hsfmt.codecs import CODECS
from hsfmt.column_plan import ColumnKind
from hsfmt.columns import STATES
from hsfmt.dataset_size import DatasetSize, SizePlan, dataset_size, even_dataset_size
from hsfmt.dtypes import STATE_DTYPES
from hsfmt.errors import NotFoundError, StorageError, UsageError
from hsfmt.header import make_header
from hsfmt.readers.sources import SOURCE_NAMES, SourceOptions, find_source, parse_key_map, settle_layers
from hsfmt.readers.sources.meaning import FP8_SCALING
from hsfmt.storage import Store, open_store

Int64 = npt.NDArray[np.int64]

_MAX_TOKENS, _MAX_LENGTH = 1 << 40, (1 << 31) - 1
_SHAPE = ("samples", "tokens", "lengths", "layers", "dtype")
_SOURCE = ("from_", "key_map", "model_config", "loss_weights")
# A norm takes no room: what a source says that convert needs is shown without this option of convert's.
_NORM = re.compile(r" --final-norm \w+")


@dataclass(frozen=True, slots=True)
class Figures:
    """An estimate, and what it is made of.

    Attributes
    ----------
    estimate
        How large.
    source, of_what
        The folder, or the shape that the user gave, for people and for programs.
    measured
        What compressing a part of it showed.
    """

    estimate: Estimate
    of_what: str
    of_shape: dict[str, Any]
    measured: Known | None = None


@click.command()
@click.argument("src", required=False)
@click.option("--samples", type=click.IntRange(1, 1 << 32), metavar="N", help="Number of samples.")
@click.option("--tokens", type=click.IntRange(1, _MAX_TOKENS), metavar="N", help="Tokens of all samples together.")
@click.option("--lengths", metavar="FILE", help="Tokens of each sample instead: a file with a number a line.")
@click.option(
    "--hidden-size", "--hidden", type=click.IntRange(1), metavar="N", help="Width of one state; splits [T, L*H] of SRC."
)
@click.option("--layers", type=click.IntRange(1, 10_000), metavar="N", help="How many layers are stored.")
@click.option("--layer-ids", metavar="IDS", callback=layer_ids, help="Which ones, instead of their number: 2,4,5,8.")
@click.option("--dtype", type=click.Choice(STATE_DTYPES), help="Of the states. [default: bfloat16]")
@click.option("--from", "from_", type=click.Choice(SOURCE_NAMES), help="Format of SRC. [default: found by looking]")
@click.option("--map", "key_map", metavar="ROLE=KEY", multiple=True, help="Where the tensors are in files of SRC.")
@click.option("--model-config", metavar="PATH", help="The model's config.json, as for convert.")
@click.option("--loss-weights", is_flag=True, help="Loss masks hold weights, as for convert.")
@click.option("--measure", is_flag=True, help="Read some samples of SRC and compress them, to know the ratio.")
@click.option("--codec", type=click.Choice(CODECS), default="zstd", show_default=True, help="Lossless, or none.")
@click.option("--ratio", type=click.FloatRange(0.1, 1000), metavar="X", help="Raw to stored bytes of the states.")
@click.option("--part-size", "part_nbytes", metavar="SIZE", callback=size_or_none, help="Raw bytes of a part.")
@click.option("--dst", metavar="URL", help="Where it will be written: is there room?")
@json_option
@click.pass_context
def command(ctx: click.Context, /, *, src: str | None, as_json: bool, measure: bool, **given: Any) -> None:
    """Say how large a dataset will be; writes nothing.

    Either of --samples and --tokens, or --lengths, with --hidden-size and --layers; or of the folder SRC, which another
    program wrote. The layout is known to the byte, so without a codec the figures are exact as far as the lengths
    are. What a codec saves is assumed (1.4 for bfloat16), or given by --ratio, or measured with --measure.
    """
    store = open_store(given["dst"]) if given["dst"] else None
    figures = _of_source(src, given, store, measured=measure) if src else _of_shape(given, store, measured=measure)
    error = None
    try:
        figures.estimate.check(store.url if store else "", "compress more")
    except StorageError as no_room:
        error = no_room
    if as_json:
        document = _json(figures)
        click.echo(dumps(document if error is None else document | {"error": json_problems(error), "exit_code": 3}))
    else:
        click.echo(_text(figures))
    if error is not None:
        show(error)
        ctx.exit(exit_code(error))


def _of_source(src: str, given: dict[str, Any], store: Store | None, *, measured: bool) -> Figures:
    """Estimate from the folder of another program."""
    stray = [f"--{name}" for name in _SHAPE if given[name]]
    if stray:
        got = f"{', '.join(stray)} beside {src}"
        raise UsageError.at("estimate", expected="a folder, which has them, or these options", got=got)
    if measured and given["ratio"]:
        raise UsageError.at("--measure", expected="--measure or --ratio", got="both")
    key_map = parse_key_map(",".join(given["key_map"]))
    options = SourceOptions(
        key_map=key_map,
        hidden_size=given["hidden_size"],
        layer_ids=given["layer_ids"],
        model_config=given["model_config"],
        loss_weights=given["loss_weights"],
    )
    try:
        source = find_source(src, given["from_"], options=options)
        meaning = source.meaning()
    except UsageError as error:
        shown = [replace(p, expected=_NORM.sub("", p.expected), remedy=_NORM.sub("", p.remedy)) for p in error.problems]
        raise UsageError(shown) from error
    if given["layer_ids"]:
        meaning = replace(meaning, layers=settle_layers(meaning, given["layer_ids"]))
    codec = given["codec"]
    found = measured_ratio.measure(source, meaning, codec) if measured else None
    known = found or Known(assumed_ratios(codec, meaning.dtype, given["ratio"]))
    size = estimate(
        source,
        range(len(source.items)),
        meaning,
        codec,
        store,
        part_nbytes=given["part_nbytes"] or PART_NBYTES,
        known=known,
    )
    shape = {"dtype": meaning.dtype, "hidden_size": meaning.hidden_size, "n_layers": meaning.n_layers}
    return Figures(size, f"{src} ({source.name})", {**shape, "source": src, "source_format": source.name}, found)


def _of_shape(given: dict[str, Any], store: Store | None, *, measured: bool) -> Figures:
    """Estimate from what the user says of the samples."""
    wrong = [name for name in _SOURCE if given[name]] + ["measure"] * measured
    if wrong:
        names = ", ".join("--" + name.strip("_").replace("key_", "").replace("_", "-") for name in wrong)
        raise UsageError.at("estimate", expected=f"a folder SRC beside {names}", got="none")
    _refuse_missing(given)
    layers = given["layer_ids"] or range(given["layers"])
    dtype, codec = given["dtype"] or "bfloat16", given["codec"]
    scaling = FP8_SCALING if dtype == "float8_e4m3fn" else None
    shape = {"layers": layers, "hidden_size": given["hidden_size"], "dtype": dtype}
    header = make_header(**shape, final_norm="post", scaling=scaling)
    extras: dict[str, ColumnKind] = {scaling["column"]: ("token", "float32", ())} if scaling else {}
    ratios = assumed_ratios(codec, dtype, given["ratio"])
    plan = SizePlan(header, codec, extras, part_nbytes=given["part_nbytes"] or PART_NBYTES, ratios=ratios)
    size = _size(plan, given)
    free = store.free_nbytes() if store else None
    ratio = 1.0 if codec == "none" else ratios[STATES]
    found = Estimate(size.raw_nbytes, True, ratio, size.stored_nbytes, free, size)  # noqa: FBT003  as the fields are
    counted = units.counted(len(layers), "layer")
    what = f"{units.counted(size.samples, 'sample')}, {counted} of width {given['hidden_size']}, {dtype}"
    of = {"dtype": dtype, "hidden_size": given["hidden_size"], "n_layers": len(layers)}
    return Figures(found, what, {**of, "source": None, "source_format": None})


def _refuse_missing(given: dict[str, Any]) -> None:
    """Refuse a shape that is not complete, or contradicts itself."""
    missing = []
    if not given["lengths"]:
        missing = [f"--{name}" for name in ("samples", "tokens") if not given[name]]
        if len(missing) == 2:
            missing = ["--samples and --tokens (or --lengths)"]
    elif given["samples"] or given["tokens"]:
        raise UsageError.at("--lengths", expected="--lengths alone, or --samples and --tokens", got="both")
    ids = given["layer_ids"]
    missing += ["--hidden-size"] * (not given["hidden_size"]) + ["--layers"] * (not given["layers"] and not ids)
    if missing:
        said = ", ".join(f"--{name.replace('_', '-')}" for name in (*_SHAPE, "hidden_size", "layer_ids") if given[name])
        got = f"only {said}" if said else "nothing"
        raise UsageError.at("estimate", expected=f"{', '.join(missing)}, or a folder SRC", got=got)
    if ids and given["layers"] not in (None, len(ids)):
        raise UsageError.at("--layers", expected=f"{len(ids)}, as many as --layer-ids has", got=str(given["layers"]))
    if ids and any(b <= a for a, b in pairwise(ids)):
        raise UsageError.at("--layer-ids", expected="strictly ascending ids", got=",".join(map(str, ids)))


def _size(plan: SizePlan, given: dict[str, Any]) -> DatasetSize:
    """Return the size of samples of the lengths in a file, or of even lengths."""
    if given["lengths"]:
        return dataset_size(plan, _lengths(Path(given["lengths"])))
    n, total = given["samples"], given["tokens"]
    if not n <= total <= n * _MAX_LENGTH:
        expected = f"1 to {_MAX_LENGTH:,} for each of {units.counted(n, 'sample')}"
        raise UsageError.at("--tokens", expected=expected, got=str(total))
    return even_dataset_size(plan, n, total)


def _lengths(path: Path) -> Int64:
    """Return the tokens of each sample, int64 [sample]."""
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise NotFoundError.at(str(path), expected="a text file with a number a line", got=str(error)) from error
    bad = next((word for word in words if not (word.isascii() and word.isdigit() and 0 < int(word[:13]) < 1 << 31)), "")
    if bad or not words:
        raise UsageError.at(str(path), expected="tokens of a sample, a number a line", got=repr(bad[:40]) or "nothing")
    return np.array(words, np.int64)


def _json(figures: Figures) -> dict[str, Any]:
    found, measured = figures.estimate, figures.measured
    return {
        **figures.of_shape,
        **asdict(found.size),
        "exact_lengths": found.exact,
        "fits": found.fits,
        "free_nbytes": found.free_nbytes,
        "measured": asdict(measured) if measured else None,
        "ratio": found.ratio,
    }


def _text(figures: Figures) -> str:
    found, size, measured = figures.estimate, figures.estimate.size, figures.measured
    how = "" if found.exact else ", about: from the sizes of files"
    if measured:
        chunks = units.counted(measured.n_chunks, "chunk")
        ratio = f"at a ratio of {found.ratio:.3f}, measured on {chunks} of {measured.n_samples:,} samples"
    else:
        ratio = "without a codec" if found.ratio == 1 else f"at a ratio of {found.ratio:.3f}, not measured"
    objects = (("part", size.parts), ("file", size.files), ("shard", size.shards), ("chunk", size.chunks))
    rows = [
        ("of", figures.of_what),
        ("samples", f"{size.samples:,}"),
        ("tokens", f"{size.tokens:,}{how}"),
        ("raw size", f"{units.nbytes(size.raw_nbytes)}, {units.nbytes(size.states_nbytes)} of it states"),
        ("stored size", f"{units.nbytes(size.stored_nbytes)}, {ratio}"),
        ("layout", ", ".join(units.counted(n, noun) for noun, n in objects)),
    ]
    if found.free_nbytes is not None:
        rows.append(("free space", units.nbytes(found.free_nbytes) + ("" if found.fits else ": NOT ENOUGH")))
    return "\n".join(["estimate, nothing was written", units.aligned(rows, "  ")])
