"""Destinations as memory: whatever the strides, the bytes of a chunk go where plain slicing puts them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsfmt.readers import scatter
from hsfmt.readers.planner import Copy
from hsfmt.readers.scatter import Destinations

CHUNK_ROWS = 12


def make_array(draw, n_rows, n_planes, rest, dtype):
    """An array [row, plane, *rest] cut out of a larger one, by any slices that leave its rows adjacent elements."""
    steps = [draw(st.sampled_from([1, 2, 3, -1, -2])) for _ in range(2)]
    margins = [draw(st.integers(0, 2)) for _ in range(2)]
    shape = [n * abs(step) + margin for n, step, margin in zip((n_rows, n_planes), steps, margins, strict=True)]
    swapped = draw(st.booleans())
    base = np.zeros((*(shape[::-1] if swapped else shape), *rest), dtype)
    array = base.swapaxes(0, 1) if swapped else base
    for axis, (step, n) in enumerate(zip(steps, (n_rows, n_planes), strict=True)):
        array = np.moveaxis(np.moveaxis(array, axis, 0)[::step][:n], 0, axis)
    assert array.shape == (n_rows, n_planes, *rest)
    return base, array


def make_copies(draw, arrays, *, apart):
    copies, taken = [], 0
    for _ in range(draw(st.integers(1, 3))):
        target = draw(st.integers(0, len(arrays) - 1))
        array = arrays[target]
        src = draw(st.integers(taken if apart else 0, CHUNK_ROWS))
        n_rows = min(draw(st.integers(1, CHUNK_ROWS)), len(array), CHUNK_ROWS - src)
        if n_rows:
            dst = draw(st.integers(0, len(array) - n_rows))
            copies.append(Copy(target, draw(st.integers(0, array.shape[1] - 1)), dst, src, n_rows))
            taken = src + n_rows
    return draw(st.permutations(copies))


@st.composite
def chunks(draw, apart):
    dtype = draw(st.sampled_from(["u1", "<u2", "<f4", "<i8"]))
    rest = draw(st.sampled_from([(), (1,), (3,), (5,), (2, 3)]))
    made = [
        make_array(draw, draw(st.integers(1, 14)), draw(st.integers(1, 3)), rest, dtype)
        for _ in range(draw(st.integers(1, 2)))
    ]
    values = np.random.default_rng(0).integers(1, 255, (CHUNK_ROWS, *rest)).astype(dtype)
    return [base for base, _ in made], [array for _, array in made], make_copies(
        draw, [array for _, array in made], apart=apart
    ), values  # fmt: skip


def expected_bases(bases, arrays, copies, values):
    """What plain slicing makes of the bases."""
    before = [base.copy() for base in bases]
    for target, plane, dst, src, n_rows in sorted(copies, key=lambda copy: (copy.src, copy.n_rows)):
        arrays[target][dst : dst + n_rows, plane] = values[src : src + n_rows]
    after = [base.copy() for base in bases]
    for base, old in zip(bases, before, strict=True):
        base[...] = old
    return after


@pytest.mark.parametrize("min_row", [1, 1 << 20])
@given(chunks(apart=True), st.integers(1, 70), st.integers(1, 40))
def test_pieces_fill_the_destinations_and_nothing_else(min_row, chunk, piece_nbytes, scratch_nbytes):
    bases, arrays, copies, values = chunk
    wanted = expected_bases(bases, arrays, copies, values)
    raw = values.tobytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scatter, "MIN_ROW_NBYTES", min_row)
        places = Destinations(arrays).places(copies)
        at = 0
        for piece in places.pieces(len(raw), lambda: memoryview(bytearray(scratch_nbytes)), piece_nbytes):
            assert piece.at == at, "in order, without gaps"
            for buffer in piece.buffers:
                buffer[:] = raw[at : at + len(buffer)]
                at += len(buffer)
            assert piece.nbytes == at - piece.at > 0
            if piece.staged:
                places.put(piece.at, piece.buffers[0])
        assert at == len(raw)
    for base, expected in zip(bases, wanted, strict=True):
        np.testing.assert_array_equal(base, expected)


@given(chunks(apart=False), st.lists(st.integers(1, 60), min_size=1, max_size=20))
def test_put_takes_the_bytes_in_any_portions(chunk, sizes):
    """Also where several places want the same rows; those of one array do not lie over another here."""
    bases, arrays, copies, values = chunk
    copies = [copy for number, copy in enumerate(copies) if copy.target not in {c.target for c in copies[:number]}]
    wanted = expected_bases(bases, arrays, copies, values)
    raw = memoryview(values.tobytes())
    places = Destinations(arrays).places(copies)
    at = 0
    for size in (*sizes, len(raw)):
        run = places.run(at, min(at + size, len(raw)))
        part = raw[at : at + size]
        if run is not None and len(part):
            run[:] = part
        elif len(part) and places.wanted(at, at + len(part)):
            places.put(at, part)
        at += len(part)
    for base, expected in zip(bases, wanted, strict=True):
        np.testing.assert_array_equal(base, expected)


def test_rows_whose_elements_are_apart_have_no_memory():
    array = np.zeros((3, 2, 8), "<u2")
    assert Destinations([array[:, :, ::2]]).places([Copy(0, 0, 0, 0, 3)]) is None
    assert Destinations([array[:, :, ::-1]]).places([Copy(0, 0, 0, 0, 3)]) is None
    assert Destinations([array]).places([Copy(0, 0, 0, 0, 3)]) is not None


def test_rows_of_a_plane_are_adjacent_or_apart():
    one, three = np.zeros((6, 1, 4), "<u2"), np.zeros((6, 3, 4), "<u2")
    places = Destinations([one]).places([Copy(0, 0, 1, 2, 4)])
    assert places.run(16, 48).nbytes == 32
    assert places.run(16, 56) is None, "more than goes there"
    assert Destinations([three]).places([Copy(0, 1, 1, 2, 4)]).run(16, 48) is None
    assert Destinations([three]).places([Copy(0, 1, 1, 2, 1)]).run(16, 24).nbytes == 8, "one row is"


def test_no_more_buffers_than_the_system_takes(monkeypatch):
    monkeypatch.setattr(scatter, "MIN_ROW_NBYTES", 1)
    array = np.zeros((3000, 2, 4), "u1")
    places = Destinations([array]).places([Copy(0, 1, 0, 0, 3000)])
    pieces = list(places.pieces(12000, lambda: memoryview(bytearray(1)), 1 << 20))
    assert [len(piece.buffers) for piece in pieces] == [1024, 1024, 952]
