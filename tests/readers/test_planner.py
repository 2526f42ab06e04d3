"""The planner against plain slicing: whatever the grid, the windows and the layers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsfmt.columns import Column
from hsfmt.readers.planner import Coalescing, Window, plan

PART = "part-a"


def column(n_rows, n_planes, chunk_rows, shard_chunks, name="hidden_states"):
    shape = (n_rows, n_planes, 4) if name == "hidden_states" else (n_rows,)
    return Column(name, "token", "bfloat16", shape, chunk_rows, chunk_rows * shard_chunks, "none")


def dense_table(of, nbytes=10):
    """Chunks of `nbytes` (payload) that lie dense in their shards, each with its number as digest."""
    table = np.zeros((of.n_chunks, 3), np.uint64)
    for shard in range(of.n_shards):
        first, end = of.shard_chunks(shard)
        table[first:end, 0] = np.arange(end - first) * (nbytes + 4)
    table[:, 1] = nbytes
    table[:, 2] = np.arange(of.n_chunks)
    return table


def run(of, ranges, windows):
    """Execute a plan on chunks that hold (row, plane) pairs, and return the destinations."""
    targets = [np.full((stop - start, len(planes), 2), -1) for start, stop, planes, _ in windows]
    for read in ranges:
        for chunk in read.chunks:
            row, plane = divmod(chunk.number, of.n_planes)
            values = np.stack([np.arange(of.chunk_rows) + row * of.chunk_rows, np.full(of.chunk_rows, plane)], -1)
            for target, place, dst, src, n_rows in chunk.copies:
                assert np.all(targets[target][dst : dst + n_rows, place] == -1)
                targets[target][dst : dst + n_rows, place] = values[src : src + n_rows]
    return targets


@given(st.data())
def test_every_row_and_plane_goes_where_it_belongs(data):
    n_rows, n_planes = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 4))
    of = column(n_rows, n_planes, data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4)))
    windows = []
    for target in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, n_rows - 1))
        stop = data.draw(st.integers(start + 1, n_rows))
        planes = data.draw(st.lists(st.integers(0, n_planes - 1), min_size=1, unique=True))
        windows.append(Window(start, stop, planes, target))
    gaps = Coalescing(data.draw(st.sampled_from([0, 4, 20, 1000])), data.draw(st.sampled_from([10, 30, 10_000])))
    ranges = plan(PART, of, dense_table(of), windows, gaps)
    for (start, stop, planes, _), result in zip(windows, run(of, ranges, windows), strict=True):
        rows = np.arange(start, stop)
        np.testing.assert_array_equal(result[..., 0], np.repeat(rows[:, None], len(planes), 1))
        np.testing.assert_array_equal(result[..., 1], np.repeat(np.array([planes]), len(rows), 0))
    numbers = [chunk.number for read in ranges for chunk in read.chunks]
    assert len(numbers) == len(set(numbers)), "no chunk is read twice"
    for read in ranges:
        assert len(read.chunks) == 1 or read.nbytes <= gaps.max_range_nbytes
        last = read.chunks[-1]
        assert (read.offset, read.nbytes) == (read.chunks[0].offset, last.offset + last.nbytes - read.chunks[0].offset)


def test_all_layers_of_a_sample_are_one_range_a_shard():
    of = column(100, 4, 8, 5)
    ranges = plan(PART, of, dense_table(of), [Window(10, 70, range(4), 0)], Coalescing(4))
    assert [read.path for read in ranges] == [f"parts/{PART}/hidden_states/c/{shard}/0/0" for shard in (0, 1)]
    # Chunk rows 1 to 4 of shard 0, and 0 to 3 of shard 1.
    assert [(read.offset, read.nbytes) for read in ranges] == [(4 * 14, 16 * 14 - 4), (0, 16 * 14 - 4)]


def test_one_layer_skips_the_others_unless_the_gap_is_small():
    of = column(100, 4, 8, 100)
    windows = [Window(0, 32, [2], 0)]
    apart = plan(PART, of, dense_table(of), windows, Coalescing(45))
    assert [(read.offset, read.nbytes) for read in apart] == [((4 * row + 2) * 14, 10) for row in range(4)]
    (together,) = plan(PART, of, dense_table(of), windows, Coalescing(46))
    assert (together.offset, together.nbytes) == (28, 3 * 56 + 10)


def test_windows_share_chunks():
    of = column(100, 1, 50, 2, "input_ids")
    (read,) = plan(PART, of, dense_table(of), [Window(0, 10, [0], 0), Window(10, 60, [0], 1)], Coalescing())
    assert [len(chunk.copies) for chunk in read.chunks] == [2, 1]
    assert read.path == f"parts/{PART}/input_ids/c/0"


@pytest.mark.parametrize("limit", [10, 24, 38])
def test_ranges_are_limited(limit):
    of = column(64, 1, 8, 8)
    ranges = plan(PART, of, dense_table(of), [Window(0, 64, [0], 0)], Coalescing(100, limit))
    assert [len(read.chunks) for read in ranges][:2] == [(limit + 4) // 14] * 2
