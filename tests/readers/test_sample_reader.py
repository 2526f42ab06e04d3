"""SampleReader against what was written, and what it reads to get there. No torch."""

import pickle
import threading

import numpy as np
import pytest
from written import CountingStore, RemoteLikeStore, assert_same

from hsfmt import digests, seal
from hsfmt.catalog import read_pointer
from hsfmt.errors import NotFoundError, SampleNotFoundError, UsageError
from hsfmt.readers.descriptors import OpenFile
from hsfmt.readers.sample_reader import Piece, ReadOptions, SampleReader, SampleRequest

DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn"]


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(write, dtype, codec):
    written = write(dtype=dtype, codec=codec)
    reader = SampleReader(written.url)
    assert list(reader.sample_ids) == written.ids
    assert reader.lengths.tolist() == [len(sample.input_ids) for sample in written.content.values()]
    for number, wanted in enumerate(written.content.values()):
        got = reader.read(number)
        assert_same(got, wanted)
        assert got.metadata == wanted.metadata
        for name, value in wanted.extras.items():
            assert got.extras[name].tobytes() == value.tobytes()


@pytest.mark.parametrize("store_class", [CountingStore, RemoteLikeStore])
@pytest.mark.parametrize("n_threads", [1, 3])
def test_a_batch_is_one_plan(write, store_class, n_threads):
    written = write()
    store = store_class(written.path)
    reader = SampleReader(store, options=ReadOptions(n_threads=n_threads))
    numbers = [3, 0, 3, 9, -1, 5]
    for got, number in zip(reader.read_many(numbers), numbers, strict=True):
        assert_same(got, written.content[written.ids[number]])
    assert len(store.batches) == (1 if store_class is RemoteLikeStore else 0)


def test_layers(write):
    written = write(layers=(0, 2, 9, 31))
    reader = SampleReader(written.url)
    for layers, planes in (([0], [0]), ([31], [3]), ([2, 31], [1, 3]), ([0, 2, 9], [0, 1, 2]), (None, [0, 1, 2, 3])):
        for number, wanted in enumerate(written.content.values()):
            assert_same(reader.read(number, layers=layers), wanted, planes=planes)


@pytest.mark.parametrize("layers", [[1], [0, 5], [31, 2], [2, 2], []])
def test_other_layers_are_refused_by_name(write, layers):
    reader = SampleReader(write(layers=(0, 2, 9, 31)).url)
    with pytest.raises(UsageError, match=r"\[0, 2, 9, 31\]"):
        reader.read(0, layers=layers)


@pytest.mark.local
def test_one_layer_reads_its_share_of_the_bytes(write, monkeypatch):
    written = write([512], parts=1, layers=(0, 1, 2, 3), hidden=1024, chunk_tokens=64, shard_tokens=256, codec="none")
    amounts = []
    read = OpenFile.read

    def counted(self, offset, buffers, nbytes):
        if "hidden_states" in self._key[1]:
            amounts[-1] += nbytes
        return read(self, offset, buffers, nbytes)

    monkeypatch.setattr(OpenFile, "read", counted)
    reader = SampleReader(written.url)
    for layers in (None, [2]):
        amounts.append(0)
        assert_same(reader.read(0, layers=layers), written.content["id-000"], planes=[2] if layers else slice(None))
    raw = 512 * 4 * 1024 * 2
    assert amounts[0] == pytest.approx(raw, rel=0.001)
    assert amounts[1] == raw // 4


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_windows_at_all_borders(write, codec):
    """Chunks of 8 tokens, shards of 32: every window of a sample that crosses both kinds of border."""
    written = write([5, 64, 7], parts=1, codec=codec)
    reader = SampleReader(written.url)
    wanted = written.content["id-001"]
    borders = [0, 1, 2, 3, 4, 10, 11, 12, 19, 26, 27, 28, 34, 35, 58, 59, 60, 63, 64]
    requests = [(a, b) for a in borders for b in borders if a <= b]
    for (start, stop), got in zip(
        requests, reader.read_requests([SampleRequest(1, start, stop) for start, stop in requests]), strict=True
    ):
        assert_same(got, wanted, start, stop)


