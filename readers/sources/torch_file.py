"""Reading `.pt` files that others wrote: zip structure and every CRC-32 first, then `torch.load(weights_only=True)`.

`torch.load` checks no CRC, so a flipped bit would become a value; what is read after the check is held to it by a
`FileStamp`. Storages are read into memory. Only those of which a file needs a small part, or of a file over 1 GiB, are
mapped, so that they cost no more than the pages that are copied. What a gzip stream holds is unpacked into a file in
memory and mapped from there.
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsfmt.errors import SourceError, UsageError
from hsfmt.readers.sources.file_stamp import FileStamp
from hsfmt.readers.sources.folder import HEAD_NBYTES, describe_foreign
from hsfmt.readers.sources.gzip_stream import GZIP_MAGIC, unpacked
from hsfmt.readers.sources.torch_pickle import check_legacy_pickles, check_pickle

if TYPE_CHECKING:
    from typing import BinaryIO

    import torch

_ZIP_MAGIC = b"PK\x03\x04"
_LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_BLOCK_NBYTES = 1 << 20
# Objects of a pickle take some 64 times its bytes: no more of them than the file's tensors may take, and a little.
_PICKLE_NBYTES = 16 << 20
_PICKLE_FLOOR_NBYTES, _PICKLE_SHARE = 1 << 20, 64
# A file of at most this size is read whole if half of it is wanted, a smaller one than `_SMALL_NBYTES` always.
_WHOLE_NBYTES = 1 << 30
_SMALL_NBYTES = 1 << 20
# Members that hold no tensor: the sizes of the others are what storages may have.
_STORAGE = re.compile(r"/data/[0-9]+$")


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A loaded file: what it holds, its stamp, and the bytes of its payload, which are more than the file's if packed.

    Tensors may be mapped: who copies them checks the stamp afterwards.
    """

    value: Any
    stamp: FileStamp
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Bytes:
    """The bytes of a PyTorch file: open, the path by which they can be mapped, their number, their name for messages.

    `stamp` is that of the file itself, `packed` says that they were unpacked from it.
    """

    file: BinaryIO
    path: Path
    nbytes: int
    stamp: FileStamp
    packed: bool = False

    @property
    def where(self) -> str:
        return self.stamp.where


def load_torch_file(path: Path, where: str) -> tuple[Any, FileStamp]:
    """Load a `.pt` file as `read_torch_file` does; return what it holds, and the stamp of the file."""
    loaded = read_torch_file(path, where)
    return loaded.value, loaded.stamp


