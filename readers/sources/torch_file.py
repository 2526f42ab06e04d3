"""Reading `.pt` files that others wrote: zip structure and every CRC-32 first, then `torch.load(weights_only=True)`.

`torch.load` checks no CRC, so a flipped bit would become a value; what is read after the check is held to it by a
`FileStamp`. Storages are read into memory. Only those of which a file needs a small part, or of a file over 1 GiB, are
mapped, so that they cost no more than the pages that are copied.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsfmt.errors import SourceError, UsageError
from hsfmt.readers.sources.file_stamp import FileStamp
from hsfmt.readers.sources.folder import HEAD_NBYTES, describe_foreign

if TYPE_CHECKING:
    from typing import BinaryIO

    import torch

_ZIP_MAGIC = b"PK\x03\x04"
_LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_BLOCK_NBYTES = 1 << 20
_PICKLE_NBYTES = 16 << 20
# A file of at most this size is read whole if half of it is wanted, a smaller one than `_SMALL_NBYTES` always.
_WHOLE_NBYTES = 1 << 30
_SMALL_NBYTES = 1 << 20
# Members that hold no tensor: the sizes of the others are what storages may have.
_STORAGE = re.compile(r"/data/[0-9]+$")
_UNSAFE = re.compile(r"GLOBAL (\S+) was not an allowed global")


def load_torch_file(path: Path, where: str) -> tuple[Any, FileStamp]:
    """Load a `.pt` file on the CPU, executing nothing.

    Returns
    -------
    tuple
        What it holds; and the stamp of the file, whose size bounds the tensors' real data. Tensors may be mapped: who
        copies them checks the stamp afterwards.

    Raises
    ------
    SourceError
        It is truncated, damaged (CRC-32), no PyTorch file, holds an object that only executing code would make, or
        changed while it was read.
    UsageError
        No torch here, or one whose `weights_only` can be made to execute code.
    OSError
        The file can't be read.
    """
    import_torch()
    with path.open("rb") as file:
        stamp = FileStamp.take(path, where, file.fileno())
        head = file.read(HEAD_NBYTES)
        foreign = describe_foreign(head, stamp.nbytes)
        if foreign is not None:
            raise SourceError.at(where, expected="a PyTorch file", got=foreign)
        is_zip = head.startswith(_ZIP_MAGIC)
        if not is_zip and not (head[:1] == b"\x80" and head[2:].startswith(_LEGACY_MAGIC)):
            plain = "a plain pickle, which is never loaded"
            got = plain if head[:1] == b"\x80" else f"bytes that begin with {head[:8]!r}"
            raise SourceError.at(
                where, expected="a PyTorch file", got=f"{stamp.nbytes} bytes that torch.save did not write: {got}"
            )
        value = _load_zip(file, stamp) if is_zip else _load(file, stamp)
    # Before anyone touches a page of a mapping: one that lies past the end of its file ends the process with SIGBUS.
    # That is left to a file which is cut while its pages are copied.
    stamp.check_unchanged()
    return value, stamp


def _load_zip(file: BinaryIO, stamp: FileStamp) -> Any:
    members = check_zip(file, stamp.where)
    value = _load(stamp.path, stamp)
    storages = _storages(value)
    # A mapped storage is only a slice of the file: hold it to the size of a member.
    known = sorted({0, *(member.file_size for member in members)})
    for storage, _ in storages:
        if storage.nbytes() not in known:
            raise SourceError.at(stamp.where, expected=f"storages of {known} bytes", got=f"one of {storage.nbytes()}")
    wanted = sum(min(used, storage.nbytes()) for storage, used in storages)
    if stamp.nbytes > _SMALL_NBYTES and stamp.nbytes > min(2 * wanted, _WHOLE_NBYTES):
        return value
    value = _load(file, stamp)
    if any(member.CRC for member in members):
        _check_read(value, {(member.file_size, member.CRC) for member in members}, stamp)
    return value


def _load(source: BinaryIO | Path, stamp: FileStamp) -> Any:
    """Load from an open file, into memory, or from a path, mapped."""
    import torch

    mapped = isinstance(source, Path)
    if not isinstance(source, Path):
        source.seek(0)
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        # A malformed pickle can raise anything, and so can a file that changes meanwhile.
        stamp.check_unchanged()
        raise _not_loadable(error, stamp.path, stamp.where) from error


def import_torch() -> Any:
    """Import torch, or say what is missing.

    Raises
    ------
    UsageError
        Not installed, or older than 2.6.
    """
    try:
        import torch
    except ImportError as error:
        raise UsageError.at(
            "torch", expected="PyTorch, to read .pt files", got="none", remedy="install torch"
        ) from error
    version = tuple(map(int, re.findall(r"[0-9]+", torch.__version__)[:2]))
    if version < (2, 6):
        raise UsageError.at(
            "torch",
            expected="2.6 or later: before it, weights_only could be made to execute code (CVE-2025-32434)",
            got=str(torch.__version__),
            remedy="upgrade torch",
        )
    return torch


def check_zip(file: BinaryIO, where: str) -> list[zipfile.ZipInfo]:
    """Check structure and CRC-32 of every member of a `.pt` zip, in blocks of 1 MiB.

    A file saved with `torch.serialization.set_crc32_options(False)` has zeros for all of them: nothing to check.

    Returns
    -------
    list of zipfile.ZipInfo
        The members that are storages.

    Raises
    ------
    SourceError
        Truncated, damaged, compressed (PyTorch never does that), or members that overlap or repeat.
    OSError
        The file can't be read.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = sorted(archive.infolist(), key=lambda member: member.header_offset)
            _check_members(members, where)
            if any(member.CRC for member in members):
                for member in members:
                    _check_crc(archive, member, where)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, zlib.error) as error:
        if isinstance(error, SourceError):
            raise
        # zipfile's own words for a missing end are that this is no zip file, which its beginning denies.
        end = "its end is missing" if str(error) == "File is not a zip file" else str(error)
        got = f"{file.seek(0, 2)} bytes that are truncated or damaged: {end}"
        remedy = "copy the file again or extract the sample again"
        raise SourceError.at(where, expected="a whole PyTorch file", got=got, remedy=remedy) from error
    return [member for member in members if _STORAGE.search(member.filename)]


