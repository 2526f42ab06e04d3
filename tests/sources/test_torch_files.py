"""Hostile and damaged `.pt` files: what is not just what torch.save writes is refused by name, never executed."""

import io
import os
import pickle
import struct
import sys
import zipfile
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch

from hsfmt.errors import SourceError, UsageError
from hsfmt.readers.sources import torch_file
from hsfmt.readers.sources.file_stamp import FileStamp
from hsfmt.readers.sources.options import KeyMap
from hsfmt.readers.sources.torch_file import load_torch_file
from hsfmt.readers.sources.torch_record import load_record, read_sample
from hsfmt.readers.sources.torch_states import check_tensor, row_values, split_layers, stack_layers

GLOBALS = b"ctorch._utils\n_rebuild_tensor_v2\n"


@pytest.fixture
def load(tmp_path):
    """Load bytes as a file."""

    def load_bytes(data: bytes):
        path = tmp_path / "x.pt"
        path.write_bytes(data)
        return load_torch_file(path, "x.pt")[0]

    return load_bytes


@pytest.fixture
def refuse(load):
    """The message with which bytes are refused."""

    def refuse_bytes(data: bytes) -> str:
        with pytest.raises(SourceError) as info:
            load(data)
        assert info.value.problems[0].where.startswith("x.pt")
        return str(info.value)

    return refuse_bytes


def saved(value, **options) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def rezipped(data: bytes, *, change=None, compression=zipfile.ZIP_STORED) -> bytes:
    """The same members in a new archive, valid but for the change."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w", compression) as target:
        for member in source.infolist():
            content = source.read(member)
            target.writestr(member.filename, change(member.filename, content) if change else content)
    return out.getvalue()


RECORD = {"input_ids": torch.arange(5), "hidden_states": torch.arange(40, dtype=torch.bfloat16).reshape(5, 2, 4)}


def same(value) -> bool:
    return value.keys() == RECORD.keys() and all(torch.equal(value[key], RECORD[key]) for key in RECORD)


def test_a_good_file(load):
    assert same(load(saved(RECORD)))


def test_every_single_bit_flip_is_found_or_harmless(tmp_path, load):
    """Each byte of a file, one bit of it flipped: refused, or exactly the same values (padding, file times)."""
    data = saved(RECORD)
    refused = 0
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        try:
            assert same(load(bytes(damaged))), position
        except SourceError:
            refused += 1
    tensor_bytes = 5 * 8 + 40 * 2
    assert refused > tensor_bytes


def test_every_truncation_is_refused(refuse):
    data = saved(RECORD)
    for nbytes in range(0, len(data), 7):
        refuse(data[:nbytes])
    for cut in (data[:-1], data[: len(data) // 2]):
        assert f"{len(cut)} bytes that are truncated or damaged: its end is missing" in refuse(cut)


def test_a_file_saved_without_crcs(load):
    """torch offers this; there is nothing to check then, and zeros everywhere say so."""
    torch.serialization.set_crc32_options(False)
    try:
        data = saved(RECORD)
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert {member.CRC for member in archive.infolist()} == {0}
    assert same(load(data))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty file"),
        (bytes(4096), "zeros from the first byte"),
        (b"<!DOCTYPE html><html>404", "web page"),
        (b"\n<html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (pickle.dumps({"input_ids": [1]}), "plain pickle"),
        (b"\x93NUMPY\x01\x00", "8 bytes that torch.save did not write: bytes that begin with"),
        (b"PK\x05\x06" + bytes(18), "begin with"),
        (b"PK\x03\x04", "truncated or damaged"),
    ],
)
def test_files_that_are_something_else(refuse, data, words):
    assert words in refuse(data)


class Call:
    """Unpickling this calls a function."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def executed(*args):
    raise AssertionError("executed")


