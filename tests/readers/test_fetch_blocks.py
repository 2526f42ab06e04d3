"""Blosc frames decoded block by block: what the whole frame decodes to, and hostile frames do no harm."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import blosc

from hsfmt import codecs
from hsfmt.errors import CorruptionError

KIB = 1 << 10


def values(nbytes, seed):
    """Bytes of which every other one compresses."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, nbytes, dtype=np.uint8)
    data[1::2] = rng.integers(0, 5, len(data[1::2]))
    return data


def decode_blocks(frame, nbytes, only=None):
    """All blocks, or some of them, decoded on their own."""
    payload = memoryview(bytearray(frame))
    out = np.full(nbytes, 77, np.uint8)
    for number, block in enumerate(codecs.blosc_blocks(payload, nbytes, "chunk")):
        if only is None or number in only:
            codecs.decode_block(payload, block, out[block.at : block.at + block.nbytes], "chunk")
    return out


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 400 * KIB),
    st.sampled_from([64 * KIB, 64 * KIB + 16, 100 * KIB, 128 * KIB]),
    st.sampled_from([1, 2, 3, 4, 8, 16]),
    st.sampled_from([blosc.SHUFFLE, blosc.NOSHUFFLE, blosc.BITSHUFFLE]),
    st.sampled_from([b"zstd", b"lz4", b"blosclz"]),
)
def test_blocks_are_what_the_whole_frame_decodes_to(nbytes, blocksize, typesize, shuffle, name):
    nbytes = max(typesize, nbytes // typesize * typesize)
    data = values(nbytes, nbytes)
    frame = blosc.compress(data, name, 1, shuffle, blocksize, typesize)
    blocks = codecs.blosc_blocks(memoryview(frame), nbytes, "chunk")
    if blocks is None:
        assert frame[2] & 2 or struct.unpack_from("<I", frame, 8)[0] < min(64 * KIB, nbytes)
        return
    np.testing.assert_array_equal(decode_blocks(frame, nbytes), data)
    assert [block.at for block in blocks] == list(range(0, nbytes, blocks[0].nbytes))
    some = set(range(0, len(blocks), 2))
    out = decode_blocks(frame, nbytes, some)
    for number, block in enumerate(blocks):
        span = slice(block.at, block.at + block.nbytes)
        assert np.array_equal(out[span], data[span]) if number in some else np.all(out[span] == 77)


def test_the_frames_of_the_writer_have_blocks():
    for itemsize in (1, 2, 4):
        chunk = values(3 * codecs.BLOSC_BLOCKSIZE + 4000, 1).view(f"<u{itemsize}")
        frame = codecs.encode("zstd", chunk)
        sizes = [block.nbytes for block in codecs.blosc_blocks(memoryview(frame), chunk.nbytes, "chunk")]
        assert sizes == [codecs.BLOSC_BLOCKSIZE] * 3 + [4000]
        np.testing.assert_array_equal(decode_blocks(frame, chunk.nbytes), chunk.view(np.uint8))


def test_incompressible_chunks_are_decoded_whole():
    data = np.random.default_rng(1).integers(0, 256, 300 * KIB, dtype=np.uint8)
    frame = codecs.encode("zstd", data)
    if codecs.blosc_blocks(memoryview(frame), data.nbytes, "chunk") is not None:
        np.testing.assert_array_equal(decode_blocks(frame, data.nbytes), data)
    copied = blosc.compress(data, b"zstd", 0, blosc.SHUFFLE, 128 * KIB, 2)
    assert copied[2] & 2
    assert codecs.blosc_blocks(memoryview(copied), data.nbytes, "chunk") is None


NBYTES = 300 * KIB
FRAME = blosc.compress(values(NBYTES, 3), b"zstd", 1, blosc.SHUFFLE, 100 * KIB, 2)
STARTS = struct.unpack_from("<3I", FRAME, 16)


def changed(offset, form, *fields):
    data = bytearray(FRAME)
    struct.pack_into(form, data, offset, *fields)
    return data


@pytest.mark.parametrize(
    "frame",
    [
        changed(0, "<B", 1),  # another version of the format
        changed(2, "<B", FRAME[2] | 2),  # says that it is a copy
        changed(8, "<I", 0),  # blocks of no bytes
        changed(8, "<I", 16),  # thousands of them
        changed(16, "<I", 0),  # a block within the header
        changed(16, "<I", 27),
        changed(16, "<3I", STARTS[0], STARTS[2], STARTS[1]),  # out of order
        changed(16, "<3I", STARTS[0], STARTS[0], STARTS[2]),  # of no bytes
        changed(24, "<I", len(FRAME)),  # behind the end
        changed(24, "<I", 2**32 - 1),
    ],
)
def test_frames_that_are_not_plain_are_left_to_the_whole_decoder(frame):
    assert codecs.blosc_blocks(memoryview(frame), NBYTES, "chunk") is None


@pytest.mark.parametrize(
    "frame",
    [
        changed(STARTS[1], "<I", 2**31 - 1),  # the block says that it is larger than all
        changed(STARTS[1], "<I", 2**32 - 1),
        changed(STARTS[2], "<I", len(FRAME)),
        changed(STARTS[1], "<I", 0),
        changed(STARTS[1] + 4, "<I", 0),  # no zstd frame
        changed(20, "<I", STARTS[1] + 1),
        changed(20, "<I", STARTS[2] - 1),  # a block of one byte
        changed(3, "<B", 0),  # elements of no bytes
        changed(2, "<B", FRAME[2] | 0xE0),  # a compressor that there is not
        changed(2, "<B", FRAME[2] | 0x08),  # flags of later versions
    ],
)
def test_hostile_blocks_are_refused(frame):
    with pytest.raises(CorruptionError, match="chunk: expected a valid Blosc frame"):
        decode_blocks(bytes(frame), NBYTES)


def test_a_frame_of_another_size_is_refused_before_its_blocks_are_looked_at():
    for nbytes in (NBYTES - 2, NBYTES + 2, 0):
        with pytest.raises(CorruptionError, match="expected a Blosc frame that decodes to"):
            codecs.blosc_blocks(memoryview(FRAME), nbytes, "chunk")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, len(FRAME) - 1), st.integers(0, 255)), min_size=1, max_size=5))
def test_damaged_frames_decode_within_their_bounds_or_not_at_all(changes):
    """The digest finds them first; this is for frames that were made to fit theirs."""
    payload = bytearray(FRAME)
    for position, byte in changes:
        payload[position] = byte
    memory = np.full(NBYTES + 200, 77, np.uint8)
    out = memory[100:-100]
    try:
        blocks = codecs.blosc_blocks(memoryview(payload), NBYTES, "chunk") or []
        for block in blocks:
            codecs.decode_block(memoryview(payload), block, out[block.at : block.at + block.nbytes], "chunk")
    except CorruptionError as error:
        assert "Blosc frame" in str(error)  # noqa: PT017
    assert np.all(memory[:100] == 77)
    assert np.all(memory[-100:] == 77)
