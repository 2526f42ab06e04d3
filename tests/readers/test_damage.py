"""Whatever happens to stored bytes: a reader raises and names file and sample, or gives what was committed."""

import errno
import os
import shutil

import numpy as np
import pytest
from written import CountingStore, RemoteLikeStore, assert_same, flip_bit

from hsfmt import open_zarr, seal
from hsfmt.errors import CorruptionError, HsfmtError, NotFoundError, StorageError
from hsfmt.readers.descriptors import DESCRIPTORS
from hsfmt.readers.sample_reader import ReadOptions, SampleReader, SampleRequest

STORES = [CountingStore, RemoteLikeStore]


def read_all(written, store_class=CountingStore):
    """Read everything that a reader can give; compare all of it."""
    reader = SampleReader(store_class(written.path))
    assert list(reader.sample_ids) == written.ids
    for number, wanted in enumerate(written.content.values()):
        assert_same(reader.read(number), wanted)


def read_arrays(written):
    """The same through zarr-python."""
    dataset = open_zarr(written.url)
    for number, wanted in enumerate(written.content.values()):
        rows = dataset.sample_tokens(number)
        assert dataset.hidden_states[rows].tobytes() == wanted.states.tobytes()
        np.testing.assert_array_equal(dataset.input_ids[rows], wanted.input_ids)
        np.testing.assert_array_equal(dataset.loss_mask[rows], wanted.loss_mask)


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("reading", [read_all, read_arrays])
def test_a_flipped_bit_in_any_byte_never_gets_through(write, codec, reading):
    """Every 31st byte of every file: what comes back is what was written, or an error."""
    written = write([5, 9], parts=1, layers=(1, 2), hidden=4, codec=codec, chunk_tokens=4, shard_tokens=8)
    reading(written)
    found = {}
    for path in sorted(path for path in written.path.rglob("*") if path.is_file()):
        data = path.read_bytes()
        for position in range(len(path.name) % 31, len(data), 31):
            flip_bit(path, position, position % 8)
            try:
                reading(written)
            except HsfmtError:
                found[path.name, path.parts[-4]] = found.get((path.name, path.parts[-4]), 0) + 1
            finally:
                path.write_bytes(data)
    reading(written)
    # What is read is found; the zarr.json files and the shards' own indexes are not read at all.
    names = {name for name, _ in found}
    assert {"manifest.json", "index.safetensors", "ids.safetensors", "0"} <= names | {"ids.safetensors"}
    assert "zarr.json" not in names


@pytest.mark.parametrize("store_class", STORES)
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_damaged_chunk_names_file_chunk_range_and_samples(write, codec, store_class):
    written = write([5, 6, 20], parts=1, codec=codec)
    (shard,) = written.shards()
    flip_bit(shard, 20)  # in the first chunk: tokens 0 to 7, so samples 0 and 1
    reader = SampleReader(store_class(written.path))
    assert_same(reader.read(2), written.content["id-002"])
    for number in (0, 1):
        with pytest.raises(CorruptionError) as caught:
            reader.read(number)
        (problem,) = caught.value.problems
        assert problem.where.startswith(f"{shard.relative_to(written.path)}: chunk 0, bytes 0 to ")
        assert problem.samples == (written.ids[number],)
        assert "xxh3_64" in problem.expected
        assert "read twice" in problem.got
        assert "hsfmt verify" in problem.remedy
    with pytest.raises(CorruptionError) as caught:
        reader.read_many([2, 0, 1])
    assert caught.value.problems[0].samples == ("id-000", "id-001")
    # The last layer's first chunk is intact: whoever asks for that one alone gets it.
    assert_same(reader.read(0, layers=[5]), written.content["id-000"], planes=[2])
    unchecked = SampleReader(store_class(written.path), options=ReadOptions(unsafe_skip_checks=True))
    if codec == "none":
        assert not np.array_equal(unchecked.read(0).hidden_states, written.content["id-000"].states)


