"""`hsfmt doctor`: say what a folder of another program holds, without converting it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hsfmt.cli import units
from hsfmt.cli.diagnosis import Diagnosis, shortened, text
from hsfmt.cli.examination import Examination, examine, spread
from hsfmt.cli.failures import STORAGE, dumps, exit_code, json_problems, one_line, show
from hsfmt.cli.options import json_option, layer_ids, quiet_option
from hsfmt.cli.progress import open_progress
from hsfmt.cli.single_file import SingleFile, look_into
from hsfmt.cli.termination import sigterm_interrupts
from hsfmt.errors import HsfmtError, NotFoundError, Problem, SourceError, UsageError
from hsfmt.header import NORMS
from hsfmt.readers.sources import (
    SOURCE_NAMES,
    Source,
    SourceOptions,
    find_source,
    parse_key_map,
    settle_final_norm,
    settle_layers,
)
from hsfmt.readers.sources.detection import folder_claims

if TYPE_CHECKING:
    from hsfmt.readers.sources.base import Claim

_DAMAGED = 1
_READING = "to read "  # how problems begin that say what files may be read as
_GENERIC = ("pt", "safetensors", "npz")  # sources whose files never fix the norm
_EMPTIED = (
    "if `hsfmt convert SRC DST --delete-source` emptied it, all is done when the same command with the same DST says so"
)


@click.command()
@click.argument("src")
@click.option("--from", "from_", type=click.Choice(SOURCE_NAMES), help="Format of SRC. [default: found by looking]")
@click.option("--layer-ids", "layers", metavar="IDS", callback=layer_ids, help="As for convert: HF indices, 2,4,5,8.")
@click.option("--final-norm", type=click.Choice(NORMS), help="As for convert.")
@click.option("--map", "key_map", metavar="ROLE=KEY", multiple=True, help="Where the tensors are, as for convert.")
@click.option("--hidden-size", type=click.IntRange(1), metavar="N", help="Width of one state, to split [T, L*H].")
@click.option("--model-config", metavar="PATH", help="The model's config.json, to tell its number of layers.")
@click.option("--loss-weights", is_flag=True, help="Loss masks hold weights, as for convert.")
@click.option("--pad-id", type=click.IntRange(0), default=0, show_default=True, metavar="ID", help="Id of padding.")
@click.option("--full", is_flag=True, help="Read every file. [default: up to 48, spread over the folder]")
@json_option
@quiet_option
@click.pass_context
def command(ctx: click.Context, /, *, src: str, as_json: bool, quiet: bool, full: bool, **given: Any) -> None:
    """Say what the folder SRC, which another program wrote, holds and means, and what convert would do with it.

    Nothing is written, and nothing in the files is executed. Files are read and checked as convert does: format,
    layers, norm, lengths, masks, padding, damage, duplicates, holes in numbering, files that nothing reads. SRC may be
    a single file too: then what it is, and which folder to give.

    Exit codes: 0 where convert can go, or only layer ids and the like are missing; 1 for damage; 2 where the format or
    the width must be said; 3 where nothing is there.
    """
    path = Path(src)
    with sigterm_interrupts():
        if path.is_file():
            ctx.exit(_report_file(look_into(path), as_json=as_json))
        claims: dict[str, Claim] = {}
        name = given["from_"]
        guessing = name is None and not given["key_map"]
        try:
            if guessing:
                claims = folder_claims(src)  # as text: a URL is told by it
                certain = [claimed for claimed, claim in claims.items() if claim.certain]
                name = certain[0] if len(certain) == 1 else None
            source = find_source(src, name, options=_options(given))
        except NotFoundError as error:
            if not path.is_dir() or Path(error.problems[0].where) != path:
                raise
            raise _maybe_emptied(error) from error
        except UsageError as error:
            readings = [problem for problem in error.problems if problem.where.startswith(_READING)]
            if not guessing or not readings:
                raise
            ctx.exit(_report_readings(path, readings, error, given, as_json=as_json))
        evidence = claims[name].evidence if name in claims else ""
        try:
            source.meaning()
        except (SourceError, UsageError) as error:
            ctx.exit(_report_source(source, evidence, error, given, as_json=as_json))
        diagnosis = _examine(source, evidence, given, full=full, shown=not (as_json or quiet))
    facts = diagnosis.facts()
    click.echo(dumps(facts | {"exit_code": _code(diagnosis.seen)}) if as_json else text(facts))
    ctx.exit(_code(diagnosis.seen))


def _options(given: Mapping[str, Any]) -> SourceOptions:
    return SourceOptions(
        key_map=parse_key_map(",".join(given["key_map"])),
        hidden_size=given["hidden_size"],
        layer_ids=given["layers"],
        model_config=given["model_config"],
        loss_weights=given["loss_weights"],
    )


def _examine(source: Source, evidence: str, given: Mapping[str, Any], *, full: bool, shown: bool) -> Diagnosis:
    meaning = source.meaning()
    missing: list[tuple[str, str]] = []
    layers, final_norm = given["layers"], given["final_norm"]
    if layers is None and meaning.layers is None:
        missing.append(("--layer-ids IDS", f"{meaning.n_layers} of them: {meaning.layers_from}"))
    else:
        said = "--layer-ids" if meaning.layers is None else meaning.layers_from
        layers = settle_layers(meaning, layers)
        meaning = replace(meaning, layers=layers, layers_from=said)
    if final_norm is None and meaning.final_norm is None:
        missing.append(("--final-norm NORM", f"pre, post or unknown: {meaning.final_norm_from}"))
    else:
        said = "as --final-norm says" if meaning.final_norm is None else meaning.final_norm_from
        final_norm = settle_final_norm(meaning, final_norm)
        meaning = replace(meaning, final_norm=final_norm, final_norm_from=said)
    numbers = list(range(len(source.items))) if full else spread(source.items)
    total, done = sum(source.items[number].nbytes for number in numbers), 0
    with open_progress("reading", total, shown=shown) as progress:

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress.update(done)

        seen = examine(source, meaning, numbers, given["pad_id"], advance)
    notes = seen.take_attachments(source)
    return Diagnosis(source, meaning, evidence, _words(given), missing, layers, final_norm, seen, notes)


def _words(given: Mapping[str, Any]) -> list[str]:
    """Return the options of convert that were given."""
    words = []
    if given["layers"]:
        words += ["--layer-ids", ",".join(map(str, given["layers"]))]
    for name in ("final_norm", "hidden_size", "model_config"):
        if given[name]:
            words += ["--" + name.replace("_", "-"), str(given[name])]
    for pair in given["key_map"]:
        words += ["--map", pair]
    return words + ["--loss-weights"] * given["loss_weights"]


def _code(seen: Examination) -> int:
    if seen.storage_failed and not seen.nonfinite:
        return STORAGE
    return _DAMAGED if seen.is_damaged else 0


def _maybe_emptied(error: NotFoundError) -> NotFoundError:
    """Return the error about a folder with nothing to read, which a conversion may have made so."""
    first, *others = error.problems
    return NotFoundError([replace(first, remedy="; ".join(filter(None, (first.remedy, _EMPTIED)))), *others])


def _as_given(options: str, given: Mapping[str, Any]) -> str:
    """Return the options of a reading with the values that the user gave already."""
    options, bracket, note = options.partition(" (")
    words = iter(_words(given))
    for word in words:
        if word == "--loss-weights":
            options += f" {word}"
            continue
        said = f"{word} {shlex.quote(next(words))}"
        options, n = re.subn(rf"{word} \S+", said.replace("\\", r"\\"), options)
        options += "" if n else f" {said}"
    return options + bracket + note


def _unsaid(source: Source, error: HsfmtError, given: Mapping[str, Any]) -> list[str]:
    """Return the options, with placeholders, that convert needs where an error says that the width has to be said."""
    if not (
        isinstance(error, UsageError) and any("give --hidden-size" in problem.remedy for problem in error.problems)
    ):
        return []
    options = ["--hidden-size N"] + ["--layer-ids IDS"] * (given["layers"] is None)
    return options + ["--final-norm NORM"] * (source.name in _GENERIC and given["final_norm"] is None)


def _report_readings(
    path: Path, readings: Sequence[Problem], error: UsageError, given: Mapping[str, Any], *, as_json: bool
) -> int:
    """Say between which readings only the user can choose, and with which commands."""
    start = f"hsfmt convert {shlex.quote(str(path))} DST"
    candidates = [
        {
            "command": f"{start} {_as_given(problem.expected, given)}",
            "evidence": problem.remedy,
            "what": problem.where,
        }
        for problem in readings
    ]
    code = exit_code(error)
    if as_json:
        click.echo(dumps({"candidates": candidates, "error": json_problems(error), "exit_code": code}))
    else:
        lines = [f"{path}: not known what it is; only you can say"]
        for candidate in candidates:
            evidence = f": {candidate['evidence']}" if candidate["evidence"] else ""
            lines.append(f"  {shortened(candidate['what'] + evidence)}")
            lines.append(f"    {one_line(candidate['command'])}")
        click.echo("\n".join(lines))
    first = replace(error.problems[0], remedy="choose one of these commands")
    show(UsageError([first]))
    return code


def _report_source(source: Source, evidence: str, error: HsfmtError, given: Mapping[str, Any], *, as_json: bool) -> int:
    """Say what is known of a folder whose states are not understood: something has to be said, or all is damaged."""
    code, unsaid = exit_code(error), _unsaid(source, error, given)
    words = ["hsfmt", "convert", str(source.root), "DST", "--from", source.name, *_words(given)]
    following = " ".join([*map(shlex.quote, words), *unsaid]) if unsaid else None
    listed = [asdict(item.problem) for item in source.items if item.problem is not None]
    facts = {
        "command": following,
        "evidence": evidence,
        "items": len(source.items),
        "notes": source.notes,
        "problems": listed,
        "source": {"format": source.name, "path": str(source.root), "summary": source.summary},
        "strays": [asdict(stray) for stray in source.strays],
        "support": [asdict(support) for support in source.support],
    }
    if as_json:
        click.echo(dumps(facts | {"error": json_problems(error), "exit_code": code}))
    else:
        rows = [
            ("format", source.summary),
            ("found by", shortened(evidence) or "--from"),
            ("samples", f"{len(source.items):,}"),
            ("unreadable", f"{len(listed):,} of them, by what listing them shows" if listed else ""),
            ("not read", units.counted(len(source.strays), "file") if source.strays else ""),
            ("states", "not understood, see below"),
        ]
        click.echo(f"{source.root}: {source.name}\n{units.aligned([row for row in rows if row[1]], '  ')}")
        if following:
            click.echo(f"\n  {one_line(following)}")
    show(error)
    return code


def _report_file(found: SingleFile, *, as_json: bool) -> int:
    """Say what a file is, and which folder to give."""
    code = _DAMAGED if found.problems else 0
    following = f"hsfmt doctor {shlex.quote(str(found.folder))}"
    if as_json:
        document = {
            "command": following,
            "exit_code": code,
            "file": str(found.path),
            "folder": str(found.folder),
            "holds": found.holds,
            "problems": json_problems(UsageError(found.problems)),
            "sources": {name: claim.evidence for name, claim in found.claims.items()},
            "what": found.what,
        }
        click.echo(dumps(document))
        return code
    rows = [("file", one_line(str(found.path))), ("what", found.what)]
    if found.holds:
        rows.append(("holds", shortened(found.holds)))
    rows += [("damaged", one_line(str(problem))) for problem in found.problems]
    rows.append(("folder", f"{found.folder} ({' or '.join(found.claims) or 'of no source known here'})"))
    click.echo(f"a single file: hsfmt converts folders\n{units.aligned(rows, '  ')}\n\n  {following}")
    return code