def _check_members(members: list[zipfile.ZipInfo], where: str) -> None:
    if members and members[0].header_offset:
        # Another reader of the same bytes might find another archive in them.
        raise SourceError.at(where, expected="a zip archive from the first byte on", got="other bytes before it")
    end, names = 0, set()
    for member in members:
        got = None
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            got = "a compressed one"
        elif member.flag_bits & 0x1:
            got = "an encrypted one"
        elif member.header_offset < end:
            got = "one that overlaps another"
        elif member.filename in names:
            got = "two of that name"
        elif member.filename.endswith("/data.pkl") and member.file_size > _PICKLE_NBYTES:
            got = f"a pickle of {member.file_size} bytes (the limit is {_PICKLE_NBYTES})"
        if got is not None:
            raise SourceError.at(f"{where}[{member.filename}]", expected="a plain member of a PyTorch file", got=got)
        names.add(member.filename)
        end = member.header_offset + 30 + len(member.filename) + member.file_size
    if not any(name.endswith("/data.pkl") for name in names):
        raise SourceError.at(where, expected="a PyTorch file", got="a zip file without data.pkl")


def _check_crc(archive: zipfile.ZipFile, member: zipfile.ZipInfo, where: str) -> None:
    try:
        with archive.open(member) as stream:
            while stream.read(_BLOCK_NBYTES):
                pass
    except zipfile.BadZipFile as error:
        raise SourceError.at(
            f"{where}[{member.filename}]",
            expected=f"bytes with the CRC-32 {member.CRC:08x} that was stored with them",
            got=f"damaged ones ({error})",
            remedy="restore the file from a copy or extract the sample again",
        ) from error


def _storages(value: Any) -> list[tuple[torch.UntypedStorage, int]]:
    """The storages of the tensors in a loaded value, each once, with the bytes that its tensors hold together."""
    import torch

    found: dict[tuple[int, int], tuple[torch.UntypedStorage, int]] = {}
    stack, seen = [value], set()
    while stack:
        item = stack.pop()
        if id(item) in seen:  # a list may hold itself
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            if item.device.type == "cpu" and item.layout is torch.strided:
                storage = item.untyped_storage()
                key = storage.data_ptr(), storage.nbytes()
                found[key] = storage, item.nbytes + (found[key][1] if key in found else 0)
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
    return list(found.values())


def _check_read(value: Any, known: set[tuple[int, int]], stamp: FileStamp) -> None:
    """Hold what was read to the CRCs: torch reads by rules of its own, and the file may have changed meanwhile."""
    import torch

    for storage, _ in _storages(value):
        data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        if data.size and (data.size, zlib.crc32(data.data)) not in known:
            stamp.check_unchanged()
            raise SourceError.at(
                stamp.where,
                expected="storages with the CRC-32 that was stored with them",
                got=f"other {data.size} bytes than the file's: it is damaged where its members are listed",
                remedy="restore the file from a copy or extract the sample again",
            )


def _not_loadable(error: Exception, path: Path, where: str) -> SourceError:
    text = str(error)
    unsafe = _unsafe_names(path, text)
    if unsafe:
        return SourceError.at(
            where,
            expected="tensors, numbers, strings, lists and dicts",
            got=f"objects that only executing code would make: {', '.join(unsafe[:5])} (refused, not executed)",
            remedy="save it again as a dict of plain tensors, on a machine that trusts the file",
        )
    line = next((line.strip() for line in text.splitlines() if "rror" in line), text.strip().partition("\n")[0])
    return SourceError.at(
        where, expected="a PyTorch file that loads with weights_only", got=f"{type(error).__name__}: {line[:300]}"
    )


def _unsafe_names(path: Path, text: str) -> list[str]:
    """Names of the classes and functions that the file would call; read from the opcodes, nothing is executed."""
    import torch

    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # noqa: BLE001 - not a zip, or no pickle at all: then the error's own words must do
        return _UNSAFE.findall(text)
