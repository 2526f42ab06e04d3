"""Digests: known answers, and that each byte form is what the specification says."""

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hsfmt import digests
from hsfmt.errors import FormatError

EMPTY = "xxh3_128:99aa06d3014798d86001c324468d497f"


def test_known_answers():
    assert digests.digest(b"") == EMPTY
    assert digests.chunk_digest(b"") == 0x2D06800538D394C2
    assert digests.id_hash(b"") == 0x2D06800538D394C2
    assert digests.id_key(b"").hex() == EMPTY[9:]


@given(st.lists(st.binary(max_size=50), max_size=6))
def test_a_file_in_pieces_has_the_digest_of_the_whole(pieces):
    hasher = digests.FileHasher()
    for piece in pieces:
        hasher.update(memoryview(piece))
    assert hasher.digest() == digests.digest(b"".join(pieces))


def test_raw_and_text():
    assert digests.from_raw(digests.to_raw(EMPTY)) == EMPTY
    assert len(digests.to_raw(EMPTY)) == 16


@pytest.mark.parametrize(
    "text",
    ["", EMPTY[9:], EMPTY.upper(), EMPTY[:-1], EMPTY + "0", "sha256:" + "0" * 64, "xxh3_128:" + "g" * 32, 5, None, b"x",
     EMPTY + "\n", "xxh3_128: " + "0" * 31],
)  # fmt: skip
def test_what_is_no_digest_is_refused(text):
    assert not digests.is_digest(text)
    with pytest.raises(FormatError, match="place: expected a digest"):
        digests.check(text, "place")


def test_the_sample_digest_is_of_the_specified_bytes():
    ids, mask = np.array([5, -1], np.int64), np.array([1, 0], np.uint8)
    states = np.arange(12, dtype="<u2").reshape(2, 2, 3)
    hasher = digests.SampleHasher("bfloat16", 2, 2, 3)
    hasher.tokens(ids, mask)
    hasher.states(states[:1])
    hasher.states(states[1:])
    form = b"hsfmt:sample:1\0bfloat16\0" + struct.pack("<3Q2q2B12H", 2, 2, 3, 5, -1, 1, 0, *range(12))
    assert hasher.digest() == xxhash.xxh3_128_digest(form)


def test_the_extras_digest_is_of_the_specified_bytes():
    value = struct.pack("<2f", 1, 2)
    form = b"hsfmt:extras:1\0" + struct.pack("<Q", 2) + b"{}" + b"a\0float32\0\1" + struct.pack("<2Q", 1, 2) + value
    form += b"b\0int8\0\0"
    given_extras = [("a", "float32", (2,), value), ("b", "int8", (2,), None)]
    assert digests.extras_digest(b"{}", given_extras) == xxhash.xxh3_128_digest(form)


def test_the_dataset_digest_does_not_depend_on_order():
    rng = np.random.default_rng(0)
    pairs = [(f"sample-{i}".encode(), rng.bytes(16)) for i in range(1000)]
    shuffled = [pairs[i] for i in rng.permutation(1000)]
    digest = digests.dataset_digest(pairs, 1000)
    assert digests.dataset_digest(shuffled, 1000) == digest
    assert digests.dataset_digest(pairs[:-1], 999) != digest
    changed = [(pairs[0][0], pairs[1][1]), (pairs[1][0], pairs[0][1]), *pairs[2:]]
    assert digests.dataset_digest(changed, 1000) != digest, "a content is bound to its id"
    keys = sorted(
        xxhash.xxh3_128_digest(b"hsfmt:pair:1\0" + struct.pack("<Q", len(key)) + key + content)
        for key, content in pairs
    )
    form = b"hsfmt:dataset:1\0" + struct.pack("<Q", 1000) + b"".join(keys)
    assert digest == digests.digest(form)
    assert digests.is_digest(digests.dataset_digest([], 0))
