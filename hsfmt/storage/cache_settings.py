"""Where the local cache of remote reads lies and how large it may grow: by argument, else by the environment."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from hsfmt.errors import UsageError
from hsfmt.storage.redaction import redacted

FOLDER_VARIABLE = "HSFMT_CACHE_DIR"
SIZE_VARIABLE = "HSFMT_CACHE_SIZE"
DEFAULT_NBYTES = 32 << 30

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power, _letter: 1024**_power}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([a-z]*)")


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """A folder, as an absolute path, and the most bytes that it may hold."""

    folder: str
    limit_nbytes: int


def cache_settings(folder: str | os.PathLike[str] | None = None, size: int | str | None = None) -> CacheSettings | None:
    """Return the settings, or None where there shall be no cache.

    Parameters
    ----------
    folder
        None: what HSFMT_CACHE_DIR says; "": no cache, whatever it says.
    size
        Bytes, or a text like 200GiB; None: what HSFMT_CACHE_SIZE says, else 32 GiB.

    Raises
    ------
    UsageError
        A size that is none, or a URL.
    """
    where = SIZE_VARIABLE if size is None else "cache_size"
    given = os.environ.get(SIZE_VARIABLE) or None if size is None else size
    limit = DEFAULT_NBYTES if given is None else parse_size(given, where)
    text = os.environ.get(FOLDER_VARIABLE, "") if folder is None else os.fspath(folder)
    if "://" in text or "\0" in text:
        named = FOLDER_VARIABLE if folder is None else "cache_dir"
        raise UsageError.at(named, expected="the path of a folder on a local disk", got=redacted(repr(text))[:100])
    return CacheSettings(os.path.abspath(os.path.expanduser(text)), limit) if text else None


def parse_size(size: int | str, where: str) -> int:
    """Return bytes given as a number or as 32GiB, 500MB or 1048576.

    >>> parse_size("1.5KiB", "cache_size"), parse_size(500, "cache_size")
    (1536, 500)

    Raises
    ------
    UsageError
        It is neither, or less than 1.
    """
    n = 0
    if isinstance(size, int) and not isinstance(size, bool):
        n = size
    elif isinstance(size, str) and (match := _SIZE.fullmatch(size.strip().lower())) and match[2] in _UNITS:
        n = int(float(match[1]) * _UNITS[match[2]])
    if n < 1:
        raise UsageError.at(where, expected="a size like 32GiB, 500MB or 1048576", got=repr(size)[:60])
    return n
