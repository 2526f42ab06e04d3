"""Codecs: round trips, the cap on what a payload may take, and hostile frames."""
# ruff: noqa: E501 - one case a line

import struct

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import blosc

from hsfmt import codecs
from hsfmt.dtypes import DTYPES, STATE_DTYPES, dtype, n_nonfinite
from hsfmt.errors import CorruptionError, FormatError


@given(st.sampled_from(codecs.CODECS), st.sampled_from(sorted(DTYPES)), st.integers(1, 5000), st.integers(0, 2))
def test_round_trip_within_the_cap(codec, name, n, kind):
    raw = np.random.default_rng(n).bytes(n * dtype(name).itemsize)
    if kind:
        raw = bytes(len(raw)) if kind == 1 else (raw[:7] * len(raw))[: len(raw)]
    chunk = np.frombuffer(raw, dtype(name).storage)
    payload = codecs.encode(codec, chunk)
    assert 1 <= len(payload) <= codecs.max_payload_nbytes(codec, chunk.nbytes)
    out = np.full(chunk.nbytes, 77, np.uint8)
    codecs.decode_into(codec, memoryview(bytes(payload)), out, "chunk")
    assert out.tobytes() == raw


def test_large_incompressible_chunks_stay_within_the_cap():
    for nbytes in (1, 15, 16, 17, 524287, 524288, 524289, 4 << 20):
        chunk = np.frombuffer(np.random.default_rng(nbytes).bytes(nbytes), np.uint8)
        assert len(codecs.encode("zstd", chunk)) <= nbytes + 16


def test_the_frame_is_what_the_metadata_says():
    chunk = np.zeros(1 << 20, "<u2")
    frame = codecs.encode("zstd", chunk)
    version, _, flags, typesize, nbytes, blocksize, cbytes = struct.unpack_from("<BBBBIII", frame)
    assert (version, typesize, nbytes, blocksize, cbytes) == (2, 2, 2 << 20, 512 << 10, len(frame))
    assert flags & 1, "byte shuffle"
    assert flags >> 5 == 4, "zstd"
    (_, configured, _) = codecs.zarr_codecs("zstd", 2)
    assert configured == {
        "name": "blosc",
        "configuration": {"blocksize": 524288, "clevel": 1, "cname": "zstd", "shuffle": "shuffle", "typesize": 2},
    }
    assert codecs.zarr_codecs("none", 1) == [{"name": "bytes"}, {"name": "crc32c"}]


def frame(**changes):
    data = bytearray(codecs.encode("zstd", np.arange(1000, dtype="<u2")))
    fields = dict(zip(("v", "vl", "flags", "typesize", "nbytes", "blocksize", "cbytes"), struct.unpack_from("<BBBBIII", data), strict=True))  # fmt: skip
    struct.pack_into("<BBBBIII", data, 0, *{**fields, **changes}.values())
    return bytes(data)


HOSTILE = {
    "says a GiB": frame(nbytes=1 << 30),
    "says nothing": frame(nbytes=0),
    "says one more": frame(nbytes=2001),
    "says another frame size": frame(cbytes=20),
    "says a larger frame": frame(cbytes=2**32 - 1),
    "blocks larger than all": frame(blocksize=2**31),
    "cut short": frame()[:-1],
    "with a tail": frame() + b"\0",
    "header only": frame()[:16],
    "half a header": frame()[:15],
    "nothing": b"",
    "no frame": b"\xff" * 500,
    "a zstd bomb": blosc.compress(bytes(1 << 26), b"zstd", 9, blosc.NOSHUFFLE, 0, 1),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_frames_are_refused_before_anything_is_decoded(case):
    out = np.full(2000, 77, np.uint8)
    with pytest.raises(CorruptionError, match="parts/p/x: expected"):
        codecs.decode_into("zstd", memoryview(HOSTILE[case]), out, "parts/p/x")
    assert (out == 77).all()


def test_raw_payloads_must_have_the_very_size():
    for nbytes in (0, 9, 11):
        with pytest.raises(CorruptionError, match="expected 10 bytes"):
            codecs.decode_into("none", memoryview(bytes(nbytes)), np.zeros(10, np.uint8), "x")


def test_the_set_is_closed():
    for name in ("lz4", "", None, ["zstd"], "ZSTD"):
        with pytest.raises(FormatError, match="x: expected one of none, zstd"):
            codecs.check_codec(name, "x")
    for name in ("float128", "", None, ["int8"], {}, "complex64"):
        with pytest.raises(FormatError, match="d: expected one of bfloat16"):
            dtype(name, "d")


def test_crc32c_is_the_castagnoli_one():
    assert codecs.crc32c(b"123456789") == (0xE3069283).to_bytes(4, "little")
    assert codecs.crc32c(memoryview(b"abc")) == google_crc32c.value(b"abc").to_bytes(4, "little")
    assert codecs.crc32c(b"") == bytes(4)


def test_the_buffer_of_a_raw_chunk_is_not_copied():
    chunk = np.zeros((2, 3), "<f4")
    payload = codecs.encode("none", chunk)
    chunk[0, 0] = 1
    assert bytes(payload[:4]) == np.float32(1).tobytes()


@pytest.mark.parametrize("name", STATE_DTYPES)
def test_every_nonfinite_pattern_is_counted(name):
    import ml_dtypes

    native = np.dtype(getattr(ml_dtypes, name, None) or name)
    if name == "float32":
        bits = np.arange(2**16, dtype="<u4") << 16
        bits = np.concatenate([bits, bits | 1, bits | 0xFFFF])
    else:
        bits = np.arange(2 ** (8 * native.itemsize), dtype=f"<u{native.itemsize}")
    with np.errstate(invalid="ignore"):
        expected = int(np.count_nonzero(~np.isfinite(bits.view(native))))
    assert n_nonfinite(bits.view(dtype(name).storage), dtype(name)) == expected > 0
    assert n_nonfinite(bits.view(np.uint8), dtype("uint8")) == 0
