"""Extra columns of every kind and dtype, with nulls, and sample metadata."""

import ml_dtypes
import numpy as np
import part_oracles as oracles
import pytest

from hsfmt.dtypes import DTYPES
from hsfmt.errors import SampleError
from hsfmt.writers.extras import Extra

STATES = np.ones((4, 2, 8), np.float32)


def native(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def values(name, shape, seed=0):
    """Make an array whose bytes are all sorts of patterns of the dtype."""
    rng = np.random.default_rng(seed)
    if name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    nbytes = int(np.prod(shape)) * native(name).itemsize
    return np.frombuffer(rng.bytes(nbytes), native(name)).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_kind(url, open_writer, dtype):
    extras = {
        "a_token": Extra("token", dtype, []),
        "b_sample": {"kind": "sample", "dtype": dtype, "shape": (2, 3)},
        "c_ragged": {"kind": "ragged", "dtype": dtype, "shape": [5]},
        "d_scalar": {"kind": "sample", "dtype": dtype},
    }
    written = {}
    with open_writer(extras=extras, chunk_tokens=3, shard_tokens=6) as writer:
        for number in range(7):
            written[f"{number}"] = given = {
                "a_token": values(dtype, (4,), number),
                "b_sample": values(dtype, (2, 3), number),
                "c_ragged": values(dtype, (number, 5), number),
                "d_scalar": values(dtype, (), number),
            }
            writer.write(f"{number}", np.arange(4), STATES, **given)
        writer.write("nulls", np.arange(4), STATES, a_token=None)
    read = oracles.read_samples(url)
    for sample_id, given in written.items():
        for name, value in given.items():
            assert read[sample_id].extras[name].tobytes() == value.tobytes(), (sample_id, name)
    assert read["nulls"].extras == dict.fromkeys(extras)
    (part,) = oracles.loaded_parts(url)
    for name in extras:
        expected = oracles.decode_column(url, part, name).tobytes()
        assert oracles.by_zarr(url, part, name).tobytes() == expected
        assert oracles.by_tensorstore(url, part, name).tobytes() == expected


def test_ragged_columns_may_be_empty_throughout(url, open_writer):
    extras = {"boxes": {"kind": "ragged", "dtype": "float32", "shape": [4]}}
    with open_writer(extras=extras) as writer:
        writer.write("null", np.arange(4), STATES)
        writer.write("empty", np.arange(4), STATES, boxes=np.empty((0, 4), np.float32))
        writer.write("list", np.arange(4), STATES, boxes=[])
    (part,) = oracles.loaded_parts(url)
    column = part.manifest.columns["boxes"]
    assert (column.shape, column.n_chunks, column.n_shards) == ((0, 4), 0, 0)
    assert part.index.valid["boxes"].tolist() == [0, 1, 1]
    assert part.index.offsets["boxes"].tolist() == [0, 0, 0, 0]
    assert oracles.by_zarr(url, part, "boxes").shape == (0, 4)
    assert oracles.by_tensorstore(url, part, "boxes").shape == (0, 4)
    read = oracles.read_samples(url)
    assert read["null"].extras["boxes"] is None
    assert read["empty"].extras["boxes"].shape == (0, 4)


def test_a_column_of_nothing_but_nulls(url, open_writer):
    extras = {kind: {"kind": kind, "dtype": "int64", "shape": [2]} for kind in ("token", "sample", "ragged")}
    with open_writer(extras=extras) as writer:
        writer.write("a", np.arange(4), STATES)
    assert oracles.read_samples(url)["a"].extras == dict.fromkeys(extras)


PLAIN = {
    "float32": (1.5, [1.5]),
    "bfloat16": (1.5, [0x3FC0]),
    "float8_e4m3fn": (-2, [0xC0]),
    "float16": (float("inf"), [np.inf]),
    "int8": (-128, [-128]),
    "uint64": (2**64 - 1, [2**64 - 1]),
    "bool": (True, [1]),
    "float64": (0.1, [0.1]),
}


@pytest.mark.parametrize("dtype", PLAIN)
def test_plain_numbers_mean_their_value_not_a_pattern(url, open_writer, dtype):
    given, expected = PLAIN[dtype]
    extras = {"one": {"kind": "sample", "dtype": dtype}, "many": {"kind": "token", "dtype": dtype}}
    with open_writer(extras=extras) as writer:
        writer.write("a", np.arange(4), STATES, one=given, many=[given] * 4)
    read = oracles.read_samples(url)["a"].extras
    assert [read["one"].item()] == expected
    assert read["many"].tolist() == expected * 4


NOT_VALUES = {
    "int8": [128, -129, 1.5, "1", True, None.__class__, [1, 2], [[1], [1, 2]]],
    "uint8": [-1, 256, 0.0],
    "int32": [2**31, float("nan")],
    "bool": [2, 1, 0.0],
    "float16": [1e30, True],
    "bfloat16": [1e300, "x"],
    "float8_e4m3fn": [1e9],
}


@pytest.mark.parametrize("dtype", NOT_VALUES)
def test_plain_numbers_that_do_not_fit_are_refused(open_writer, dtype):
    with open_writer(extras={"one": {"kind": "sample", "dtype": dtype}}) as writer:
        for given in NOT_VALUES[dtype]:
            with pytest.raises(SampleError, match="one: expected"):
                writer.write("a", np.arange(4), STATES, one=given)
        assert writer.commit() == []


def test_shapes_that_do_not_fit_are_refused(open_writer):
    extras = {
        "token": {"kind": "token", "dtype": "int8", "shape": [2]},
        "sample": {"kind": "sample", "dtype": "int8", "shape": [2]},
        "ragged": {"kind": "ragged", "dtype": "int8", "shape": [2]},
    }
    with open_writer(extras=extras) as writer:
        for name, shape in (
            ("token", (4,)),
            ("token", (3, 2)),
            ("token", (4, 3)),
            ("sample", (3,)),
            ("sample", (2, 2)),
            ("sample", ()),
            ("ragged", (2,)),
            ("ragged", (3, 3)),
            ("ragged", (3, 2, 1)),
            ("ragged", ()),
        ):
            with pytest.raises(SampleError, match=f"{name}: expected"):
                writer.write("a", np.arange(4), STATES, **{name: np.zeros(shape, np.int8)})
        writer.write("a", np.arange(4), STATES, sample=np.zeros((1, 2), np.int8), token=[[1, 2]] * 4, ragged=[[1, 2]])


def test_wide_rows_do_not_follow_the_states_chunks_beyond_the_cap(url, open_writer):
    extras = {"wide": {"kind": "sample", "dtype": "float32", "shape": [1 << 20]}}
    with open_writer(extras=extras, chunk_tokens=4096) as writer:
        writer.write("a", np.arange(4), STATES, wide=np.arange(1 << 20, dtype=np.float32))
    (part,) = oracles.loaded_parts(url)
    assert part.manifest.columns["wide"].chunk_shape == (16, 1 << 20)
    assert oracles.read_samples(url)["a"].extras["wide"].tolist() == list(range(1 << 20))


def test_content_digests_see_every_change(url, open_writer):
    base = {"input_ids": np.arange(4), "hidden_states": STATES, "loss_mask": [1, 1, 1, 0], "metadata": {"a": 1}}
    changes = {
        "base": {},
        "ids": {"input_ids": [0, 1, 2, 4]},
        "mask": {"loss_mask": [1, 1, 0, 0]},
        "states": {"hidden_states": STATES * np.float32(-1)},
        "metadata": {"metadata": {"a": 2}},
        "extra": {"e": 1.0},
        "zero extra": {"e": 0.0},
    }
    with open_writer(extras={"e": {"kind": "sample", "dtype": "float32"}}) as writer:
        for name, change in changes.items():
            writer.write(name, **{**base, **change})
    (part,) = oracles.loaded_parts(url)
    content = dict(zip(changes, map(bytes, part.index.content_digest), strict=True))
    extra = dict(zip(changes, map(bytes, part.index.extra_digest), strict=True))
    assert len({content[name] for name in ("base", "ids", "mask", "states")}) == 4
    assert content["base"] == content["metadata"] == content["extra"]
    assert len({extra[name] for name in ("base", "metadata", "extra", "zero extra")}) == 4


def test_digests_depend_on_content_alone(tmp_path, states, open_writer):
    array, digests = states(37), set()
    for number, (codec, chunk) in enumerate((("none", None), ("zstd", 1), ("zstd", 5), ("none", 64))):
        with open_writer(url=str(tmp_path / f"{number}"), codec=codec, chunk_tokens=chunk) as writer:
            writer.write("other", np.arange(3), states(3))
            writer.write("a", np.arange(37), array if number % 2 else [array[:, 0], array[:, 1]], metadata={"x": [1.5]})
        (part,) = oracles.loaded_parts(tmp_path / f"{number}")
        digests.add((bytes(part.index.content_digest[1]), bytes(part.index.extra_digest[1])))
    assert len(digests) == 1


def test_metadata_comes_back(url, open_writer):
    metadata = {
        "split": "train",
        "row": 2**63 - 1,
        "nested": {"ü": [1, 2.5, None, True, {"": -0.0}]},
        "text": '\u2028 \\ " \x00',
    }
    with open_writer() as writer:
        writer.write("a", np.arange(4), STATES, metadata=metadata)
        writer.write("b", np.arange(4), STATES)
        writer.write("c", np.arange(4), STATES, metadata={})
        writer.write("large", np.arange(4), STATES, metadata={"x": "y" * ((1 << 20) - 8)})
    read = oracles.read_samples(url)
    assert read["a"].metadata == metadata
    assert read["b"].metadata == read["c"].metadata == {}
    assert len(read["large"].metadata["x"]) == (1 << 20) - 8
