"""What is said of a folder that no source claims, and of torch dicts whose keys have no source of their own."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from hsfmt.errors import HsfmtError, NotFoundError, Problem, SourceError, UsageError
from hsfmt.readers.sources.sample_names import stray_reason
from hsfmt.readers.sources.speculators import ROW_FILE, has_arrow

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hsfmt.readers.sources.look import Look
    from hsfmt.readers.sources.torch_record import Record

_ARROW_INFO = "dataset_info.json"
_TWO_ENTRIES = "to read the last layer from an entry of its own"
ADVICE = "say what they are, with the options of a line below (HF layer ids, n layers in the model)"


def refusal(look: Look, sources: Iterable[str]) -> HsfmtError:
    """The error about a folder that no source claims."""
    where = str(look.folder.root)
    row = next((path for path in look.names if ROW_FILE.fullmatch(path)), None)
    if row is not None:
        return _rows_alone(look, row)
    if look.samples:
        return _unknown_keys(look, look.samples[0])
    if look.problems:
        # Several sources may have looked into one file.
        return SourceError(list({problem.where: problem for problem in reversed(look.problems)}.values())[::-1])
    if look.torch_names:
        return _no_ids(look)
    if has_arrow(look.names):
        for path in look.names:
            if PurePosixPath(path).name == _ARROW_INFO and look.document(path) is None:
                expected = "a JSON document that says which columns the Arrow dataset has"
                return SourceError.at(path, expected=expected, got="something else: the file is damaged")
        return NotFoundError.at(
            where,
            expected="hidden_states/hs_{row}.safetensors beside the Arrow dataset",
            got="no such file",
            remedy="run speculators generate-offline-data first",
        )
    kinds = sorted({PurePosixPath(path).suffix or path.rpartition("/")[2] for path in look.names})
    kinds_found = f"{len(look.names)} files of other kinds ({', '.join(kinds[:8])})"
    return NotFoundError.at(
        where,
        expected=f"a folder of one of the sources {', '.join(sources)}",
        got=kinds_found if look.names else "hidden files, which are not read",
        remedy=next(filter(None, (stray_reason(path, "") for path in look.names)), ""),
    )


def _rows_alone(look: Look, row: str) -> UsageError:
    parent = look.folder.root.parent
    remedy = "--from vllm takes them without loss masks"
    if (parent / "state.json").is_file():
        remedy = f"give the dataset's folder instead: hsfmt convert {parent} DST; {remedy}"
    return UsageError.at(
        str(look.folder.root),
        expected="the Arrow dataset (state.json) that rows like these belong to, which has their loss masks",
        got=f"{row} without it",
        remedy=remedy,
    )


def _no_ids(look: Look) -> UsageError:
    record = look.records[0] if look.records else None
    got = f"the keys {', '.join(sorted(record.entries))} in {record.where}" if record else "none"
    return UsageError.at(
        str(look.folder.root),
        expected="dicts with token ids under input_ids",
        got=got,
        remedy="name the keys: --from pt --map input_ids=KEY,hidden_states=KEY --layer-ids IDS --final-norm NORM",
    )


def _unknown_keys(look: Look, record: Record) -> UsageError:
    """The error with a problem, and so a line, for each reading of the files and the options that ask for it."""
    from hsfmt.readers.sources.key_sets import describe, programs_of
    from hsfmt.readers.sources.torch_states import is_tensor

    known = ", ".join(program.name for program in programs_of(record)) or "no program known here"
    entries = record.entries.items()
    dicts = [name for name, value in entries if isinstance(value, dict) and any(map(is_tensor, value.values()))]
    choices = generic_choices(look)
    problems = [
        Problem(
            str(look.folder.root),
            "files whose keys say what they hold",
            f"{record.where} with {describe(record)}; such keys are written by {known}",
            ADVICE if choices else "",
        )
    ]
    remedy = "states in a dict are not read: save a list of [token, hidden], in the order of --layer-ids"
    problems.extend(choices)
    problems.extend(Problem(record.at(name), "a tensor, or a list of tensors", "a dict", remedy) for name in dicts)
    return UsageError(problems)


def generic_choices(look: Look) -> list[Problem]:
    """A line for each way to read the first torch dict with a key map; none where no entry may hold states."""
    if not look.samples:
        return []
    from hsfmt.readers.sources.key_sets import is_rows, programs_of, state_keys
    from hsfmt.readers.sources.torch_states import is_tensor

    record = look.samples[0]
    programs, keys = programs_of(record), sorted(state_keys(record))
    in_dicts = any(isinstance(value, dict) and any(map(is_tensor, value.values())) for value in record.entries.values())
    problems = []
    for program in programs:
        options = f"--map {program.key_map} --layer-ids {program.layer_ids} --final-norm {program.final_norm}"
        problems.append(choice(program.name, f"--from pt {options}"))
    if not keys and in_dicts:
        return problems
    key, others = (keys[0], "") if len(keys) == 1 else ("KEY", " --map ignore=OTHER_KEY")
    options = f"--map hidden_states={key}{others} --layer-ids IDS --final-norm NORM"
    if key == "KEY" or is_rows(record, key):
        options += " --hidden-size N (to split rows of several states)"
    problems.append(Problem("to read one entry as all layers", f"--from pt {options}", "no such options"))
    if not programs:
        options = "--map aux=KEY,last=KEY --layer-ids IDS --final-norm NORM"
        problems.append(Problem(_TWO_ENTRIES, f"--from pt {options}", "no such options"))
    return problems


def other_readings(look: Look) -> list[Problem]:
    """As `generic_choices`, where sources claim the files: one entry may hold all layers only if it is alone."""
    from hsfmt.readers.sources.key_sets import state_keys

    alone = bool(look.samples) and len(state_keys(look.samples[0])) == 1
    return [problem for problem in generic_choices(look) if alone or problem.where == _TWO_ENTRIES]


def choice(name: str, command: str, evidence: str = "") -> Problem:
    """The line that says how to choose a source, and what speaks for it."""
    return Problem(f"to read as {name}", command, "no such options", evidence)
