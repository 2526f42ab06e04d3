"""The container of index files: it is safetensors, and each malformed file is refused."""
# ruff: noqa: E501 - one case a line

import json
import struct
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from hsfmt import tables
from hsfmt.errors import CorruptionError

DTYPES = ["i4", "i8", "u8", "u1"]
META = {"format": "1.0", "kind": "test"}


def array(dtype, shape, seed=0):
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), f"<{dtype}").reshape(shape)


ARRAYS = st.dictionaries(
    st.text(st.sampled_from("abc_."), min_size=1, max_size=8),
    st.builds(array, st.sampled_from(DTYPES), st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)),
    max_size=6,
)


@given(ARRAYS)
def test_the_library_reads_ours_and_we_read_its(tmp_path_factory, arrays):
    data = tables.serialize(arrays, META)
    path = tmp_path_factory.mktemp("tables") / "x.safetensors"
    path.write_bytes(data)
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == set(arrays)
        assert json.loads(file.metadata()["hsfmt"]) == META
        for name, expected in arrays.items():
            assert np.array_equal(file.get_tensor(name), expected)
    ours = tables.parse(data, "x")
    theirs = tables.parse(safetensors.numpy.save(arrays, {"hsfmt": json.dumps(META, separators=(",", ":"))}), "x")
    for table in (ours, theirs):
        assert table.metadata == META
        assert table.arrays.keys() == arrays.keys()
        for name, expected in arrays.items():
            assert table.arrays[name].dtype == expected.dtype
            assert np.array_equal(table.arrays[name], expected)
            assert not table.arrays[name].flags.writeable


@given(ARRAYS)
def test_the_same_content_gives_the_same_bytes_and_lies_aligned(arrays):
    data = tables.serialize(arrays, META)
    assert tables.serialize(dict(reversed(arrays.items())), META) == data
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    for name, entry in header.items():
        if name != "__metadata__":
            start = 8 + int.from_bytes(data[:8], "little") + entry["data_offsets"][0]
            assert start % arrays[name].dtype.itemsize == 0


@pytest.mark.parametrize("n", range(1, 10))
def test_the_header_is_padded_to_eight_bytes(n):
    """Rule TAB-2; a length that is a multiple already gets none."""
    data = tables.serialize({"a" * n: array("u1", (3,))}, META)
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0
    assert len(data) == 8 + size + 3
    text = data[8 : 8 + size]
    assert 0 <= len(text) - len(text.rstrip(b" ")) < 8
    assert tables.serialized_nbytes({"a" * n: (np.dtype("u1"), (3,))}, META) == len(data)


