"""RemoteStore on file systems that fail as networks do."""

import asyncio
import errno
import multiprocessing
import os
import pickle
import threading
import uuid

import fsspec
import loop_filesystem
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from hsfmt.errors import CorruptionError, NotFoundError, StorageError
from hsfmt.storage import open_store, retries
from hsfmt.storage.remote import RemoteStore


class StatusError(Exception):
    """As SDKs raise it: nobody's subclass, with a status."""

    def __init__(self, status):
        super().__init__(f"status {status}")
        self.status = status


class ClientError(Exception):
    """As botocore raises it."""

    def __init__(self, status):
        super().__init__(f"botocore {status}")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


class ClientPayloadError(Exception):
    """As aiohttp raises it, by name."""


TRANSIENT = [
    ConnectionResetError("reset"),
    TimeoutError("late"),
    StatusError(429),
    StatusError(503),
    ClientError(500),
    ClientPayloadError("short"),
    OSError(errno.EBUSY, "SlowDown"),
]
PERMANENT = [StatusError(400), StatusError(403), ClientError(401), PermissionError("no"), ValueError("?")]


class FlakyFileSystem(MemoryFileSystem):
    """Raises `errors` first, one a call, then works; counts calls."""

    protocol = "flaky"
    cachable = False

    def __init__(self, **kwargs):
        super().__init__(global_store=False, skip_instance_cache=True, **kwargs)
        self.errors, self.calls, self.after = [], [], False

    def _meet(self, name):
        self.calls.append(name)
        if self.errors:
            raise self.errors.pop(0)

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._meet("cat_file")
        return super().cat_file(path, start, end, **kwargs)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        if not self.after:
            self._meet("pipe_file")
        super().pipe_file(path, value, mode, **kwargs)
        if self.after:  # the request arrived, its answer did not
            self._meet("pipe_file")

    def info(self, path, **kwargs):
        self._meet("info")
        return super().info(path, **kwargs)

    def ls(self, path, detail=True, **kwargs):
        self._meet("ls")
        return super().ls(path, detail, **kwargs)

    def invalidate_cache(self, path=None):
        self.calls.append("invalidate_cache")


@pytest.fixture
def fs():
    return FlakyFileSystem()


@pytest.fixture
def store(fs, monkeypatch):
    monkeypatch.setattr(retries, "pause_seconds", lambda attempts, at_least: 0.0)
    store = RemoteStore("flaky://base", {})
    monkeypatch.setattr(store, "_connected", lambda: (fs, "/base"))
    return store


