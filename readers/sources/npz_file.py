"""Reading foreign `.npz` files: the archive and every member's `.npy` header are checked before an array is made.

Nothing is unpickled. `numpy.load` believes a member's header, and so allocates what a few bytes ask for; here a header
has to agree with the member's declared size, and that with what the archive can hold. CRC-32 of all that is read is
checked.
"""

from __future__ import annotations

import ast
import math
import re
import struct
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hsfmt.errors import SourceError
from hsfmt.readers.sources.folder import HEAD_NBYTES, describe_foreign

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import IO

    from numpy.typing import NDArray

SUFFIX = ".npz"
_ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
_HEADER_NBYTES = 4096
_BLOCK_NBYTES = 1 << 20
# Masks and padding compress well, states hardly. Small archives may be of zeros throughout.
_RATIO = 64
_SMALL_NBYTES = 64 << 20
_MEMBERS = 4096
_RANK = 8
_DESCR = re.compile(r"[|<>=]?(?:b1|[iu][1248]|f[248]|V[12]|U[0-9]{1,8})")
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """An array of the archive: the file's dtype, its shape, and where its values begin within the member."""

    member: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    offset: int


def read_arrays_header(path: Path, where: str) -> dict[str, ArrayEntry]:
    """Read and check the archive's directory and the header of every array in it.

    Raises
    ------
    SourceError
        No such archive, damaged, or with members that overlap, repeat, hold pickled objects, or would grow beyond
        what such files do when they are unpacked.
    OSError
        The file can't be read.
    """
    with path.open("rb") as file, _reading(where):
        nbytes = file.seek(0, 2)
        file.seek(0)
        head = file.read(HEAD_NBYTES)
        foreign = describe_foreign(head, nbytes)
        if foreign is None and not head.startswith(_ZIP_MAGIC):
            foreign = f"bytes that begin with {head[:8]!r}"
        if foreign is not None:
            raise SourceError.at(where, expected="an .npz archive", got=foreign)
        with zipfile.ZipFile(file) as archive:
            members = sorted(archive.infolist(), key=lambda member: member.header_offset)
            _check_members(members, nbytes, where)
            return {
                member.filename.removesuffix(".npy"): _entry(archive, member, f"{where}[{member.filename}]")
                for member in members
            }


def read_array(path: Path, entry: ArrayEntry, where: str) -> NDArray[Any]:
    """Read one array into memory of its own, C-contiguous and in native byte order; its CRC-32 is checked.

    Raises
    ------
    SourceError
        The member is damaged or cut short, or the file has changed since its header was read.
    OSError
        The file can't be read.
    """
    at = f"{where}[{entry.member}]"
    shape = entry.shape[::-1] if entry.fortran else entry.shape
    with path.open("rb") as file, _reading(where), zipfile.ZipFile(file) as archive:
        if archive.getinfo(entry.member).file_size != entry.offset + math.prod(shape) * entry.dtype.itemsize:
            raise SourceError.at(at, expected="a file that stays as it is while it is read", got="another one")
        array: NDArray[Any] = np.empty(shape, dtype=entry.dtype)
        buffer = array.reshape(-1).view(np.uint8).data if array.size else memoryview(bytearray())
        with archive.open(entry.member) as stream:
            _read(stream, memoryview(bytearray(entry.offset)), at)
            _read(stream, buffer, at)
            stream.read(1)  # only at its end is the CRC compared
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return np.ascontiguousarray(array.T) if entry.fortran else array


def _read(stream: IO[bytes], buffer: memoryview, where: str) -> None:
    done = 0
    while done < len(buffer):
        block = stream.read(min(_BLOCK_NBYTES, len(buffer) - done))
        if not block:
            raise SourceError.at(where, expected=f"{len(buffer)} bytes", got=f"{done}: truncated")
        buffer[done : done + len(block)] = block
        done += len(block)


