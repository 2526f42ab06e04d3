"""Reading remote datasets through a local cache: the second time nothing is asked for, and nothing is believed."""

import os
import pickle
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from written import RemoteLikeStore, assert_same, flip_bit

from hsfmt import HiddenStateDataset, open_zarr
from hsfmt.errors import CorruptionError, UsageError
from hsfmt.readers import cache_filling
from hsfmt.readers.local_cache import LocalCache, shared_cache
from hsfmt.readers.sample_reader import ReadOptions, SampleReader, SampleRequest
from hsfmt.sealing import seal
from hsfmt.storage import open_store
from hsfmt.storage.cache_entries import ABANDONED_SECONDS
from hsfmt.storage.cache_folder import CacheFolder
from hsfmt.storage.cache_layout import key_of
from hsfmt.storage.cache_settings import CacheSettings, cache_settings

POINTER = "hsfmt/manifest.json"


@pytest.fixture(autouse=True)
def no_cache_around(monkeypatch):
    monkeypatch.delenv("HSFMT_CACHE_DIR", raising=False)
    monkeypatch.delenv("HSFMT_CACHE_SIZE", raising=False)


@pytest.fixture
def options(tmp_path):
    return ReadOptions(cache_dir=tmp_path / "cache", cache_size="64MiB")


def read_all(written, options, *, threads=None):
    """Read and compare everything; return the store, and the reader."""
    store = RemoteLikeStore(written.path)
    reader = SampleReader(store, options=options)
    assert list(reader.sample_ids) == written.ids
    for number, got in enumerate(reader.read_many(range(len(written.ids)))):
        assert_same(got, written.content[written.ids[number]])
    reader.cache.drain()
    return store, reader


def requests(store):
    return store.reads, [item for batch in store.batches for item in batch]


def entries(options):
    return [path for path in Path(options.cache_dir).glob("*/*/*") if path.is_file()]


@pytest.mark.parametrize("codec", ["zstd", "none"])
@pytest.mark.parametrize("n_threads", [1, 4])
def test_the_second_time_only_the_pointer_is_read(write, tmp_path, codec, n_threads):
    written = write(codec=codec)
    options = ReadOptions(cache_dir=tmp_path / "cache", cache_size="64MiB", n_threads=n_threads)
    store, reader = read_all(written, options)
    assert len(requests(store)[0]) == 7
    assert requests(store)[1]
    for _ in range(2):
        store, reader = read_all(written, options)
        assert requests(store) == ([POINTER], [])
        assert reader._state.fetcher.nbytes_read == 0
    # Windows, layers, memory of the caller, copies by pickle, zarr: all of it out of the cache.
    wanted = written.content[written.ids[7]]
    assert_same(reader.read(7, 3, 50), wanted, 3, 50)
    assert_same(reader.read(7, layers=[1, 5]), wanted, planes=[0, 2])
    out = np.zeros((64, 2, 3, 16), np.uint16)[:, 1, :, 4:12]
    reader.read_requests([SampleRequest(7, None, None, out)])
    assert out.tobytes() == wanted.states.tobytes()
    copy = pickle.loads(pickle.dumps(reader))
    assert_same(copy.read(7), wanted)
    assert requests(copy.store) == ([POINTER], [])
    assert reader.cache.n_damaged == 0


def test_windows_bring_what_they_need(write, options):
    written = write()
    store = RemoteLikeStore(written.path)
    reader = SampleReader(store, options=options)
    assert_same(reader.read(7, 0, 20, layers=[1, 5]), written.content["id-007"], 0, 20, planes=[0, 2])
    reader.cache.drain()
    before = reader.cache.n_hits
    assert_same(reader.read(7), written.content["id-007"])
    assert reader.cache.n_hits > before
    reader.cache.drain()
    n = len(requests(store)[1])
    assert_same(reader.read(7), written.content["id-007"])
    assert len(requests(store)[1]) == n


