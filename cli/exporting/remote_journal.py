"""The journal of an export to a URL: an object for each note, numbered, since objects can't be appended to.

It is the folder `DST.hsfmt-export` beside DST. A number is taken by creating its object: of two exports that are at
work at once, one finds that it is not alone. Files are whole objects of equal bytes, whichever of them wrote them.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from hsfmt.cli.exporting.journal import JournalWriter, busy, no_journal, parse_journal
from hsfmt.storage import Store

FOLDER_SUFFIX = ".hsfmt-export"


class RemoteJournal(JournalWriter):
    """A journal as objects.

    Parameters
    ----------
    store, folder
        Where.

    Raises
    ------
    UsageError
        What is there is no journal.
    StorageError
        The storage fails.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder
        self._name = f"{store.url}/{folder}"
        self._notes = [(path, nbytes) for path, nbytes in store.walk(folder) if path.startswith(f"{folder}/")]
        self.entries = parse_journal(b"".join(store.read_many(self._notes)), self._name)
        try:
            self._next = max((int(PurePosixPath(path).stem) for path, _ in self._notes), default=-1) + 1
        except ValueError:
            raise no_journal(self._name) from None

    def _drop(self) -> None:
        for path, _ in reversed(self._notes):  # the first one last: it says what the others are
            self._store.remove(path)
        self._next = 0

    def _write(self, data: bytes) -> None:
        if not self._store.create(f"{self._folder}/{self._next:08}.jsonl", data):
            raise busy(self._name)
        self._next += 1
