"""The folder of an export: what an earlier run of the same job left there, and what is nobody's business to touch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hsfmt.cli import units
from hsfmt.cli.exporting.journal import FileRecord, JournalEntries
from hsfmt.cli.exporting.places import Place
from hsfmt.errors import Problem, UsageError
from hsfmt.writers.targets.base import Unit

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Destination:
    """What is at the destination.

    Attributes
    ----------
    place
        Where the files and the journal are.
    done
        Files by the key of their unit, of units that are whole.
    finished
        Files of `finish`, None where it has to run.
    redone
        Units that the journal has and whose files are missing or of another size.
    is_new
        Whether the journal has to be begun.
    """

    place: Place
    done: Mapping[str, Sequence[FileRecord]]
    finished: Sequence[FileRecord] | None
    redone: int
    is_new: bool


def look_at(
    place: Place, job: Mapping[str, Any], planned: Sequence[Unit], final_paths: Iterable[str], *, resume: bool
) -> Destination:
    """Look at a destination; refuse one that holds anything which this job did not write.

    Parameters
    ----------
    place
        The destination.
    job
        What is to be written.
    planned, final_paths
        All units, and the paths of what goes with them.
    resume
        Whether an earlier run may be gone on with.

    Raises
    ------
    UsageError
        Another job's export, foreign files, or something that `resume` forbids.
    OSError
        The storage fails.
    """
    entries = place.entries()
    found = place.files()
    if not resume and found:
        raise UsageError.at(
            place.name,
            expected="an empty folder, as --no-resume asks",
            got=units.counted(len(found), "file"),
            remedy="leave --no-resume out to go on with the export, or choose another folder",
        )
    known = {path for unit in planned for path in unit.paths} | set(final_paths) if entries.job is not None else set()
    if entries.job is not None and entries.job != job:
        if found:
            raise _other_job(place, entries.job, job)
        entries = JournalEntries(None, {}, None, 0)
    foreign = sorted(found.keys() - known)
    if foreign:
        remedy = "choose an empty folder; nothing that is there is replaced"
        if entries.job is None and not place.has_journal():
            remedy += (
                f"; if it is an export that was begun, its journal {_last(place.journal_name)} is missing beside it"
            )
        more = f" and {len(foreign) - _SHOWN:,} more" if len(foreign) > _SHOWN else ""
        got = f"{units.counted(len(foreign), 'other file')}: {', '.join(foreign[:_SHOWN])}{more}"
        raise UsageError.at(place.name, expected="files of this export only", got=got, remedy=remedy)
    done = {key: files for key, files in entries.done.items() if _whole(files, found)}
    finished = entries.finished
    if finished is not None and (len(done) < len(planned) or not _whole(finished, found)):
        finished = None
    return Destination(place, done, finished, len(entries.done) - len(done), entries.job is None)


def _whole(files: Iterable[FileRecord], found: Mapping[str, int]) -> bool:
    return all(found.get(file.path) == file.nbytes for file in files)


def _other_job(place: Place, there: Mapping[str, Any], asked: Mapping[str, Any]) -> UsageError:
    remedy = f"choose another folder; or remove {place.name} and {_last(place.journal_name)} beside it to begin anew"
    return UsageError(
        Problem(
            f"{place.name}: {name}",
            f"{_shown(there.get(name))}, as in the export there",
            _shown(asked.get(name)),
            remedy,
        )
        for name in sorted(there.keys() | asked.keys())
        if there.get(name) != asked.get(name)
    )


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