class Named(NamedTuple):
    """A tuple of a class of its own."""

    a: int


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"x": Call(executed)}, "executed"),
        ({"x": Call(eval, "1")}, "eval"),
        ({"x": Call(exec, "1")}, "exec"),
        ({"x": Call(getattr, "", "join")}, "getattr"),
        ({"x": np.arange(3)}, "numpy"),
        ({"x": Named(1)}, "Named"),
        ({"x": torch.nn.Linear(1, 1)}, "torch.nn.modules.linear.Linear"),
    ],
    ids=["own", "eval", "exec", "getattr", "numpy", "class", "module"],
)
@pytest.mark.parametrize("legacy", [False, True])
def test_objects_that_loading_would_execute_are_named(refuse, value, name, legacy):
    text = refuse(saved(value, _use_new_zipfile_serialization=not legacy))
    assert name in text
    assert "not executed" in text


def test_a_legacy_file(load):
    """Files from before torch 1.6, or saved that way, hold the same values; they can't be mapped."""
    data = saved(RECORD, _use_new_zipfile_serialization=False)
    assert not data.startswith(b"PK")
    assert same(load(data))


def test_a_truncated_legacy_file(refuse):
    data = saved(RECORD, _use_new_zipfile_serialization=False)
    refuse(data[:-1])
    refuse(data[: len(data) // 2])


def test_tensors_of_another_device_come_to_the_cpu(load):
    data = rezipped(
        saved(RECORD), change=lambda name, content: content.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
    )
    assert b"cuda:0" in data
    assert same(load(data))


def test_a_torchscript_archive(refuse):
    """torch.load would hand these to torch.jit.load."""
    data = io.BytesIO(saved(RECORD))
    with zipfile.ZipFile(data, "a") as archive:
        archive.writestr("archive/constants.pkl", pickle.dumps((), 2))
    assert "TorchScript" in refuse(data.getvalue())


def test_compressed_members(refuse):
    """A zip bomb would have these; torch never writes them."""
    assert "compressed" in refuse(rezipped(saved(RECORD), compression=zipfile.ZIP_DEFLATED))


def test_bytes_before_the_archive(refuse):
    """Of two archives in one file, one would be checked and the other loaded."""
    assert "before it" in refuse(saved({"input_ids": torch.zeros(3)}) + saved(RECORD))


def test_a_zip_of_something_else(refuse):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("word/document.xml", "x")
    assert "without data.pkl" in refuse(buffer.getvalue())


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name(refuse):
    data = io.BytesIO(saved(RECORD))
    with zipfile.ZipFile(data, "a") as archive:
        archive.writestr("archive/data/0", b"x")
    assert "two of that name" in refuse(data.getvalue())


def test_overlapping_members(refuse):
    data = bytearray(saved({"a": torch.zeros(4), "b": torch.ones(4)}))
    with zipfile.ZipFile(io.BytesIO(bytes(data))) as archive:
        first, second = (archive.getinfo(f"archive/data/{i}").header_offset for i in (0, 1))
    at = data.index(struct.pack("<I", second), data.index(b"PK\x01\x02"))
    data[at : at + 4] = struct.pack("<I", first)
    refuse(bytes(data))


def test_a_giant_pickle(refuse, monkeypatch):
    monkeypatch.setattr(torch_file, "_PICKLE_NBYTES", 64)
    assert "the limit is 64" in refuse(saved(RECORD))


def hand_made(numel: int, size, stride, offset: int = 0) -> bytes:
    """A valid archive whose pickle claims a float32 storage of `numel` elements, and a view of it."""

    def number(value: int) -> bytes:
        digits = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
        return b"\x8a" + bytes([len(digits)]) + digits

    def numbers(values) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    text = b"\x80\x02}X\x01\x00\x00\x00x" + GLOBALS + b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    text += b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + number(numel) + b"tQ" + number(offset)
    text += numbers(size) + numbers(stride) + b"\x89ccollections\nOrderedDict\n)RtRs."
    base = saved({"x": torch.ones(16)})
    return rezipped(base, change=lambda name, content: text if name.endswith("data.pkl") else content)


def test_hand_made_is_sound(load):
    assert torch.equal(load(hand_made(16, (4, 4), (4, 1)))["x"], torch.ones(4, 4))


@pytest.mark.parametrize(
    ("numel", "size", "stride", "offset"),
    [
        (40, (40,), (1,), 0),  # over its member, still inside the file
        (1 << 40, (1 << 40,), (1,), 0),
        (16, (32,), (1,), 0),
        (16, (8,), (1,), 12),
        (16, (4,), (-1,), 8),
        (8, (8,), (1,), 0),
    ],
)
def test_sizes_are_not_believed(refuse, numel, size, stride, offset):
    refuse(hand_made(numel, size, stride, offset))


def test_an_expanded_view_is_not_copied_to_a_giant(load):
    value = load(hand_made(16, (1 << 30, 7168), (0, 0)))["x"]
    with pytest.raises(SourceError, match="expanded view"):
        check_tensor(value, "x", 1000)
    with pytest.raises(SourceError, match="expanded view"):
        row_values(value, "x", 1000)


def test_a_list_that_holds_itself(load):
    value: list = [torch.ones(2)]
    value.append(value)
    assert torch.equal(load(saved(value))[0], torch.ones(2))


def test_a_view_of_a_huge_storage_costs_its_own_pages(tmp_path, repo_root, run_python):
    """A slice of a batch, saved with the storage behind it."""
    path = tmp_path / "view.pt"
    storage = torch.zeros(96 << 20, dtype=torch.int8)
    storage[5_000_000:5_008_704] = 7
    torch.save({"hidden_states": storage[5_000_000:5_008_704].view(torch.bfloat16).reshape(17, 4, 64)}, path)
    assert path.stat().st_size > 96 << 20
    code = f"""
import resource, sys, torch
from pathlib import Path
from hsfmt.readers.sources.torch_file import load_torch_file
from hsfmt.readers.sources.torch_states import split_layers, stack_layers
path = Path({str(path)!r})
def read():
    record, stamp = load_torch_file(path, "x")
    return stack_layers(split_layers(record["hidden_states"], 17, None, "x", stamp.nbytes), "x")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
states = read()
assert states.nbytes == 8704 and set(states.tobytes()) == {{7}}
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    assert int(run_python(code, path=repo_root)) < 48


def overwrite(path, data):
    """Same size, same file; on a coarse clock the times alone would not differ."""
    status = path.stat()
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def replace_by_copy(path, data):
    copy = path.with_name("copy")
    copy.write_bytes(data)
    copy.replace(path)


CHANGES = {
    "other bytes": (lambda path, data: overwrite(path, data[: len(data) // 2]), "written to meanwhile"),
    "cut": (lambda path, data: os.truncate(path, 1000), "got 1000 bytes instead of"),
    "cut to nothing": (lambda path, data: os.truncate(path, 0), "got 0 bytes instead of"),
    "longer": (lambda path, data: path.write_bytes(data + b"x"), "bytes instead of"),
    "another file": (replace_by_copy, "another file in its place"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("n_tokens", [5, 5000])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_that_changes_before_its_sample_is_copied(tmp_path, change, n_tokens, legacy):
    """5000 tokens are no small file: it is read whole since all of it is wanted."""
    path, roles = tmp_path / "x.pt", KeyMap(input_ids="input_ids", hidden_states="hidden_states")
    states = torch.arange(n_tokens * 2 * 128).reshape(n_tokens, 2, 128).bfloat16()
    record = {"input_ids": torch.arange(n_tokens), "hidden_states": states}
    data = saved(record, _use_new_zipfile_serialization=not legacy)
    path.write_bytes(data)
    whole = read_sample(load_record(path, "x.pt"), roles, "x", 128)
    assert whole.hidden_states.tobytes() == states.view(torch.int16).numpy().tobytes()
    loaded = load_record(path, "x.pt")
    make, words = CHANGES[change]
    make(path, data)
    with pytest.raises(SourceError, match=words) as info:
        read_sample(loaded, roles, "x", 128)
    assert info.value.problems[0].where == "x.pt"


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_after_its_check(tmp_path, monkeypatch, change):
    path, data = tmp_path / "x.pt", saved(RECORD)
    path.write_bytes(data)
    check, (make, words) = torch_file.check_zip, CHANGES[change]

    def check_and_change(file, where):
        members = check(file, where)
        make(path, data)
        return members

    monkeypatch.setattr(torch_file, "check_zip", check_and_change)
    with pytest.raises(SourceError, match=words):
        load_torch_file(path, "x.pt")


def test_what_is_read_is_held_to_the_crcs_even_where_no_time_shows_a_change(tmp_path, monkeypatch):
    path, data = tmp_path / "x.pt", saved(RECORD)
    path.write_bytes(data)
    at = data.index(RECORD["hidden_states"].view(torch.int16).numpy().tobytes())
    check = torch_file.check_zip

    def check_and_change(file, where):
        members = check(file, where)
        with path.open("r+b") as other:
            other.seek(at + 3)
            other.write(b"\x55")
        return members

    monkeypatch.setattr(torch_file, "check_zip", check_and_change)
    monkeypatch.setattr(FileStamp, "check_unchanged", lambda stamp: None)
    with pytest.raises(SourceError, match="storages with the CRC-32"):
        load_torch_file(path, "x.pt")


def test_a_mapped_file_that_is_cut_before_it_is_copied(tmp_path, monkeypatch):
    """Noticed before a page past its end is touched, which would end the process."""
    path = tmp_path / "x.pt"
    storage = torch.zeros(4 << 20, dtype=torch.int8)
    torch.save({"hidden_states": storage[-(1 << 16) :].view(torch.bfloat16).reshape(16, 4, 512)}, path)
    load = torch_file._load

    def load_and_cut(data, **options):
        value = load(data, **options)
        os.truncate(path, 1000)
        return value

    value, stamp = load_torch_file(path, "x.pt")
    assert not value["hidden_states"].any()
    monkeypatch.setattr(torch_file, "_load", load_and_cut)
    with pytest.raises(SourceError, match=f"got 1000 bytes instead of {stamp.nbytes}"):
        load_torch_file(path, "x.pt")


def test_a_file_that_goes_away_is_no_fault_of_its_data(tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(saved(RECORD))
    loaded = load_record(path, "x.pt")
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_sample(loaded, KeyMap(input_ids="input_ids", hidden_states="hidden_states"), "x", 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_bit_patterns_survive(load, dtype):
    """NaN payloads, signed zeros and subnormals too, through views and stacking."""
    if dtype is torch.float32:
        bits = torch.from_numpy(np.random.default_rng(0).integers(-(2**31), 2**31, (256, 256), dtype=np.int32))
    else:
        bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).reshape(256, 256)
    states = bits.view(dtype)
    value = load(saved([states[:, :128], states[:, 128:]]))
    array = stack_layers(split_layers(value, 256, None, "x", 1 << 20), "x")
    assert array.shape == (256, 2, 128)
    assert array.tobytes() == bits.numpy().tobytes()


def test_dtype_of_the_arrays(load):
    array = stack_layers([RECORD["hidden_states"]], "x")
    assert array.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.eye(3).to_sparse(), "plain dense tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8), "plain dense tensor"),
        (lambda: torch.ones(3, device="meta"), "plain dense tensor"),
        (lambda: "text", "got str"),
    ],
    ids=["sparse", "quantized", "meta", "text"],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensors_that_are_not_plain(make, words):
    with pytest.raises(SourceError, match=words):
        check_tensor(make(), "x", 1000)


def test_parameters_lose_their_gradient(load):
    value = load(saved({"x": torch.nn.Parameter(torch.ones(2))}))["x"]
    assert not check_tensor(value, "x", 1000).requires_grad


def test_an_old_torch_is_refused(load, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu121")
    with pytest.raises(UsageError, match=r"2\.6 or later"):
        load(saved(RECORD))


def test_no_torch(load, monkeypatch):
    data = saved(RECORD)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match="install torch"):
        load(data)
