"""Full disks, blocked and broken storage, threads and forks: what stays, what is said, and what it costs in memory."""

import errno
import os
import threading
import time
from pathlib import Path

import numpy as np
import part_oracles as oracles
import pytest

from hsfmt.catalog import committed_parts
from hsfmt.errors import StorageError, UsageError, WriterClosedError
from hsfmt.storage import open_store
from hsfmt.storage.local import LocalStore


def sample(number, n_tokens=50):
    return np.arange(n_tokens), np.full((n_tokens, 2, 8), number, np.float32)


class FailingDisk:
    """Makes a call of the operating system fail from its n-th use on."""

    def __init__(self, monkeypatch, name, code=errno.ENOSPC, allowed=None):
        self.left = allowed
        real = getattr(os, name)

        def call(*args, **kwargs):
            if self.left is not None:
                if self.left <= 0:
                    raise OSError(code, os.strerror(code))
                self.left -= 1
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)


def test_a_full_disk_is_said_at_the_next_call(url, open_writer, monkeypatch):
    writer = open_writer(chunk_tokens=5, codec="none")
    writer.write("a", *sample(1))
    writer.commit()
    disk = FailingDisk(monkeypatch, "write", allowed=None)
    disk.left = 0
    writer.write("b", *sample(2))
    with pytest.raises(StorageError, match="No space left on device") as caught:  # noqa: PT012 - which call raises is open
        for number in range(30_000):
            time.sleep(0.01)
            writer.write(f"c{number}", *sample(3))
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.exit_code == 3
    assert "committed parts are intact" in str(caught.value)
    with pytest.raises(WriterClosedError) as later:
        writer.write("d", *sample(4))
    assert later.value.__cause__ is caught.value
    with pytest.raises(WriterClosedError):
        writer.close()
    disk.left = None
    assert list(oracles.read_samples(url)) == ["a"]
    assert not [path for path in oracles.left_files(url) if path.endswith(".tmp")]
    with open_writer(chunk_tokens=5) as again:
        assert list(again.committed_ids()) == ["a"]
        again.write("b", *sample(2))
    assert sorted(oracles.read_samples(url)) == ["a", "b"]


@pytest.mark.parametrize(("name", "step"), [("write", 1), ("fsync", 5), ("rename", 1), ("link", 1), ("open", 5)])
def test_the_kth_call_fails(tmp_path, open_writer, monkeypatch, name, step):
    """For each k (each fifth of many) until a run is clean: an error, or all is there; a rerun completes."""
    allowed, clean = 0, False
    while not clean:
        url = str(tmp_path / f"{allowed}")
        with monkeypatch.context() as patch:
            acknowledged = ["a"]
            with open_writer(url=url) as first:
                first.write("a", *sample(1))
            FailingDisk(patch, name, errno.EIO, allowed)
            try:
                with open_writer(url=url, part_nbytes=1) as writer:
                    writer.write("b", *sample(2))
                    writer.write("c", *sample(3))
                    acknowledged += writer.commit()
                clean = True
            except StorageError as error:
                assert error.errno == errno.EIO  # noqa: PT017 - whether it raises is open
        read = oracles.read_samples(url)
        assert set(acknowledged) <= set(read)
        for sample_id, number in zip("abc", (1, 2, 3), strict=True):
            if sample_id in read:
                assert read[sample_id].states.tobytes() == sample(number)[1].tobytes()
        with open_writer(url=url, on_duplicate="skip", seal=True) as again:
            for sample_id, number in zip("abc", (1, 2, 3), strict=True):
                again.write(sample_id, *sample(number))
        assert sorted(oracles.read_samples(url)) == ["a", "b", "c"]
        allowed += step
    assert allowed > 3 * step


def test_a_failure_at_the_manifest_never_takes_the_files_of_a_commit(url, open_writer, monkeypatch):
    """The manifest is linked, then its folder's fsync fails: nobody knows, so the files must stay."""
    writer = open_writer()
    writer.write("a", *sample(1))
    real, linked = LocalStore._sync_to_root, []
    link = os.link

    def recorded(source, target, *rest, **named):
        linked.append(target)
        return link(source, target, *rest, **named)

    def failing(self, folder, done=None):
        if any("manifests" in target for target in linked):
            raise OSError(errno.EIO, "no fsync")
        return real(self, folder, done)

    monkeypatch.setattr(os, "link", recorded)
    monkeypatch.setattr(LocalStore, "_sync_to_root", failing)
    with pytest.raises(StorageError, match="no fsync"):
        writer.commit()
    monkeypatch.undo()
    assert list(oracles.read_samples(url)) == ["a"], "not acknowledged, but whole"


