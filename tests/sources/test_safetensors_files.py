"""Foreign safetensors files: the header and the file's size must agree to the byte before a tensor is read."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest

from hsfmt.errors import SourceError
from hsfmt.readers.sources.safetensors_file import read_entries, read_tensor

STATES = np.arange(24, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(3, 2, 4)
TENSORS = {"hidden_states": STATES, "token_ids": np.arange(3)}


@pytest.fixture
def refuse(tmp_path):
    def refuse_bytes(data: bytes) -> str:
        path = tmp_path / "bad.safetensors"
        path.write_bytes(data)
        with pytest.raises(SourceError) as info:
            read_entries(path, "bad.safetensors")
        assert info.value.problems[0].where.startswith("bad.safetensors")
        return str(info.value)

    return refuse_bytes


def with_header(header: object, data: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes) -> dict:
    return {"x": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]} | changes}


def test_tensors_come_as_they_are(tmp_path, save_safetensors):
    path = tmp_path / "x.safetensors"
    save_safetensors(path, TENSORS, entries={"__metadata__": {"a": "b"}})
    entries = read_entries(path, "x")
    assert set(entries) == set(TENSORS)
    for name, array in TENSORS.items():
        got = read_tensor(path, entries[name], "x")
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert got.flags.owndata


def test_empty_tensors(tmp_path, save_safetensors):
    path = tmp_path / "x.safetensors"
    save_safetensors(path, {"a": np.empty((0, 4), dtype=np.int64), "b": np.ones((), dtype=np.int64)})
    entries = read_entries(path, "x")
    assert read_tensor(path, entries["a"], "x").shape == (0, 4)
    assert read_tensor(path, entries["b"], "x").shape == ()


def test_every_truncation_is_refused(tmp_path, save_safetensors, refuse):
    data = save_safetensors(tmp_path / "good.safetensors", TENSORS)
    for nbytes in range(len(data)):
        text = refuse(data[:nbytes])
        assert nbytes == 0 or "truncated" in text
    assert "empty file" in refuse(b"")


def test_bytes_after_the_tensors(tmp_path, save_safetensors, refuse):
    data = save_safetensors(tmp_path / "x.safetensors", TENSORS, tail=b"\0")
    assert "longer than its tensors" in refuse(data)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (entry(data_offsets=[0, 9]), "9 bytes for int64"),
        (entry(data_offsets=[8, 0]), "bytes for int64"),
        (entry(data_offsets=[-8, 0]), "offsets"),
        (entry(data_offsets=[0]), "agree"),
        (entry(data_offsets=None), "agree"),
        (entry(shape=[2]), "8 bytes for int64 [2]"),
        (entry(shape=[-1, -1]), "shape"),
        (entry(shape=[True]), "shape"),
        (entry(shape=[1.0]), "shape"),
        (entry(shape=[2**40, 2**40], data_offsets=[0, 2**83]), "offsets"),
        (entry(shape=[1] * 9), "shape"),
        (entry(shape=1), "agree"),
        (entry(dtype="F8_E5M2"), "F8_E5M2"),
        (entry(dtype=["I64"]), "agree"),
        ({"x": []}, "agree"),
        ({"x": None}, "agree"),
        ([], "an object"),
        (b"{", "in JSON"),
        (b'{"x": 1, "x": 1}', "a name twice"),
        (b"\xff\xfe", "in JSON"),
        (b"[" * 100_000, "in JSON"),
        (entry(data_offsets=[8, 16]), "data offset 0"),
        (entry() | {"y": entry()["x"]}, "data offset 8"),
        (entry() | {"y": entry(data_offsets=[12, 20])["x"]}, "data offset 8"),
    ],
)
def test_headers_that_do_not_hold(refuse, header, words):
    assert words in refuse(with_header(header))


@pytest.mark.parametrize("size", [2**63, 2**64 - 1, 16 << 20, 100])
def test_header_sizes_are_not_believed(refuse, size):
    assert "claim a header" in refuse(struct.pack("<Q", size) + b"{}")


@pytest.mark.parametrize(
    "data", [b"<!DOCTYPE html>" + bytes(80), b"version https://git-lfs.github.com/spec/v1", bytes(64)]
)
def test_files_that_are_something_else(refuse, data):
    refuse(data)


def test_a_file_that_shrinks_between_header_and_data(tmp_path, save_safetensors):
    path = tmp_path / "x.safetensors"
    data = save_safetensors(path, TENSORS)
    entries = read_entries(path, "x")
    path.write_bytes(data[:-8])
    with pytest.raises(SourceError, match="truncated"):
        read_tensor(path, entries["token_ids"], "x")