@pytest.mark.parametrize("window", [(-1, 3), (0, 65), (5, 4), (65, 65)])
def test_windows_outside_are_refused(write, window):
    reader = SampleReader(write([5, 64, 7]).url)
    with pytest.raises(UsageError, match=r"tokens of sample 1: expected a window within \[0, 64\)"):
        reader.read(1, *window)


def test_out_takes_the_states(write):
    written = write()
    reader = SampleReader(written.url)
    wanted = written.content["id-005"]
    # Rows of a larger buffer with room between layers: nothing about the strides is special.
    buffer = np.full((50, 6, 11), 7, np.uint16)
    out = buffer[10:43, ::2, 2:10]
    got = reader.read(5, out=out)
    assert np.shares_memory(got.hidden_states, buffer)
    assert_same(got, wanted)
    outside = np.ones(buffer.shape, bool)
    outside[10:43, ::2, 2:10] = False
    assert np.all(buffer[outside] == 7)
    for bad in (np.empty((33, 3, 7), np.uint16), np.empty((32, 3, 8), np.uint16), np.empty((33, 3, 8), np.uint8)):
        with pytest.raises(UsageError, match="out: expected a writable array"):
            reader.read(5, out=bad)
    out.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        reader.read(5, out=out)


def test_out_of_another_kind_is_refused(write):
    reader = SampleReader(write().url)
    big = np.empty((33, 3, 8), np.dtype(np.uint16).newbyteorder())
    for bad in (big, np.empty((33, 3, 8), "S2"), np.empty((33, 3, 8)).tolist(), bytearray(33 * 3 * 8 * 2)):
        with pytest.raises(UsageError, match="out: expected a writable array"):
            reader.read(5, out=bad)


def strided(shape, strides):
    """uint16 elements at any strides, counted in elements."""
    memory = np.zeros(sum(abs(stride) * n for stride, n in zip(strides, shape, strict=True)) + 1, np.uint16)
    return np.lib.stride_tricks.as_strided(memory, shape, [2 * stride for stride in strides])


@pytest.mark.parametrize(
    "strides",
    [(0, 8, 1), (24, 0, 1), (24, 8, 0), (0, 0, 0), (8, 8, 1), (23, 8, 1), (24, 7, 1), (24, 8, 1 << 5), (1, 1, 1)],
)
def test_out_whose_elements_overlap_is_refused(write, strides):
    """An expanded tensor: each token would overwrite the one before."""
    out = strided((33, 3, 8), strides)
    with pytest.raises(UsageError, match="out: expected elements that do not overlap in memory"):
        SampleReader(write().url).read(5, out=out)