def test_a_failed_part_leaves_no_files(url, open_writer, monkeypatch):
    writer = open_writer(chunk_tokens=4, shard_tokens=8)
    writer.write("a", *sample(1))
    monkeypatch.setattr(LocalStore, "size", lambda self, path: None if "index" in path or "manifests" in path else 1)
    with pytest.raises(StorageError, match="before the commit"):
        writer.commit()
    assert oracles.left_files(url) == oracles.empty_dataset_files()


def test_a_file_that_vanished_is_noticed_before_the_commit(url, open_writer):
    writer = open_writer()
    writer.write("a", *sample(1))
    part = writer._parts.open()
    write_files = part._write_files

    def then_truncate(replaces):
        manifest = write_files(replaces)
        path = Path(url) / next(entry.path for entry in manifest.files if "hidden_states/c/" in entry.path)
        path.write_bytes(path.read_bytes()[:-1])
        return manifest

    part._write_files = then_truncate
    with pytest.raises(StorageError, match="bytes before the commit"):
        writer.commit()
    assert committed_parts(open_store(url)) == []


def test_a_manifest_that_could_not_be_read_back_is_never_committed(url, open_writer, monkeypatch):
    writer = open_writer()
    writer.write("a", *sample(1))
    monkeypatch.setattr("hsfmt.writers.part_writer.MAX_MANIFEST_NBYTES", 100)
    with pytest.raises(ValueError, match="at most 100 bytes"):
        writer.commit()
    assert committed_parts(open_store(url)) == []


def test_a_failure_of_an_earlier_part_is_raised_by_close(url, open_writer, monkeypatch):
    writer = open_writer(part_nbytes=1)
    disk = FailingDisk(monkeypatch, "rename", errno.EDQUOT, allowed=0)
    writer.write("a", *sample(1))
    with pytest.raises(StorageError, match="quota"):
        writer.close()
    disk.left = None
    assert committed_parts(open_store(url)) == []


def test_a_caught_error_does_not_make_the_end_look_like_success(open_writer, monkeypatch):
    with pytest.raises(WriterClosedError), open_writer(part_nbytes=1) as writer:  # noqa: PT012 - the context manager is what is tested
        FailingDisk(monkeypatch, "rename", errno.EIO, allowed=0)
        writer.write("a", *sample(1))
        with pytest.raises(StorageError):
            writer.commit()


class Gate:
    """Blocks every write of a shard until it is opened."""

    def __init__(self, monkeypatch):
        self.event = threading.Event()
        real = LocalStore.open_object

        def gated(store, path):
            writer = real(store, path)
            write = writer.write

            def slow(data):
                assert self.event.wait(300)
                write(data)

            writer.write = slow
            return writer

        monkeypatch.setattr(LocalStore, "open_object", gated)


def test_write_returns_before_the_disk_until_the_queue_is_full(url, open_writer, monkeypatch):
    gate = Gate(monkeypatch)
    writer = open_writer(queue_nbytes=64 << 10, chunk_tokens=16, part_seconds=None)
    accepted = threading.Semaphore(0)

    def produce():
        for number in range(100):
            writer.write(f"{number}", *sample(number, 16))
            accepted.release()

    producer = threading.Thread(target=produce)
    producer.start()
    # A chunk row is 16 x (2 x 8 x 4 + 4 + 1) = 1104 bytes: 59 of them fit.
    for _ in range(59):
        assert accepted.acquire(timeout=300), "write() waits for a disk that does nothing"
    assert not accepted.acquire(timeout=0.5), "the queue has a bound"
    gate.event.set()
    producer.join(300)
    assert sorted(map(int, writer.commit())) == list(range(100))
    assert len(oracles.read_samples(url)) == 100