@pytest.mark.parametrize("store_class", STORES)
def test_damage_to_a_narrow_column_names_the_samples(write, store_class):
    written = write([5, 6, 20], parts=1)
    (shard,) = written.shards("loss_mask")
    flip_bit(shard, 20)
    reader = SampleReader(store_class(written.path))
    with pytest.raises(CorruptionError) as caught:
        reader.read_many([1, 0])
    assert caught.value.problems[0].samples == ("id-001", "id-000")
    with pytest.raises(CorruptionError):
        reader.read(0)


@pytest.mark.parametrize("store_class", STORES)
def test_a_mismatch_is_read_once_more(write, store_class, monkeypatch):
    written = write([5, 6, 20], parts=1, codec="none")
    store = store_class(written.path)
    reader = SampleReader(store)
    reader.locate(1)
    preadv, damaged = os.preadv, []

    def once(fd, buffers, offset):
        count = preadv(fd, buffers, offset)
        if not damaged and len(buffers[0]) > 200:
            damaged.append(offset)
            buffers[0][5] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", once)
    assert_same(reader.read(1), written.content["id-001"])
    assert damaged


@pytest.mark.parametrize("store_class", STORES)
@pytest.mark.parametrize("column", ["hidden_states", "input_ids", "loss_mask"])
@pytest.mark.parametrize(
    "harm", ["deleted", "emptied", "truncated", pytest.param("folder", marks=pytest.mark.lists), "folder deleted"]
)
def test_shards_that_are_gone(write, column, harm, store_class):
    """Never zeros in place of what is missing."""
    written = write([5, 6, 20], parts=1)
    (shard,) = written.shards(column)
    if harm == "deleted":
        shard.unlink()
    elif harm == "emptied":
        os.truncate(shard, 0)
    elif harm == "truncated":
        os.truncate(shard, 20)
    elif harm == "folder":
        shard.unlink()
        shard.mkdir()
    else:
        shutil.rmtree(written.path / "parts")
    reader = SampleReader(store_class(written.path))
    with pytest.raises(CorruptionError) as caught:
        reader.read(1)
    assert "id-001" in str(caught.value)
    assert harm == "folder deleted" or str(shard.relative_to(written.path)) in str(caught.value)
    dataset = open_zarr(written.url)
    with pytest.raises(CorruptionError, match=column):
        dataset.columns[column][:]


@pytest.mark.parametrize("reading", [read_all, read_arrays])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_swapped_and_duplicated_shards(write, reading, codec):
    written = write([64, 64], parts=1, codec=codec)
    first, second, *_ = written.shards()
    a, b = first.read_bytes(), second.read_bytes()
    for x, y in ((b, a), (a, a), (b, b)):
        first.write_bytes(x)
        second.write_bytes(y)
        with pytest.raises(CorruptionError):
            reading(written)
    first.write_bytes(a)
    second.write_bytes(b)
    reading(written)


@pytest.mark.parametrize("reading", [read_all, read_arrays])
def test_indexes_and_manifests_of_another_part(write, reading):
    written = write([8, 8], parts=2)
    for folder in ("hsfmt/index", "hsfmt/manifests"):
        first, second = sorted((written.path / folder).iterdir())
        a, b = first.read_bytes(), second.read_bytes()
        for x, y in ((b, a), (a, a)):
            first.write_bytes(x)
            second.write_bytes(y)
            with pytest.raises(CorruptionError):
                reading(written)
        first.write_bytes(a)
        second.write_bytes(b)
    reading(written)


@pytest.mark.parametrize("pattern", ["hsfmt/index/*", "hsfmt/manifests/*", "hsfmt/snapshots/*/index.safetensors"])
def test_documents_that_are_gone(write, pattern):
    written = write([8, 8], parts=2)
    paths = sorted(written.path.glob(pattern), key=lambda path: path.stat().st_size)
    path = paths[-1]  # of the snapshots the current one, which has more rows than that of the first writer
    path.unlink()
    with pytest.raises(NotFoundError) as caught:
        read_all(written)
    assert str(path.relative_to(written.path)) in str(caught.value)