def test_entries_survive_snapshots_and_serve_copies(write, options, tmp_path):
    written = write()
    read_all(written, options)
    copy = tmp_path / "copy"
    shutil.copytree(written.path, copy)
    seal(open_store(copy), retract={"id-003"})
    store = RemoteLikeStore(copy)
    reader = SampleReader(store, options=options)
    assert len(reader) == 9
    for number, sample_id in enumerate(reader.sample_ids):
        assert_same(reader.read(number), written.content[sample_id])
    reads, ranges = requests(store)
    assert len(reads) == 3, "the pointer, and the files of the new snapshot"
    assert ranges == []


def test_parts_of_one_name_with_other_content_do_not_share(write, options):
    first, second = write(), write(lengths=(20, 3, 9, 40), parts=1)
    read_all(first, options)
    read_all(second, options)
    store, _ = read_all(first, options)
    assert requests(store) == ([POINTER], [])


DAMAGE = {
    "flipped": lambda data: data[:-7] + bytes([data[-7] ^ 16]) + data[-6:],
    "zeros": lambda data: bytes(len(data)),
    "truncated": lambda data: data[:-1],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0",
}


@pytest.mark.parametrize("codec", ["zstd", "none"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entries_are_fetched_again(write, tmp_path, codec, damage):
    written = write(codec=codec)
    options = ReadOptions(cache_dir=tmp_path / "cache", cache_size="64MiB")
    first, _ = read_all(written, options)
    paths = entries(options)
    assert len(paths) > 100
    for path in paths:
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
        os.utime(path, (time.time() - ABANDONED_SECONDS - 10,) * 2)  # or short ones could be on their way
    store, reader = read_all(written, options)
    assert requests(store)[0] == requests(first)[0]
    assert sum(nbytes for _, _, nbytes in requests(store)[1]) > 5000
    assert (reader.cache.n_damaged >= len(paths)) == (damage in ("flipped", "zeros"))
    store, _ = read_all(written, options)
    assert requests(store) == ([POINTER], [])


def test_swapped_entries_are_fetched_again(write, options):
    """Each is a good entry, of something else."""
    written = write(codec="none")
    read_all(written, options)
    by_size = {}
    for path in entries(options):
        by_size.setdefault(path.name.partition("-")[2], []).append(path)
    swapped = 0
    for paths in by_size.values():
        bodies = [path.read_bytes() for path in paths]
        for path, body in zip(paths, bodies[1:] + bodies[:1], strict=True):
            swapped += path.read_bytes() != body
            path.write_bytes(body)
    assert swapped > 100
    _, reader = read_all(written, options)
    assert reader.cache.n_damaged >= swapped
    store, _ = read_all(written, options)
    assert requests(store) == ([POINTER], [])


def test_documents_of_another_part_are_not_taken(write, options):
    """Sealed as documents are, under the name of another one: only the snapshot's digests tell."""
    written = write()
    _, reader = read_all(written, options)
    first, second = reader.snapshot.parts[:2]
    cache = reader.cache
    paths = {}
    for kind, attribute in (("manifest", "manifest_digest"), ("index", "index_digest")):
        whats = [(f"{kind} of {ref.name}", getattr(ref, attribute)) for ref in (first, second)]
        bodies = [cache.get_document(what, None) for what in whats]
        for what, body in zip(whats, reversed(bodies), strict=True):
            cache.forget_document(what)
            cache.add_document(what, body)
            paths[what] = len(body)
    what = ("snapshot index", reader.fingerprint)
    cache.forget_document(what)
    cache.add_document(what, b"{}")
    cache.drain()
    assert len(paths) == 4
    for fingerprint in (None, reader.fingerprint):
        store = RemoteLikeStore(written.path)
        again = SampleReader(store, options=options, snapshot=fingerprint)
        for number, got in enumerate(again.read_many(range(10))):
            assert_same(got, written.content[written.ids[number]])
        cache.drain()


def test_what_cannot_be_listed_or_is_too_large_is_not_there(write, options):
    """A size that a name carries is not believed, and what stands in a subfolder's place is no reason to fail."""
    written = write()
    _, reader = read_all(written, options)
    folder = reader.cache.folder
    name = folder.find(key_of("document", "snapshot index", reader.fingerprint))
    path = Path(folder.locate(name))
    path.unlink()
    huge = path.with_name(f"{name.key}-{1 << 45}")
    with huge.open("wb") as file:
        try:
            file.truncate(1 << 45)
        except OSError:  # the file system has no such files
            file.truncate(0)
    again = SampleReader(RemoteLikeStore(written.path), options=options, snapshot=reader.fingerprint)
    assert_same(again.read(0), written.content["id-000"])
    again.cache.drain()
    huge.unlink()
    shutil.rmtree(path.parent)
    path.parent.write_bytes(b"")
    again = SampleReader(RemoteLikeStore(written.path), options=options, snapshot=reader.fingerprint)
    assert_same(again.read(0), written.content["id-000"])


def test_an_entry_that_goes_between_look_and_read(write, options, monkeypatch):
    written = write()
    read_all(written, options)
    real = LocalCache.split

    def split(self, ranges, gap):
        found = real(self, ranges, gap)
        for cached in found[0]:
            for _, path in cached.found[::2]:
                Path(path).unlink()
        return found

    monkeypatch.setattr(LocalCache, "split", split)
    store, reader = read_all(written, options)
    assert requests(store)[1]
    assert reader.cache.n_damaged > 20


def test_damage_in_the_storage_is_never_kept(write, options):
    written = write()
    shard = written.shards()[0]
    good = shard.read_bytes()
    flip_bit(shard, 20)
    for _ in range(2):
        reader = SampleReader(RemoteLikeStore(written.path), options=options)
        with pytest.raises(CorruptionError) as caught:
            reader.read_many(range(10))
        assert caught.value.problems[0].samples
        assert "read twice" in str(caught.value)
        reader.cache.drain()
    shard.write_bytes(good)
    read_all(written, options)
    store, _ = read_all(written, options)
    assert requests(store) == ([POINTER], [])


def test_damaged_cache_and_damaged_storage(write, options):
    """What is not in the cache as it should be, and not in the storage either, is an error that names the sample."""
    written = write(codec="none")
    read_all(written, options)
    for path in entries(options):
        flip_bit(path, -1)
    for shard in written.shards():
        flip_bit(shard, 20)
    reader = SampleReader(RemoteLikeStore(written.path), options=options)
    with pytest.raises(CorruptionError) as caught:
        reader.read_many(range(10))
    assert caught.value.problems[0].samples


def test_no_checks_no_cache(write, tmp_path):
    written = write()
    options = ReadOptions(cache_dir=tmp_path / "cache", unsafe_skip_checks=True)
    reader = SampleReader(RemoteLikeStore(written.path), options=options)
    reader.read_many(range(10))
    with pytest.raises(UsageError):
        reader.warm([0])
    reader.cache.drain()
    assert reader.cache.n_hits == reader.cache.n_misses == 0


def test_local_datasets_are_not_cached(write, tmp_path):
    reader = SampleReader(write().path, options=ReadOptions(cache_dir=tmp_path / "cache"))
    reader.read_many(range(10))
    assert reader.cache is None
    assert not (tmp_path / "cache").exists()
    with pytest.raises(UsageError):
        reader.warm([0])


def test_a_cache_that_can_not_be_written_fails_no_read(write, tmp_path, caplog):
    written = write()
    (tmp_path / "file").write_bytes(b"")
    options = ReadOptions(cache_dir=tmp_path / "file" / "cache")
    for _ in range(2):
        store, reader = read_all(written, options)
        assert requests(store)[1]
    assert reader.cache.folder.failure
    assert len([record for record in caplog.records if record.name == "hsfmt"]) == 1


def test_too_much_at_once_is_left_out_not_waited_for(write, options, monkeypatch):
    written = write()
    monkeypatch.setattr(cache_filling, "MAX_WAITING_NBYTES", 2000)
    reader = SampleReader(RemoteLikeStore(written.path), options=options)
    gate, insert = threading.Event(), CacheFolder.insert
    with monkeypatch.context() as patch:
        patch.setattr(CacheFolder, "insert", lambda self, batch: gate.wait(300) and insert(self, batch))
        reader.read_many(range(len(written.ids)))
        gate.set()
        reader.cache.drain()
    assert reader.cache._filler.n_left_out > 50
    for _ in range(100):
        if len(entries(options)) > 115:
            break
        read_all(written, options)
    store, _ = read_all(written, options)
    assert len(requests(store)[1]) < 5


def test_warming(write, options):
    written = write()
    store = RemoteLikeStore(written.path)
    reader = SampleReader(store, options=options)
    assert reader.warm(range(10)) == reader.warm(range(10)) > 5000
    n = len(requests(store)[1])
    for number, got in enumerate(reader.read_many(range(10))):
        assert_same(got, written.content[written.ids[number]])
    assert len(requests(store)[1]) == n
    flip_bit(written.shards()[0], 20)
    for path in entries(options):
        path.unlink()
    with pytest.raises(CorruptionError) as caught:
        SampleReader(RemoteLikeStore(written.path), options=options).warm(range(10))
    assert caught.value.problems[0].samples


def test_settings(monkeypatch, tmp_path):
    assert cache_settings() is None
    assert cache_settings(tmp_path) == CacheSettings(str(tmp_path), 32 << 30)
    assert cache_settings(str(tmp_path), "1.5 GiB") == CacheSettings(str(tmp_path), 3 << 29)
    monkeypatch.setenv("HSFMT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HSFMT_CACHE_SIZE", "10MB")
    assert cache_settings() == CacheSettings(str(tmp_path), 10_000_000)
    assert cache_settings("") is None
    assert cache_settings(size=7) == CacheSettings(str(tmp_path), 7)
    monkeypatch.chdir(tmp_path)
    assert cache_settings("cache") == CacheSettings(str(tmp_path / "cache"), 10_000_000)
    monkeypatch.setenv("HSFMT_CACHE_SIZE", "much")
    with pytest.raises(UsageError, match="HSFMT_CACHE_SIZE"):
        cache_settings()
    assert cache_settings(size="1k") == CacheSettings(str(tmp_path), 1024)
    for size in (0, -1, "", "GiB", "1 apple", True, 1.5):
        with pytest.raises(UsageError, match="cache_size"):
            ReadOptions(cache_size=size)
    settings = CacheSettings(str(tmp_path), 1)
    assert shared_cache(settings) is shared_cache(CacheSettings(str(tmp_path), 1))


@pytest.mark.torch
def test_dataset_and_environment(write, tmp_path, monkeypatch):
    written = write()
    for name, value in (("cache_dir", tmp_path / "a"), ("HSFMT_CACHE_DIR", tmp_path / "b")):
        settings = {}
        if name == "cache_dir":
            settings = {"cache_dir": value, "cache_size": "1MiB"}
        else:
            monkeypatch.setenv(name, str(value))
        for _ in range(2):
            store = RemoteLikeStore(written.path)
            dataset = HiddenStateDataset(store, **settings)
            for item in dataset:
                wanted = written.content[item["sample_id"]]
                assert item["hidden_states"].view(dtype=__import__("torch").int16).numpy().tobytes() == (
                    wanted.states.tobytes()
                )
            dataset.reader.cache.drain()
        assert requests(store) == ([POINTER], [])
    off = HiddenStateDataset(RemoteLikeStore(written.path), cache_dir="")
    assert off.reader.cache is None


def test_documents_of_zarr_arrays_are_read_through_it(write, tmp_path, monkeypatch):
    written = write()
    monkeypatch.setenv("HSFMT_CACHE_DIR", str(tmp_path / "cache"))
    for _ in range(2):
        store = RemoteLikeStore(written.path)
        dataset = open_zarr(store)
        for number, wanted in enumerate(written.content.values()):
            assert dataset.hidden_states[dataset.sample_tokens(number)].tobytes() == wanted.states.tobytes()
        shared_cache(cache_settings()).drain()
    assert requests(store)[0] == [POINTER]
