"""What a broken writer could commit with every digest right: found by decoding, and only by that."""

from dataclasses import replace

import google_crc32c
import numpy as np
import pytest
import xxhash

from hsfmt import DatasetWriter
from hsfmt.readers.verification import verify
from hsfmt.tables import pack_strings


def changed(array, at, value):
    copy = np.array(array)
    copy[at] = value
    return copy


def rewrite_chunk(forger, column, chunk, edit):
    """Edit a decoded chunk of codec none in place, and correct its digest and crc32c; the shard's own index stays."""
    shape = forger.manifest.columns[column]
    table = forger.index.chunks[column]
    number = next(n for n in range(shape.n_shards) if chunk < shape.shard_chunks(n)[1])
    path = forger.shard(column, number)
    data = bytearray((forger.root / path).read_bytes())
    start, nbytes = int(table[chunk, 0]), int(table[chunk, 1])
    payload = np.frombuffer(bytes(data[start : start + nbytes]), np.uint8).copy()
    edit(payload)
    data[start : start + nbytes] = payload.tobytes()
    data[start + nbytes : start + nbytes + 4] = google_crc32c.value(payload.tobytes()).to_bytes(4, "little")
    forger.set_file(path, bytes(data))
    digest = xxhash.xxh3_64_intdigest(payload.tobytes())
    forger.set_index(chunks={**forger.index.chunks, column: changed(table, (chunk, 2), digest)})


def errors(forger, **kwargs):
    forger.sign(**kwargs)
    assert verify(forger.root, level="complete").ok or kwargs.get("reseal") is False
    return verify(forger.root, level="full").errors


@pytest.fixture
def plain(tmp_path, build_dataset, forge):
    """A forger at work on a dataset of codec none, whose chunks can be edited in place."""
    return forge(build_dataset(tmp_path / "plain", codec="none"))


def test_a_loss_mask_of_two(plain):
    rewrite_chunk(plain, "loss_mask", 0, lambda payload: payload.__setitem__(1, 2))
    found = {finding.code: finding for finding in errors(plain)}
    assert set(found) == {"loss_mask", "n_supervised", "content_digest"}
    assert found["loss_mask"].path == "parts/part-0/loss_mask"
    assert found["loss_mask"].samples == ("s0-0",)


def test_n_supervised_of_another_mask(plain):
    plain.set_index(n_supervised=changed(plain.index.n_supervised, 1, plain.index.n_supervised[1] - 1))
    plain.manifest = replace(
        plain.manifest,
        counts=replace(plain.manifest.counts, supervised_tokens=plain.manifest.counts.supervised_tokens - 1),
    )
    (finding,) = errors(plain)
    assert (finding.code, finding.samples) == ("n_supervised", ("s0-1",))


def test_a_mask_that_was_not_given_is_all_ones(plain):
    plain.set_index(loss_mask_given=changed(plain.index.loss_mask_given, 2, 0))
    (finding,) = errors(plain)
    assert (finding.code, finding.samples) == ("loss_mask", ("s0-2",))


def test_states_of_another_sample(plain):
    rewrite_chunk(plain, "hidden_states", 1, lambda payload: payload.__setitem__(3, payload[3] ^ 4))
    (finding,) = errors(plain)
    assert (finding.code, finding.path) == ("content_digest", "hsfmt/index/part-0.safetensors")
    assert finding.samples == ("s0-0",)


def test_two_samples_digests_swapped(plain):
    plain.set_index(
        content_digest=plain.index.content_digest[[1, 0, 2]], extra_digest=plain.index.extra_digest[[0, 2, 1]]
    )
    found = {finding.code: finding.samples for finding in errors(plain)}
    assert found == {"content_digest": ("s0-0", "s0-1"), "extra_digest": ("s0-1", "s0-2")}


@pytest.mark.parametrize(("column", "sample"), [("weight", "s0-0"), ("score", "s0-0"), ("topk", "s0-0")])
def test_an_extra_value_of_another_digest(plain, column, sample):
    rewrite_chunk(plain, column, 0, lambda payload: payload.__setitem__(0, payload[0] ^ 1))
    (finding,) = errors(plain)
    assert (finding.code, finding.samples) == ("extra_digest", (sample,))


