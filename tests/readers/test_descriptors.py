"""Open files: few, shared, and closed when nobody needs them."""

import gc
import os
import resource
import threading
from pathlib import Path

import pytest
from written import assert_same

from hsfmt.errors import CorruptionError, NotFoundError
from hsfmt.readers.descriptors import DESCRIPTORS, DescriptorCache
from hsfmt.readers.sample_reader import SampleReader


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / f"{number}" for number in range(10)]
    for path in paths:
        path.write_bytes(path.name.encode())
    return [str(path) for path in paths]


def content(file):
    return os.pread(file.fd, 10, 0).decode()


def test_the_least_recently_used_is_closed(files):
    cache = DescriptorCache(max_open=3)
    for number in (0, 1, 2, 0, 3, 4):
        with cache.opened(0, files[number], lambda path: path) as file:
            assert content(file) == str(number)
    assert [path for _, path in cache._files] == [files[0], files[3], files[4]]
    cache.release(0)
    assert len(cache) == 0


def test_one_in_use_stays_open(files):
    cache = DescriptorCache(max_open=1)
    with cache.opened(0, files[0], lambda path: path) as first:
        for number in range(1, 10):
            with cache.opened(0, files[number], lambda path: path) as file:
                assert content(file) == str(number)
        cache.release(0)
        cache.forget(0, files[0])
        assert content(first) == "0"
        fd = first.fd
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_owners_do_not_meet(files):
    cache = DescriptorCache()
    with cache.opened(0, files[0], lambda path: path) as a, cache.opened(1, files[0], lambda path: path) as b:
        assert a.fd != b.fd
    cache.release(0)
    assert list(cache._files) == [(1, files[0])]


def test_a_file_that_ends_too_soon_is_opened_anew_once(files):
    cache, buffer = DescriptorCache(), bytearray(3)
    with cache.opened(0, files[0], lambda path: path) as file:
        Path(f"{files[0]}.new").write_bytes(b"abc")
        Path(f"{files[0]}.new").replace(files[0])
        file.read(0, [buffer], 3)
        assert bytes(buffer) == b"abc"
        with pytest.raises(
            CorruptionError, match="expected 3 bytes at offset 1, got the end of the file after 2 bytes"
        ):
            file.read(1, [buffer], 3)
        assert file.nbytes_read == 3
    assert len(cache) == 1
    cache.release(0)
    assert len(cache) == 0


def test_a_file_that_is_gone_when_it_is_opened_anew(files):
    cache = DescriptorCache()
    with cache.opened(0, files[0], lambda path: path) as file:
        Path(files[0]).unlink()
        with pytest.raises(FileNotFoundError):
            file.read(0, [bytearray(3)], 3)
    assert len(cache) == 0


def test_release_while_locked_is_deferred(files):
    """A finalizer can run in the thread that holds the lock."""
    cache = DescriptorCache()
    with cache.opened(0, files[0], lambda path: path):
        pass
    with cache._lock:
        cache.release(0)
        assert len(cache) == 1
    with cache.opened(1, files[1], lambda path: path):
        pass
    assert list(cache._files) == [(1, files[1])]


def test_threads(files):
    cache = DescriptorCache(max_open=2)
    failures = []

    def work(seed):
        for step in range(300):
            number = (seed * 7 + step) % 10
            with cache.opened(0, files[number], lambda path: path) as file:
                if content(file) != str(number):
                    failures.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(cache) <= 2


# Python 3.12 and later warn of any fork in a process with threads.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_closes_what_it_inherits(files):
    cache = DescriptorCache()
    with cache.opened(0, files[0], lambda path: path) as file:
        fd = file.fd
    read_end, write_end = os.pipe()
    with cache._lock:  # as another thread of the parent may
        child = os.fork()
        if child == 0:
            try:
                os.fstat(fd)
                result = b"open"
            except OSError:
                result = b"closed"
            with cache.opened(0, files[1], lambda path: path) as own:
                result += content(own).encode()
            os.write(write_end, result)
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 20) == b"closed1"
    assert os.pread(fd, 10, 0) == b"0"
    os.close(read_end)
    os.close(write_end)


def descriptors():
    return list(Path("/proc/self/fd").iterdir())


def open_files():
    """How many descriptors are open, but for connections, which servers of other tests end whenever they like."""
    return sum(not path.resolve().name.startswith("socket:") for path in descriptors())


def test_many_shards_under_a_low_limit(write):
    """A few hundred shards, and no more descriptors than a few: `ulimit -n 256` is enough."""
    written = write([8] * 200, parts=1, chunk_tokens=8, shard_tokens=8)
    assert len(written.shards()) == 200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_files()
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(descriptors()) + 100, hard))
    try:
        reader = SampleReader(written.url)
        for number in (*range(200), *range(0, 200, 3)):
            assert_same(reader.read(number), written.content[written.ids[number]])
        assert open_files() - before <= 64 + 2
        # With even less, it makes do: what is cached is closed first.
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(descriptors()) + 1, hard))
        held = [os.open("/dev/null", os.O_RDONLY)]
        for number in range(200):
            assert_same(reader.read(number), written.content[written.ids[number]])
        os.close(held.pop())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.local
def test_files_are_closed_with_their_reader(write):
    written = write()
    gc.collect()
    DESCRIPTORS.release(-1)
    before = open_files()
    reader = SampleReader(written.url)
    reader.read_many(range(10))
    assert open_files() > before
    reader.close()
    assert open_files() == before
    reader.read(0)
    del reader
    gc.collect()
    assert open_files() == before


def test_a_missing_file_is_no_leak(tmp_path):
    from hsfmt.storage.local import os_errors_typed

    cache = DescriptorCache()
    before = open_files()
    for _ in range(3):
        with (
            pytest.raises(NotFoundError),
            os_errors_typed("x"),
            cache.opened(0, "x", lambda path: str(tmp_path / path)),
        ):
            pass
    assert (open_files(), len(cache)) == (before, 0)
