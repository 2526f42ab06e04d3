"""Every bit pattern of our extension types survives zarr-python, tensorstore and zarrs reading each other's bytes."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec
from zarr.core.sync import sync

from hsfmt import zarr_dtypes
from hsfmt.zarr_dtypes import BFloat16, Float8E4M3FN

zarr_dtypes.register()

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
ALL = {
    "bfloat16": np.arange(1 << 16, dtype=np.uint16).view(BF16).reshape(1024, 2, 32),
    "float8_e4m3fn": np.arange(1 << 8, dtype=np.uint8).view(FP8).reshape(8, 2, 16),
}
pytestmark = pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")


def bits(array):
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def serializer(array, endian="little"):
    """As hsfmt lays its shards out: inner chunks of one layer, blosc, crc32c."""
    tokens, _, hidden = array.shape
    blosc = BloscCodec(cname="zstd", clevel=1, shuffle="shuffle", typesize=array.itemsize, blocksize=524288)
    inner = BytesCodec(endian=endian if array.itemsize > 1 else None)
    return ShardingCodec(
        chunk_shape=(tokens // 8, 1, hidden),
        codecs=[inner, blosc, Crc32cCodec()],
        index_codecs=[BytesCodec(), Crc32cCodec()],
    )


def written_by_zarr(path, array, endian="little"):
    tokens, layers, hidden = array.shape
    target = zarr.create_array(
        path,
        shape=array.shape,
        dtype=array.dtype,
        chunks=(tokens // 2, layers, hidden),
        serializer=serializer(array, endian),
        compressors=None,
        fill_value=0,
        config={"write_empty_chunks": True},
    )
    target[...] = array
    return path


def tensorstore_open(path, **options):
    ts = pytest.importorskip("tensorstore")
    return ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}, **options).result()


@pytest.mark.parametrize("name", ALL)
def test_zarr_round_trip(name, tmp_path):
    array = ALL[name]
    path = written_by_zarr(tmp_path / "a", array)
    back = zarr.open_array(path, mode="r")
    assert back.dtype == array.dtype
    assert (bits(back[...]) == bits(array)).all()
    assert (bits(back[3:5, 1]) == bits(array[3:5, 1])).all()
    metadata = json.loads((path / "zarr.json").read_text())
    assert metadata["data_type"] == name
    assert metadata["fill_value"] == 0.0


@pytest.mark.parametrize("name", ALL)
def test_tensorstore_reads_what_zarr_wrote(name, tmp_path):
    array = ALL[name]
    back = tensorstore_open(written_by_zarr(tmp_path / "a", array)).read().result()
    assert back.dtype == array.dtype
    assert (bits(back) == bits(array)).all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("fill", ["0", "nan", "payload"])
def test_zarr_reads_what_tensorstore_wrote(name, fill, tmp_path):
    array = ALL[name]
    pattern = {"0": 0, "nan": 0x7FC0 if name == "bfloat16" else 0x7F, "payload": 0xFFC1 if name == "bfloat16" else 0xFF}
    fill_value = np.array([pattern[fill]], bits(array).dtype).view(array.dtype)[0]
    ts = pytest.importorskip("tensorstore")
    target = tensorstore_open(
        tmp_path / "a",
        create=True,
        dtype=ts.dtype(name),
        shape=[array.shape[0] + 8, *array.shape[1:]],
        chunk_layout=ts.ChunkLayout(read_chunk_shape=[8, 1, array.shape[2]], write_chunk_shape=[8, *array.shape[1:]]),
        fill_value=fill_value,
    )
    target[: array.shape[0]].write(array).result()
    back = zarr.open_array(tmp_path / "a", mode="r")
    assert (bits(back[: array.shape[0]]) == bits(array)).all()
    assert (bits(back[array.shape[0] :]) == pattern[fill]).all()
    ours = back.metadata.to_dict()["fill_value"]
    assert ours == json.loads((tmp_path / "a" / "zarr.json").read_text())["fill_value"]


# The zarrs crate knows bfloat16 and not float8_e4m3fn; its Python binding refuses all of NumPy's kind "V".
@pytest.mark.parametrize(
    ("name", "how"),
    [("bfloat16", "own-type"), *((name, how) for name in ALL for how in ("as-integers", "fallback"))],
)
def test_zarrs_reads_what_zarr_wrote(name, how, tmp_path):
    pytest.importorskip("zarrs")
    array = ALL[name]
    path = written_by_zarr(tmp_path / "a", array)
    if how == "as-integers":
        metadata = json.loads((path / "zarr.json").read_text())
        metadata.update(data_type=f"uint{8 * array.itemsize}", fill_value=0)
        (path / "zarr.json").write_text(json.dumps(metadata))
    # In a process of its own: the pipeline's threads outlive the test, and a later fork would hang.
    code = """
import sys, warnings; warnings.simplefilter("ignore")
import numpy as np, zarr, zarrs
from hsfmt import zarr_dtypes; zarr_dtypes.register()
path, out, how = sys.argv[1:]
zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", "codec_pipeline.strict": how != "fallback"})
if how == "own-type":
    zarrs.ZarrsCodecPipeline._raise_error_on_unsupported_batch_dtype = lambda self, batch: None
