"""Every way a chunk can take from the disk to its destination: the same values, and damage is found in each.

The sizes at which the ways part are set low, so that small data takes them all.
"""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from written import CountingStore, RemoteLikeStore, assert_same, flip_bit

from hsfmt import codecs
from hsfmt.errors import CorruptionError
from hsfmt.readers import delivery, fetch, scatter
from hsfmt.readers.planner import RangeRead
from hsfmt.readers.sample_reader import ReadOptions, SampleReader, SampleRequest

LAYERS = (1, 3, 5)


@pytest.fixture(params=["scattered", "staged", "coarse", "together"])
def way(request, monkeypatch):
    """Rows straight to their places, through a scratch buffer, in the large steps of many threads, or together."""
    monkeypatch.setattr(codecs, "BLOSC_BLOCKSIZE", 256)
    monkeypatch.setattr(codecs, "_MIN_BLOCKSIZE", 16)
    if request.param != "together":
        monkeypatch.setattr(delivery, "SMALL_CHUNK_NBYTES", 1)
        monkeypatch.setattr(fetch, "PIECE_NBYTES", 112)
        monkeypatch.setattr(scatter, "MIN_ROW_NBYTES", 1 << 20 if request.param == "staged" else 1)
    if request.param == "coarse":
        monkeypatch.setattr(fetch, "_MAX_FINE_THREADS", 0)
        monkeypatch.setattr(fetch, "_COARSE_PIECE_NBYTES", 400)
    return request.param


@pytest.fixture(params=["none", "zstd"])
def written(request, write, way):
    """Chunks of 8 tokens and 576 bytes: two blocks and a rest, all of which end within a row."""
    return write([1, 7, 8, 9, 16, 33, 3, 64], layers=LAYERS, hidden=36, codec=request.param, chunk_tokens=8)


def states_of(written, number, start, stop, planes):
    return written.content[written.ids[number]].states[start:stop][:, planes]


def destination(draw, shape, dtype):
    """An array of that shape over memory of any layout, and the memory."""
    kind = draw(st.sampled_from(["plain", "rows apart", "planes apart", "backwards", "planes first", "elements apart"]))
    n, p, h = shape
    base = np.zeros({"rows apart": (2 * n, p, h), "planes apart": (n, p + 2, h), "planes first": (p, n, h),
                     "elements apart": (n, p, 2 * h)}.get(kind, shape), dtype)  # fmt: skip
    view = {
        "plain": lambda: base,
        "rows apart": lambda: base[::2],
        "planes apart": lambda: base[:, 1:-1],
        "backwards": lambda: base[::-1, ::-1],
        "planes first": lambda: base.swapaxes(0, 1),
        "elements apart": lambda: base[:, :, ::2],
    }[kind]()
    return base, view


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(data=st.data())
def test_any_window_layers_and_strides(written, data):
    reader = SampleReader(CountingStore(written.path), options=ReadOptions(n_threads=data.draw(st.integers(1, 2))))
    layers = data.draw(st.lists(st.sampled_from(LAYERS), min_size=1, unique=True).map(sorted))
    planes = [LAYERS.index(layer) for layer in layers]
    requests, outs = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        number = data.draw(st.integers(0, 7))
        start = data.draw(st.integers(0, int(reader.lengths[number])))
        stop = data.draw(st.integers(start, int(reader.lengths[number])))
        base, out = destination(data.draw, (stop - start, len(planes), 36), np.uint16)
        requests.append(SampleRequest(number, start, stop, out))
        outs.append((base, out))
    reader.read_requests(requests, layers=layers)
    for request, (base, out) in zip(requests, outs, strict=True):
        expected = states_of(written, request.index, request.start, request.stop, planes)
        np.testing.assert_array_equal(out, expected)
        assert base.astype(np.int64).sum() == expected.astype(np.int64).sum(), "nothing beside it is touched"


def test_the_same_tokens_twice_in_a_batch(written):
    reader = SampleReader(written.url)
    windows = [(5, 0, 33), (5, 3, 20), (5, 0, 33), (7, 60, 64)]
    for read, (number, start, stop) in zip(
        reader.read_requests([SampleRequest(*window) for window in windows]), windows, strict=True
    ):
        assert_same(read, written.content[written.ids[number]], start, stop)


