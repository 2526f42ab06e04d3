"""Compressed torch files: whole, truncated, damaged, bombs; what they cost."""

import gzip
import io
import zlib

import pytest
import torch

from hsfmt.errors import SourceError
from hsfmt.readers.sources import find_source, gzip_stream
from hsfmt.readers.sources.torch_file import load_torch_file, read_torch_file

pytestmark = pytest.mark.torch
T, H = 17, 64
RECORD = {
    "input_ids": torch.arange(T),
    "loss_mask": torch.ones(T, dtype=torch.int64),
    "aux_hidden_state": torch.randn(1, T, 3 * H, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "hidden_state": torch.randn(1, T, H, generator=torch.Generator().manual_seed(2)).bfloat16(),
}


def saved(value=RECORD, **options) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


PACKED = gzip.compress(saved())


@pytest.fixture
def load(tmp_path):
    """Load bytes as a file `x.ckpt.gz`."""

    def load_bytes(data: bytes):
        path = tmp_path / "x.ckpt.gz"
        path.write_bytes(data)
        return load_torch_file(path, "x.ckpt.gz")[0]

    return load_bytes


@pytest.fixture
def refuse(load):
    """The message with which bytes are refused."""

    def refuse_bytes(data: bytes) -> str:
        with pytest.raises(SourceError) as info:
            load(data)
        assert info.value.problems[0].where.startswith("x.ckpt.gz")
        return str(info.value)

    return refuse_bytes


def same(value) -> bool:
    return value.keys() == RECORD.keys() and all(torch.equal(value[key], RECORD[key]) for key in RECORD)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("level", [0, 6, 9])
def test_what_is_in_them_is_read_as_it_is(load, level, legacy):
    assert same(load(gzip.compress(saved(_use_new_zipfile_serialization=not legacy), level)))


def test_members_one_after_another_are_one_stream(load):
    data = saved()
    assert same(load(gzip.compress(data[:1000]) + gzip.compress(data[1000:])))


def test_the_size_that_bounds_tensors_is_the_unpacked_one(tmp_path):
    path = tmp_path / "x.ckpt.gz"
    path.write_bytes(PACKED)
    loaded = read_torch_file(path, "x")
    assert (loaded.nbytes, loaded.stamp.nbytes) == (len(saved()), len(PACKED))


def test_every_truncation_is_named(refuse):
    for nbytes in range(2, len(PACKED), 97):
        assert "truncated" in refuse(PACKED[:nbytes])
    assert "its end is missing" in refuse(PACKED[:-1])
    assert "empty file" in refuse(b"")


def test_every_flipped_bit_is_found_or_harmless(load):
    refused = 0
    for position in range(0, len(PACKED), 11):
        damaged = bytearray(PACKED)
        damaged[position] ^= 1 << (position % 8)
        try:
            assert same(load(bytes(damaged))), position
        except SourceError:
            refused += 1
    assert refused > len(PACKED) // 11 - 12


def test_a_stream_cut_where_its_checksum_begins(refuse):
    assert "truncated" in refuse(PACKED[:-8])


def test_a_wrong_checksum_and_a_wrong_size(refuse):
    for end in (bytes(8), PACKED[-8:-4] + bytes(4)):
        assert "a damaged one" in refuse(PACKED[:-8] + end)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (saved(), "take .gz off its name"),
        (b"<!DOCTYPE html><html>404", "web page"),
        (gzip.compress(b"<html>", mtime=0), "web page"),
        (gzip.compress(b"", mtime=0), "empty file"),
        (gzip.compress(PACKED), "a gzip stream, which has to be unpacked first"),
        (gzip.compress(saved()[:-100]), "truncated or damaged"),
        (PACKED + b"more", "a damaged one"),
        (gzip.compress(b"plain", mtime=0), "torch.save did not write"),
        (b"\x1f\x8b", "truncated"),
        (bytes(100), "zeros"),
    ],
)
def test_streams_of_something_else(refuse, data, words):
    assert words in refuse(data)


def test_a_packed_file_without_the_name_is_told_to_unpack(tmp_path):
    (tmp_path / "x.ckpt").write_bytes(PACKED)
    with pytest.raises(SourceError, match="gunzip"):
        load_torch_file(tmp_path / "x.ckpt", "x.ckpt")


def test_a_flipped_bit_under_a_good_gzip_stream_is_found_by_the_zip(refuse):
    data = bytearray(saved())
    at = data.index(RECORD["hidden_state"].view(torch.int16).numpy().tobytes())
    data[at + 5] ^= 1
    assert "CRC-32" in refuse(gzip.compress(bytes(data)))


def test_without_files_in_memory(load, monkeypatch):
    def refuse(name: str) -> int:
        raise PermissionError(1, "Operation not permitted", name)

    monkeypatch.setattr(gzip_stream.os, "memfd_create", refuse)
    assert same(load(PACKED))
    monkeypatch.delattr(gzip_stream.os, "memfd_create")
    assert same(load(PACKED))


