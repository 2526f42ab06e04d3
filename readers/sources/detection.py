"""Finding the source of a folder: by file names, key sets and ranks together, or by the name the user gives."""

from __future__ import annotations

import json
import os
import re
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from hsfmt.errors import HsfmtError, NotFoundError, Problem, SourceError, StorageError, UsageError
from hsfmt.layout import ROOT_METADATA
from hsfmt.readers.sources.connector_file import connector_entries
from hsfmt.readers.sources.folder import Folder
from hsfmt.readers.sources.listing import list_folder
from hsfmt.readers.sources.options import SourceOptions
from hsfmt.readers.sources.sample_names import is_torch_name, stray_reason

if TYPE_CHECKING:
    from hsfmt.readers.sources.base import Source
    from hsfmt.readers.sources.torch_record import Record

_CLASSES = {
    "vllm": ("hsfmt.readers.sources.vllm", "VllmSource"),
    "speculators": ("hsfmt.readers.sources.speculators", "SpeculatorsSource"),
    "speculators-pt": ("hsfmt.readers.sources.speculators_pt", "SpeculatorsPtSource"),
    "pt": ("hsfmt.readers.sources.generic_pt", "GenericPtSource"),
}
SOURCE_NAMES = tuple(_CLASSES)
_ROW_FILE = re.compile(r"(.*/)?hs_[0-9]+\.safetensors")
_PEEKS = 16
_ROOT_NBYTES = 64 << 20


def source_class(name: str) -> type[Source]:
    """The class of a source.

    Raises
    ------
    UsageError
        No such source.
    """
    if name not in _CLASSES:
        raise UsageError.at("--from", expected=f"one of {', '.join(_CLASSES)}", got=repr(name))
    module, attribute = _CLASSES[name]
    found: type[Source] = getattr(import_module(module), attribute)
    return found


def find_source(
    folder: str | os.PathLike[str], name: str | None = None, *, options: SourceOptions | None = None
) -> Source:
    """Open a folder of foreign files.

    Parameters
    ----------
    folder
        Where they are.
    name
        The source, or None to find it by looking. A key map without a name means `pt`.
    options
        What the user said.

    Raises
    ------
    UsageError
        More than one source or program may have written this, or hsfmt did, or an option is wrong; says what to type.
    NotFoundError
        No folder, or nothing in it that a source reads.
    SourceError
        A file that the source as a whole depends on is damaged, or none of the first ones can be read.
    StorageError
        The folder can't be listed, or a file not read.
    """
    options = options or SourceOptions()
    if name is None and options.key_map:
        name = "pt"
    if name is not None:
        source_class(name)
    listing = list_folder(folder)
    _refuse_datasets(listing)
    try:
        source = source_class(name or _find_name(listing))(listing, options)
    except OSError as error:
        if isinstance(error, HsfmtError):
            raise
        where = str(error.filename or folder)
        raise StorageError.at(where, expected="a readable file", got=str(error)) from error
    if not source.items:
        raise NotFoundError.at(
            str(folder),
            expected=f"files that the source {source.name!r} reads ({source.summary})",
            got=f"{len(listing.files)} files, none of them",
        )
    return source


def _refuse_datasets(listing: Folder) -> None:
    """Refuse a folder that is, or holds, an hsfmt dataset: its own files would be taken for samples."""
    names = {file.path for file in listing.files}
    holders = {f"/{path}"[: match.start()] for path in names for match in re.finditer("(?=/hsfmt/)", f"/{path}")}
    for prefix in sorted(holders):
        path = f"{prefix}/{ROOT_METADATA}"[1:]
        if path not in names or not _is_dataset(listing.root / path):
            continue
        where = str(listing.root) + prefix
        remedy = f"hsfmt info {where} shows it" if not prefix else "move it out of the folder that is converted"
        raise UsageError.at(
            where, expected="files that another program wrote", got="an hsfmt dataset already", remedy=remedy
        )


