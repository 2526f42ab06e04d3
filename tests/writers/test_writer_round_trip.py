"""Every dtype, codec and kind of input comes back bit for bit, by hand and with three other libraries."""

import ml_dtypes
import numpy as np
import part_oracles as oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsfmt import DatasetWriter

NATIVE = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
PATTERN = {"bfloat16": "<u2", "float16": "<u2", "float32": "<u4", "float8_e4m3fn": "u1"}
ZARRS = "zarrs.ZarrsCodecPipeline"


def as_memmap(array, tmp_path):
    path = tmp_path / "input.bin"
    path.write_bytes(array.tobytes())
    return np.memmap(path, array.dtype, "r", shape=array.shape)


INPUTS = {
    "dense": lambda array, _: array,
    "strided": lambda array, _: np.repeat(np.repeat(array, 2, axis=0), 3, axis=2)[::2, :, ::3],
    "reversed": lambda array, _: np.ascontiguousarray(array[::-1])[::-1],
    "fortran": lambda array, _: np.asfortranarray(array),
    "layers": lambda array, _: [np.ascontiguousarray(array[:, i]) for i in range(array.shape[1])],
    "layer views": lambda array, _: tuple(array[:, i] for i in range(array.shape[1])),
    "memmap": as_memmap,
    "big-endian": lambda array, _: array.astype(array.dtype.newbyteorder(">")),
    "read-only": lambda array, _: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape),
    "patterns": lambda array, _: array.view(PATTERN_OF[array.dtype.name]),
}
PATTERN_OF = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8}


