"""Unpacking a gzip stream, with its CRC-32 checked and never to more bytes than its size lets expect.

The bytes go to a file that only memory holds, where the system has such, else to a temporary one: what reads them can
map them, so that they are in memory once.
"""

from __future__ import annotations

import gzip
import os
import tempfile
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hsfmt.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

GZIP_MAGIC = b"\x1f\x8b"
# Hidden states shrink to about 0.7, those of padding or repeated texts further; gzip can reach 1/1032, as bombs do.
_RATIO = 32
_FLOOR_NBYTES = 16 << 20
_MOST_NBYTES = 32 << 30
_BLOCK_NBYTES = 1 << 20
_DESCRIPTORS = Path("/proc/self/fd")


@contextmanager
def unpacked(file: BinaryIO, nbytes: int, where: str) -> Iterator[tuple[BinaryIO, Path, int]]:
    """Unpack a gzip stream of `nbytes` bytes.

    Yields
    ------
    tuple
        The open file of the unpacked bytes, the path under which it can be opened meanwhile, and its size.

    Raises
    ------
    SourceError
        The stream is truncated or damaged, or unpacks to more than 32 times its size and 16 MiB, or to 32 GiB.
    OSError
        The file can't be read, or the temporary one not written.
    """
    file.seek(0)
    with _scratch_file() as (target, path):
        size = _unpack(file, target, min(_FLOOR_NBYTES + _RATIO * nbytes, _MOST_NBYTES), where)
        target.seek(0)
        yield target, path, size


def _unpack(file: BinaryIO, target: BinaryIO, limit: int, where: str) -> int:
    size = 0
    try:
        with gzip.GzipFile(fileobj=file) as stream:
            while block := stream.read(_BLOCK_NBYTES):
                size += len(block)
                if size > limit:
                    raise SourceError.at(
                        where,
                        expected=f"a gzip stream of at most {limit} bytes, as the size of this one lets expect",
                        got="more of them: unpacking was stopped",
                        remedy="if the file is meant to be so, unpack it first (gunzip)",
                    )
                target.write(block)
    except EOFError as error:
        raise _damaged(where, "one that is truncated: its end is missing") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(where, f"a damaged one ({error})") from error
    target.flush()
    return size


def _damaged(where: str, got: str) -> SourceError:
    remedy = "copy the file again or extract the sample again"
    return SourceError.at(where, expected="a whole gzip stream", got=got, remedy=remedy)


@contextmanager
def _scratch_file() -> Iterator[tuple[BinaryIO, Path]]:
    descriptor = _memory_file()
    if descriptor is not None:
        with os.fdopen(descriptor, "w+b") as target:
            yield target, _DESCRIPTORS / str(descriptor)
    else:
        with tempfile.NamedTemporaryFile(prefix="hsfmt-") as named, Path(named.name).open("w+b") as target:
            yield target, Path(named.name)


def _memory_file() -> int | None:
    """A descriptor of a file in memory that can be opened again by its path; None where the system has none."""
    if not hasattr(os, "memfd_create") or not _DESCRIPTORS.is_dir():
        return None
    try:
        return os.memfd_create("hsfmt")
    except OSError:  # forbidden in this sandbox
        return None