def read_torch_file(path: Path, where: str) -> TorchFile:
    """Load a `.pt` file, or one of a name in `.gz` that is packed by gzip, on the CPU, executing nothing.

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
        if not path.name.endswith(".gz"):
            plain = _Bytes(file, path, stamp.nbytes, stamp)
            value = _load_bytes(plain)
        else:
            _check_gzip(file.read(HEAD_NBYTES), stamp)
            with unpacked(file, stamp.nbytes, where) as (inner, inner_path, nbytes):
                plain = _Bytes(inner, inner_path, nbytes, stamp, packed=True)
                value = _load_bytes(plain)
    # Before anyone touches a page of a mapping: one that lies past the end of its file ends the process with SIGBUS.
    # That is left to a file which is cut while its pages are copied.
    stamp.check_unchanged()
    return TorchFile(value, stamp, plain.nbytes)


def _check_gzip(head: bytes, stamp: FileStamp) -> None:
    if head.startswith(GZIP_MAGIC):
        return
    got = describe_foreign(head, stamp.nbytes) or f"{stamp.nbytes} bytes that begin with {head[:8]!r}"
    remedy = "take .gz off its name if it is not compressed" if head.startswith(_ZIP_MAGIC) else ""
    raise SourceError.at(stamp.where, expected="a gzip stream", got=got, remedy=remedy)


def _load_bytes(data: _Bytes) -> Any:
    data.file.seek(0)
    head = data.file.read(HEAD_NBYTES)
    foreign = describe_foreign(head, data.nbytes)
    if foreign is not None:
        raise SourceError.at(data.where, expected="a PyTorch file", got=foreign)
    if head.startswith(_ZIP_MAGIC):
        return _load_zip(data)
    if not (head[:1] == b"\x80" and head[2:].startswith(_LEGACY_MAGIC)):
        plain = "a plain pickle, which is never loaded"
        got = plain if head[:1] == b"\x80" else f"bytes that begin with {head[:8]!r}"
        raise SourceError.at(
            data.where, expected="a PyTorch file", got=f"{data.nbytes} bytes that torch.save did not write: {got}"
        )
    check_legacy_pickles(data.file, _pickle_limit(data.nbytes), data.where)
    return _load(data)


def _load_zip(data: _Bytes) -> Any:
    members = check_zip(data.file, data.where)
    value = _load(data, mapped=True)
    storages = _storages(value)
    # A mapped storage is only a slice of the file: hold it to the size of a member.
    known = sorted({0, *(member.file_size for member in members)})
    for storage, _ in storages:
        if storage.nbytes() not in known:
            raise SourceError.at(data.where, expected=f"storages of {known} bytes", got=f"one of {storage.nbytes()}")
    wanted = sum(min(used, storage.nbytes()) for storage, used in storages)
    # Nobody else can change what was unpacked, and it is in memory already.
    if not data.packed and (data.nbytes <= _SMALL_NBYTES or data.nbytes <= min(2 * wanted, _WHOLE_NBYTES)):
        value = _load(data)
    elif not data.packed:
        return value
    if any(member.CRC for member in members):
        _check_read(value, {(member.file_size, member.CRC) for member in members}, data.stamp)
    return value


def _load(data: _Bytes, *, mapped: bool = False) -> Any:
    """Load into memory, or mapped."""
    import torch

    data.file.seek(0)
    try:
        return torch.load(data.path if mapped else data.file, map_location="cpu", weights_only=True, mmap=mapped)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        # A malformed pickle can raise anything, and so can a file that changes meanwhile.
        data.stamp.check_unchanged()
        raise _not_loadable(error, data.where) from error


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
            _check_members(members, _pickle_limit(file.seek(0, 2)), where)
            if any(member.CRC for member in members):
                for member in members:
                    _check_crc(archive, member, where)
            for member in filter(_is_pickle, members):
                check_pickle(_member(file, member), where)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, struct.error, zlib.error) as error:
        if isinstance(error, SourceError):
            raise
        # zipfile's own words for a missing end are that this is no zip file, which its beginning denies.
        end = "its end is missing" if str(error) == "File is not a zip file" else str(error)
        got = f"{file.seek(0, 2)} bytes that are truncated or damaged: {end}"
        remedy = "copy the file again or extract the sample again"
        raise SourceError.at(where, expected="a whole PyTorch file", got=got, remedy=remedy) from error
    return [member for member in members if _STORAGE.search(member.filename)]


def _pickle_limit(nbytes: int) -> int:
    return min(_PICKLE_NBYTES, _PICKLE_FLOOR_NBYTES + nbytes // _PICKLE_SHARE)


def _member(file: BinaryIO, member: zipfile.ZipInfo) -> BytesIO:
    """The bytes of a stored member; zipfile would hold one of a file without CRCs to a CRC of 0."""
    file.seek(member.header_offset + 26)
    n_name, n_extra = struct.unpack("<HH", file.read(4))
    file.seek(n_name + n_extra, 1)
    return BytesIO(file.read(member.file_size))


def _is_pickle(member: zipfile.ZipInfo) -> bool:
    # torch finds members by names in any case.
    return member.filename.lower().endswith("/data.pkl")


def _check_members(members: list[zipfile.ZipInfo], pickle_limit: int, where: str) -> None:
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
        elif member.filename.lower() in names:
            got = "two of that name"
        elif _is_pickle(member) and member.file_size > pickle_limit:
            got = f"a pickle of {member.file_size} bytes (the limit is {pickle_limit})"
        if got is not None:
            raise SourceError.at(f"{where}[{member.filename}]", expected="a plain member of a PyTorch file", got=got)
        names.add(member.filename.lower())
        end = member.header_offset + 30 + len(member.filename) + member.file_size
    if not any(map(_is_pickle, members)):
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


def _not_loadable(error: Exception, where: str) -> SourceError:
    text = str(error)
    line = next((line.strip() for line in text.splitlines() if "rror" in line), text.strip().partition("\n")[0])
    return SourceError.at(
        where, expected="a PyTorch file that loads with weights_only", got=f"{type(error).__name__}: {line[:300]}"
    )