def test_out_of_any_layout_without_overlap_is_taken(write):
    written = write()
    reader = SampleReader(written.url)
    square = np.zeros((33, 33, 3, 8), np.uint16)
    diagonal = np.lib.stride_tricks.as_strided(square, (33, 3, 8), [34 * 48, 16, 2])
    for out in (
        np.zeros((8, 3, 33), np.uint16).T,
        np.zeros((3, 8, 33), np.uint16).transpose(2, 0, 1),
        np.zeros((66, 3, 16), np.uint16)[::-2, ::-1, ::2],
        np.zeros((33, 1, 3, 1, 8), np.uint16).reshape(33, 3, 8),
        diagonal,
    ):
        assert_same(reader.read(5, out=out), written.content["id-005"])
    assert_same(reader.read(0, layers=[3], out=strided((1, 1, 8), (0, 0, 1))), written.content["id-000"], planes=[1])
    assert reader.read(5, 4, 4, out=strided((0, 3, 8), (0, 0, 1))).hidden_states.shape == (0, 3, 8)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_pieces_take_the_states(write, codec):
    """Layers at token shifts of their own, in any order and twice, into memory of any strides, by one plan."""
    written = write(codec=codec)
    reader = SampleReader(RemoteLikeStore(written.path))
    states = written.content["id-007"].states
    aux, last, turned = np.zeros((40, 2, 8), np.uint16), np.zeros((40, 1, 8), np.uint16), np.zeros((8, 3, 9), np.uint16)
    pieces = [
        Piece(10, 50, (0, 1), aux),
        Piece(11, 51, [2], last),
        Piece(np.int64(20), 29, np.array([2, 0, 2]), turned.T),
        Piece(51, 51, [1], np.zeros((0, 1, 8), np.uint16)),
    ]
    wanted = [SampleRequest(7, 10, 51, pieces=pieces), SampleRequest(3), SampleRequest(5, pieces=())]
    got, other, nothing = reader.read_requests(wanted)
    np.testing.assert_array_equal(aux, states[10:50, :2])
    np.testing.assert_array_equal(last, states[11:51, 2:])
    np.testing.assert_array_equal(turned.T, states[20:29, [2, 0, 2]])
    np.testing.assert_array_equal(got.input_ids, written.content["id-007"].input_ids[10:51])
    assert got.hidden_states.shape == nothing.hidden_states.shape == (0, 3, 8)
    assert_same(other, written.content["id-003"])
    np.testing.assert_array_equal(nothing.loss_mask, written.content["id-005"].loss_mask)
    assert len(reader.store.batches) == 1


def test_pieces_that_do_not_fit_are_refused(write):
    reader = SampleReader(write().url)
    out = np.zeros((3, 2, 8), np.uint16)
    where = "pieces of sample 5: expected"
    for window in ((9, 12), (30, 33), (12, 9), (-1, 2), (10.0, 13), ("10", 13), (10, None), (True, 4)):
        with pytest.raises(UsageError, match=where):
            reader.read_requests([SampleRequest(5, 10, 31, pieces=[Piece(*window, [0, 1], out)])])
    for planes in ([0, 3], [-1, 0], [0.0, 1], ["0", "1"], [True, False], []):
        with pytest.raises(UsageError, match=f"{where} positions on the layer axis"):
            reader.read_requests([SampleRequest(5, 10, 31, pieces=[Piece(10, 13, planes, out)])])
    read_only = np.broadcast_to(np.uint16(0), (3, 2, 8))
    for bad in (None, out.tolist(), out[:2], out[:, :1], out[..., :7], out.astype(np.uint8), read_only, out.T):
        with pytest.raises(UsageError, match=r"out of pieces of sample 5: expected a writable array \(3, 2, 8\)"):
            reader.read_requests([SampleRequest(5, 10, 31, pieces=[Piece(10, 13, [0, 1], bad)])])
    with pytest.raises(UsageError, match="out of pieces of sample 5: expected elements that do not overlap"):
        reader.read_requests([SampleRequest(5, pieces=[Piece(10, 13, [0, 1], strided((3, 2, 8), (0, 8, 1)))])])
    with pytest.raises(UsageError, match="expected out or pieces, got both"):
        reader.read_requests([SampleRequest(5, out=np.zeros((33, 3, 8), np.uint16), pieces=[])])
    assert not out.any()


@pytest.mark.parametrize("layers", ["25", b"25", [1.0], [1.9], ["1"], [True], [None], 1, 1.5, {1: 2}, [[1]]])
def test_layers_are_integers_or_refused(write, layers):
    """Nothing is rounded, parsed, or taken letter by letter."""
    reader = SampleReader(write(layers=(1, 2, 5)).url)
    with pytest.raises(UsageError, match="layers: expected"):
        reader.read(0, layers=layers)


