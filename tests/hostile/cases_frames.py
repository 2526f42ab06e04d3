# ruff: noqa: E501  a case a line
"""Lies in the frames of chunks: Blosc headers, other codecs, bombs."""

import struct
from collections.abc import Callable

import numpy as np
from cases import PART, case
from dataset_forge import Forge
from numcodecs import blosc, zstd


def _frame(raw: bytes, itemsize: int = 2, codec: bytes = b"zstd") -> bytes:
    shuffle = blosc.SHUFFLE if itemsize > 1 else blosc.NOSHUFFLE
    return bytes(blosc.compress(raw, codec, 1, shuffle, 512 << 10, itemsize))


RAW = np.arange(32, dtype="<u2").tobytes()  # a chunk of hidden_states: 4 tokens of 8 elements


def _field(fmt: str, at: int, value: int) -> Callable[[bytes], bytes]:
    def change(frame: bytes) -> bytes:
        data = bytearray(frame)
        struct.pack_into(fmt, data, at, value)
        return bytes(data)

    return change


FRAMES: dict[str, Callable[[bytes], bytes]] = {
    "one byte": lambda f: f[:1], "half": lambda f: f[: len(f) // 2], "header alone": lambda f: f[:16], "random": lambda f: b"\xa5" * 60,
    "zeros": lambda f: bytes(70), "raw zstd": lambda f: zstd.compress(RAW)[:80], "nested": lambda f: _frame(f)[:80],
    **{f"nbytes {v}": _field("<I", 4, v) for v in (0, 1, 63, 65, 2**31, 2**32 - 1)},
    **{f"cbytes {v}": _field("<I", 12, v) for v in (0, 15, 16, 2**31, 2**32 - 1)},
    **{f"blocksize {v}": _field("<I", 8, v) for v in (65, 2**31, 2**32 - 1)},
}  # fmt: skip
for _name, _change in FRAMES.items():
    for _column in ("hidden_states", "topk"):
        _raw = RAW if _column == "hidden_states" else None

        def _bad(forge: Forge, column: str = _column, change: Callable[[bytes], bytes] = _change) -> None:
            forge.chunk(PART, column, 0, change(forge.payload(PART, column, 0)))

        _skips = ("items", "batch", "speculators") if _column == "topk" else ()
        case(f"{_column} frame: {_name}", "chunk", _bad, but=_skips)
# Of these the decoder is the judge: an error, or bytes that verification compares with the content digest.
for _name, _change in {
    **{f"typesize {v}": _field("B", 3, v) for v in (0, 1, 3, 255)}, **{f"version {v}": _field("B", 0, v) for v in (0, 1, 3, 255)},
    **{f"flags {v:#x}": _field("B", 2, v) for v in (0x00, 0x02, 0x04, 0x1F, 0x20, 0x40, 0x60, 0x80, 0xE0, 0xFF)},
    **{f"blocksize {v}": _field("<I", 8, v) for v in (0, 1, 2, 17)}, **{f"block start {v}": _field("<I", 16, v) for v in (0, 4, 16, 2**31, 2**32 - 1)},
}.items():  # fmt: skip

    def _odd(forge: Forge, change: Callable[[bytes], bytes] = _change) -> None:
        frame = _frame(bytes(64))  # compressible, so that it is no mere copy
        forge.chunk(PART, "hidden_states", 0, change(frame))

    case(f"frame of {_name}", "verify full", _odd)
for _codec in (b"blosclz", b"lz4", b"zlib"):
    case(
        f"a frame of {_codec.decode()}",
        "verify full",
        lambda f, c=_codec: f.chunk(PART, "hidden_states", 0, _frame(bytes(64), 2, c)),
    )  # type: ignore[misc]


def _zstd_bomb(forge: Forge) -> None:
    """A block whose inner zstd frame says that it holds 2^40 bytes, in a window of as much."""
    inner = b"\x28\xb5\x2f\xfd" + bytes([0xC0, 0xF8]) + struct.pack("<Q", 2**40) + b"\x03\x00\x10\x41"
    block = struct.pack("<i", len(inner)) + inner
    frame = struct.pack("<BBBBIII", 2, 1, 0x91, 2, 64, 64, 20 + len(block)) + struct.pack("<I", 20) + block
    forge.chunk(PART, "hidden_states", 0, frame)


case("a zstd bomb", "chunk", _zstd_bomb)
case(
    "a loss mask of 2",
    "chunk",
    lambda f: f.chunk(PART, "loss_mask", 0, _frame(bytes([2, 0, 0, 0]), 1)),
    but=("zarr", "export zarr"),
)
