"""The journal of an export: which job its folder is for, and which files are whole. It makes an export resumable.

It is `DST.hsfmt-export.jsonl` beside the folder DST, since some programs read every file under a folder. Its first line
is the job; each further one tells of a unit (or of the `finish` that follows them), and is there once the files are.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash

from hsfmt.errors import UsageError
from hsfmt.writers.targets.atomic import make_folder, sync_folder

SUFFIX = ".hsfmt-export.jsonl"
_KIND = "hsfmt.export"
# The workers of a killed run end some seconds after it, and may be writing until then.
_PATIENCE_SECONDS = 15.0
_POLL_SECONDS = 0.1
_BLOCK_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file that was written: path relative to the export's folder, size, and xxh3_128 of its bytes."""

    path: str
    nbytes: int
    xxh3: str


def record(folder: Path, path: str) -> FileRecord:
    """Return the record of a file that is whole.

    Raises
    ------
    OSError
        It can't be read.
    """
    state, nbytes = xxhash.xxh3_128(), 0
    with (folder / path).open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_NBYTES):
            state.update(block)
            nbytes += len(block)
    return FileRecord(path, nbytes, state.hexdigest())


@dataclass(frozen=True, slots=True)
class JournalEntries:
    """What a journal says.

    Attributes
    ----------
    job
        None where there is none yet, or only half a line of it.
    done
        Files by the key of their unit.
    finished
        Files of `finish`, None where it has not come to its end.
    nbytes
        Of the lines that are whole.
    """

    job: Mapping[str, Any] | None
    done: Mapping[str, Sequence[FileRecord]]
    finished: Sequence[FileRecord] | None
    nbytes: int


def journal_path(folder: Path) -> Path:
    """Return where the journal of an export to a folder lies."""
    return folder.with_name(folder.name + SUFFIX)


def read_journal(path: Path) -> JournalEntries:
    """Read a journal as far as its lines are whole: a killed run may have left half a line.

    Raises
    ------
    UsageError
        A file of that name is no journal.
    OSError
        It can't be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    return parse_journal(data, str(path))


def parse_journal(data: bytes, where: str) -> JournalEntries:
    """Read what a journal holds, as `read_journal`."""
    job: Mapping[str, Any] | None = None
    done: dict[str, Sequence[FileRecord]] = {}
    finished: Sequence[FileRecord] | None = None
    good = 0
    for line in data.splitlines(keepends=True):
        try:
            entry = json.loads(line)
            if not line.endswith(b"\n"):
                break
            if job is None:
                job = _job(entry, where)
            else:
                files = [FileRecord(**file) for file in entry["files"]]
                if entry["unit"] is None:
                    finished = files
                else:
                    done[entry["unit"]], finished = files, None
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, UsageError):
                raise
            break
        good += len(line)
    if data and job is None and b"\n" in data:
        raise no_journal(where)
    return JournalEntries(job, done, finished, good)


def _job(entry: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(entry, dict) or entry.get("kind") != _KIND or not isinstance(entry.get("job"), dict):
        raise no_journal(where)
    job: dict[str, Any] = entry["job"]
    return job


def no_journal(where: str) -> UsageError:
    """Return the error for something else under the journal's name."""
    remedy = "move that file away, or export to a folder of another name"
    return UsageError.at(where, expected="the journal of an export", got="something else", remedy=remedy)


def busy(where: str) -> UsageError:
    """Return the error for another export that is at work at the same place."""
    remedy = "wait for it to end, or export to another folder"
    return UsageError.at(where, expected="no export at work", got="one that is running", remedy=remedy)


class JournalWriter(ABC):
    """The journal of an export that runs.

    Attributes
    ----------
    entries
        What it said when it was opened.
    """

    entries: JournalEntries

    def begin(self, job: Mapping[str, Any]) -> None:
        """Write the first line, which drops all others."""
        self._drop()
        self._append([{"job": job, "kind": _KIND}])

    def add(self, units: Mapping[str, Sequence[FileRecord]]) -> None:
        """Note units whose files are whole."""
        self._append([{"files": list(map(asdict, files)), "unit": key} for key, files in units.items()])

    def finish(self, files: Iterable[FileRecord]) -> None:
        """Note that `finish` came to its end."""
        self._append([{"files": list(map(asdict, files)), "unit": None}])

    def close(self) -> None:  # noqa: B027  where it is held
        """Let go of it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, entries: Iterable[Mapping[str, Any]]) -> None:
        self._write("".join(json.dumps(entry, sort_keys=True) + "\n" for entry in entries).encode())

    @abstractmethod
    def _drop(self) -> None:
        """Remove all lines."""

    @abstractmethod
    def _write(self, data: bytes) -> None:
        """Append lines durably."""


class Journal(JournalWriter):
    """A journal as a file, held against others: by a lock that ends with the last of its processes.

    Parameters
    ----------
    path
        `journal_path`.

    Raises
    ------
    UsageError
        Another export to the same folder runs, or the file is no journal.
    OSError
        The storage fails.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        make_folder(path.parent)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._lock()
            self.entries = read_journal(path)
            os.ftruncate(self._fd, self.entries.nbytes)
            os.lseek(self._fd, 0, os.SEEK_END)
            # A run that was killed may have left the file, or its last lines, before they were durable.
            os.fsync(self._fd)
            sync_folder(path.parent)
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Let go of the lock."""
        os.close(self._fd)

    def _drop(self) -> None:
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._fd, data) :]
        os.fsync(self._fd)

    def _lock(self) -> None:
        """Wait for the workers of a killed run to end, then share the lock with those of this one."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while not _locked(self._fd, fcntl.LOCK_EX):
            if time.monotonic() > until:
                raise busy(str(self.path))
            time.sleep(_POLL_SECONDS)
        if not _locked(self._fd, fcntl.LOCK_SH):
            raise busy(str(self.path))


def hold(path: Path) -> int | None:
    """Share the lock of the journal that this process's parent holds, until the process ends."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        _locked(fd, fcntl.LOCK_SH)
        return fd
    return None


def _locked(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