def scales(dtype, n_tokens):
    return {"hidden_states_scale": np.ones(n_tokens, np.float32)} if dtype == "float8_e4m3fn" else {}


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("dtype", NATIVE)
def test_every_dtype_codec_and_input_comes_back(url, tmp_path, states, dtype, codec):
    kinds = [kind for kind in INPUTS if kind != "patterns" or dtype in PATTERN_OF]
    written = {f"{kind} {n}": states(n, 2, 8, dtype, seed=n) for kind in kinds for n in (1, 5, 23)}
    with DatasetWriter(
        url, layers=[1, 3], hidden_size=8, final_norm="pre", dtype=dtype, codec=codec, chunk_tokens=4, shard_tokens=40
    ) as writer:
        for sample_id, array in written.items():
            given = INPUTS[sample_id.rpartition(" ")[0]](array, tmp_path)
            assert writer.write(sample_id, np.arange(len(array)), given, **scales(dtype, len(array)))
    read = oracles.read_samples(url)
    for sample_id, array in written.items():
        assert read[sample_id].states.tobytes() == array.tobytes(), sample_id
        assert read[sample_id].input_ids.tolist() == list(range(len(array)))
        assert (read[sample_id].loss_mask == 1).all()
    (part,) = oracles.loaded_parts(url)
    whole = b"".join(array.tobytes() for array in written.values())
    assert oracles.by_zarr(url, part, "hidden_states").tobytes() == whole
    assert oracles.by_tensorstore(url, part, "hidden_states").tobytes() == whole


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_every_bit_pattern_survives_everywhere(url, dtype, codec):
    n_bits = 8 * NATIVE[dtype].itemsize
    array = np.arange(2**n_bits, dtype=PATTERN[dtype]).view(NATIVE[dtype]).reshape(-1, 2, 2 ** (n_bits // 2 - 1))
    with DatasetWriter(
        url,
        layers=[0, 5],
        hidden_size=array.shape[2],
        final_norm="post",
        dtype=dtype,
        codec=codec,
        nonfinite="keep",
        chunk_tokens=48,
        shard_tokens=96,
    ) as writer:
        writer.write("all", np.zeros(len(array), np.int64), array, **scales(dtype, len(array)))
    (part,) = oracles.loaded_parts(url)
    expected = np.arange(2**n_bits, dtype=PATTERN[dtype]).tobytes()
    assert oracles.read_samples(url)["all"].states.tobytes() == expected
    assert oracles.by_zarr(url, part, "hidden_states").tobytes() == expected
    assert oracles.by_tensorstore(url, part, "hidden_states").tobytes() == expected
    if dtype != "float8_e4m3fn":  # zarrs 0.2 does not know it, and says so
        assert oracles.by_zarr(url, part, "hidden_states", ZARRS).tobytes() == expected


def test_zarrs_reads_float32_and_the_token_columns(url, states, open_writer):
    array = states(29)
    with open_writer(chunk_tokens=4, shard_tokens=12) as writer:
        writer.write("a", np.arange(29), array, np.arange(29) % 2)
    (part,) = oracles.loaded_parts(url)
    assert oracles.by_zarr(url, part, "hidden_states", ZARRS).tobytes() == array.tobytes()
    assert oracles.by_zarr(url, part, "input_ids", ZARRS).tolist() == list(range(29))
    assert oracles.by_tensorstore(url, part, "input_ids").tolist() == list(range(29))
    assert oracles.by_zarr(url, part, "loss_mask", ZARRS).tolist() == [i % 2 for i in range(29)]
    assert oracles.by_tensorstore(url, part, "loss_mask").tolist() == [i % 2 for i in range(29)]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    chunk=st.integers(1, 17),
    shard=st.integers(1, 60),
    codec=st.sampled_from(["none", "zstd"]),
    n_layers=st.integers(1, 3),
)
def test_borders_of_chunks_and_shards(tmp_path_factory, lengths, chunk, shard, codec, n_layers):
    url = str(tmp_path_factory.mktemp("borders") / "dataset")
    rng = np.random.default_rng(sum(lengths))
    written = [rng.integers(0, 0x7F00, (n, n_layers, 3), np.uint16) for n in lengths]
    with DatasetWriter(
        url,
        layers=range(n_layers),
        hidden_size=3,
        final_norm="pre",
        codec=codec,
        chunk_tokens=chunk,
        shard_tokens=shard,
        seal=False,
    ) as writer:
        for number, array in enumerate(written):
            writer.write(f"{number}", rng.integers(0, 9, len(array)), array)
    (part,) = oracles.loaded_parts(url)
    column = part.manifest.columns["hidden_states"]
    assert column.chunk_rows == chunk
    assert column.shard_rows % chunk == 0
    assert column.shard_rows <= max(shard, chunk)
    read = oracles.read_samples(url)
    assert [read[f"{i}"].states.tobytes() for i in range(len(written))] == [array.tobytes() for array in written]
    assert oracles.by_tensorstore(url, part, "hidden_states").tobytes() == np.concatenate(written).tobytes()


def test_sample_longer_than_shards_and_part(url, states, open_writer):
    array = states(100)
    with open_writer(chunk_tokens=3, shard_tokens=6, part_nbytes=1) as writer:
        writer.write("long", np.arange(100), array)
        writer.write("next", np.arange(1), states(1))
    long, following = sorted(oracles.loaded_parts(url), key=lambda part: -part.manifest.counts.tokens)
    assert long.manifest.columns["hidden_states"].n_shards == 17
    assert following.manifest.counts.tokens == 1
    assert oracles.read_samples(url)["long"].states.tobytes() == array.tobytes()


def test_caller_may_change_its_arrays_right_after_write(url, states, open_writer):
    ids, mask, array, extra = np.arange(7), np.ones(7, np.uint8), states(7), np.arange(7, dtype=np.float32)
    expected = array.copy()
    with open_writer(extras={"w": {"kind": "token", "dtype": "float32"}}) as writer:
        for number in range(20):
            array[...] = expected + number
            ids[...], mask[...], extra[...] = number, number % 2, number
            writer.write(f"{number}", ids, array, mask, w=extra)
            array[...], ids[...], mask[...], extra[...] = -1, -1, 1, -1
    for number, read in ((int(key), value) for key, value in oracles.read_samples(url).items()):
        assert read.states.tobytes() == (expected + number).tobytes()
        assert set(read.input_ids.tolist()) == {number}
        assert set(read.loss_mask.tolist()) == {number % 2}
        assert set(read.extras["w"].tolist()) == {number}


def test_masks_and_ids_of_all_kinds(url, states, open_writer):
    with open_writer() as writer:
        writer.write("bool", [1, 2, 3], states(3), np.array([True, False, True]))
        writer.write("list", (1, 2, 3), states(3), [0, 1, 0])
        writer.write("float", np.array([5, 6, 7], np.uint16), states(3), np.array([0.0, 1.0, 1.0]))
        writer.write("limits", np.array([-(2**31), 2**31 - 1], np.int64), states(2), [0, 0])
        writer.write("none", [0], states(1))
    read = oracles.read_samples(url)
    assert read["bool"].loss_mask.tolist() == [1, 0, 1]
    assert read["list"].loss_mask.tolist() == [0, 1, 0]
    assert read["float"].loss_mask.tolist() == [0, 1, 1]
    assert read["float"].input_ids.tolist() == [5, 6, 7]
    assert read["limits"].input_ids.tolist() == [-(2**31), 2**31 - 1]
    (part,) = oracles.loaded_parts(url)
    given = dict(zip((part.index.sample_id(i) for i in range(5)), part.index.loss_mask_given.tolist(), strict=True))
    assert given == {"bool": 1, "list": 1, "float": 1, "limits": 1, "none": 0}
