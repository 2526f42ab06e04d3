"""Torch files that hold many samples: their shapes at a glance, and one sample after the other for one check.

To check a file's CRC-32 is to read it whole, which would be too much for every sample but the first. What was checked
is mapped, as long as the file's stamp says that it is the same, and costs the pages that are copied. What can't be
mapped, a file from before the zip format or one that gzip packed, stays loaded for as long as few bytes of others do.
"""

from __future__ import annotations

import zipfile
from io import BytesIO
from typing import TYPE_CHECKING, Any

from hsfmt.errors import SourceError
from hsfmt.readers.sources.file_stamp import FileStamp
from hsfmt.readers.sources.torch_file import TorchFile, import_torch, read_torch_file
from hsfmt.readers.sources.torch_pickle import check_pickle

if TYPE_CHECKING:
    from pathlib import Path

_PICKLE_NBYTES = 1 << 20
_REMEMBERED = 1024
_KEPT_NBYTES = 1 << 30


def map_torch_file(path: Path, where: str) -> TorchFile | None:
    """Map a file without reading its tensors; None where that does not work, and only loading it tells why.

    No CRC is checked: what it holds may be used to tell shapes, or after `read_torch_file` has read the same file.

    Raises
    ------
    UsageError
        No torch here, or one whose `weights_only` can be made to execute code.
    OSError
        The file can't be read.
    """
    torch = import_torch()
    stamp = FileStamp.take(path, where)
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [member for member in archive.infolist() if member.filename.lower().endswith("/data.pkl")]
            if len(pickles) != 1 or pickles[0].file_size > _PICKLE_NBYTES:
                return None
            check_pickle(BytesIO(archive.read(pickles[0])), where)
        value: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception:  # noqa: BLE001 - a malformed file can raise anything: loading it says what
        return None
    return TorchFile(value, stamp, stamp.nbytes)


class TorchContainers:
    """Loads files again and again, and checks each once a process; pickles without what it knows."""

    def __init__(self) -> None:
        self._checked: dict[Path, FileStamp] = {}
        self._kept: dict[Path, TorchFile] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return TorchContainers, ()

    def load(self, path: Path, where: str) -> TorchFile:
        """Load a file as `read_torch_file` does. Who copies its tensors checks the stamp afterwards.

        Raises
        ------
        SourceError, UsageError, OSError
            As `read_torch_file`.
        """
        known, kept = self._checked.get(path), self._kept.pop(path, None)
        if known is not None and known == FileStamp.take(path, where):
            if kept is not None and kept.stamp == known:
                self._kept[path] = kept
                return kept
            mapped = map_torch_file(path, where)
            if mapped is not None and mapped.stamp == known:
                return mapped
        del kept
        self._make_room(path.stat().st_size)
        loaded = read_torch_file(path, where)
        if map_torch_file(path, where) is None:
            self._make_room(loaded.nbytes)
            self._kept[path] = loaded
        if len(self._checked) >= _REMEMBERED:
            self._checked.clear()
        self._checked[path] = loaded.stamp
        return loaded

    def _make_room(self, nbytes: int) -> None:
        """Let go of the files that were asked for longest ago, to keep one of `nbytes` beside the others."""
        while self._kept and sum(file.nbytes for file in self._kept.values()) + nbytes > _KEPT_NBYTES:
            del self._kept[next(iter(self._kept))]

    def glance(self, path: Path, where: str) -> TorchFile | None:
        """Return what tells a file's shapes; None where it can't be loaded."""
        try:
            return map_torch_file(path, where) or self.load(path, where)
        except SourceError:
            return None
