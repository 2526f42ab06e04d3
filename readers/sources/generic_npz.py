"""Source `npz`: any folder of `.npz` files with one sample each; see `array_files`.

NumPy has no bfloat16: programs store its bit patterns as uint16, int16 or two-byte voids. `NAME.dtype` beside such an
array says so, as hsfmt writes it, or the user does: `--map hidden_states=NAME:bfloat16`. It is never guessed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hsfmt.errors import SourceError
from hsfmt.readers.sources.array_files import ArrayFilesSource
from hsfmt.readers.sources.array_record import ATTRIBUTES, DTYPE_SUFFIX, ArrayFile, parse_attributes
from hsfmt.readers.sources.file_stamp import FileStamp
from hsfmt.readers.sources.npz_file import SUFFIX, ArrayEntry, read_array, read_arrays_header

if TYPE_CHECKING:
    from pathlib import Path

_TEXT_NBYTES = 4 << 20


class GenericNpzSource(ArrayFilesSource):
    """A folder of `.npz` archives, one sample a file."""

    name: ClassVar[str] = "npz"
    summary: ClassVar[str] = "any folder of .npz with input_ids and hidden_states (see --map)"
    suffix: ClassVar[str] = SUFFIX

    @staticmethod
    def shapes(path: Path, where: str) -> tuple[dict[str, tuple[int, ...]], str | None]:
        """Read the arrays' headers, and hsfmt's note."""
        entries = read_arrays_header(path, where)
        note = entries.get(ATTRIBUTES)
        text = _text(path, note, where) if note is not None and note.dtype.kind == "U" else None
        return {name: entry.shape for name, entry in entries.items() if entry.dtype.kind != "U"}, text

    @staticmethod
    def read(path: Path, where: str, ignore: tuple[str, ...]) -> tuple[ArrayFile, dict[str, str]]:
        """Read a file but for the arrays to ignore.

        Raises
        ------
        SourceError
            As `read_arrays_header` and `read_array`, or hsfmt's note is damaged.
        OSError
            The file can't be read.
        """
        stamp = FileStamp.take(path, where)
        entries = read_arrays_header(path, where)
        strings = {
            name: _text(path, entry, where)
            for name, entry in entries.items()
            if entry.dtype.kind == "U" and name not in ignore
        }
        noted = strings.pop(ATTRIBUTES, None)
        attributes = None if noted is None else parse_attributes(noted, f"{where}[{ATTRIBUTES}]")
        types = {
            name.removesuffix(DTYPE_SUFFIX): text
            for name, text in strings.items()
            if name.endswith(DTYPE_SUFFIX) and name.removesuffix(DTYPE_SUFFIX) in entries
        }
        arrays = {
            name: read_array(path, entry, where)
            for name, entry in entries.items()
            if entry.dtype.kind != "U" and name not in ignore
        }
        stamp.check_unchanged()
        kept = {name: text for name, text in strings.items() if name.removesuffix(DTYPE_SUFFIX) not in types}
        return ArrayFile(stamp, arrays, kept, attributes), types


def _text(path: Path, entry: ArrayEntry, where: str) -> str:
    """The text of an array that holds one."""
    at = f"{where}[{entry.member}]"
    if entry.shape or entry.dtype.itemsize > _TEXT_NBYTES:
        got = f"{entry.dtype} of shape {list(entry.shape)}"
        raise SourceError.at(at, expected=f"numbers, or one text of at most {_TEXT_NBYTES} bytes", got=got)
    try:
        return str(read_array(path, entry, where)[()])
    except ValueError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError.at(at, expected="Unicode text", got=str(error)) from error