def test_ids_that_are_gone_hurt_only_who_asks_for_them(write):
    written = write(parts=1)
    (path,) = written.path.glob("hsfmt/snapshots/*/ids.safetensors")
    path.unlink()
    reader = SampleReader(written.url)
    assert_same(reader.read(3), written.content["id-003"])
    with pytest.raises(NotFoundError, match=r"ids\.safetensors"):
        reader.index_of("id-003")


@pytest.mark.local
def test_a_snapshot_under_another_name(write):
    written = write([8, 8], parts=2)
    first = SampleReader(written.url)
    second = seal(written.url, retract=["id-001"]).snapshot
    snapshots = written.path / "hsfmt/snapshots"
    old, new = (snapshots / name.partition(":")[2] for name in (first.fingerprint, second.fingerprint))
    for name in ("index.safetensors", "ids.safetensors"):
        shutil.copy(old / name, new / name)
    with pytest.raises(CorruptionError, match=r"index\.safetensors: expected"):
        SampleReader(written.url)


@pytest.mark.local
def test_a_replaced_file_is_opened_anew(write):
    """A descriptor of a damaged file that was restored meanwhile must not stand in the way."""
    written = write([20, 20], parts=1)
    (*_, shard) = written.shards()
    good = shard.read_bytes()
    flip_bit(shard, 20)
    reader = SampleReader(written.url)
    with pytest.raises(CorruptionError):
        reader.read(1)
    shard.with_suffix(".new").write_bytes(good)
    shard.with_suffix(".new").replace(shard)
    assert_same(reader.read(1), written.content["id-001"])


@pytest.mark.local
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_file_that_was_restored_is_read_again(write, codec):
    """The one that is open is short for ever: its name leads to another one by now."""
    written = write([9], parts=1, codec=codec)
    shard = written.shards()[0]
    good = shard.read_bytes()
    reader = SampleReader(written.url)
    assert_same(reader.read(0), written.content["id-000"])
    with shard.open("r+b") as file:
        file.truncate(10)
    for _ in range(2):
        with pytest.raises(CorruptionError, match=r"the end of the file after .* bytes .*id-000"):
            reader.read(0)
    restored = shard.with_name("restored")
    restored.write_bytes(good)
    restored.replace(shard)
    assert_same(reader.read(0), written.content["id-000"])


@pytest.mark.local
def test_a_handle_that_the_server_forgot_is_opened_again(write, monkeypatch):
    written = write([9], parts=1)
    reader = SampleReader(written.url, options=ReadOptions(n_threads=1))
    reader.read(0)
    preadv, stale = os.preadv, set()

    def forgotten(fd, buffers, offset):
        if fd in stale:
            raise OSError(errno.ESTALE, "Stale file handle")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", forgotten)
    stale |= {entry.fd for entry in DESCRIPTORS._files.values()}
    # New descriptors would get the numbers of those that are closed.
    held = [os.dup(min(stale)) for _ in range(20)]
    close = os.close
    monkeypatch.setattr(os, "close", lambda fd: None if fd in stale else close(fd))
    assert_same(reader.read(0), written.content["id-000"])
    stale |= set(range(4096))
    with pytest.raises(StorageError, match="mount it again") as caught:
        reader.read(0)
    assert caught.value.errno == errno.ESTALE
    stale.clear()
    assert_same(reader.read(0), written.content["id-000"])
    for fd in held:
        close(fd)


@pytest.mark.local
def test_a_fifo_does_not_hang(write):
    written = write([5])
    (shard,) = written.shards()
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CorruptionError, match="regular file"):
        SampleReader(written.url).read(0)


def test_an_error_leaves_the_rest_readable(write):
    written = write([64] * 6, parts=1, codec="zstd")
    flip_bit(written.shards()[3], 50)
    reader = SampleReader(written.url, options=ReadOptions(n_threads=3))
    outcomes = []
    for number in range(6):
        try:
            assert_same(reader.read_requests([SampleRequest(number)])[0], written.content[written.ids[number]])
            outcomes.append("good")
        except CorruptionError:
            outcomes.append("bad")
    assert outcomes == ["good", "bad", "good", "good", "good", "good"]