def test_a_null_that_was_a_value(plain):
    flags = changed(plain.index.valid["score"], 0, 0)
    plain.set_index(valid={**plain.index.valid, "score": flags})
    (finding,) = errors(plain)
    assert (finding.code, finding.samples) == ("extra_digest", ("s0-0",))


@pytest.mark.parametrize("column", ["weight", "score"])
def test_a_null_value_has_zeros(plain, column):
    extra_digest = plain.index.extra_digest
    plain.set_index(valid={**plain.index.valid, column: changed(plain.index.valid[column], 1, 0)})
    plain.set_index(extra_digest=changed(extra_digest, 1, 0))
    found = {finding.code: finding for finding in errors(plain)}
    assert set(found) == {"values", "extra_digest"}
    assert (found["values"].where, found["values"].samples) == (f"parts/part-0/{column}", ("s0-1",))


def test_ragged_rows_of_the_neighbour(plain):
    offsets = changed(plain.index.offsets["topk"], 2, plain.index.offsets["topk"][2] + 1)
    plain.set_index(offsets={"topk": offsets})
    assert {finding.code for finding in errors(plain)} == {"extra_digest", "values"}  # sample 1 is null, with a row now


def test_token_offsets_of_the_neighbour(plain):
    plain.set_index(token_offsets=changed(plain.index.token_offsets, 1, plain.index.token_offsets[1] + 1))
    found = {finding.code: finding.samples for finding in errors(plain)}
    assert found["content_digest"] == ("s0-0", "s0-1")


def test_padding_is_zero(plain):
    last = plain.index.chunks["hidden_states"].shape[0] - 1
    column = plain.manifest.columns["hidden_states"]
    assert column.n_rows == 12
    rewrite_chunk(plain, "weight", 2, lambda payload: None)
    # Twelve tokens fill their chunks; the sample column has three rows in a larger one.
    rewrite_chunk(plain, "score", 0, lambda payload: payload.__setitem__(-1, 1))
    (finding,) = errors(plain)
    assert (finding.code, finding.path) == ("padding", plain.shard("score"))
    assert last == 5


def test_a_chunk_crc_that_only_other_readers_look_at(plain):
    path = plain.shard("hidden_states")
    data = bytearray((plain.root / path).read_bytes())
    table = plain.index.chunks["hidden_states"]
    data[int(table[1, 0] + table[1, 1])] ^= 1
    plain.set_file(path, bytes(data))
    (finding,) = errors(plain)
    assert (finding.code, finding.path, finding.samples) == ("chunk_crc", path, ("s0-0", "s0-1"))


@pytest.mark.parametrize(
    ("slot", "value", "what"),
    [(0, 8, "as the part index says"), (1, 2**64 - 1, "as the part index says"), (-1, 0, "absent entries")],
)
def test_a_shard_index_that_only_other_readers_look_at(plain, slot, value, what):
    column = plain.manifest.columns["hidden_states"]
    assert column.n_shards == 2
    path = plain.shard("hidden_states", 1)
    data = (plain.root / path).read_bytes()
    nbytes = column.chunk_rows_per_shard * column.n_planes * 16
    entries = np.frombuffer(data[-nbytes - 4 : -4], "<u8").copy()
    entries[slot] = value
    table = entries.tobytes()
    plain.set_file(path, data[: -nbytes - 4] + table + google_crc32c.value(table).to_bytes(4, "little"))
    (finding,) = errors(plain)
    assert (finding.code, finding.path) == ("shard_index", path)
    assert what in finding.expected
    assert finding.samples


def test_a_shard_with_bytes_between_chunks_and_index(plain):
    path = plain.shard("input_ids")
    data = (plain.root / path).read_bytes()
    plain.set_file(path, data + b"\0")
    (finding,) = errors(plain)
    assert (finding.code, finding.path) == ("shard_index", path)