def test_a_failing_disk_frees_a_blocked_write(url, open_writer, monkeypatch):
    gate = Gate(monkeypatch)
    disk = FailingDisk(monkeypatch, "write")
    writer = open_writer(queue_nbytes=1, chunk_tokens=4, part_seconds=None)
    failures = []

    def produce():
        try:
            for number in range(100):
                writer.write(f"{number}", *sample(number))
        except StorageError as error:
            failures.append(error)

    producer = threading.Thread(target=produce)
    producer.start()
    time.sleep(0.2)
    assert producer.is_alive()
    disk.left = 0
    gate.event.set()
    producer.join(300)
    assert not producer.is_alive()
    assert failures[0].errno == errno.ENOSPC


def test_many_threads_may_write(url, open_writer):
    writer = open_writer(chunk_tokens=7, part_nbytes=20_000)
    failures = []

    def produce(thread):
        try:
            for number in range(25):
                value = thread * 100 + number
                writer.write(f"{value}", *sample(value, 1 + value % 9), metadata={"value": value})
                if number % 10 == 9:
                    writer.commit()
        except BaseException as error:  # noqa: BLE001 - the thread's error is the test's result
            failures.append(error)

    threads = [threading.Thread(target=produce, args=[thread]) for thread in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert failures == []
    read = oracles.read_samples(url)
    assert len(read) == 150
    for sample_id, found in read.items():
        value = int(sample_id)
        assert found.metadata == {"value": value}
        assert found.states.tobytes() == sample(value, 1 + value % 9)[1].tobytes()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_use_after_fork_is_refused_and_harmless(url, open_writer):
    writer = open_writer(chunk_tokens=4, shard_tokens=8)
    writer.write("a", *sample(1))
    lock_held = threading.Event()
    release = threading.Event()

    def hold():
        with writer._lock:
            lock_held.set()
            release.wait(300)

    holder = threading.Thread(target=hold)
    holder.start()
    assert lock_held.wait(300)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for call in (lambda: writer.write("b", *sample(2)), writer.commit, writer.close, writer.committed_ids):
                with pytest.raises(UsageError, match="another process"):
                    call()
            writer.abort()
            code = 0
        finally:
            os._exit(code)
    release.set()
    holder.join()
    for _ in range(30_000):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs on a lock that the parent held")
    assert os.waitstatus_to_exitcode(status) == 0
    assert writer.commit() == ["a"]
    assert oracles.read_samples(url)["a"].states.tobytes() == sample(1)[1].tobytes()


MEMORY = """
import resource, sys, numpy as np
from hsfmt import DatasetWriter
url, codec = sys.argv[1:]
n_tokens, hidden = 65_536, 2048
states = np.lib.stride_tricks.as_strided(
    np.arange(1 << 20, dtype=np.uint16) % 0x7F00, (n_tokens, 2, hidden), (16, 8, 2), writeable=False)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
with DatasetWriter(url, layers=[1, 2], hidden_size=hidden, final_norm="pre", codec=codec, queue_nbytes=16 << 20,
                   seal=False, threads=2) as writer:
    writer.write("small", np.arange(600), states[:600])
    writer.commit()
    before = peak()
    writer.write("large", np.arange(n_tokens), states)
    writer.commit()
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_memory_is_bounded_by_the_queue_not_by_the_sample(url, run_python, repo_root, codec):
    """A 65,536-token sample of 512 MiB, whose rows are views of one MiB, so that the caller holds nothing."""
    grown = int(run_python(MEMORY, url, codec, path=repo_root))
    assert grown < 96 << 20
    (part,) = (part for part in oracles.loaded_parts(url) if part.manifest.counts.tokens == 65_536)
    assert part.manifest.columns["hidden_states"].shape == (65_536, 2, 2048)


FLAT = """
import resource, sys, numpy as np
from hsfmt import DatasetWriter
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
states = np.zeros((64, 2, 256), np.uint16)
with DatasetWriter(sys.argv[1], layers=[1, 2], hidden_size=256, final_norm="pre", seal=False,
                   part_nbytes=8 << 20, queue_nbytes=4 << 20) as writer:
    for number in range(1200):
        writer.write(f"{number}", np.arange(64), states)
        if number == 200:
            before = peak()
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_stays_flat_over_a_thousand_samples(url, run_python, repo_root):
    assert int(run_python(FLAT, url, path=repo_root)) < 24 << 20
