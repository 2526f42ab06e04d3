"""Columns: chunk grids, the writer's choice of sizes, and hostile entries."""
# ruff: noqa: E501 - one case a line

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsfmt import columns
from hsfmt.columns import Column, parse_column, state_chunk_rows
from hsfmt.errors import FormatError

GOOD = {
    "kind": "token", "dtype": "bfloat16", "codec": "zstd", "shape": [1000, 4, 7168], "chunk_shape": [256, 1, 7168],
    "shard_shape": [512, 4, 7168],
}  # fmt: skip


def test_a_column_comes_back():
    column = parse_column("hidden_states", GOOD, "x")
    assert column.to_json() == GOOD
    assert (column.n_planes, column.n_chunk_rows, column.n_chunks, column.n_shards) == (4, 4, 16, 2)
    assert column.chunk_nbytes == 256 * 7168 * 2
    assert column.row_nbytes == 4 * 7168 * 2
    assert column.shard_chunks(0) == (0, 8)
    assert column.shard_chunks(1) == (8, 16)
    assert column.shard_key(1) == "c/1/0/0"


@given(st.integers(1, 5000), st.integers(1, 5), st.integers(1, 300), st.integers(1, 9))
def test_the_grid_covers_every_row_once(rows, planes, chunk, chunks_per_shard):
    column = Column("hidden_states", "token", "float16", (rows, planes, 8), chunk, chunk * chunks_per_shard, "none")
    assert (column.n_chunk_rows - 1) * chunk < rows <= column.n_chunk_rows * chunk
    ranges = [column.shard_chunks(shard) for shard in range(column.n_shards)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == column.n_chunks
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert all(0 < end - first <= chunks_per_shard * planes for first, end in ranges)
    assert parse_column("hidden_states", column.to_json(), "x") == column


HOSTILE = {
    "a list": [],
    "no shape": {**GOOD, "shape": None},
    "a scalar shape": {**GOOD, "shape": 5},
    "an empty shape": {**GOOD, "shape": [], "chunk_shape": [], "shard_shape": []},
    "two axes": {**GOOD, "shape": [1000, 4], "chunk_shape": [256, 1], "shard_shape": [512, 4]},
    "nine axes": {**GOOD, "shape": [1] * 9, "chunk_shape": [1] * 9, "shard_shape": [1] * 9},
    "ranks that differ": {**GOOD, "chunk_shape": [256, 7168]},
    "a negative row count": {**GOOD, "shape": [-1, 4, 7168]},
    "no rows": {**GOOD, "shape": [0, 4, 7168]},
    "more than 2**40 rows": {**GOOD, "shape": [2**40 + 1, 4, 7168]},
    "2**63 rows": {**GOOD, "shape": [2**63, 4, 7168]},
    "an axis of 0": {**GOOD, "shape": [1000, 0, 7168], "shard_shape": [512, 0, 7168]},
    "an axis of 2**40": {**GOOD, "shape": [1000, 4, 2**40], "chunk_shape": [256, 1, 2**40], "shard_shape": [512, 4, 2**40]},
    "a fractional axis": {**GOOD, "shape": [1000, 4, 7168.0]},
    "a flag as axis": {**GOOD, "shape": [True, 4, 7168]},
    "a text as axis": {**GOOD, "shape": ["1000", 4, 7168]},
    "chunks of 0 rows": {**GOOD, "chunk_shape": [0, 1, 7168]},
    "chunks of two layers": {**GOOD, "chunk_shape": [256, 2, 7168]},
    "chunks of half the hidden axis": {**GOOD, "chunk_shape": [256, 1, 3584]},
    "chunks beyond 64 MiB": {**GOOD, "chunk_shape": [8192, 1, 7168], "shard_shape": [8192, 4, 7168]},
    "chunks of 2**40 rows": {**GOOD, "chunk_shape": [2**40, 1, 7168], "shard_shape": [2**40, 4, 7168]},
    "shards of 0 rows": {**GOOD, "shard_shape": [0, 4, 7168]},
    "shards of half a chunk": {**GOOD, "shard_shape": [128, 4, 7168]},
    "shards of one and a half": {**GOOD, "shard_shape": [384, 4, 7168]},
    "shards of one layer": {**GOOD, "shard_shape": [512, 1, 7168]},
    "shards beyond 4 GiB": {**GOOD, "shard_shape": [256 * 512, 4, 7168]},
    "shards of 2**40 rows": {**GOOD, "shard_shape": [2**40, 4, 7168]},
    "more chunk rows than an index may list": {**GOOD, "chunk_shape": [1, 1, 7168], "shard_shape": [4097, 4, 7168]},
    "an unknown codec": {**GOOD, "codec": "lz4"},
    "a codec of a list": {**GOOD, "codec": ["zstd"]},
    "no codec": {key: value for key, value in GOOD.items() if key != "codec"},
    "an unknown dtype": {**GOOD, "dtype": "float128"},
    "a dtype of an object": {**GOOD, "dtype": {}},
    "no dtype": {key: value for key, value in GOOD.items() if key != "dtype"},
    "an unknown kind": {**GOOD, "kind": "layer"},
    "a kind of a list": {**GOOD, "kind": ["token"]},
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_entries_are_refused(case):
    with pytest.raises(FormatError) as caught:
        parse_column("hidden_states", HOSTILE[case], "m: columns.hidden_states")
    for problem in caught.value.problems:
        assert problem.where.startswith("m: columns.hidden_states")
        assert len(str(problem)) < 600


@pytest.mark.parametrize("name", ["", "A", "1a", "a-b", "a.b", "a/b", "..", "a" * 65, "é", "a\n", "zarr.json"])
def test_names_are_of_a_closed_alphabet(name):
    with pytest.raises(FormatError, match="a name of"):
        parse_column(name, {**GOOD, "shape": [9], "chunk_shape": [9], "shard_shape": [9]}, "x")


def test_all_faults_of_an_entry_come_at_once():
    with pytest.raises(FormatError) as caught:
        parse_column(
            "hidden_states", {**GOOD, "shape": [0, 4, 7168], "chunk_shape": [0, 1, 7168], "shard_shape": [1, 1, 1]}, "x"
        )
    assert len(caught.value.problems) == 3


def test_a_ragged_column_may_have_no_rows():
    entry = {
        "kind": "ragged",
        "dtype": "int8",
        "codec": "none",
        "shape": [0, 2],
        "chunk_shape": [8, 2],
        "shard_shape": [8, 2],
    }
    column = parse_column("r", entry, "x")
    assert (column.n_chunks, column.n_shards) == (0, 0)
    for kind in ("token", "sample"):
        with pytest.raises(FormatError):
            parse_column("r", {**entry, "kind": kind}, "x")


@pytest.mark.parametrize(
    ("hidden", "itemsize", "rows"),
    [
        (7168, 2, 256),
        (4096, 2, 256),
        (2048, 2, 256),
        (5120, 2, 256),
        (1024, 2, 512),
        (576, 2, 4096 // 1),
        (128, 2, 4096),
    ],
)
def test_preferred_chunks(hidden, itemsize, rows):
    chosen = state_chunk_rows(hidden, itemsize)
    nbytes = chosen * hidden * itemsize
    if (1 << 20) <= nbytes <= (4 << 20) and nbytes % (512 << 10) == 0:
        whole = [n for n in range(1, (4 << 20) // (hidden * itemsize) + 1)
                 if n * hidden * itemsize >= 1 << 20 and n * hidden * itemsize % (512 << 10) == 0]  # fmt: skip
        assert abs(chosen - 256) == min(abs(n - 256) for n in whole)
    if hidden in (7168, 4096, 2048, 5120):
        assert chosen == rows


@given(st.integers(1, 1 << 20), st.sampled_from([1, 2, 4]))
def test_any_width_gets_a_chunk_that_the_format_takes(hidden, itemsize):
    name = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}[itemsize]
    rows = state_chunk_rows(hidden, itemsize)
    nbytes = rows * hidden * itemsize
    assert 0 < nbytes <= columns.MAX_CHUNK_NBYTES
    for n_layers in (1, 4, 64):
        row_nbytes = n_layers * hidden * itemsize
        shard = columns.max_shard_rows(rows, row_nbytes)
        fitted = columns.fitted_shard_rows(1, rows, row_nbytes)
        assert fitted == rows <= shard
        for n_rows in (1, rows, rows + 1, 10 * shard):
            shard_rows = columns.fitted_shard_rows(n_rows, rows, row_nbytes)
            column = Column("hidden_states", "token", name, (n_rows, n_layers, hidden), rows, shard_rows, "zstd")
            assert parse_column("hidden_states", column.to_json(), "x") == column


@given(st.integers(1, 1 << 26))
def test_other_columns_get_chunks_that_the_format_takes(row_nbytes):
    rows = columns.column_chunk_rows(row_nbytes)
    assert rows >= 1
    assert math.log2(rows) % 1 == 0
    assert rows * row_nbytes <= max(row_nbytes, 1 << 20)