def test_integers_of_any_type_are_taken(write):
    written = write()
    reader = SampleReader(written.url)
    wanted = written.content["id-005"]
    assert_same(reader.read(5, layers=np.array([1, 5], np.uint8)), wanted, planes=[0, 2])
    assert_same(reader.read(5, layers=(np.int64(3),)), wanted, planes=[1])
    assert_same(reader.read(5, np.int16(1), np.uint64(9)), wanted, 1, 9)


@pytest.mark.parametrize("window", [(1.7, 3.9), (0, 3.0), ("0", None), (None, "3"), (True, 3), (0, True)])
def test_windows_are_integers_or_refused(write, window):
    with pytest.raises(UsageError, match=r"tokens of sample 5: expected a window within \[0, 33\)"):
        SampleReader(write().url).read(5, *window)


@pytest.mark.parametrize(
    "options",
    [
        *({"n_threads": wrong} for wrong in (0, -1, 1.5, "2", True)),
        *({"part_cache_nbytes": wrong} for wrong in (-1, 1e9, None)),
        *({"chunk_cache_nbytes": wrong} for wrong in (-1, 1e9, None)),
    ],
)
def test_options_are_checked_when_made(options):
    (name,) = options
    with pytest.raises(UsageError, match=f"{name}: expected an integer from"):
        ReadOptions(**options)


def test_results_belong_to_the_caller(write):
    reader = SampleReader(write().url)
    first = reader.read(4)
    kept = first.input_ids.copy(), first.loss_mask.copy(), first.hidden_states.copy()
    first.input_ids[:] = 0
    first.loss_mask[:] = ~first.loss_mask
    first.hidden_states[:] = 0
    again = reader.read(4)
    for array, wanted in zip((again.input_ids, again.loss_mask, again.hidden_states), kept, strict=True):
        np.testing.assert_array_equal(array, wanted)


def test_extras_of_every_kind(write):
    extras = {
        "weight": {"kind": "token", "dtype": "float32"},
        "last": {"kind": "token", "dtype": "bfloat16", "shape": [70]},
        "flags": {"kind": "token", "dtype": "bool", "shape": [2]},
        "score": {"kind": "sample", "dtype": "float64"},
        "box": {"kind": "sample", "dtype": "int16", "shape": [2, 2]},
        "top": {"kind": "ragged", "dtype": "int64", "shape": [3]},
    }

    def values(number, n_tokens):
        rng = np.random.default_rng(number)
        made = {
            "weight": rng.normal(size=n_tokens).astype(np.float32),
            "last": rng.integers(0, 0x7F00, (n_tokens, 70)).astype(np.uint16),
            "flags": rng.integers(0, 2, (n_tokens, 2)).astype(bool),
            "score": np.array(rng.normal()),
            "box": rng.integers(0, 99, (2, 2)).astype(np.int16),
            "top": rng.integers(0, 99, (number % 4, 3)),
        }
        return {name: None if (number + at) % 5 == 0 else value for at, (name, value) in enumerate(made.items())}

    written = write(extras=extras, values=values)
    reader = SampleReader(written.url)
    for number, wanted in enumerate(written.content.values()):
        got = reader.read(number)
        assert_same(got, wanted)
        assert sorted(got.extras) == sorted(extras)
        for name, value in wanted.extras.items():
            if value is None:
                assert got.extras[name] is None
                continue
            assert got.extras[name].shape == value.shape
            assert got.extras[name].dtype == value.dtype
            np.testing.assert_array_equal(got.extras[name], value)
            assert got.extra_dtypes[name] == extras[name]["dtype"]
    (window,) = reader.read_requests([SampleRequest(7, 10, 50)], extras=["weight", "flags", "score"])
    assert list(window.extras) == ["weight", "flags", "score"]
    np.testing.assert_array_equal(window.extras["weight"], written.content["id-007"].extras["weight"][10:50])
    np.testing.assert_array_equal(window.extras["flags"], written.content["id-007"].extras["flags"][10:50])
    with pytest.raises(UsageError, match="extras: expected columns of part"):
        reader.read_requests([SampleRequest(0)], extras=["no_such"])


