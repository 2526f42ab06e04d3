"""open_zarr: zarr-python arrays over checked bytes, and the columns over all parts."""

import asyncio
import pickle

import ml_dtypes
import numpy as np
import pytest
import zarr
from written import as_written, flip_bit
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype

from hsfmt import open_zarr, seal
from hsfmt.errors import CorruptionError, NotFoundError

NATIVE = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float32": np.float32}


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("dtype", list(NATIVE))
def test_samples_by_their_rows(write, dtype, codec):
    written = write(dtype=dtype, codec=codec, parts=3)
    dataset = open_zarr(written.url)
    assert len(dataset.parts) == 3
    assert dataset.hidden_states.shape == (sum(dataset.lengths), 3, 8)
    assert dataset.hidden_states.dtype == NATIVE[dtype]
    for number, wanted in enumerate(written.content.values()):
        rows = dataset.sample_tokens(number)
        states = dataset.hidden_states[rows]
        assert states.dtype == NATIVE[dtype]
        assert states.tobytes() == wanted.states.tobytes()
        np.testing.assert_array_equal(dataset.input_ids[rows], wanted.input_ids)
        np.testing.assert_array_equal(dataset.loss_mask[rows], wanted.loss_mask)
    for part, columns in dataset.parts.items():
        assert all(isinstance(array, zarr.Array) for array in columns.values())
        assert columns["hidden_states"].metadata.dimension_names == ("token", "layer", "hidden")
        assert part in columns["hidden_states"].path


@pytest.fixture
def dataset_and_states(write):
    written = write(parts=3)
    dataset = open_zarr(written.url)
    order = np.argsort(dataset.token_starts)
    states = np.concatenate([written.content[written.ids[number]].states for number in order])
    return dataset, as_written(states, "bfloat16")