array = zarr.open_array(path, mode="r")
assert isinstance(array._async_array.codec_pipeline, zarrs.ZarrsCodecPipeline)
array[...].tofile(out)
"""
    subprocess.run([sys.executable, "-c", code, path, tmp_path / "out", how], check=True)
    assert (np.fromfile(tmp_path / "out", bits(array).dtype) == bits(array).ravel()).all()


def test_big_endian_storage(tmp_path):
    array = ALL["bfloat16"]
    path = written_by_zarr(tmp_path / "a", array, endian="big")
    back = zarr.open_array(path, mode="r")[...]
    assert (bits(back.astype(BF16)) == bits(array)).all()
    assert (bits(tensorstore_open(path).read().result()) == bits(array)).all()


def test_found_by_name(tmp_path):
    for name, array in ALL.items():
        target = zarr.create_array(tmp_path / name, shape=(4,), dtype=name, chunks=(4,))
        assert target.dtype == array.dtype
        assert target.fill_value == 0


@pytest.mark.parametrize(
    ("data_type", "json_value", "pattern", "canonical"),
    [
        (BFloat16(), 0, 0x0000, 0.0),
        (BFloat16(), -0.0, 0x8000, -0.0),
        (BFloat16(), 1.5, 0x3FC0, 1.5),
        (BFloat16(), 0.1, 0x3DCD, 0.10009765625),
        (BFloat16(), "NaN", 0x7FC0, "NaN"),
        (BFloat16(), "Infinity", 0x7F80, "Infinity"),
        (BFloat16(), "-Infinity", 0xFF80, "-Infinity"),
        (BFloat16(), "0x7fc0", 0x7FC0, "NaN"),
        (BFloat16(), "0x7FC1", 0x7FC1, "0x7fc1"),
        (BFloat16(), "0x7f81", 0x7F81, "0x7f81"),
        (BFloat16(), "0xffc0", 0xFFC0, "0xffc0"),
        (BFloat16(), "0x3f80", 0x3F80, 1.0),
        (Float8E4M3FN(), 448, 0x7E, 448.0),
        (Float8E4M3FN(), "NaN", 0x7F, "NaN"),
        (Float8E4M3FN(), "0xff", 0xFF, "0xff"),
        (Float8E4M3FN(), "0x38", 0x38, 1.0),
    ],
)
def test_fill_value(data_type, json_value, pattern, canonical):
    scalar = data_type.from_json_scalar(json_value, zarr_format=3)
    assert int(bits(np.asarray([scalar]))[0]) == pattern
    written = data_type.to_json_scalar(scalar, zarr_format=3)
    assert written == canonical
    assert json.dumps(written) == json.dumps(canonical)  # -0.0 too
    assert int(bits(np.asarray([data_type.from_json_scalar(written, zarr_format=3)]))[0]) == pattern


@pytest.mark.parametrize("data_type", [BFloat16(), Float8E4M3FN()], ids=lambda data_type: data_type._zarr_v3_name)
def test_every_pattern_survives_as_fill_value(data_type):
    array = ALL[data_type._zarr_v3_name].ravel()
    written = [data_type.to_json_scalar(scalar, zarr_format=3) for scalar in array]
    text = json.dumps(written, allow_nan=False)
    back = np.array([data_type.from_json_scalar(value, zarr_format=3) for value in json.loads(text)], array.dtype)
    assert (bits(back) == bits(array)).all()


@pytest.mark.parametrize("data_type", [BFloat16(), Float8E4M3FN()], ids=lambda data_type: data_type._zarr_v3_name)
@pytest.mark.parametrize("bad", ["nan", "1.0", "", "0x", "0x7f8", "0x7f800", "7fc0", "0xzz", True, None, [0], {}, 1e39])
def test_bad_fill_value_is_refused(data_type, bad):
    with pytest.raises((TypeError, ValueError)):
        data_type.from_json_scalar(bad, zarr_format=3)


def test_float8_has_no_infinity():
    for bad in ("Infinity", "-Infinity", 500):
        with pytest.raises(ValueError):
            Float8E4M3FN().from_json_scalar(bad, zarr_format=3)


@pytest.mark.parametrize("data_type", [BFloat16(), Float8E4M3FN()], ids=lambda data_type: data_type._zarr_v3_name)
def test_data_type_protocol(data_type):
    name, native = data_type._zarr_v3_name, data_type.to_native_dtype()
    cls = type(data_type)
    assert cls.from_json(name, zarr_format=3) == data_type
    assert data_type.to_json(zarr_format=3) == name
    assert cls.from_native_dtype(native) == data_type
    assert data_type.item_size == native.itemsize
    assert data_type.default_scalar() == 0
    assert data_type.cast_scalar(np.float32(1)) == 1
    for other in (np.dtype("f2"), np.dtype("V2"), np.dtype("V1"), BF16 if native == FP8 else FP8):
        with pytest.raises(ValueError):
            cls.from_native_dtype(other)
    with pytest.raises(ValueError):
        cls.from_json("float16", zarr_format=3)
    with pytest.raises(ValueError):
        cls.from_json({"name": "<V2", "object_codec_id": None}, zarr_format=2)
    with pytest.raises(ValueError):
        data_type.to_json(zarr_format=2)
    with pytest.raises(TypeError):
        data_type.cast_scalar("x")
    with pytest.raises(TypeError):
        data_type.cast_scalar(1j)


def test_register_is_idempotent():
    before = dict(zarr.dtype.data_type_registry.contents)
    zarr_dtypes.register()
    assert zarr.dtype.data_type_registry.contents == before


def test_groups_with_our_members_list(tmp_path):
    group = zarr.open_group(tmp_path, mode="w")
    for name in ALL:
        group.create_array(name, shape=(4,), dtype=name, chunks=(4,))
    assert sorted(sync(_names(group))) == sorted(ALL)


async def _names(group):
    return [name async for name, _ in group._async_group.members()]
