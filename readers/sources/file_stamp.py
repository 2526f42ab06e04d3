"""What shows that a file is still the one that was checked, as far as its file system tells."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hsfmt.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class FileStamp:
    """A file of `nbytes` bytes at `path`, which messages call `where`, at one moment: its times in ns, its inode."""

    path: Path
    where: str
    nbytes: int
    times: tuple[int, int]
    inode: tuple[int, int]

    @classmethod
    def take(cls, path: Path, where: str, file: int | None = None) -> FileStamp:
        """Take the stamp of a path, or of the descriptor `file` that was opened by it.

        Raises
        ------
        OSError
            There is no such file any more, or its folder can't be searched.
        """
        status = path.stat() if file is None else os.fstat(file)
        times, inode = (status.st_mtime_ns, status.st_ctime_ns), (status.st_dev, status.st_ino)
        return cls(path, where, status.st_size, times, inode)

    def check_unchanged(self) -> None:
        """Refuse what was read since the stamp was taken if the file has changed, or is another by now.

        Raises
        ------
        SourceError
            Its size, a time or the inode differs.
        OSError
            As `take`.
        """
        now = FileStamp.take(self.path, self.where)
        if now == self:
            return
        if now.inode != self.inode:
            got = "another file in its place"
        elif now.nbytes != self.nbytes:
            got = f"{now.nbytes} bytes instead of {self.nbytes}"
        else:
            got = "a file that was written to meanwhile"
        raise SourceError.at(
            self.where,
            expected="a file that stays as it is while it is read",
            got=got,
            remedy="convert when the program that writes it is done",
        )