KEYS = [
    ...,
    (),
    0,
    -1,
    50,
    np.int64(60),
    slice(None),
    slice(3, 90),
    slice(40, 41),
    slice(90, 3),
    slice(5, 5),
    slice(-30, None),
    slice(None, None, 7),
    slice(3, 120, 5),
    slice(None, None, -1),
    slice(100, 20, -9),
    slice(20, 100, -1),
    (slice(3, 90), 1),
    (slice(3, 90), -1, slice(2, 5)),
    (slice(3, 90), slice(1, 3)),
    (slice(3, 90), slice(None, None, 2), 4),
    (slice(3, 90), slice(2, 0, -1)),
    (slice(3, 90, 4), slice(0, 2), slice(None, None, -1)),
    (7, 1, 3),
    (7, slice(None), 3),
    (..., 3),
    (slice(60, 80), ..., slice(0, 2)),
    (7, ...),
    (slice(0, 10_000), slice(0, 100)),
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_basic_indexing_is_numpys(dataset_and_states, key):
    dataset, states = dataset_and_states
    got, wanted = dataset.hidden_states[key], states[key]
    assert np.shape(got) == np.shape(wanted)
    assert np.asarray(got).tobytes() == np.asarray(wanted).tobytes()


@pytest.mark.parametrize("key", [(0, 0, 0, 0), 10_000, -10_000, (0, 9), [1, 2], "x", None, True, (..., ...), 1.0])
def test_other_indexing_is_refused(dataset_and_states, key):
    dataset, _ = dataset_and_states
    with pytest.raises(IndexError):
        dataset.hidden_states[key]


def test_numpy_conversion(dataset_and_states):
    dataset, states = dataset_and_states
    column = dataset.hidden_states
    assert np.asarray(column).tobytes() == states.tobytes()
    np.testing.assert_array_equal(np.asarray(column, dtype=np.float32), states.astype(np.float32))
    with pytest.raises(ValueError, match="without a copy"):
        np.array(column, copy=False)
    assert (len(column), column.ndim, column.size) == (len(states), 3, states.size)
    assert column.chunks == (8, 1, 8)


@pytest.mark.lists
def test_order_is_that_of_the_parts_not_of_the_snapshot(write):
    written = write([3, 4, 5, 6, 7, 8], parts=3)
    before = open_zarr(written.url)
    assert (
        sorted(before.token_starts.tolist())
        == np.cumsum([0, *before.lengths[np.argsort(before.token_starts)]]).tolist()[:-1]
    )
    seal(written.url, retract=["id-002"])
    after = open_zarr(written.url)
    # What is not served stays in the arrays of its part, and no sample of the snapshot points at it.
    assert after.hidden_states.shape == before.hidden_states.shape
    kept = [0, 1, 3, 4, 5]
    assert after.token_starts.tolist() == before.token_starts[kept].tolist()
    assert after.sample_tokens(-1) == before.sample_tokens(5)
    with pytest.raises(IndexError):
        after.sample_tokens(5)


def test_extra_columns(write):
    extras = {"weight": {"kind": "token", "dtype": "float32"}, "flag": {"kind": "sample", "dtype": "bool"}}
    written = write(
        extras=extras, values=lambda number, n: {"weight": np.full(n, number, np.float32), "flag": number % 2 == 0}
    )
    dataset = open_zarr(written.url)
    assert sorted(dataset.columns) == ["flag", "hidden_states", "input_ids", "loss_mask", "weight"]
    assert "weight" in dir(dataset)
    assert np.all(dataset.weight[dataset.sample_tokens(6)] == 6)
    assert dataset.flag.shape == (10,)
    assert dataset.flag.dtype == np.bool_
    assert dataset.flag[:].sum() == 5
    with pytest.raises(AttributeError, match="no column 'nothing'"):
        dataset.nothing  # noqa: B018


def test_columns_that_differ_between_parts_have_no_common_view(write):
    written = write([3, 4], parts=1, extras={"weight": {"kind": "token", "dtype": "float32"}})
    from hsfmt import DatasetWriter

    with DatasetWriter(written.path, layers=[1, 3, 5], hidden_size=8, final_norm="pre") as writer:
        writer.write("more", np.arange(3), np.zeros((3, 3, 8), np.uint16))
    dataset = open_zarr(written.url)
    assert sorted(dataset.columns) == ["hidden_states", "input_ids", "loss_mask"]
    assert sum("weight" in columns for columns in dataset.parts.values()) == 1


def test_a_part_of_holes_only(write):
    from hsfmt import DatasetWriter

    written = write([3, 4], parts=1)
    with DatasetWriter(written.path, layers=[1, 3, 5], hidden_size=8, final_norm="pre") as writer:
        writer.hole("gone", "the engine aborted")
    dataset = open_zarr(written.url)
    assert len(dataset.parts) == 1
    assert dataset.hidden_states.shape == (7, 3, 8)


def test_damage_is_seen_chunk_by_chunk(write):
    written = write([64], parts=1, codec="none")
    shard = written.shards()[0]
    flip_bit(shard, 5)
    dataset = open_zarr(written.url)
    wanted = written.content["id-000"].states
    assert dataset.hidden_states[8:].tobytes() == wanted[8:].tobytes()
    assert dataset.hidden_states[0:8, 1:].tobytes() == wanted[:8, 1:].tobytes()
    for key in (0, slice(None), (slice(0, 8), 0)):
        with pytest.raises(CorruptionError, match=r"hidden_states/c/0/0/0: bytes 0 to 132: expected xxh3_64"):
            dataset.hidden_states[key]


def test_a_damaged_crc_is_seen(write):
    written = write([64], parts=1, codec="none")
    flip_bit(written.shards()[0], 8 * 8 * 2)  # right behind the first payload
    with pytest.raises(CorruptionError, match="crc32c"):
        open_zarr(written.url).hidden_states[0]


def test_the_stored_zarr_json_is_not_believed(write):
    written = write()
    wanted = open_zarr(written.url).hidden_states[:].tobytes()
    for path in written.path.rglob("zarr.json"):
        path.write_text("{}")
    assert open_zarr(written.url).hidden_states[:].tobytes() == wanted


def test_missing_parts_are_refused_at_open(write):
    written = write()
    next(written.path.glob("hsfmt/index/*")).unlink()
    with pytest.raises(NotFoundError):
        open_zarr(written.url)


@pytest.mark.parametrize("column", ["hidden_states", "input_ids"])
def test_the_store_gives_exactly_the_bytes_on_disk(write, column):
    """Any range: inside a chunk, across chunks, across the start of the index, beyond the end."""
    written = write([64, 64], parts=1)
    dataset = open_zarr(written.url)
    (columns,) = dataset.parts.values()
    store = columns[column].store
    prototype = default_buffer_prototype()

    def get(key, request=None):
        found = asyncio.run(store.get(key, prototype, request))
        return None if found is None else found.to_bytes()

    keys = {
        path.relative_to(written.path).as_posix(): path.read_bytes()
        for path in written.path.glob("parts/**/*")
        if path.is_file()
    }
    keys["zarr.json"] = (written.path / "zarr.json").read_bytes()

    async def listed():
        return [key async for key in store.list()]

    assert sorted(asyncio.run(listed())) == sorted(keys)
    for key, data in keys.items():
        assert get(key) == data
        assert asyncio.run(store.exists(key))
        n = len(data)
        for start, stop in [(0, n), (0, 1), (3, 50), (n // 2, n), (n - 5, n), (n - 5, n + 7), (10, 10), (n, n + 3)]:
            assert get(key, RangeByteRequest(start, stop)) == data[start:stop]
        for count in (1, 4, n // 2, n, n + 9):
            assert get(key, SuffixByteRequest(count)) == data[-count:]
        for start in (0, 5, n // 2, n, n + 1):
            assert get(key, OffsetByteRequest(start)) == data[start:]
    shard = next(key for key in keys if f"/{column}/c/" in key)
    for absent in (
        "parts/x/zarr.json",
        f"{shard}/0",
        shard.replace("/c/", "/c/99"),
        shard.replace("/c/", "/c/0"),
        "hsfmt/manifest.json",
        "",
    ):
        assert get(absent) is None
        assert not asyncio.run(store.exists(absent))


def test_the_store_is_read_only(write):
    dataset = open_zarr(write(parts=1).url)
    (columns,) = dataset.parts.values()
    with pytest.raises(PermissionError, match="read-only"):
        columns["input_ids"][0] = 3
    for method in (columns["input_ids"].store.set("x", None), columns["input_ids"].store.delete("x")):
        with pytest.raises(PermissionError):
            asyncio.run(method)


def test_pickling(write):
    """As dask does with the arrays that it hands to its workers."""
    written = write()
    dataset = open_zarr(written.url)
    wanted = dataset.hidden_states[:].tobytes()
    column = pickle.loads(pickle.dumps(dataset.hidden_states))
    assert column[:].tobytes() == wanted
    array = next(iter(dataset.parts.values()))["hidden_states"]
    again = pickle.loads(pickle.dumps(array))
    assert again[:].tobytes() == array[:].tobytes()
    assert again.store == array.store


@pytest.mark.lists
def test_plain_zarr_opens_it_too(write):
    """Without hsfmt's reader: the standard hierarchy, through the data types that the package registers."""
    written = write(parts=1)
    group = zarr.open_group(written.url, mode="r")
    ((name, part),) = group["parts"].groups()
    array = part["hidden_states"]
    assert array.dtype == ml_dtypes.bfloat16
    states = np.concatenate([sample.states for sample in written.content.values()])
    assert array[:].tobytes() == states.tobytes()
    assert group.attrs["hsfmt"]["layers"] == [1, 3, 5]
    assert name in open_zarr(written.url).parts
