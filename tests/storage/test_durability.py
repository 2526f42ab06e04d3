"""The order of system calls that makes an object durable, what a failure of any of them leaves, and races."""

import ctypes
import errno
import fcntl
import multiprocessing
import os
import pickle
import signal
import stat
import threading
import time
from pathlib import Path

import pytest

from hsfmt.errors import NotFoundError, StorageError
from hsfmt.storage import exclusive, open_store


class Recorder:
    """Records the calls that matter for a crash, as (call, name relative to the root), and can make one fail."""

    CALLS = ("fsync", "rename", "link", "unlink", "write")

    def __init__(self, monkeypatch, root):
        self.root = str(root)
        self.events = []
        self.fail = {}
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._recorded(name, getattr(os, name)))

    def _recorded(self, name, real):
        def call(target, *rest):
            path = str(Path(f"/proc/self/fd/{target}").readlink()) if isinstance(target, int) else target
            kind = "dir" if Path(path).is_dir() else "file"
            self.events.append((name, kind, os.path.relpath(path, self.root)))
            if (code := self.fail.get((name, kind)) or self.fail.get(name)) is not None:
                raise OSError(code, os.strerror(code), path)
            return real(target, *rest)

        return call

    def order(self, *skip):
        names = []
        for name, kind, path in self.events:
            temporary = path.endswith(".tmp")
            if name not in skip:
                names.append(f"{name} {'temporary' if temporary else path}{' (folder)' if kind == 'dir' else ''}")
        return names


@pytest.fixture
def recorder(monkeypatch, tmp_path):
    (tmp_path / "ds").mkdir()
    return Recorder(monkeypatch, tmp_path / "ds")


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "ds")


TO_ROOT = ["fsync hsfmt/manifests (folder)", "fsync hsfmt (folder)", "fsync . (folder)", "fsync .. (folder)"]


def test_write_syncs_file_then_renames_then_syncs_folders(store, recorder):
    store.write("hsfmt/manifests/p.json", b"x")
    assert recorder.order("write") == ["fsync temporary", "rename temporary", *TO_ROOT]


def test_create_syncs_file_then_links_then_syncs_folders(store, recorder):
    assert store.create("hsfmt/manifests/p.json", b"x")
    assert recorder.order("write") == ["fsync temporary", "link temporary", "unlink temporary", *TO_ROOT]


def test_create_that_lost_syncs_what_it_found(store, recorder):
    store.create("hsfmt/manifests/p.json", b"x")
    recorder.events.clear()
    assert not store.create("hsfmt/manifests/p.json", b"y")
    assert recorder.order("write")[-4:] == TO_ROOT


def test_commit_syncs_file_then_renames_and_sync_does_the_folders_once(store, recorder):
    for name in ("0", "1"):
        with store.open_object(f"parts/p/c/{name}") as writer:
            writer.write(b"x")
            writer.commit()
    assert recorder.order("write") == ["fsync temporary", "rename temporary"] * 2
    recorder.events.clear()
    store.sync(["parts/p", "parts/p/c", ""])
    assert recorder.order() == [f"fsync {path} (folder)" for path in ("parts/p/c", "parts/p", "parts", ".", "..")]


def test_folders_above_a_new_root_are_synced(tmp_path, recorder):
    open_store(tmp_path / "ds" / "new" / "er").write("x", b"")
    synced = [path for name, kind, path in recorder.events if (name, kind) == ("fsync", "dir")]
    assert {".", "new", "new/er"} <= set(synced)


def test_a_folder_that_a_killed_writer_made_above_the_root_is_synced(tmp_path, recorder):
    """It was killed before the folder's entry was durable, and a later writer finds the folder."""
    (tmp_path / "ds" / "found").mkdir()
    open_store(tmp_path / "ds" / "found" / "new" / "er").write("x", b"")
    synced = [path for name, kind, path in recorder.events if (name, kind) == ("fsync", "dir")]
    assert {".", "found", "found/new", "found/new/er"} <= set(synced)


def test_nothing_is_seen_under_its_name_before_it_is_whole(store, recorder, monkeypatch):
    seen = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (seen.append(store.size("x")), real(fd))[1])
    store.write("x", b"12345")
    assert seen[0] is None
    assert set(seen[1:]) == {5}