@pytest.mark.local
@pytest.mark.parametrize("unsafe", [False, True])
def test_short_reads(written, monkeypatch, unsafe):
    """A read may return less than was asked for at any time."""
    preadv, calls = os.preadv, []

    def short(fd, buffers, offset):
        calls.append(offset)
        wanted, cut = sum(len(buffer) for buffer in buffers), []
        left = max(1, wanted * (len(calls) % 5) // 5)
        for buffer in buffers:
            cut.append(memoryview(buffer)[:left])
            left -= len(cut[-1])
            if not left:
                break
        return preadv(fd, cut, offset)

    monkeypatch.setattr(os, "preadv", short)
    reader = SampleReader(written.url, options=ReadOptions(unsafe_skip_checks=unsafe))
    for number, wanted in enumerate(written.content.values()):
        assert_same(reader.read(number), wanted)
    assert len(calls) > 50


@pytest.mark.local
def test_a_flipped_bit_anywhere_in_a_chunk_is_found_by_any_window_of_it(written):
    """Also in rows that nobody asked for: a chunk is checked whole."""
    reader = SampleReader(written.url, options=ReadOptions(n_threads=1))
    part, row = reader.locate(5)
    first = int(part.index.token_offsets[row]) + 12
    number = first // 8 * 3 + 1
    (shard,) = [path for path in written.shards() if part.name in str(path)][first // 32 :][:1]
    offset, nbytes, _ = part.index.chunks["hidden_states"][number].tolist()
    good = shard.read_bytes()
    out = np.zeros((2, 1, 36), np.uint16)
    for position in range(offset, offset + nbytes, 7 if nbytes > 300 else 1):
        flip_bit(shard, position)
        with pytest.raises(CorruptionError, match=f"chunk {number}, .*read twice") as caught:
            reader.read(5, 12, 14, layers=[3], out=out)
        assert caught.value.problems[0].samples == ("id-005",)
        shard.write_bytes(good)
    reader.read(5, 12, 14, layers=[3], out=out)
    np.testing.assert_array_equal(out, states_of(written, 5, 12, 14, [1]))


@pytest.mark.local
def test_a_mismatch_is_read_once_more(written, monkeypatch):
    reader = SampleReader(written.url, options=ReadOptions(n_threads=1))
    reader.read(5, 0, 1)  # ids and masks are in the cache from here on
    preadv, damaged = os.preadv, []

    def once(fd, buffers, offset):
        count = preadv(fd, buffers, offset)
        if len(damaged) < 1:
            damaged.append(fd)
            memoryview(buffers[-1])[0] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", once)
    assert_same(reader.read(5), written.content["id-005"])
    assert damaged


@pytest.mark.local
def test_a_file_that_was_replaced_is_opened_anew(written):
    reader = SampleReader(written.url)
    for number, wanted in enumerate(written.content.values()):
        assert_same(reader.read(number), wanted)
    contents = {shard: shard.read_bytes() for shard in written.shards()}
    for shard, good in contents.items():
        with shard.open("r+b") as file:
            file.truncate(10)
        with pytest.raises(CorruptionError, match="the end of the file after"):
            reader.read_many(range(8))
        shard.with_name("new").write_bytes(good)
        shard.with_name("new").replace(shard)
        for number, wanted in enumerate(written.content.values()):
            assert_same(reader.read(number), wanted)


def test_a_payload_of_another_size_than_a_raw_chunk(write, monkeypatch, way):
    written = write([16], parts=1, layers=LAYERS, hidden=36, codec="none", chunk_tokens=8)
    reader = SampleReader(written.url, options=ReadOptions(unsafe_skip_checks=True))
    part, _ = reader.locate(0)
    table = part.index.chunks["hidden_states"].copy()
    table[0, 1] -= 1
    monkeypatch.setitem(part.index.chunks, "hidden_states", table)
    with pytest.raises(CorruptionError, match="expected 576 bytes, got 575 bytes"):
        reader.read(0)


@pytest.mark.parametrize("store_class", [CountingStore, RemoteLikeStore])
def test_bytes_asked_of_the_storage_are_counted(write, store_class, way):
    written = write([64], parts=1, layers=LAYERS, hidden=36, codec="none", chunk_tokens=8)
    reader = SampleReader(store_class(written.path))
    reader.read(0)  # ids and masks are in the cache from here on
    fetcher = reader._state.fetcher
    before = fetcher.nbytes_read
    reader.read(0)
    between = 4 * 24 if way == "together" or store_class is RemoteLikeStore else 0
    assert 0 <= fetcher.nbytes_read - before - 64 * 3 * 72 <= between
    before = fetcher.nbytes_read
    reader.read(0, 9, 11, layers=[3])
    assert fetcher.nbytes_read - before == 8 * 72, "the one chunk"


@pytest.mark.local
def test_without_checks_rows_that_nobody_wants_are_not_read(write, monkeypatch, way):
    written = write([64], parts=1, layers=LAYERS, hidden=36, codec="none", chunk_tokens=8)
    amounts, preadv = [], os.preadv

    def counted(fd, buffers, offset):
        amounts.append(sum(len(buffer) for buffer in buffers))
        return preadv(fd, buffers, offset)

    reader = SampleReader(written.url, options=ReadOptions(unsafe_skip_checks=True))
    reader.read(0)
    monkeypatch.setattr(os, "preadv", counted)
    assert_same(reader.read(0, 10, 12), written.content["id-000"], 10, 12)
    asked = reader._state.fetcher.nbytes_read
    assert_same(reader.read(0, 10, 12), written.content["id-000"], 10, 12)
    assert reader._state.fetcher.nbytes_read - asked == sum(amounts) / 2
    assert (
        sum(amounts) / 2
        == {"scattered": 2 * 3 * 72, "coarse": 2 * 3 * 72, "staged": 3 * 224, "together": 3 * 576 + 8}[way]
    )


def runs_of(ranges, n_threads):
    """Paths and range numbers of each run."""
    reads = [RangeRead(None, path, number, nbytes, []) for number, (path, nbytes) in enumerate(ranges)]
    return [({read.path for read in run}, [read.offset for read in run]) for run in fetch._runs(reads, n_threads)]


def test_a_run_is_of_one_file_and_leaves_work_for_other_threads():
    mib = 1 << 20
    assert runs_of([("a", 3 * mib)] * 4, 1) == [({"a"}, [0, 1, 2, 3])]
    assert runs_of([("a", 3 * mib)] * 4, 2) == [({"a"}, [number]) for number in range(4)]
    assert runs_of([("a", 1), ("a", 1), ("b", 1), ("a", 1)], 1) == [({"a"}, [0, 1]), ({"b"}, [2]), ({"a"}, [3])]
    assert runs_of([], 2) == []
    for n_threads in (1, 2, 4):
        runs = runs_of([("a", 3 * mib)] * 500, n_threads)
        assert [number for _, run in runs for number in run] == list(range(500))
        assert max(len(run) for _, run in runs) * 3 * mib <= 64 * mib
        assert len(runs) >= 8 * n_threads


@pytest.mark.local
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_chunks_of_a_file_that_is_damaged_and_then_replaced_while_it_is_read(write, monkeypatch, codec):
    """What follows in the same run comes from the new file too."""
    monkeypatch.setattr(delivery, "SMALL_CHUNK_NBYTES", 1)
    written = write([64], parts=1, layers=LAYERS, hidden=36, codec=codec, chunk_tokens=8, shard_tokens=64)
    reader = SampleReader(written.url, options=ReadOptions(n_threads=1))
    reader.read(0, 0, 1)  # ids and masks are in the cache from here on
    (shard,) = written.shards()
    good, preadv, calls = shard.read_bytes(), os.preadv, []

    def replaced(fd, buffers, offset):
        calls.append(fd)
        if len(calls) == 3:
            shard.with_name("new").write_bytes(good)
            shard.with_name("new").replace(shard)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", replaced)
    damaged, _, _ = reader.locate(0)[0].index.chunks["hidden_states"][5].tolist()
    flip_bit(shard, damaged)
    assert_same(reader.read(0), written.content["id-000"])
    assert len(calls) > 24, "one of the 24 chunks twice"
    assert shard.read_bytes() == good
