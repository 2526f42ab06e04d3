"""The order of system calls that makes an object durable, what a failure of any of them leaves, and races."""

import errno
import multiprocessing
import os
import pickle
import stat
from pathlib import Path

import pytest

from hsfmt.errors import NotFoundError, StorageError
from hsfmt.storage import open_store


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


def test_create_without_hard_links_removes_what_it_could_not_finish(store, recorder):
    recorder.fail["link"] = errno.EPERM
    store.sync([""])
    recorder.events.clear()
    real, calls = os.write, []

    def second_write_fails(fd, data):
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", second_write_fails)
        with pytest.raises(StorageError):
            store.create("x", b"1")
    assert store.list("") == []


def test_link_that_nfs_reports_twice_is_ours(store, recorder, monkeypatch):
    real = os.link

    def retransmitted(source, target):
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", retransmitted)
    assert store.create("x", b"1") is True


def test_short_writes_and_reads_are_continued(store, monkeypatch):
    real_write, real_preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:3]))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real_preadv(fd, [buffers[0][:3]], offset))
    data = bytes(range(100))
    store.write("x", data)
    with store.open_object("y") as writer:
        writer.write(data)
        writer.commit()
    assert store.read("x", 100) == store.read("y", 100) == data


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
        barrier.wait(60)
        results.put((round_, me, store.create("zarr.json", b"%d" % me * 1000)))


def test_one_of_four_processes_creates(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(PROCESSES), context.Queue()
    processes = [context.Process(target=_race, args=(tmp_path, barrier, results, me)) for me in range(PROCESSES)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=120) for _ in range(ROUNDS * PROCESSES)]
    for process in processes:
        process.join(60)
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