def test_opening_reads_two_files(write):
    written = write([3, 4, 5, 6, 7, 8, 9, 10], parts=4)
    store = CountingStore(written.path)
    reader = SampleReader(store)
    assert store.reads == [
        "hsfmt/manifest.json",
        f"hsfmt/snapshots/{reader.fingerprint.partition(':')[2]}/index.safetensors",
    ]
    assert len(reader) == 8
    assert reader.lengths.sum() == 52
    assert len(store.reads) == 2
    reader.read(0)
    assert len(store.reads) == 4, "the first sample of a part reads its manifest and index"
    reader.read(1)
    assert len(store.reads) == 4
    assert reader.sample_ids[2] == "id-002"
    assert len(store.reads) == 5
    by_name = CountingStore(written.path)
    SampleReader(by_name, snapshot=reader.fingerprint)
    assert len(by_name.reads) == 1


def test_few_parts_in_memory(write):
    written = write([3, 4, 5, 6, 7, 8, 9, 10], parts=4)
    store = CountingStore(written.path)
    reader = SampleReader(store, options=ReadOptions(part_cache_nbytes=1))
    for number in (0, 7, 3, 0, 5):
        assert_same(reader.read(number), written.content[written.ids[number]])
    assert len(reader.parts._parts) == 1


def test_narrow_columns_come_from_memory(write):
    written = write([9] * 12, parts=1)
    store = RemoteLikeStore(written.path)
    reader = SampleReader(store)
    for number in range(12):
        assert_same(reader.read(number), written.content[written.ids[number]])
    paths = [path for batch in store.batches for path, _, _ in batch]
    # 108 tokens in chunks of 8: each chunk of these columns was fetched once, though most samples touch two or three.
    assert sum("input_ids" in path for path in paths) <= 14
    tiny = SampleReader(RemoteLikeStore(written.path), options=ReadOptions(chunk_cache_nbytes=100))
    for number in (3, 0, 3, 11):
        assert_same(tiny.read(number), written.content[written.ids[number]])
    assert tiny._state.chunks.nbytes <= 100


def test_indices(write):
    written = write()
    reader = SampleReader(written.url)
    assert reader.read(-1).sample_id == written.ids[-1]
    assert reader.read(np.int64(2)).sample_id == written.ids[2]
    for bad in (10, -11):
        with pytest.raises(IndexError, match="snapshot of 10"):
            reader.read(bad)
    for bad in (1.0, "id-000", None):
        with pytest.raises(TypeError, match="index_of"):
            reader.read(bad)
    assert reader.sample_ids[2:4] == written.ids[2:4]
    assert reader.sample_ids[-1] == written.ids[-1]
    with pytest.raises(IndexError):
        reader.sample_ids[10]


def test_index_of(write):
    written = write()
    reader = SampleReader(written.url)
    assert [reader.index_of(sample_id) for sample_id in written.ids] == list(range(10))
    for unknown in ("id-010", "", 3, None, "\udc80"):
        with pytest.raises(SampleNotFoundError) as caught:
            reader.index_of(unknown)
        assert isinstance(caught.value, KeyError)


def test_index_of_compares_ids_where_hashes_collide(write, monkeypatch):
    monkeypatch.setattr(digests, "id_hash", lambda sample_id: 7 + sample_id[-1] % 2)
    written = write()
    reader = SampleReader(written.url)
    assert len(set(reader.snapshot.id_hash.tolist())) == 2
    assert [reader.index_of(sample_id) for sample_id in written.ids] == list(range(10))
    with pytest.raises(SampleNotFoundError):
        reader.index_of("id-777")