def test_a_frame_that_does_not_decode(forger):
    path = forger.shard("input_ids")
    table = forger.index.chunks["input_ids"]
    data = bytearray((forger.root / path).read_bytes())
    payload = bytearray(data[: int(table[0, 1])])
    payload[4] ^= 0x10  # the size that the frame claims
    data[: len(payload)] = payload
    data[len(payload) : len(payload) + 4] = google_crc32c.value(bytes(payload)).to_bytes(4, "little")
    forger.set_file(path, bytes(data))
    digest = xxhash.xxh3_64_intdigest(bytes(payload))
    forger.set_index(chunks={**forger.index.chunks, "input_ids": changed(table, (0, 2), digest)})
    (finding,) = errors(forger)
    assert (finding.code, finding.path) == ("chunk_decode", path)
    assert finding.samples == ("s0-0", "s0-1")


def test_every_chunk_digest_of_a_shard_is_one_finding(forger):
    table = np.array(forger.index.chunks["hidden_states"])
    table[:, 2] ^= 1
    forger.set_index(chunks={**forger.index.chunks, "hidden_states": table})
    found = errors(forger)
    assert [(f.code, f.path) for f in found] == [
        ("chunk_digest", forger.shard("hidden_states", 0)),
        ("chunk_digest", forger.shard("hidden_states", 1)),
    ]
    assert "3 more chunks" in found[0].got
    assert found[0].samples == ("s0-0", "s0-1", "s0-2")


@pytest.mark.parametrize(
    ("ids", "code"), [([b"s0-0", b"x", b"s0-0"], "sample_id"), ([b"s0-0", b"\xff\xfe", b"x"], "corrupt")]
)
def test_ids_are_utf8_and_occur_once(forger, ids, code):
    data, offsets = pack_strings(ids)
    forger.set_index(ids=data, id_offsets=offsets)
    forger.sign(reseal=False)
    found = [f for f in verify(forger.root, level="full").errors if f.code == code]
    assert [f.where for f in found] == ["hsfmt/index/part-0.safetensors: ids"]


@pytest.mark.parametrize("meta", [b"", b"[]", b'{"a":NaN}', b'{"a":1,"a":2}', b"\xff"])
def test_metadata_that_is_no_json_object(forger, meta):
    data, offsets = pack_strings([forger.index.meta_bytes(0), meta, forger.index.meta_bytes(2)])
    forger.set_index(meta=data, meta_offsets=offsets)
    found = {finding.code: finding.samples for finding in errors(forger)}
    assert found == {"metadata": ("s0-1",), "extra_digest": ("s0-1",)}


def write(path, values, ids=None, **settings):
    n_tokens = len(values)
    with DatasetWriter(path, layers=[0, 1], hidden_size=8, final_norm="pre", nonfinite="keep", **settings) as writer:
        writer.write("good", np.arange(4), np.ones((4, 2, 8), np.uint16), **extra(settings, 4))
        writer.write("odd", np.arange(n_tokens) if ids is None else ids, values, **extra(settings, n_tokens))


def extra(settings, n_tokens):
    return {"hidden_states_scale": np.ones(n_tokens, np.float32)} if "float8" in settings.get("dtype", "") else {}


@pytest.mark.parametrize(
    ("dtype", "pattern"),
    [
        ("bfloat16", 0x7F80), ("bfloat16", 0xFF80), ("bfloat16", 0x7FC1), ("float16", 0x7C00), ("float16", 0xFE00),
        ("float32", 0x7F800000), ("float32", 0xFFC00000), ("float8_e4m3fn", 0x7F), ("float8_e4m3fn", 0xFF),
    ],
)  # fmt: skip
def test_nan_and_inf_are_warnings_that_name_samples(tmp_path, dtype, pattern):
    from hsfmt.dtypes import DTYPES

    unsigned = np.dtype(f"<u{DTYPES[dtype].itemsize}")
    values = np.ones((6, 2, 8), unsigned)
    good = np.ones((4, 2, 8), unsigned)
    values[5, 1, 7] = pattern
    name = {"bfloat16": "<u2", "float8_e4m3fn": "u1", "float16": "<f2", "float32": "<f4"}[dtype]
    settings = {"dtype": dtype}
    with DatasetWriter(
        tmp_path / "d", layers=[0, 1], hidden_size=8, final_norm="pre", nonfinite="keep", dtype=dtype
    ) as writer:
        writer.write("good", np.arange(4), good.view(name), **extra(settings, 4))
        writer.write("odd", np.arange(6), values.view(name), **extra(settings, 6))
    report = verify(tmp_path / "d", level="full")
    assert report.ok
    (finding,) = report.problems
    assert (finding.severity, finding.code, finding.samples) == ("warning", "nonfinite", ("odd",))
    assert finding.got.startswith("1 NaN or Inf")
    assert finding.where.endswith("/hidden_states")


