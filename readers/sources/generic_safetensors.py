"""Source `safetensors`: any folder of `.safetensors` files with one sample each; see `array_files`.

Keys and shapes are those that the source `pt` takes, one tensor an entry. The strings of a file's `__metadata__` become
its sample's metadata.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hsfmt.readers.sources import connector_file
from hsfmt.readers.sources.array_files import ArrayFilesSource
from hsfmt.readers.sources.array_record import ATTRIBUTES, ArrayFile, parse_attributes
from hsfmt.readers.sources.file_stamp import FileStamp
from hsfmt.readers.sources.safetensors_file import read_header, read_tensor

if TYPE_CHECKING:
    from pathlib import Path


class GenericSafetensorsSource(ArrayFilesSource):
    """A folder of safetensors files, one sample a file."""

    name: ClassVar[str] = "safetensors"
    summary: ClassVar[str] = "any folder of .safetensors with input_ids and hidden_states (see --map)"
    suffix: ClassVar[str] = ".safetensors"
    foreign_keys: ClassVar[frozenset[frozenset[str]]] = frozenset({connector_file.KEYS, connector_file.FP8_KEYS})

    @staticmethod
    def shapes(path: Path, where: str) -> tuple[dict[str, tuple[int, ...]], str | None]:
        """Read the header alone."""
        entries, strings = read_header(path, where)
        return {name: entry.shape for name, entry in entries.items()}, strings.get(ATTRIBUTES)

    @staticmethod
    def read(path: Path, where: str, ignore: tuple[str, ...]) -> tuple[ArrayFile, dict[str, str]]:
        """Read a file but for the tensors to ignore.

        Raises
        ------
        SourceError
            As `read_header` and `read_tensor`, or hsfmt's note is damaged.
        OSError
            The file can't be read.
        """
        stamp = FileStamp.take(path, where)
        entries, strings = read_header(path, where)
        noted = strings.pop(ATTRIBUTES, None)
        attributes = None if noted is None else parse_attributes(noted, f"{where}[__metadata__][{ATTRIBUTES}]")
        arrays = {name: read_tensor(path, entry, where) for name, entry in entries.items() if name not in ignore}
        stamp.check_unchanged()
        kept = {name: text for name, text in strings.items() if name not in ignore and name not in entries}
        return ArrayFile(stamp, arrays, kept, attributes), {}
