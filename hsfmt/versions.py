"""Format versions: what this library writes, reads and may append to.

Spec: rules VER-1 to VER-4. A document says from which format version on a library can read it (`readable_from`) and
append beside it (`writable_from`); both are format versions, not library versions.
"""

from __future__ import annotations

import re
from typing import Any

from hsfmt.errors import FormatError, FormatVersionError

FORMAT = "1.0"
READABLE_FROM = "1.0"
WRITABLE_FROM = "1.0"
_SUPPORTED = (1, 0)
_PATTERN = re.compile(r"(0|[1-9][0-9]{0,3})\.(0|[1-9][0-9]{0,3})")
_REMEDY = "install a newer hsfmt (pip install -U hsfmt)"


def is_version(text: object) -> bool:
    """Say whether `text` is of the form MAJOR.MINOR (rule VER-1)."""
    return isinstance(text, str) and _PATTERN.fullmatch(text) is not None


def parse_version(text: Any, where: str) -> tuple[int, int]:
    """Return (major, minor) of a format version.

    Raises
    ------
    FormatError
        Not of the form MAJOR.MINOR.
    """
    match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise FormatError.at(where, expected="a format version like 1.0", got=repr(text)[:60])
    return int(match[1]), int(match[2])


def check_readable(document: Any, where: str) -> None:
    """Refuse a document that needs a newer library to be read (rule VER-2).

    Raises
    ------
    FormatVersionError
        Says what was found, what is supported and what to do.
    FormatError
        There is no valid `readable_from`.
    """
    _check(document, "readable_from", where, "read")


def check_writable(document: Any, where: str) -> None:
    """Refuse to append beside a document that needs a newer library for that (rule VER-3)."""
    _check(document, "writable_from", where, "appended to")


def _check(document: Any, key: str, where: str, verb: str) -> None:
    if not isinstance(document, dict):
        raise FormatError.at(where, expected="a JSON object", got=type(document).__name__)
    needed = parse_version(document.get(key), f"{where}: {key}")
    if needed > _SUPPORTED:
        raise FormatVersionError.at(
            where,
            expected=f"a format that can be {verb} by this library (it supports up to {FORMAT})",
            got=f"format {document.get('format')}, {verb} from {needed[0]}.{needed[1]} on",
            remedy=_REMEDY,
        )
    parse_version(document.get("format"), f"{where}: format")
