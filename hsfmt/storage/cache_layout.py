"""Names in a cache folder: `<number of subfolders>/<subfolder>/<key>-<nbytes>`, and one file that says it is a cache.

The number of subfolders is chosen by who makes the cache, and stays until it is cleared: processes with other limits
must find the same places. Files of other names are never counted, and never removed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import xxhash

LAYOUT_FILE = "hsfmt-cache.json"
_VERSION = 1
_MAX_FOLDERS = 256
# Many entries a subfolder, or those that chance puts into it would overflow while others have room; few enough to list.
_FOLDER_NBYTES = 256 << 20
_BLOCK_NBYTES = 4096
_NAME = re.compile(r"[0-9a-f]{32}-([0-9]{1,15})")


class EntryName(NamedTuple):
    """An entry: xxh3_128 of what it is, as 32 hex digits, and the bytes that it has once it is complete."""

    key: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.key}-{self.nbytes}"


def key_of(*words: str) -> str:
    """Return the key of what the words name; none of them contains a NUL."""
    return xxhash.xxh3_128_hexdigest("\0".join(words).encode())


def charged(nbytes: int) -> int:
    """Return what a file of so many bytes counts: whole blocks, as on the disk."""
    return -(-nbytes // _BLOCK_NBYTES) * _BLOCK_NBYTES


def named_nbytes(name: str) -> int | None:
    """Return the size that an entry's file name carries, None for a name of anything else."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def n_folders_for(limit_nbytes: int) -> int:
    """Return the number of subfolders that suits a limit, a power of two."""
    n = 1
    while n < _MAX_FOLDERS and 2 * n * _FOLDER_NBYTES <= limit_nbytes:
        n *= 2
    return n


def layout_bytes(n_folders: int) -> bytes:
    """Return the content of the file that says how many subfolders there are."""
    return json.dumps({"hsfmt_cache": _VERSION, "folders": n_folders}).encode() + b"\n"


def parse_layout(data: bytes) -> int | None:
    """Return the number of subfolders, None if that is not what the file says."""
    with suppress(ValueError, TypeError, KeyError):
        document = json.loads(data)
        n = document["folders"]
        if document["hsfmt_cache"] == _VERSION and isinstance(n, int) and n in {1 << k for k in range(17)}:
            return n
    return None


def leaf(root: str, n_folders: int, key: str) -> str:
    """Return the subfolder of a key."""
    return os.path.join(root, str(n_folders), f"{int(key[:4], 16) & (n_folders - 1):02x}")


def leaves(root: str) -> Iterator[tuple[int, str]]:
    """Yield (number of subfolders, path) of each subfolder that there is, those of former layouts included."""
    for number in sorted(_folders(root, re.compile(r"[1-9][0-9]{0,4}"))):
        top = os.path.join(root, number)
        for name in sorted(_folders(top, re.compile(r"[0-9a-f]{2,4}"))):
            yield int(number), os.path.join(top, name)


def _folders(path: str, pattern: re.Pattern[str]) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [e.name for e in entries if pattern.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
