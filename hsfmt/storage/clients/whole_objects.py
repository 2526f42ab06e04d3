"""Objects of a server without ranges, downloaded whole into files that have no name and vanish with the process."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import IO, NamedTuple

from hsfmt.storage.clients.base import Body
from hsfmt.storage.retries import ShortBodyError

_MAX_KEPT_NBYTES = 16 << 30


class _Kept(NamedTuple):
    file: IO[bytes]
    nbytes: int
    version: str | None


class WholeObjects:
    """The objects used last, up to 16 GiB, in the folder for temporary files (TMPDIR)."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        weakref.finalize(self, _close_all, self._kept)

    async def read(self, path: str, start: int, end: int) -> Body | None:
        """Return a range of an object that is here, None of one that is not."""
        kept = self._kept.get(path)
        if kept is None:
            return None
        self._kept.move_to_end(path)
        return _range(kept, start, end)

    async def keep(
        self, path: str, pieces: AsyncIterator[bytes], nbytes: int | None, version: str | None, wanted: tuple[int, int]
    ) -> Body:
        """Take a download, and return a range of it.

        Raises
        ------
        ShortBodyError
            It ended early.
        """
        file = tempfile.TemporaryFile(prefix="hsfmt-")  # noqa: SIM115  closed when it is dropped
        try:
            async for piece in pieces:
                file.write(piece)
            file.flush()
            size = file.tell()
            if nbytes is not None and size != nbytes:
                raise ShortBodyError(f"{size} of {nbytes} bytes")
        except BaseException:
            file.close()
            raise
        kept = self._kept[path] = _Kept(file, size, version)
        while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > _MAX_KEPT_NBYTES:
            self._kept.popitem(last=False)[1].file.close()
        return _range(kept, *wanted)


def _close_all(kept: OrderedDict[str, _Kept]) -> None:
    for each in kept.values():
        each.file.close()


def _range(kept: _Kept, start: int, end: int) -> Body:
    data = os.pread(kept.file.fileno(), max(min(end, kept.nbytes) - start, 0), start)
    return Body(data, kept.nbytes, kept.version)
