"""Folders that go while something is written into them, and errors that must not hold memory."""

import gc
import itertools
import os
import shutil
import threading
import time
import uuid
import weakref
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from hsfmt.errors import CorruptionError, NotFoundError, StorageError
from hsfmt.storage import retries
from hsfmt.storage.local import LocalStore
from hsfmt.storage.remote import RemoteStore


def write(store):
    store.write("a/b/c/x", b"data")


def create(store):
    assert store.create("a/b/c/x", b"data")


def stream(store):
    with store.open_object("a/b/c/x") as file:
        file.write(b"data")
        file.commit()


def link(store):
    assert store.link(LocalStore(Path(store.url).parent / "source"), "a/b/c/x")


@pytest.mark.parametrize("n_times", [1, 2, 9])
@pytest.mark.parametrize("call", ["mkdir", "open", "link"])
@pytest.mark.parametrize("work", [write, create, stream, link])
def test_a_folder_that_a_collection_takes_away_is_made_again(tmp_path, monkeypatch, work, call, n_times):
    """Empty it looks as one that a killed writer left, just before its first file is there."""
    LocalStore(tmp_path / "source").write("a/b/c/x", b"data")
    store = LocalStore(tmp_path / "d")
    real, left = getattr(os, call), n_times

    def racing(path, *args, **options):
        nonlocal left
        target = args[0] if call == "link" else path
        if left and str(target).startswith(f"{tmp_path / 'd'}/a/b/c"):
            left -= 1
            shutil.rmtree(tmp_path / "d/a", ignore_errors=True)
        return real(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, racing)
        hit = call == "mkdir" or (call == "open" and work is not link) or (call == "link" and work is link)
        if n_times == 9 and hit:
            with pytest.raises(NotFoundError):
                work(store)
            return
        if call == "link" and work is create:
            return  # by then it has its file, and no folder with one is taken away
        work(store)
    assert store.read("a/b/c/x", 10) == b"data"
    assert not hit or left == 0
    assert store.list("a/b/c") == ["x"]


class ResetError(ConnectionResetError):
    """An error that can be looked for after it was dealt with."""


class Broken(MemoryFileSystem):
    """Answers every range with the same failure."""

    cachable = False
    failure = ResetError

    def cat_file(self, path, start=None, end=None, **_):
        raise self.noted()

    def noted(self):
        error = self.failure("no answer")
        self.seen.append(weakref.ref(error))
        return error


@pytest.mark.parametrize(("failure", "typed"), [(ResetError, StorageError), (ValueError, StorageError)])
def test_a_failed_batch_is_free_once_its_error_was_dealt_with(monkeypatch, failure, typed):
    """An error refers to the frames it came by; if these refer to it, the batch stays until the collector comes."""
    monkeypatch.setattr(retries, "pause_seconds", lambda attempts, at_least: 0.0)
    fs = Broken(skip_instance_cache=True)
    fs.failure, fs.seen = type("Failure", (failure,), {}), []
    fail_and_forget(fs, typed)


class BrokenWhileAsked(Broken):
    """The first request fails while the size of the other's object is being asked for."""

    def __init__(self, **options):
        super().__init__(**options)
        self.failure, self.seen = type("Failure", (ValueError,), {}), []
        self.calls, self.others, self.done = itertools.count(), threading.Event(), threading.Event()

    def info(self, path, **options):
        if next(self.calls):
            self.others.set()
            assert self.done.wait(300)
        else:
            assert self.others.wait(300)
        return super().info(path, **options)


def test_a_failed_batch_is_free_although_a_request_of_it_was_cancelled():
    fs = BrokenWhileAsked(skip_instance_cache=True)
    fail_and_forget(fs, StorageError, fs.done.set)
    assert len(fs.seen) == 2


def fail_and_forget(fs, typed, then=lambda: None):
    root = f"/{uuid.uuid4().hex}"
    fs.pipe_file(f"{root}/x", b"data" * 100)
    store = RemoteStore(f"memory:/{root}", {})
    store._opened = (os.getpid(), fs, root)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(typed) as caught:
            store.read_ranges([("x", 0, 100), ("x", 100, 100)])
        del caught
        then()
        assert len(fs.seen) >= 1
        deadline = time.monotonic() + 300  # the loop's thread may still be busy with the one that came second
        while any(ref() for ref in fs.seen) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not any(ref() for ref in fs.seen)
    finally:
        gc.enable()


def test_a_file_that_could_not_be_written_leaves_no_temporary_one(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    store.write("x", b"old")
    monkeypatch.setattr(os, "write", lambda fd, data: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    for work in (lambda: store.write("x", b"new"), lambda: store.create("y", b"new")):
        with pytest.raises(StorageError, match="free space"):
            work()
    assert store.list("") == ["x"]
    assert store.read("x", 10) == b"old"


def test_copies_are_compared_and_nothing_appears_of_a_wrong_one(tmp_path):
    from hsfmt.digests import FileHasher

    source, target = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    source.write("f/x", b"data")
    hasher = FileHasher()
    hasher.update(b"data")
    for nbytes, digest in ((4, "xxh3_128:" + "0" * 32), (5, hasher.digest()), (3, hasher.digest())):
        with pytest.raises(CorruptionError):
            target.copy_from(source, "f/x", nbytes, digest)
    assert target.size("f/x") is None
    assert list(target.walk("")) == []
    target.copy_from(source, "f/x", 4, hasher.digest())
    assert target.read("f/x", 4) == b"data"