@pytest.mark.lists
def test_not_sealed(write, tmp_path):
    written = write(seal=False)
    with pytest.raises(NotFoundError, match=r'run `hsfmt seal [^`]*`; snapshot="live", or --snapshot live, reads'):
        SampleReader(written.url)
    with pytest.raises(NotFoundError, match=r"expected an hsfmt dataset, got no zarr\.json there"):
        SampleReader(tmp_path / "nothing")
    live = SampleReader(written.url, snapshot="live")
    assert_same(live.read(3), written.content["id-003"])
    assert live.fingerprint == seal(written.url).snapshot.fingerprint


def test_live_is_resolved_once(write, tmp_path):
    written = write([3, 4], parts=1, seal=False)
    store = CountingStore(written.path)
    live = SampleReader(store, snapshot="live")
    more = write([5, 6], parts=1)  # another dataset: its part goes into the first one
    for folder in ("parts", "hsfmt/index", "hsfmt/manifests"):
        for entry in (more.path / folder).iterdir():
            if not (written.path / folder / entry.name).exists():
                entry.rename(written.path / folder / entry.name)
    copy = pickle.loads(pickle.dumps(live))
    assert len(copy) == len(live) == 2
    assert copy.fingerprint == live.fingerprint
    assert list(copy.sample_ids) == ["id-000", "id-001"]
    assert_same(copy.read(1), written.content["id-001"])


@pytest.mark.lists
def test_by_fingerprint(write):
    written = write([3, 4, 5, 6], parts=2)
    first = read_pointer(CountingStore(written.path)).fingerprint
    sealed = seal(written.url, retract=["id-001"])
    assert sealed.snapshot.fingerprint != first
    assert list(SampleReader(written.url, snapshot=first).sample_ids) == written.ids
    assert list(SampleReader(written.url).sample_ids) == ["id-000", "id-002", "id-003"]
    with pytest.raises(NotFoundError, match="belongs to another dataset or was removed"):
        SampleReader(written.url, snapshot="xxh3_128:" + "0" * 32)
    for wrong in ("latest", "0" * 32, "xxh3_128:../../x"):
        with pytest.raises(UsageError, match="snapshot: expected None"):
            SampleReader(written.url, snapshot=wrong)


@pytest.mark.lists
def test_pickles_name_the_snapshot_not_the_pointer(write):
    written = write([3, 4, 5, 6], parts=2)
    reader = SampleReader(written.url)
    reader.read(0)
    data = pickle.dumps(reader)
    assert len(data) < 1000
    seal(written.url, retract=["id-001"])
    copy = pickle.loads(data)
    assert copy.fingerprint == reader.fingerprint
    assert_same(copy.read(1), written.content["id-001"])
    assert copy.content_digest == reader.content_digest


def test_threads_share_a_reader(write):
    written = write(parts=5, codec="zstd")
    reader = SampleReader(written.url, options=ReadOptions(n_threads=2, part_cache_nbytes=1, chunk_cache_nbytes=500))
    failures = []

    def work(seed):
        try:
            for number in np.random.default_rng(seed).integers(0, 10, 30).tolist():
                assert_same(reader.read(number), written.content[written.ids[number]])
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_caches_count_again_after_a_fork(write):
    """A fork can copy a cache that another thread is changing: entries without their bytes, or the other way round."""
    reader = SampleReader(write().url)
    reader.read_many(range(10))
    chunks, parts = reader._state.chunks, reader.parts
    right = chunks._nbytes, parts._nbytes
    chunks._nbytes = parts._nbytes = 1 << 40
    chunks.after_fork()
    parts.after_fork()
    assert (chunks._nbytes, parts._nbytes) == right
    assert min(right) > 0


def test_an_empty_batch(write):
    assert SampleReader(write().url).read_many([]) == []


def test_unchecked_reads_are_equal(write):
    written = write()
    reader = SampleReader(written.url, options=ReadOptions(unsafe_skip_checks=True))
    for number, wanted in enumerate(written.content.values()):
        assert_same(reader.read(number), wanted)