def file(header, body=b"\0" * 16, size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + body


OK = {"__metadata__": {"hsfmt": "{}"}}


def entry(dtype="U8", shape=(16,), offsets=(0, 16)):
    return {**OK, "a": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


def test_the_template_is_fine():
    assert tables.parse(file(entry()), "x").arrays["a"].shape == (16,)


HOSTILE = {
    "nothing": b"",
    "seven bytes": b"\0" * 7,
    "a header of nothing": struct.pack("<Q", 0),
    "a header longer than the file": file(entry(), size=10_000),
    "a header of 2**63": file(entry(), size=2**63),
    "a header of 2**64 - 1": file(entry(), size=2**64 - 1),
    "a header cut short": file(entry(), size=20),
    "no JSON": file(b"hello"),
    "a list": file([]),
    "a number": file(5),
    "a text": file("x"),
    "null": file(None),
    "not UTF-8": file(b'{"\xff":1}'),
    "deep nesting": file(b"[" * 100_000),
    "duplicate names": file(b'{"__metadata__":{"hsfmt":"{}"},"a":{"dtype":"U8","shape":[16],"data_offsets":[0,16]},'
                            b'"a":{"dtype":"U8","shape":[16],"data_offsets":[0,16]}}'),
    "no metadata": file({"a": entry()["a"]}),
    "metadata of a list": file({**entry(), "__metadata__": []}),
    "metadata of a text": file({**entry(), "__metadata__": "hsfmt"}),
    "metadata without ours": file({**entry(), "__metadata__": {"x": "{}"}}),
    "metadata that is no text": file({**entry(), "__metadata__": {"hsfmt": {}}}),
    "metadata that is no JSON": file({**entry(), "__metadata__": {"hsfmt": "{"}}),
    "metadata that is not canonical": file({**entry(), "__metadata__": {"hsfmt": "{ }"}}),
    "metadata that is no object": file({**entry(), "__metadata__": {"hsfmt": "[]"}}),
    "metadata of a surrogate": file({**entry(), "__metadata__": {"hsfmt": "\ud800"}}),
    "an entry that is no object": file({**OK, "a": 5}),
    "an entry without offsets": file({**OK, "a": {"dtype": "U8", "shape": [16]}}),
    "three offsets": file(entry(offsets=(0, 8, 16))),
    "a gap at the start": file(entry(shape=(8,), offsets=(8, 16))),
    "a tail": file(entry(shape=(8,), offsets=(0, 8))),
    "beyond the end": file(entry(shape=(17,), offsets=(0, 17))),
    "negative offsets": file(entry(shape=(-16,), offsets=(0, -16))),
    "a negative start": file(entry(shape=(17,), offsets=(-1, 16))),
    "offsets of text": file(entry(offsets=("0", "16"))),
    "offsets of floats": file(entry(offsets=(0.0, 16.0))),
    "offsets of flags": file(entry(shape=(1,), offsets=(False, True)), b"\0"),
    "an offset of 2**64": file(entry(offsets=(0, 2**64))),
    "a shape of 2**40": file(entry(shape=(2**40,), offsets=(0, 2**40))),
    "a shape that overflows": file(entry(shape=(2**32, 2**32), offsets=(0, 16))),
    "a shape that overflows to its size": file(entry(shape=(2**62, 4, 4), offsets=(0, 16))),
    "two negative axes": file(entry(shape=(-4, -4))),
    "a fractional axis": file(entry(shape=(16.0,))),
    "a shape of text": file(entry(shape=("16",))),
    "a shape that is a number": file({**OK, "a": {"dtype": "U8", "shape": 16, "data_offsets": [0, 16]}}),
    "a hundred axes": file(entry(shape=(1,) * 99 + (16,))),
    "a size that does not fit": file(entry(dtype="I64", shape=(16,))),
    "a dtype of ours that is another's": file(entry(dtype="F32", shape=(4,))),
    "an unknown dtype": file(entry(dtype="Q4", shape=(4,))),
    "a dtype of a list": file(entry(dtype=["U8"])),
    "overlapping tensors": file({**entry(), "b": {"dtype": "U8", "shape": [8], "data_offsets": [8, 16]}}),
    "the same bytes twice": file({**entry(), "b": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}),
    "NaN as an offset": file(b'{"__metadata__":{"hsfmt":"{}"},"a":{"dtype":"U8","shape":[16],"data_offsets":[NaN,16]}}'),
    "very many digits": file(b'{"__metadata__":{"hsfmt":"{}"},"a":{"dtype":"U8","shape":[' + b"9" * 9999 + b'],"data_offsets":[0,16]}}'),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_malformed_files_are_refused(case):
    with pytest.raises(CorruptionError) as caught:
        tables.parse(HOSTILE[case], "hsfmt/index/p.safetensors")
    assert str(caught.value).startswith("hsfmt/index/p.safetensors: ")
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("case", "got"),
    [("beyond the end", r"a has 17 bytes for \[17\]"), ("a shape of 2**40", "a has 1099511627776 bytes"),
     ("an offset of 2**64", "a lies at 0"), ("a size that does not fit", "a has 16 bytes"), ("a tail", "8 bytes behind"),
     ("a hundred axes", "a has more than 8 axes"), ("overlapping tensors", "b lies at 8, not 16")],
)  # fmt: skip
def test_our_own_checks_come_before_numpy_s(case, got):
    """NumPy would refuse some of these too; what it would make of the rest is not for it to decide."""
    with pytest.raises(CorruptionError, match=f"got ValueError: {got}"):
        tables.parse(HOSTILE[case], "x")


def test_a_sample_s_id_may_be_as_long_as_the_cap_and_no_longer():
    data, offsets = tables.pack_strings([b"a" * 5, b"bb"])
    tables.check_ids(data, offsets, 5, "x")
    with pytest.raises(CorruptionError, match="x: id_offsets: expected at most 4 bytes"):
        tables.check_ids(data, offsets, 4, "x")


@given(st.integers(0, 10**6), st.integers(0, 255))
def test_no_changed_byte_ends_in_another_kind_of_error(at, value):
    """Digests catch these in practice; the parser must still never crash, hang or allocate by what it reads."""
    data = bytearray(tables.serialize({"a": array("i8", (3,)), "b": array("u1", (5, 2))}, META))
    data[at % len(data)] = value
    with suppress(CorruptionError):
        tables.parse(bytes(data), "x")


def test_take_names_what_is_missing_or_other():
    table = tables.parse(tables.serialize({"a": array("i8", (3,)), "b": array("u1", (5, 2))}, META), "x")
    assert tables.take(table, "a", "I64", (3,), "x").shape == (3,)
    assert tables.take(table, "b", "U8", (None, 2), "x").shape == (5, 2)
    for name, dtype, shape in (
        ("c", "I64", (3,)),
        ("a", "U64", (3,)),
        ("a", "I64", (4,)),
        ("a", "I64", (3, 1)),
        ("b", "U8", (None,)),
        ("b", "U8", (None, 3)),
    ):
        with pytest.raises(CorruptionError, match=f"x: {name}: expected {dtype}"):
            tables.take(table, name, dtype, shape, "x")


def test_strings_come_back():
    values = [b"", b"a", b"\xc3\xa9" * 5, b"", b"z"]
    data, offsets = tables.pack_strings(values)
    assert [data[a:b].tobytes() for a, b in pairwise(offsets)] == values
    empty, offsets = tables.pack_strings([])
    assert (empty.tolist(), offsets.tolist()) == ([], [0])


@pytest.mark.parametrize(
    ("offsets", "strict"),
    [([1, 5], False), ([0, 4], False), ([0, 6], False), ([0, 3, 2, 5], False), ([0, -1, 5], False), ([0, 2, 2, 5], True),
     ([0, 2**62, 5], False), ([5], False), ([0, -(2**63), 5], False), ([0, 2**63 - 1, 5], True)],
)  # fmt: skip
def test_offsets_that_do_not_rise_to_the_end_are_refused(offsets, strict):
    with pytest.raises(CorruptionError, match="x: expected offsets rising from 0 to 5"):
        tables.check_offsets(np.array(offsets, np.int64), 5, "x", strict=strict)


def test_offsets_that_rise_are_fine():
    for offsets, strict in (([0, 5], True), ([0, 0, 5, 5], False), ([0, 1, 2, 5], True)):
        tables.check_offsets(np.array(offsets, np.int64), 5, "x", strict=strict)
    tables.check_offsets(np.array([0], np.int64), 0, "x", strict=True)