def test_a_bomb_is_stopped_at_its_limit(tmp_path, refuse, monkeypatch):
    bomb = gzip.compress(bytes(64 << 20), 9)
    assert len(bomb) < 70_000
    text = refuse(bomb)
    assert f"at most {(16 << 20) + 32 * len(bomb)} bytes" in text
    assert "gunzip" in text
    monkeypatch.setattr(gzip_stream, "_MOST_NBYTES", 1000)
    assert "at most 1000 bytes" in refuse(PACKED)


def peak(run_python, repo_root, code: str) -> int:
    """MiB by which the process grows while it runs `read()`, its mapped and shared pages among them."""
    program = f"""
import threading
from pathlib import Path
import torch
from hsfmt.errors import SourceError
from hsfmt.readers.sources import find_source
from hsfmt.readers.sources.torch_file import load_torch_file

def figure(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) >> 10

{code}
Path("/proc/self/clear_refs").write_text("5")
before = figure("VmRSS")
read()
print(figure("VmHWM") - before)
"""
    return int(run_python(program, path=repo_root))


@pytest.mark.slow
def test_a_bomb_costs_little(tmp_path, repo_root, run_python):
    block = zlib.compressobj(9, zlib.DEFLATED, 31)
    data = b"".join(block.compress(bytes(1 << 20)) for _ in range(512)) + block.flush()
    (tmp_path / "data_0.ckpt.gz").write_bytes(data)
    code = f"""
def read():
    try:
        load_torch_file(Path({str(tmp_path / "data_0.ckpt.gz")!r}), "x")
    except SourceError as error:
        assert "unpacking was stopped" in str(error)
"""
    assert peak(run_python, repo_root, code) < 32


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_a_sample_costs_twice_its_payload(tmp_path, repo_root, run_python, packed):
    """The payload once, as it lies in memory, and the sample that is made of it."""
    states = torch.arange(12 << 20, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(1, 4096, 3072)
    record = {"input_ids": torch.arange(4096), "loss_mask": torch.ones(4096, dtype=torch.int64)}
    record |= {"aux_hidden_state": states[..., :2304].contiguous(), "hidden_state": states[..., 2304:].contiguous()}
    data = saved(record)
    name = "data_0.ckpt.gz" if packed else "data_0.ckpt"
    (tmp_path / name).write_bytes(gzip.compress(data, 1) if packed else data)
    code = f"""
source = find_source({str(tmp_path)!r}, 'specforge-eagle3')
source.meaning()
import gc; gc.collect()
def read():
    source.load(source.items[0])
"""
    payload = len(data) >> 20
    assert payload >= 24
    assert peak(run_python, repo_root, code) < 2 * payload + 16


def test_twins_are_compared_one_after_the_other(tmp_path, accounted_for):
    (tmp_path / "data_0.ckpt").write_bytes(saved())
    other = RECORD | {"loss_mask": RECORD["loss_mask"] * 0}
    for value, refused in ((RECORD, False), (other, True), (RECORD | {"step": 1}, True)):
        # The bytes differ in any case: other names inside, another order of the keys.
        (tmp_path / "data_0.ckpt.gz").write_bytes(gzip.compress(saved(dict(reversed(value.items())))))
        source = find_source(tmp_path)
        accounted_for(source)
        assert [item.paths for item in source.items] == [("data_0.ckpt", "data_0.ckpt.gz")]
        if refused:
            with pytest.raises(SourceError, match=r"data_0\.ckpt: expected the same sample as in data_0\.ckpt\.gz"):
                source.load(source.items[0])
        else:
            assert len(source.load(source.items[0]).input_ids) == T


def test_a_damaged_twin_is_named(tmp_path):
    (tmp_path / "data_0.ckpt").write_bytes(saved())
    (tmp_path / "data_0.ckpt.gz").write_bytes(PACKED[:-1])
    source = find_source(tmp_path)
    with pytest.raises(SourceError, match=r"data_0\.ckpt\.gz: .* truncated"):
        source.load(source.items[0])


def test_twins_of_a_generic_folder(tmp_path):
    record = {"input_ids": torch.arange(T), "hidden_states": torch.zeros(T, 3, H)}
    (tmp_path / "a.pt").write_bytes(saved(record))
    (tmp_path / "a.pt.gz").write_bytes(gzip.compress(saved(record)))
    (tmp_path / "b.pt.gz").write_bytes(gzip.compress(saved(record)))
    source = find_source(tmp_path)
    assert (source.name, [item.sample_id for item in source.items]) == ("pt", ["a", "b"])
    assert [source.load(item).hidden_states.shape for item in source.items] == [(T, 3, H)] * 2
    (tmp_path / "b.ckpt").write_bytes(saved(record))
    source = find_source(tmp_path)
    with pytest.raises(SourceError, match="2 files of that name with different extensions"):
        source.load(source.items[1])