@pytest.mark.parametrize("call", ["write", "create", "stream"])
@pytest.mark.parametrize("step", ["write", "fsync", "publish"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_failed_step_is_typed_and_leaves_what_was_there(store, recorder, tmp_path, call, step, code):
    if call != "create":
        store.write("x", b"old")
    step = {"publish": "link" if call == "create" else "rename"}.get(step, step)
    recorder.fail[(step, "file")] = code
    with pytest.raises(StorageError, match=r"^x: ") as caught:  # noqa: PT012
        if call == "stream":
            with store.open_object("x") as writer:
                writer.write(b"new")
                writer.commit()
        else:
            getattr(store, call)("x", b"new")
    assert caught.value.errno == code
    assert caught.value.exit_code == 3
    if code == errno.ENOSPC:
        assert "free space" in str(caught.value)
    recorder.fail.clear()
    assert [path.name for path in (tmp_path / "ds").iterdir()] == ([] if call == "create" else ["x"])
    if call != "create":
        assert store.read("x", 10) == b"old"


def test_failed_folder_sync_is_not_success(store, recorder):
    recorder.fail[("fsync", "dir")] = errno.EIO
    for call in (store.write, store.create):
        with pytest.raises(StorageError):
            call("a/x", b"")
    with pytest.raises(StorageError):
        store.sync(["a"])


def test_file_system_without_folder_sync_is_tolerated(store, recorder):
    recorder.fail[("fsync", "dir")] = errno.EINVAL
    store.write("a/x", b"1")
    assert store.read("a/x", 1) == b"1"


@pytest.fixture(params=["renameat2", "unsupported", "no such function", "no locks"])
def no_hard_links(request, monkeypatch):
    """A file system without hard links; only the first has a rename that never replaces, and the last no locks."""

    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    def unsupported(*_):
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(os, "link", refuse)
    if request.param == "renameat2":
        if exclusive._renameat2() is None:
            pytest.skip("the C library has no renameat2")
    else:
        found = None if request.param == "no such function" else unsupported
        monkeypatch.setattr(exclusive, "_renameat2", lambda: found)
    if request.param == "no locks":
        monkeypatch.setattr(exclusive.fcntl, "flock", refuse)
    return request.param


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_create_without_hard_links_is_still_exclusive(store, recorder, code):
    recorder.fail["link"] = code
    assert store.create("a/x", b"first") is True
    assert store.create("a/x", b"second") is False
    assert store.read("a/x", 10) == b"first"
    assert store.list("a") == ["x"]
    assert recorder.order("write")[-4:] == [
        "unlink temporary",
        "fsync a (folder)",
        "fsync . (folder)",
        "fsync .. (folder)",
    ]


def test_without_hard_links_a_file_is_whole_and_durable_before_it_has_its_name(
    store, no_hard_links, monkeypatch, tmp_path
):
    """Looked at before each step: a crash there leaves nothing of that name, or all of it."""
    final, seen = tmp_path / "ds" / "x", []

    def watched(real):
        def call(*args, **kwargs):
            seen.append(final.read_bytes() if final.exists() else None)
            return real(*args, **kwargs)

        return call

    for name in ("write", "fsync", "rename", "unlink", "close"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    data = bytes(range(256)) * 100
    monkeypatch.setattr(os, "write", lambda fd, part, real=os.write: real(fd, part[:1000]))
    assert store.create("x", data) is True
    assert set(seen) == {None, data}
    assert seen.count(None) > len(data) / 1000
    assert store.create("x", b"other") is False
    assert store.read("x", 1 << 20) == data
    assert store.list("") == ["x"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_without_hard_links_a_killed_creator_is_in_nobodys_way(store, no_hard_links):
    store.write("a/before", b"")
    child = os.fork()
    if child == 0:
        real = os.write
        os.write = lambda fd, data: os._exit(9 if real(fd, data[:3]) == 3 else 1)
        store.create("a/x", b"half of it is written")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert store.size("a/x") is None
    assert store.create("a/x", b"whole") is True
    assert store.read("a/x", 10) == b"whole"


def test_without_hard_links_a_failure_leaves_nothing(store, no_hard_links, recorder):
    store.sync([""])
    step = "fsync" if no_hard_links == "renameat2" else "rename"
    recorder.fail[(step, "file")] = errno.ENOSPC
    with pytest.raises(StorageError, match="No space") as caught:
        store.create("x", b"1")
    assert caught.value.errno == errno.ENOSPC
    assert store.list("") == []


def test_a_rename_that_fails_is_typed(store, monkeypatch):
    def full(*_):
        ctypes.set_errno(errno.ENOSPC)
        return -1

    def refuse(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(exclusive, "_renameat2", lambda: full)
    with pytest.raises(StorageError, match="No space") as caught:
        store.create("x", b"1")
    assert caught.value.errno == errno.ENOSPC
    assert store.list("") == []


def test_without_hard_links_one_of_many_threads_creates(tmp_path, no_hard_links, monkeypatch):
    """Each looks before any renames: what a lock, or a rename that never replaces, has to hold apart."""
    lexists, barrier = os.path.lexists, threading.Barrier(4)

    def slow(path):
        result = lexists(path)
        time.sleep(0.002)
        return result

    monkeypatch.setattr(os.path, "lexists", slow)

    def create(round_, me, outcomes):
        store = open_store(tmp_path / str(round_))
        barrier.wait(300)
        outcomes[me] = store.create("zarr.json", b"%d" % me * 1000)

    for round_ in range(10):
        outcomes = {}
        threads = [threading.Thread(target=create, args=(round_, me, outcomes)) for me in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        winners = [me for me, created in outcomes.items() if created]
        content = (tmp_path / str(round_) / "zarr.json").read_bytes()
        assert content in [b"%d" % me * 1000 for me in winners], "whole, and of one who was told so"
        assert [path.name for path in (tmp_path / str(round_)).iterdir()] == ["zarr.json"]
        if no_hard_links != "no locks":
            assert len(winners) == 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_child_forked_under_the_lock_does_not_keep_it(tmp_path):
    with exclusive._folder_locked(str(tmp_path)):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        fd = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_link_that_nfs_reports_twice_is_ours(store, recorder, monkeypatch):
    real = os.link

    def retransmitted(source, target):
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", retransmitted)
    assert store.create("x", b"1") is True


def test_short_writes_and_reads_are_continued(store, monkeypatch):
    real_write, real_read, real_preadv = os.write, os.read, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:3]))
    monkeypatch.setattr(os, "read", lambda fd, nbytes: real_read(fd, min(nbytes, 3)))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real_preadv(fd, [buffers[0][:3]], offset))
    data = bytes(range(100))
    store.write("x", data)
    with store.open_object("y") as writer:
        writer.write(data)
        writer.commit()
    assert store.read("x", 100) == store.read("y", 100) == data
    buffer = bytearray(50)
    store.read_into("x", 25, memoryview(buffer))
    assert buffer == data[25:75]


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.EACCES, "permissions"), (errno.EMFILE, "ulimit"), (errno.ESTALE, "mount"), (9999, "")]
)
def test_read_errors_are_typed(store, monkeypatch, code, remedy):
    store.write("x", b"1")

    def refuse(*_, **__):
        raise OSError(code, "told so")

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "stat", refuse)
    for call in (lambda: store.read("x", 1), lambda: store.read_into("x", 0, memoryview(bytearray(1)))):
        with pytest.raises(StorageError, match=f"told so.*{remedy}") as caught:
            call()
        assert caught.value.errno == code
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), StorageError)
    with pytest.raises(StorageError):
        store.size("x")