CALLS = {
    "read": lambda store: store.read("x", 10),
    "read_into": lambda store: store.read_into("x", 0, memoryview(bytearray(3))),
    "size": lambda store: store.size("x"),
    "list": lambda store: store.list(""),
    "write": lambda store: store.write("y", b"1"),
    "create": lambda store: store.create("y", b"1"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("error", TRANSIENT, ids=lambda error: f"{type(error).__name__}-{error}")
def test_what_fails_once_is_tried_again(store, fs, call, error):
    store.write("x", b"123")
    expected = call(store)
    if store.size("y") is not None:
        store.remove("y")
    fs.errors = [error, error]
    assert call(store) == expected
    assert fs.errors == []


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_what_always_fails_ends_typed(store, fs, call):
    fs.errors = [ConnectionResetError("reset")] * 100
    with pytest.raises(StorageError, match=r"reset.*run again"):
        call(store)
    assert 100 - len(fs.errors) <= 2 * retries.ATTEMPTS


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("error", PERMANENT, ids=lambda error: f"{type(error).__name__}-{error}")
def test_what_will_not_pass_is_not_tried_again(store, fs, call, error):
    fs.store["/base/x"] = fs.open("/base/x", "wb")
    fs.errors = [error] * 100
    with pytest.raises(StorageError):
        call(store)
    assert 100 - len(fs.errors) <= 2


def test_budget_bounds_the_attempts(monkeypatch, store, fs):
    monkeypatch.setenv("HSFMT_RETRY_SECONDS", "0")
    monkeypatch.setattr(retries, "pause_seconds", lambda attempts, at_least: 0.1)
    for call in (lambda: store.read("x", 1), lambda: store.list("")):
        fs.errors = [StatusError(503)] * 3
        with pytest.raises(StorageError, match="503"):
            call()
        assert len(fs.errors) == 2


def test_refused_credentials_say_so(store, fs):
    fs.errors = [StatusError(403)] * 2
    with pytest.raises(StorageError, match="credentials"):
        store.read("x", 1)


def test_whole_object_is_one_request(store, fs):
    store.write("x", b"123")
    fs.calls.clear()
    store.read("x", 1000)
    assert fs.calls == ["cat_file"]
    fs.calls.clear()
    store.read_ranges([("x", 0, 1), ("x", 2, 1)])
    assert fs.calls == ["cat_file", "cat_file"]


def test_range_of_an_empty_object_may_be_refused(store, fs):
    store.write("x", b"")
    fs.errors = [StatusError(416)]
    assert store.read("x", 10) == b""


def test_range_beyond_the_end_may_be_refused(store, fs):
    store.write("x", b"123")
    fs.errors = [StatusError(416)]
    with pytest.raises(CorruptionError, match="object of 3 bytes"):
        store.read_into("x", 2, memoryview(bytearray(2)))


def test_short_body_is_tried_again_and_the_rest_kept(store, fs, monkeypatch):
    store.write("x", bytes(range(10)))
    real, answers = fs.cat_file, []

    def short_once(path, start=None, end=None):
        data = real(path, start, end)
        first = (start, end) not in answers
        answers.append((start, end))
        return data[:-1] if start == 3 and first else data

    monkeypatch.setattr(fs, "cat_file", short_once)
    got = store.read_ranges([("x", 0, 2), ("x", 3, 2), ("x", 6, 2)])
    assert got == [bytes([0, 1]), bytes([3, 4]), bytes([6, 7])]
    assert sorted(answers) == [(0, 2), (3, 5), (3, 5), (6, 8)]


def test_always_short_body_is_an_error(store, fs, monkeypatch):
    store.write("x", bytes(10))
    monkeypatch.setattr(fs, "cat_file", lambda *_, **__: b"1")
    with pytest.raises(StorageError, match="1 of 5 bytes"):
        store.read_into("x", 0, memoryview(bytearray(5)))


def test_server_that_ignores_ranges_is_refused(store, fs, monkeypatch):
    store.write("x", bytes(10))
    monkeypatch.setattr(fs, "cat_file", lambda *_, **__: bytes(10))
    with pytest.raises(StorageError, match="range requests"):
        store.read_into("x", 0, memoryview(bytearray(5)))


def test_permanent_failure_of_a_batch_wins(store, fs):
    store.write("x", bytes(10))
    fs.errors = [ConnectionResetError()]
    with pytest.raises(NotFoundError, match="z"):
        store.read_ranges([("x", 0, 2), ("z", 0, 2)])


def test_listing_turns_caches_off(store, fs):
    for call in (lambda: store.list(""), lambda: list(store.walk("")), lambda: store.size("x")):
        fs.calls.clear()
        call()
        assert fs.calls[0] == "invalidate_cache"


def test_ambiguous_put_is_repeated_with_the_same_bytes(store, fs):
    fs.after, fs.errors = True, [ConnectionResetError()]
    store.write("x", b"123")
    assert store.read("x", 3) == b"123"


def test_ambiguous_create_is_ours_if_the_bytes_are(store, fs):
    fs.after, fs.errors = True, [ConnectionResetError()]
    assert store.create("x", b"123") is True
    assert store.create("x", b"123") is False


def test_create_that_failed_and_lost_is_not_ours(store, fs, monkeypatch):
    real = fs.pipe_file

    def overtaken(path, value, mode="overwrite"):
        if path not in fs.store:
            real(path, b"theirs")
            raise ConnectionResetError
        real(path, value, mode)

    monkeypatch.setattr(fs, "pipe_file", overtaken)
    assert store.create("x", b"ours") is False
    assert store.read("x", 10) == b"theirs"


@pytest.mark.parametrize("call", [CALLS["write"], CALLS["create"]], ids=["write", "create"])
def test_a_server_that_takes_nothing_is_not_waited_for_for_ever(tmp_path, monkeypatch, call):
    class Silent(loop_filesystem.LoopFileSystem):
        async def _pipe_file(self, *_, **__):
            await asyncio.Event().wait()

    monkeypatch.setenv("HSFMT_TIMEOUT_SECONDS", "0")  # means the shortest
    monkeypatch.setenv("HSFMT_RETRY_SECONDS", "0")
    store = RemoteStore(f"loop://{tmp_path}", {})
    monkeypatch.setattr(store, "_connected", lambda: (Silent(skip_instance_cache=True), str(tmp_path)))
    with pytest.raises(StorageError, match="Timeout"):
        call(store)


class WeakFileSystem(FlakyFileSystem):
    """One without conditional requests."""

    pipe_file = fsspec.AbstractFileSystem.pipe_file


def test_create_without_conditional_requests_looks_first(store, monkeypatch):
    fs = WeakFileSystem()
    monkeypatch.setattr(store, "_connected", lambda: (fs, "/base"))
    assert store.create("x", b"1") is True
    assert store.create("x", b"1") is False
    real = fs.cat_file

    def overwritten(path, *rest, **kwargs):
        fs.store.pop(path)
        with fs.open(path, "wb") as file:
            file.write(b"theirs")
        return real(path, *rest, **kwargs)

    monkeypatch.setattr(fs, "cat_file", overwritten)
    assert store.create("y", b"ours") is False


class MultipartFile:
    """A file of an object store: visible when closed, closed by the garbage collector."""

    def __init__(self, fs, path):
        self.fs, self.path, self.data, self.closed, self.discarded = fs, path, b"", False, False

    def write(self, data):
        self.fs._meet("write")
        self.data += bytes(data)

    def close(self):
        self.fs._meet("close")
        self.closed = True
        self.fs.pipe_file(self.path, self.data[: self.fs.stored])

    def discard(self):
        self.discarded = True


@pytest.fixture
def multipart(store, fs, monkeypatch):
    fs.stored = None
    fs.files = []
    monkeypatch.setattr(fs, "open", lambda path, mode: fs.files.append(MultipartFile(fs, path)) or fs.files[-1])
    monkeypatch.setattr(fs, "pipe_file", lambda path, data: MemoryFileSystem._open(fs, path, "wb").write(data))
    return store


def test_streamed_object_is_visible_when_committed(multipart):
    with multipart.open_object("x") as writer:
        writer.write(b"12")
        assert multipart.size("x") is None
        writer.commit()
    assert multipart.read("x", 10) == b"12"


def test_aborted_upload_is_discarded_and_never_closed(multipart, fs):
    with pytest.raises(KeyError), multipart.open_object("x") as writer:  # noqa: PT012 - leaving the block is tested too
        writer.write(b"12")
        raise KeyError
    assert fs.files[0].discarded
    assert fs.files[0].closed  # or the garbage collector would commit it
    assert multipart.size("x") is None


@pytest.mark.parametrize("step", ["write", "commit"])
def test_failed_upload_is_typed_and_leaves_nothing(multipart, fs, step):
    with pytest.raises(StorageError, match="x"), multipart.open_object("x") as writer:  # noqa: PT012 - leaving the block is tested too
        fs.errors = [StatusError(500)] if step == "write" else []
        writer.write(b"12")
        fs.errors = [StatusError(500)]
        writer.commit()
    assert fs.files[0].discarded
    assert multipart.size("x") is None


def test_upload_that_stored_less_is_an_error(multipart, fs):
    fs.stored = 1
    with pytest.raises(StorageError, match="2 bytes stored, got 1"), multipart.open_object("x") as writer:  # noqa: PT012 - leaving the block is tested too
        writer.write(b"12")
        writer.commit()


def test_missing_driver_says_what_to_install(monkeypatch):
    def missing(*_, **__):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("hsfmt.storage.remote.url_to_fs", missing)
    with pytest.raises(StorageError, match=r"Install s3fs.*pip install 'hsfmt\[s3\]'"):
        open_store("s3://bucket/ds").read("x", 1)


def test_secrets_are_not_shown():
    store = open_store("memory://x", {"secret": "hunter2"})
    assert "hunter2" not in repr(store)
    assert pickle.loads(pickle.dumps(store))._options == {"secret": "hunter2"}


def test_one_file_system_a_process_and_none_pickled():
    store = open_store("memory://x")
    assert store._opened is None
    store.list("")
    assert store._opened[0] == os.getpid()
    assert store._fs() is store._fs()
    assert pickle.loads(pickle.dumps(store))._opened is None
    assert open_store("memory://x")._fs() is not store._fs()


def _use(store, queue, fs_id):
    try:
        queue.put((store.read("x", 10), store.list("")[:1], store._opened[0] == os.getpid(), id(store._fs()) != fs_id))
    except BaseException as error:
        queue.put(repr(error))
        raise


# The child of a fork of a process with threads: what a data loader's worker is, deprecated or not.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("scheme", ["file", "loop"])
def test_works_in_another_process(method, used_before, scheme, tmp_path):
    (tmp_path / "x").write_bytes(b"123")
    store = RemoteStore(f"{scheme}://{tmp_path}", {})
    if used_before:
        assert store.read("x", 10) == b"123"
    fs_id = id(store._fs()) if used_before and method == "fork" else 0
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=_use, args=(store, queue, fs_id))
    process.start()
    process.join(300)
    assert process.exitcode == 0
    assert queue.get() == (b"123", ["x"], True, True)


def test_many_threads_share_a_store():
    store = open_store(f"memory://{uuid.uuid4().hex}")
    store.write("x", bytes(range(200)))
    wrong = []

    def read():
        for offset in range(200):
            buffer = bytearray(1)
            store.read_into("x", offset, memoryview(buffer))
            if buffer[0] != offset:
                wrong.append(offset)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
