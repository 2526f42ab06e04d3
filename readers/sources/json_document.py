"""The JSON documents that describe a folder of shards, read strictly and with a bounded size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hsfmt.errors import SourceError
from hsfmt.readers.sources.folder import HEAD_NBYTES, describe_foreign

if TYPE_CHECKING:
    from pathlib import Path

    from hsfmt.readers.sources.folder import Folder

_TEXT_NBYTES = 4096
_COUNT = 1 << 62


@dataclass(frozen=True, slots=True)
class Document:
    """A JSON object of a source, `where` messages call it, whose members are checked as they are asked for."""

    where: str
    members: dict[str, Any]

    def get(self, name: str) -> Any:
        """A member, or None."""
        return self.members.get(name)

    def refuse(self, name: str, expected: str) -> SourceError:
        """The error about a member that is not as it should be."""
        got = repr(self.members[name])[:120] if name in self.members else "no such member"
        return SourceError.at(f"{self.where}[{name}]", expected=expected, got=got)

    def integer(self, name: str, least: int = 0, most: int = _COUNT) -> int:
        """A member that is an integer in a range.

        Raises
        ------
        SourceError
            It is not.
        """
        value = self.members.get(name)
        if type(value) is not int or not least <= value <= most:
            raise self.refuse(name, f"an integer from {least} to {most}")
        return value

    def integers(self, name: str, least: int) -> list[int]:
        """A member that is a list of 1 to 4096 different integers.

        Raises
        ------
        SourceError
            It is not.
        """
        value = self.members.get(name)
        numbers: list[Any] = value if isinstance(value, list) else []
        valid = 1 <= len(numbers) <= 4096 and all(type(n) is int and least <= n < 1 << 31 for n in numbers)
        if not valid or len(set(numbers)) != len(numbers):
            raise self.refuse(name, f"a list of different integers from {least} on")
        return numbers

    def choice(self, name: str, choices: tuple[Any, ...]) -> Any:
        """A member that is one of some strings or integers.

        Raises
        ------
        SourceError
            It is not.
        """
        value = self.members.get(name)
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise self.refuse(name, " or ".join(map(repr, choices)))
        return value

    def facts(self, *names: str) -> dict[str, Any]:
        """The members among these that a producer's record can take: numbers, short texts and lists of them."""
        return {name: self.members[name] for name in names if name in self.members and _is_fact(self.members[name])}


def _is_fact(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= 1000 and all(not isinstance(item, list) and _is_fact(item) for item in value)
    if type(value) is int:
        return abs(value) < _COUNT
    return isinstance(value, bool) or (isinstance(value, str) and _is_short(value))


def _is_short(text: str) -> bool:
    try:
        return len(text.encode()) <= _TEXT_NBYTES
    except UnicodeEncodeError:
        return False


def parse_object(data: bytes, where: str) -> Document:
    """Parse the bytes of a JSON object.

    Raises
    ------
    SourceError
        They are none.
    """
    foreign = describe_foreign(data[:HEAD_NBYTES], len(data))
    if foreign is not None:
        raise SourceError.at(where, expected="a JSON object", got=foreign)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SourceError.at(where, expected="a JSON object", got=str(error)[:200]) from error
    if not isinstance(value, dict):
        raise SourceError.at(where, expected="a JSON object", got=type(value).__name__)
    return Document(where, value)


def read_file(folder: Folder, path: str, most: int, remedy: str) -> bytes:
    """Read a whole small file of the folder.

    Parameters
    ----------
    folder, path
        Which.
    most
        Bytes that it may have.
    remedy
        What to do where it is missing.

    Raises
    ------
    SourceError
        There is none, it can't be read or is larger.
    OSError
        The storage failed.
    """
    folder.check(path)
    nbytes = next((file.nbytes for file in folder.files if file.path == path), None)
    if nbytes is None:
        raise SourceError.at(path, expected="a file in the source's folder", got="no such file", remedy=remedy)
    return read_bounded(folder.root / path, path, most)


def read_bounded(path: Path, where: str, most: int) -> bytes:
    """Read a whole file of at most `most` bytes.

    Raises
    ------
    SourceError
        It is larger.
    OSError
        The storage failed.
    """
    with path.open("rb") as file:
        nbytes = file.seek(0, 2)
        if nbytes > most:
            raise SourceError.at(where, expected=f"a document of at most {most} bytes", got=f"{nbytes} bytes")
        file.seek(0)
        return file.read(nbytes)