@contextmanager
def _reading(where: str) -> Iterator[None]:
    try:
        yield
    except SourceError:
        raise
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, KeyError, ValueError, RuntimeError) as error:
        remedy = "copy the file again or extract the sample again"
        raise SourceError.at(
            where, expected="a sound .npz archive", got=f"truncated or damaged: {error}", remedy=remedy
        ) from error


def _check_members(members: list[zipfile.ZipInfo], nbytes: int, where: str) -> None:
    if len(members) > _MEMBERS:
        raise SourceError.at(where, expected=f"at most {_MEMBERS} arrays", got=str(len(members)))
    names: set[str] = set()
    end = declared = 0
    for member in members:
        got = None
        if member.compress_type not in _METHODS or member.flag_bits & 1:
            got = "one that is encrypted or packed in another way"
        elif not member.filename.endswith(".npy"):
            got = "another file"
        elif member.filename in names:
            got = "two of that name"
        elif member.header_offset < end or member.header_offset + member.compress_size > nbytes:
            got = "one that overlaps with another or with the archive's end"
        elif member.compress_type == zipfile.ZIP_STORED and member.compress_size != member.file_size:
            got = f"{member.compress_size} bytes stored for {member.file_size}"
        if got is not None:
            raise SourceError.at(f"{where}[{member.filename}]", expected="a plain array of numpy.savez", got=got)
        names.add(member.filename)
        end = member.header_offset + 30 + len(member.filename.encode()) + member.compress_size
        declared += member.file_size
    limit = max(_SMALL_NBYTES, _RATIO * nbytes)
    if declared > limit:
        raise SourceError.at(
            where,
            expected=f"arrays of at most {limit} bytes in an archive of {nbytes}",
            got=f"{declared} bytes when unpacked",
            remedy="save it with numpy.savez, uncompressed, if that is so",
        )


def _entry(archive: zipfile.ZipFile, member: zipfile.ZipInfo, where: str) -> ArrayEntry:
    with archive.open(member) as stream:
        magic = stream.read(8)
        size = {b"\x93NUMPY\x01\x00": "<H", b"\x93NUMPY\x02\x00": "<I"}.get(magic)
        if size is None:
            got = f"bytes that begin with {magic!r}"
            raise SourceError.at(where, expected="an array of .npy version 1.0 or 2.0", got=got)
        (header_nbytes,) = struct.unpack(size, stream.read(struct.calcsize(size)))
        if header_nbytes > _HEADER_NBYTES:
            raise SourceError.at(where, expected=f"a header of at most {_HEADER_NBYTES} bytes", got=str(header_nbytes))
        text = stream.read(header_nbytes)
        offset = stream.tell()
    dtype, shape, fortran = _parse_header(text, where)
    wanted = offset + math.prod(shape) * dtype.itemsize
    if wanted != member.file_size:
        raise SourceError.at(
            where,
            expected=f"{wanted} bytes, for {dtype} of shape {list(shape)}",
            got=f"a member of {member.file_size}",
        )
    return ArrayEntry(member.filename, dtype, shape, fortran and len(shape) > 1, offset)


def _parse_header(text: bytes, where: str) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    try:
        header = ast.literal_eval(text.decode("latin1").strip())
        descr, shape, fortran = header["descr"], header["shape"], header["fortran_order"]
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise SourceError.at(where, expected="the header of an array", got=f"{text[:80]!r}") from error
    if isinstance(descr, str) and descr.strip("|<>=").startswith("O"):
        raise SourceError.at(
            where,
            expected="numbers",
            got="pickled Python objects (refused, not executed)",
            remedy="save each array of numbers by itself; lists of arrays of different lengths become objects",
        )
    if not isinstance(descr, str) or not _DESCR.fullmatch(descr):
        raise SourceError.at(where, expected="numbers", got=f"dtype {descr!r:.80}")
    if not isinstance(shape, tuple) or len(shape) > _RANK or any(type(n) is not int or n < 0 for n in shape):
        raise SourceError.at(where, expected=f"at most {_RANK} axes", got=f"shape {shape!r:.80}")
    return np.dtype(descr), shape, fortran is True
