"""Reading `.pt` files that others wrote: zip structure and every CRC-32 first, then `torch.load(weights_only=True)`.

`torch.load` checks no CRC, so a flipped bit would become a value. Storages are mapped, not read: a view of a huge
storage costs only its own pages, once `dense` copies it.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

from hsfmt.errors import SourceError, UsageError
from hsfmt.readers.sources.folder import HEAD_NBYTES, describe_foreign

if TYPE_CHECKING:
    from pathlib import Path

_ZIP_MAGIC = b"PK\x03\x04"
_LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_BLOCK_NBYTES = 1 << 20
_PICKLE_NBYTES = 16 << 20
# Members that hold no tensor: the sizes of the others are what storages may have.
_STORAGE = re.compile(r"/data/[0-9]+$")
_UNSAFE = re.compile(r"GLOBAL (\S+) was not an allowed global")


def load_torch_file(path: Path, where: str) -> tuple[Any, int]:
    """Load a `.pt` file on the CPU, executing nothing.

    Returns
    -------
    tuple
        What it holds, its tensors mapped from the file; and the file's size in bytes, which bounds their real data.

    Raises
    ------
    SourceError
        It is truncated, damaged (CRC-32), no PyTorch file, or holds an object that only executing code would make.
    UsageError
        No torch here, or one whose `weights_only` can be made to execute code.
    OSError
        The file can't be read.
    """
    torch = import_torch()
    with path.open("rb") as file:
        nbytes = file.seek(0, 2)
        file.seek(0)
        head = file.read(HEAD_NBYTES)
    foreign = describe_foreign(head, nbytes)
    if foreign is not None:
        raise SourceError.at(where, expected="a PyTorch file", got=foreign)
    is_zip = head.startswith(_ZIP_MAGIC)
    if is_zip:
        storage_sizes = check_zip(path, where)
    elif not (head[:1] == b"\x80" and head[2:].startswith(_LEGACY_MAGIC)):
        got = "a plain pickle, which is never loaded" if head[:1] == b"\x80" else f"bytes that begin with {head[:8]!r}"
        raise SourceError.at(
            where, expected="a PyTorch file", got=f"{nbytes} bytes that torch.save did not write: {got}"
        )
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        # A malformed pickle can raise anything.
        raise _not_loadable(error, path, where) from error
    if is_zip:
        _check_storages(value, storage_sizes, where)
    return value, nbytes


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


def check_zip(path: Path, where: str) -> list[int]:
    """Check structure and CRC-32 of every member of a `.pt` zip, in blocks of 1 MiB.

    A file saved with `torch.serialization.set_crc32_options(False)` has zeros for all of them: nothing to check.

    Returns
    -------
    list of int
        Sizes of the storages in the file, in bytes.

    Raises
    ------
    SourceError
        Truncated, damaged, compressed (PyTorch never does that), or members that overlap or repeat.
    OSError
        The file can't be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
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
        got = f"{path.stat().st_size} bytes that are truncated or damaged: {end}"
        remedy = "copy the file again or extract the sample again"
        raise SourceError.at(where, expected="a whole PyTorch file", got=got, remedy=remedy) from error
    return [member.file_size for member in members if _STORAGE.search(member.filename)]


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


def _check_storages(value: Any, sizes: list[int], where: str) -> None:
    """A mapped storage is only a slice of the file: hold it to the size of a member."""
    import torch

    known = {0, *sizes}
    stack, seen = [value], set()
    while stack:
        item = stack.pop()
        if id(item) in seen:  # a list may hold itself
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            if item.device.type == "cpu" and item.layout is torch.strided:
                nbytes = item.untyped_storage().nbytes()
                if nbytes not in known:
                    raise SourceError.at(where, expected=f"storages of {sorted(known)} bytes", got=f"one of {nbytes}")
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)


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
