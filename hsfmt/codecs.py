"""The closed set of codecs: how a chunk becomes its payload and back.

Spec: rules COD-1 to COD-5. Whatever the codec, the stored chunk is payload + crc32c; the chunk table's digest covers
the payload alone.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt
from numcodecs import blosc

from hsfmt.errors import CorruptionError, FormatError

CODECS = ("none", "zstd")
CRC_NBYTES = 4
# An explicit block size: c-blosc's own choice costs a seventh of the ratio and two thirds of the decode speed.
BLOSC_BLOCKSIZE = 512 << 10
_BLOSC_HEADER = struct.Struct("<BBBBIII")
_BLOSC_OVERHEAD = 16
_BLOSC_VERSION = 2
_BLOSC_MEMCPYED, _BLOSC_UNSPLIT = 0x02, 0x10
_MIN_BLOCKSIZE = 64 << 10  # calls for smaller blocks would cost more than they save
_ONE_BLOCK_HEADER = struct.Struct("<BBBBIIII")


def check_codec(name: object, where: str) -> str:
    """Return the codec's name.

    Raises
    ------
    FormatError
        It is not in the closed set (rule COD-1).
    """
    if not isinstance(name, str) or name not in CODECS:
        raise FormatError.at(where, expected=f"one of {', '.join(CODECS)}", got=repr(name)[:60])
    return name


def zarr_codecs(codec: str, itemsize: int) -> list[dict[str, Any]]:
    """Return the inner Zarr v3 codec chain (rules COD-2, COD-3)."""
    bytes_codec: dict[str, Any] = {"name": "bytes"}
    if itemsize > 1:
        bytes_codec["configuration"] = {"endian": "little"}
    chain = [bytes_codec]
    if codec == "zstd":
        configuration = {
            "blocksize": BLOSC_BLOCKSIZE,
            "clevel": 1,
            "cname": "zstd",
            "shuffle": "shuffle" if itemsize > 1 else "noshuffle",
            "typesize": itemsize,
        }
        chain.append({"configuration": configuration, "name": "blosc"})
    return [*chain, {"name": "crc32c"}]


def encode(codec: str, chunk: npt.NDArray[np.generic]) -> bytes | memoryview:
    """Return the payload of a C-contiguous chunk of little-endian patterns."""
    raw = chunk.reshape(-1).view(np.uint8).data
    if codec == "none":
        return raw
    itemsize = chunk.dtype.itemsize
    shuffle = blosc.SHUFFLE if itemsize > 1 else blosc.NOSHUFFLE
    encoded: bytes = blosc.compress(raw, b"zstd", 1, shuffle, BLOSC_BLOCKSIZE, itemsize)
    return encoded


def max_payload_nbytes(codec: str, raw_nbytes: int) -> int:
    """Return the most bytes that a payload of `raw_nbytes` can take (rule COD-5)."""
    return raw_nbytes if codec == "none" else raw_nbytes + _BLOSC_OVERHEAD


def decode_into(codec: str, payload: memoryview, out: npt.NDArray[np.uint8], where: str) -> None:
    """Decode a payload into `out` uint8 [raw nbytes], contiguous; nothing is allocated by what the payload says.

    Raises
    ------
    CorruptionError
        The payload does not decode to exactly that many bytes.
    """
    if codec == "none":
        if payload.nbytes != out.nbytes:
            raise CorruptionError.at(where, expected=f"{out.nbytes} bytes", got=f"{payload.nbytes} bytes")
        out[:] = np.frombuffer(payload, np.uint8)
        return
    check_blosc_frame(payload, out.nbytes, where)
    try:
        blosc.decompress(payload, out)
    except (RuntimeError, ValueError) as error:
        raise CorruptionError.at(where, expected="a valid Blosc frame", got=str(error)[:200]) from None


def check_blosc_frame(payload: memoryview, raw_nbytes: int, where: str) -> None:
    """Compare a Blosc frame's own header with what must come out, before anything is decoded (rule COD-4).

    Raises
    ------
    CorruptionError
        Frame or decoded size differ.
    """
    if payload.nbytes < _BLOSC_HEADER.size:
        raise CorruptionError.at(where, expected="a Blosc frame", got=f"{payload.nbytes} bytes")
    _, _, _, _, nbytes, blocksize, cbytes = _BLOSC_HEADER.unpack_from(payload)
    if nbytes != raw_nbytes or cbytes != payload.nbytes or blocksize > max(nbytes, 1):
        got = f"a frame of {cbytes} that says {nbytes}, in {payload.nbytes} bytes"
        raise CorruptionError.at(where, expected=f"a Blosc frame that decodes to {raw_nbytes} bytes", got=got)


class BloscBlock(NamedTuple):
    """A block of a Blosc frame: decoded bytes [at, at + nbytes) lie encoded in [start, stop) of the frame.

    `kind` holds the first four bytes of the frame of this block alone: version, version of the compressor, flags and
    typesize.
    """

    at: int
    nbytes: int
    start: int
    stop: int
    kind: tuple[int, int, int, int]


def blosc_blocks(payload: memoryview, raw_nbytes: int, where: str) -> list[BloscBlock] | None:
    """Return the blocks of a frame, in order, or None where only the whole of it can be decoded.

    Raises
    ------
    CorruptionError
        As `check_blosc_frame`.
    """
    check_blosc_frame(payload, raw_nbytes, where)
    version, compressor, flags, typesize, nbytes, blocksize, _ = _BLOSC_HEADER.unpack_from(payload)
    if version != _BLOSC_VERSION or flags & _BLOSC_MEMCPYED or blocksize < max(1, min(_MIN_BLOCKSIZE, nbytes)):
        return None
    n_blocks = -(-nbytes // blocksize)
    table = _BLOSC_HEADER.size + 4 * n_blocks
    if payload.nbytes < table:
        return None
    starts = struct.unpack_from(f"<{n_blocks}I", payload, _BLOSC_HEADER.size)
    # A writer with threads may put blocks in any order; ours does not.
    if starts[0] < table or any(b <= a for a, b in pairwise((*starts, payload.nbytes))):
        return None
    blocks = []
    for number, (start, stop) in enumerate(pairwise((*starts, payload.nbytes))):
        at = number * blocksize
        size = min(blocksize, nbytes - at)
        kind = (version, compressor, flags if size == blocksize else flags | _BLOSC_UNSPLIT, typesize)
        blocks.append(BloscBlock(at, size, start, stop, kind))
    return blocks


def decode_block(payload: memoryview, block: BloscBlock, out: npt.NDArray[np.uint8], where: str) -> None:
    """Decode one block into `out` uint8 [block nbytes], contiguous, as a frame of its own.

    The header of that frame is written over the 20 bytes of `payload` before the block: it must be writable, and its
    blocks decoded in order, each once.

    Raises
    ------
    CorruptionError
        The block does not decode to exactly that many bytes.
    """
    first = block.start - _ONE_BLOCK_HEADER.size
    frame = payload[first : block.stop]
    _ONE_BLOCK_HEADER.pack_into(frame, 0, *block.kind, block.nbytes, block.nbytes, frame.nbytes, _ONE_BLOCK_HEADER.size)
    try:
        blosc.decompress(frame, out)
    except (RuntimeError, ValueError) as error:
        raise CorruptionError.at(where, expected="a valid Blosc frame", got=str(error)[:200]) from None


def crc32c(data: bytes | memoryview) -> bytes:
    """Return the crc32c of the bytes, little-endian, as Zarr's codec of that name appends it."""
    # The C extension takes arrays but not memoryviews.
    return struct.pack("<I", google_crc32c.value(np.frombuffer(data, np.uint8)))