def _is_dataset(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(_ROOT_NBYTES))
        return "hsfmt" in document["attributes"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _find_name(listing: Folder) -> str:
    names = [file.path for file in (*listing.files, *listing.broken)]
    rows = [path for path in names if _ROW_FILE.fullmatch(path)]
    arrow = "state.json" in names or any("/" not in path and path.endswith(".arrow") for path in names)
    found: list[str] = []
    connector_names = [path for path in names if path.endswith((".safetensors", ".safetensors.lock"))]
    if arrow and rows:
        found.append("speculators")
    elif rows:
        raise _rows_alone(listing, rows[0])
    elif connector_names:
        _check_connector(listing, connector_names)
        found.append("vllm")
    elif arrow:
        raise NotFoundError.at(
            str(listing.root),
            expected="hidden_states/hs_{row}.safetensors beside the Arrow dataset",
            got="no such file",
            remedy="run speculators generate-offline-data first",
        )
    torch_names = [path for path in names if is_torch_name(path.rpartition("/")[2])]
    if torch_names:
        found.append(_find_torch_name(listing, torch_names))
    if not found:
        kinds = sorted({PurePosixPath(path).suffix or path.rpartition("/")[2] for path in names})
        raise NotFoundError.at(
            str(listing.root),
            expected=f"a folder of one of the sources {', '.join(SOURCE_NAMES)}",
            got=f"{len(names)} files of other kinds ({', '.join(kinds[:8])})"
            if names
            else "hidden files, which are not read",
            remedy=next(filter(None, (stray_reason(path, "") for path in names)), ""),
        )
    if len(found) > 1:
        raise UsageError.at(
            str(listing.root),
            expected="files of one source",
            got=f"files of {' and '.join(found)}",
            remedy=" or ".join(f"--from {name}" for name in found) + " takes one and lists the rest as strays",
        )
    return found[0]


def _check_connector(listing: Folder, paths: list[str]) -> None:
    """Hold the folder to be the connector's if one of its first files has the connector's tensors, or has a lock."""
    if any(path.endswith(".lock") for path in paths):
        return
    problems: list[Problem] = []
    for path in paths[:_PEEKS]:
        try:
            listing.check(path)
            connector_entries(listing.root / path, path)
        except SourceError as error:
            problems.extend(error.problems)
        else:
            return
    raise SourceError(problems)


def _rows_alone(listing: Folder, row: str) -> UsageError:
    parent = listing.root.parent
    remedy = "--from vllm takes them without loss masks"
    if (parent / "state.json").is_file():
        remedy = f"give the dataset's folder instead: hsfmt convert {parent} DST; {remedy}"
    return UsageError.at(
        str(listing.root),
        expected="the Arrow dataset (state.json) that rows like these belong to, which has their loss masks",
        got=f"{row} without it",
        remedy=remedy,
    )


def _find_torch_name(listing: Folder, paths: list[str]) -> str:
    from hsfmt.readers.sources import key_sets, speculators_pt

    record = _peek(listing, paths)
    has_config = any(file.name == speculators_pt.CONFIG for file in listing.files)
    if all(speculators_pt.DATA.fullmatch(path.rpartition("/")[2]) for path in paths):
        keys = frozenset(record.entries)
        if keys == speculators_pt.CONCAT_KEYS or (keys == speculators_pt.LIST_KEYS and has_config):
            return "speculators-pt"
    if key_sets.says_all_layers(record):
        return "pt"
    raise _ambiguous(listing, record)


def _peek(listing: Folder, paths: list[str]) -> Record:
    from hsfmt.readers.sources.torch_record import load_record

    problems: list[Problem] = []
    record = None
    for path in paths[:_PEEKS]:
        try:
            listing.check(path)
            record = load_record(listing.root / path, path)
        except SourceError as error:
            problems.extend(error.problems)
        else:
            if "input_ids" in record.entries or "token_ids" in record.entries:
                return record
    if problems:
        raise SourceError(problems)
    got = f"the keys {', '.join(sorted(record.entries))} in {record.where}" if record else "none"
    raise UsageError.at(
        str(listing.root),
        expected="dicts with token ids under input_ids",
        got=got,
        remedy="name the keys: --from pt --map input_ids=KEY,hidden_states=KEY --layer-ids IDS --final-norm NORM",
    )


def _ambiguous(listing: Folder, record: Record) -> UsageError:
    """The error with a problem, and so a line, for each reading of the files and the options that ask for it."""
    from hsfmt.readers.sources.key_sets import is_rows, programs_of, state_keys
    from hsfmt.readers.sources.torch_states import is_tensor

    programs, keys = programs_of(record), sorted(state_keys(record))
    shapes = ", ".join(f"{key} {_shape(value)}" for key, value in sorted(record.entries.items()))
    known = ", ".join(program.name for program in programs) or "no program known here"
    entries = record.entries.items()
    dicts = [name for name, value in entries if isinstance(value, dict) and any(map(is_tensor, value.values()))]
    choices = bool(keys) or not dicts
    advice = "say what they are, with the options of a line below (HF layer ids, n layers in the model)"
    problems = [
        Problem(
            str(listing.root),
            "files whose keys say what they hold",
            f"{record.where} with {shapes}; such keys are written by {known}",
            advice if choices else "",
        )
    ]
    for program in programs:
        options = f"--map {program.key_map} --layer-ids {program.layer_ids} --final-norm {program.final_norm}"
        problems.append(_choice(f"to read as {program.name}", options))
    if choices:
        key, others = (keys[0], "") if len(keys) == 1 else ("KEY", " --map ignore=OTHER_KEY")
        options = f"--map hidden_states={key}{others} --layer-ids IDS --final-norm NORM"
        if key == "KEY" or is_rows(record, key):
            options += " --hidden-size N (to split rows of several states)"
        problems.append(_choice("to read one entry as all layers", options))
        if not programs:
            options = "--map aux=KEY,last=KEY --layer-ids IDS --final-norm NORM"
            problems.append(_choice("to read the last layer from an entry of its own", options))
    remedy = "states in a dict are not read: save a list of [token, hidden], in the order of --layer-ids"
    problems.extend(Problem(record.at(name), "a tensor, or a list of tensors", "a dict", remedy) for name in dicts)
    return UsageError(problems)


def _choice(where: str, options: str) -> Problem:
    return Problem(where, f"--from pt {options}", "no such options")


def _shape(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"list of {len(value)}"
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else str(list(shape))
