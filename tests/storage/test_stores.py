"""What every store must do, locally and at fsspec URLs."""

import pickle
import subprocess
import sys
import uuid

import loop_filesystem  # noqa: F401 - registers loop://
import numpy as np
import pytest

from hsfmt.errors import CorruptionError, NotFoundError, StorageError, UsageError
from hsfmt.storage import open_store
from hsfmt.storage.local import LocalStore
from hsfmt.storage.remote import RemoteStore


@pytest.fixture(params=["local", "file-url", "memory", "file-by-fsspec", "async"])
def store(request, tmp_path):
    unique = uuid.uuid4().hex
    if request.param == "file-by-fsspec":
        return RemoteStore(f"file://{tmp_path}/ds", {"auto_mkdir": True})
    if request.param == "async":
        return RemoteStore(f"loop://{tmp_path}/ds", {})
    urls = {"local": str(tmp_path / "ds"), "file-url": f"file://{tmp_path}/ds", "memory": f"memory://{unique}/ds"}
    return open_store(urls[request.param])


def test_absent_things(store):
    assert store.size("x") is None
    assert store.list("") == []
    assert store.list("a/b") == []
    assert list(store.walk("")) == []
    with pytest.raises(NotFoundError):
        store.read("x", 10)
    with pytest.raises(NotFoundError):
        store.read_into("x", 0, memoryview(bytearray(1)))
    with pytest.raises(NotFoundError):
        store.remove("x")


def test_write_read_replace_remove(store):
    store.write("a/x", b"first")
    assert store.read("a/x", 5) == b"first"
    store.replace("a/x", memoryview(b"second!"))
    assert store.read("a/x", 1000) == b"second!"
    assert store.size("a/x") == 7
    assert store.size("a") is None
    store.remove("a/x")
    assert store.size("a/x") is None


def test_empty_object(store):
    store.write("empty", b"")
    assert store.read("empty", 0) == b""
    assert store.read("empty", 10) == b""
    assert store.size("empty") == 0
    store.read_into("empty", 0, memoryview(bytearray()))


def test_read_refuses_more_than_it_was_allowed(store):
    store.write("x", b"12345")
    assert store.read("x", 5) == b"12345"
    with pytest.raises(CorruptionError, match="at most 4 bytes"):
        store.read("x", 4)


def test_read_into_any_buffer(store):
    store.write("x", bytes(range(100)))
    buffer = bytearray(10)
    store.read_into("x", 90, memoryview(buffer))
    assert bytes(buffer) == bytes(range(90, 100))
    wide = memoryview(bytearray(8)).cast("I")
    store.read_into("x", 4, wide)
    assert wide.tobytes() == bytes(range(4, 12))
    for offset, nbytes in ((91, 10), (100, 1), (5000, 1)):
        with pytest.raises(CorruptionError, match=f"{nbytes} bytes at offset {offset}"):
            store.read_into("x", offset, memoryview(bytearray(nbytes)))


def test_read_ranges(store):
    store.write("x", bytes(range(100)))
    store.write("y", b"yyy")
    got = store.read_ranges([("x", 10, 2), ("y", 0, 3), ("x", 0, 0), ("x", 99, 1)])
    assert got == [bytes([10, 11]), b"yyy", b"", bytes([99])]
    assert store.read_ranges([]) == []
    with pytest.raises(CorruptionError, match="y"):
        store.read_ranges([("x", 10, 2), ("y", 1, 3)])
    with pytest.raises(NotFoundError, match="z"):
        store.read_ranges([("x", 10, 2), ("z", 1, 3)])


def test_create_is_exclusive(store):
    assert store.create("a/x", b"mine") is True
    assert store.create("a/x", b"mine") is False
    assert store.create("a/x", b"theirs") is False
    assert store.read("a/x", 10) == b"mine"
    assert store.list("a") == ["x"]


def test_list_and_walk_are_sorted_and_fresh(store):
    for path in ("b/x", "b-1", "b/a/y", "a", "c/z"):
        store.write(path, path.encode())
    assert store.list("") == ["a", "b", "b-1", "c"]
    assert store.list("b") == store.list("b/") == ["a", "x"]
    assert list(store.walk("")) == [("a", 1), ("b/a/y", 5), ("b/x", 3), ("b-1", 3), ("c/z", 3)]
    assert list(store.walk("b")) == [("b/a/y", 5), ("b/x", 3)]
    store.write("b/new", b"")
    assert store.list("b") == ["a", "new", "x"]
    assert ("b/new", 0) in store.walk("")


def test_streamed_object(store):
    with store.open_object("a/b/x") as writer:
        writer.write(b"12")
        writer.write(memoryview(bytearray(b"345")))
        writer.write(memoryview(bytearray(8)).cast("I"))
        writer.write(memoryview(np.empty((0, 4))))
        assert writer.nbytes == 13
        writer.commit()
    assert store.read("a/b/x", 100) == b"12345" + bytes(8)
    assert [path for path, _ in store.walk("")] == ["a/b/x"]
    store.sync(["a/b", ""])
    with pytest.raises(StorageError):
        writer.write(b"late")
    with pytest.raises(StorageError):
        writer.commit()


def test_aborted_object_leaves_nothing(store):
    with pytest.raises(KeyError), store.open_object("a/x") as writer:  # noqa: PT012 - leaving the block is tested too
        writer.write(b"12")
        raise KeyError
    with store.open_object("a/y") as writer:
        writer.write(b"12")
    writer.abort()
    assert list(store.walk("")) == []


def test_pickles_and_is_the_same_place(store):
    store.write("x", b"1")
    again = pickle.loads(pickle.dumps(store))
    assert again.url == store.url
    assert again.is_local == store.is_local
    assert again.read("x", 1) == b"1"


def test_local_path_only_where_there_are_files(store, tmp_path):
    if store.is_local:
        assert store.local_path("a/x") == str(tmp_path / "ds" / "a" / "x")
        assert store.free_nbytes() > 0
    else:
        assert store.local_path("a/x") is None
        assert store.free_nbytes() is None


def test_open_store_tells_local_from_remote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_store("ds").url == str(tmp_path / "ds")
    assert open_store("~/ds").url == str(tmp_path / "home" / "ds")
    assert open_store(tmp_path).url == str(tmp_path)
    assert open_store("local:///x/ds").url == "/x/ds"
    assert isinstance(open_store("file:///x/ds/"), LocalStore)
    assert not open_store("memory://x").is_local
    assert open_store("memory://x/ds/").url == "memory://x/ds"
    with pytest.raises(UsageError):
        open_store("")
    with pytest.raises(UsageError, match="storage_options"):
        open_store("ds", {"key": "x"})


def test_unknown_scheme_is_a_usage_error():
    with pytest.raises(UsageError, match="nosuch"):
        open_store("nosuch://x").size("y")


def test_local_store_needs_no_fsspec():
    code = (
        "import sys; from hsfmt.storage import open_store; open_store('/tmp').list(''); print('fsspec' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