def test_the_largest_finite_values_are_no_warning(tmp_path):
    write(tmp_path / "d", np.full((6, 2, 8), 0xFF7F, np.uint16))
    assert verify(tmp_path / "d", level="full").problems == ()


def test_states_that_are_zero_throughout_are_a_warning(tmp_path):
    values = np.ones((6, 2, 8), np.uint16)
    values[2:4, 0] = 0
    values[5, 1, :7] = 0
    write(tmp_path / "d", values)
    report = verify(tmp_path / "d", level="full")
    assert report.ok
    (finding,) = report.problems
    assert (finding.severity, finding.code, finding.samples) == ("warning", "all_zero", ("odd",))
    assert finding.got.startswith("2 of 12 states")


def test_negative_token_ids_are_a_warning(tmp_path):
    write(tmp_path / "d", np.ones((3, 2, 8), np.uint16), ids=np.array([5, -100, 7]))
    (finding,) = verify(tmp_path / "d", level="full").problems
    assert (finding.severity, finding.code, finding.samples) == ("warning", "negative_ids", ("odd",))


def test_a_second_read_comes_before_an_error(pristine, monkeypatch):
    from hsfmt.storage.local import LocalStore

    whole, ranges = LocalStore.read, LocalStore.read_into
    seen = set()

    def first_time(*key):
        return key not in seen and not seen.add(key)

    def read(self, path, max_nbytes):
        data = whole(self, path, max_nbytes)
        return data[:-1] + bytes([data[-1] ^ 1]) if first_time(path) else data

    def read_into(self, path, offset, buffer):
        ranges(self, path, offset, buffer)
        if first_time(path, offset):
            buffer[0] ^= 1

    monkeypatch.setattr(LocalStore, "read", read)
    monkeypatch.setattr(LocalStore, "read_into", read_into)
    for level in ("quick", "complete", "full"):
        seen.clear()
        report = verify(pristine, level=level)
        assert report.ok
        assert {(f.severity, f.code) for f in report.problems} == {("warning", "unstable_read")}
        assert len(report.problems) >= {"quick": 7, "complete": 45, "full": 45}[level]


def test_a_file_that_fails_to_be_read_hides_nothing(dataset, monkeypatch):
    from hsfmt.errors import StorageError
    from hsfmt.storage.local import LocalStore

    whole, ranges = LocalStore.read, LocalStore.read_into
    broken = {"parts/part-0/hidden_states/c/0/0/0", "hsfmt/index/part-1.safetensors"}
    (dataset / "parts/part-0/input_ids/c/0").unlink()

    def fail(path):
        if path in broken:
            raise StorageError.at(path, expected="the storage to work", got="Input/output error")

    def read(self, path, max_nbytes):
        fail(path)
        return whole(self, path, max_nbytes)

    def read_into(self, path, offset, buffer):
        fail(path)
        ranges(self, path, offset, buffer)

    monkeypatch.setattr(LocalStore, "read", read)
    monkeypatch.setattr(LocalStore, "read_into", read_into)
    report = verify(dataset, level="full")
    assert {(f.code, f.path) for f in report.errors} == {
        ("missing", "parts/part-0/input_ids/c/0"),
        *(("unreadable", path) for path in broken),
    }
    assert all(f.samples for f in report.errors)
