"""Where an export goes: a folder of this machine, or a URL, where files arrive by way of one."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hsfmt.cli import units
from hsfmt.cli.exporting.journal import (
    FileRecord,
    Journal,
    JournalEntries,
    JournalWriter,
    hold,
    journal_path,
    read_journal,
    record,
)
from hsfmt.cli.exporting.remote_journal import FOLDER_SUFFIX, RemoteJournal
from hsfmt.errors import StorageError, UsageError
from hsfmt.storage import open_store
from hsfmt.writers.targets.atomic import is_temporary, make_folder, remove_temporaries

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_BLOCK_NBYTES = 1 << 20


class Place(ABC):
    """The destination of an export. It pickles into worker processes.

    Attributes
    ----------
    name, journal_name
        As messages and reports have them.
    work
        The local folder in which the target writes.
    """

    name: str
    journal_name: str
    work: Path

    @abstractmethod
    def entries(self) -> JournalEntries:
        """Return what the journal says."""

    @abstractmethod
    def files(self) -> dict[str, int]:
        """Return size by relative path of all files that are there, but temporary ones of ours."""

    @abstractmethod
    def has_journal(self) -> bool:
        """Say whether there is a journal, or what has its name."""

    @abstractmethod
    def open_journal(self) -> JournalWriter:
        """Open the journal for writing."""

    @abstractmethod
    def settle(self, paths: Iterable[str]) -> tuple[FileRecord, ...]:
        """Bring whole files of `work` to where they belong, in this order; return what they are.

        Raises
        ------
        StorageError, OSError
            The storage fails.
        """

    def prepare(self) -> None:
        """Make `work` ready to be written in; nobody else may be writing there."""
        make_folder(self.work)
        remove_temporaries(self.work)

    def hold(self) -> None:  # noqa: B027  where there are locks
        """Share the journal's lock with the parent of this process, until the process ends."""

    def free_nbytes(self) -> int | None:
        """Return the room there is, None where there is no such number."""
        return None

    def check_passing(self, nbytes: int) -> None:  # noqa: B027  where files are on their way
        """Refuse to start if so many bytes do not fit where files are on their way; raises StorageError."""

    def close(self) -> None:  # noqa: B027  likewise
        """Remove what was needed on the way."""


class LocalPlace(Place):
    """A folder: the target writes into it."""

    def __init__(self, folder: Path) -> None:
        self.work = folder
        self.name = str(folder)
        self._journal = journal_path(folder)
        self.journal_name = str(self._journal)

    def entries(self) -> JournalEntries:
        """Return what the file says."""
        return read_journal(self._journal)

    def files(self) -> dict[str, int]:
        """Return the files; a link is a file of whoever made it."""
        found: dict[str, int] = {}
        for place, folders, names in os.walk(self.work):
            links = [name for name in folders if Path(place, name).is_symlink()]
            for name in [*names, *links]:
                if not is_temporary(name):
                    path = Path(place, name)
                    found[path.relative_to(self.work).as_posix()] = path.lstat().st_size
        return found

    def has_journal(self) -> bool:
        """Say whether the file is there."""
        return self._journal.exists()

    def open_journal(self) -> JournalWriter:
        """Open the file, and lock it."""
        return Journal(self._journal)

    def settle(self, paths: Iterable[str]) -> tuple[FileRecord, ...]:
        """Return what the files are: they are in their places."""
        return tuple(record(self.work, path) for path in paths)

    def hold(self) -> None:
        """Share the lock of the file."""
        hold(self._journal)

    def free_nbytes(self) -> int | None:
        """Return the room on the file system."""
        return open_store(self.work).free_nbytes()


class RemotePlace(Place):
    """A URL: a unit's files are written into a temporary folder of this machine, and go from there as whole objects.

    Parameters
    ----------
    url
        Where.
    storage_options
        For it.

    Raises
    ------
    UsageError
        It is no place for an export.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self._store = open_store(url, storage_options)
        self.name = self._store.url
        above, _, name = url.rstrip("/").rpartition("/")
        if "::" in url or not self._store.can_list:
            got = "a chained one" if "::" in url else "one whose files can't be listed"
            raise UsageError.at(self.name, expected="a folder, or a URL of a storage to write into", got=got)
        if not name or "://" not in above or above.endswith(":/"):
            remedy = f"name a folder in it: {self.name}/export"
            raise UsageError.at(self.name, expected="a folder of its own", got="all of a storage", remedy=remedy)
        self._above, self._folder = open_store(above, storage_options), f"{name}{FOLDER_SUFFIX}"
        self.journal_name = f"{self._above.url}/{self._folder}"
        self.work = Path(tempfile.gettempdir()).resolve() / f"hsfmt-export-{secrets.token_hex(8)}"

    def entries(self) -> JournalEntries:
        """Return what the notes say."""
        return RemoteJournal(self._above, self._folder).entries

    def files(self) -> dict[str, int]:
        """Return the objects below the URL."""
        return dict(self._store.walk(""))

    def has_journal(self) -> bool:
        """Say whether there are notes."""
        return bool(self._above.list(self._folder))

    def open_journal(self) -> JournalWriter:
        """Open the notes for more of them."""
        return RemoteJournal(self._above, self._folder)

    def settle(self, paths: Iterable[str]) -> tuple[FileRecord, ...]:
        """Send the files, and remove them here."""
        return tuple(self._send(path) for path in paths)

    def prepare(self) -> None:
        """Make the temporary folder, and end the uploads that a killed run left."""
        super().prepare()
        with suppress(StorageError):  # who may write need not be let list them
            for upload in self._store.unfinished_uploads():
                self._store.abort_upload(upload)

    def check_passing(self, nbytes: int) -> None:
        """Look at the room of the temporary folder."""
        free = open_store(self.work.parent).free_nbytes()
        if free is not None and nbytes > free:
            raise StorageError.at(
                str(self.work.parent),
                expected=f"room for {units.nbytes(nbytes)} on their way",
                got=f"{units.nbytes(free)} free",
                remedy="let TMPDIR name a larger file system, use fewer --workers, or pass --force to start anyway",
            )

    def close(self) -> None:
        """Remove the temporary folder."""
        shutil.rmtree(self.work, ignore_errors=True)

    def _send(self, path: str) -> FileRecord:
        local = self.work / path
        sent = record(self.work, path)
        with local.open("rb", buffering=0) as file, self._store.open_object(path) as target:
            while block := file.read(_BLOCK_NBYTES):
                target.write(block)
            target.commit()
        local.unlink()
        return sent