def test_files_follow_the_umask(store, tmp_path):
    old = os.umask(0o027)
    try:
        store.write("w", b"")
        store.create("c", b"")
        with store.open_object("s") as writer:
            writer.commit()
    finally:
        os.umask(old)
    for name in "wcs":
        assert stat.S_IMODE((tmp_path / "ds" / name).stat().st_mode) == 0o640


def test_free_space_is_that_of_the_future_folder(tmp_path):
    free = open_store(tmp_path / "a" / "b").free_nbytes()
    status = os.statvfs(tmp_path)
    assert free == pytest.approx(status.f_bavail * status.f_frsize, rel=0.2)


ROUNDS, PROCESSES = 60, 4


def _race(root, barrier, results, me):
    for round_ in range(ROUNDS):
        store = open_store(f"{root}/{round_}")
        barrier.wait(300)
        results.put((round_, me, store.create("zarr.json", b"%d" % me * 1000)))


def test_one_of_four_processes_creates(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(PROCESSES), context.Queue()
    processes = [context.Process(target=_race, args=(tmp_path, barrier, results, me)) for me in range(PROCESSES)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=300) for _ in range(ROUNDS * PROCESSES)]
    for process in processes:
        process.join(300)
    for round_ in range(ROUNDS):
        creators = [me for at, me, created in outcomes if at == round_ and created]
        assert len(creators) == 1
        folder = tmp_path / str(round_)
        assert [path.name for path in folder.iterdir()] == ["zarr.json"]
        assert (folder / "zarr.json").read_bytes() == b"%d" % creators[0] * 1000


def test_full_disk(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    (tmp_path / "ds").mkdir()
    store = open_store(tmp_path / "ds")
    store.write("before", b"1")
    writer = store.open_object("x")
    real = writer._fd
    writer._fd = os.open("/dev/full", os.O_WRONLY)  # the kernel itself says ENOSPC
    os.close(real)
    with pytest.raises(StorageError, match="No space left") as caught, writer:
        writer.write(b"data")
    assert caught.value.errno == errno.ENOSPC
    assert store.list("") == ["before"]


def test_missing_folder_can_not_be_synced(store, recorder):
    with pytest.raises(NotFoundError):
        store.sync(["nowhere"])
