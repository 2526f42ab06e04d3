"""Every request to an object store may fail: once, from then on, or after it was done and only its answer was lost."""

import shutil
import threading

import conditions
import fsspec
import pytest
from conditions import digests
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from jobs import JOB, CommandError, command, connector_file, put

from hsfmt import seal
from hsfmt.errors import HsfmtError, StorageError
from hsfmt.storage import open_store, retries

URL = "faulty://bucket/d"
OTHERS = ("faulty://bucket/x", "faulty://bucket/y")
FAULTS = ("once", "from then on", "answer lost")


class FaultyFileSystem(MemoryFileSystem):
    """The k-th request fails."""

    protocol = "faulty"
    store: dict = {}  # noqa: RUF012 - of all instances, as a bucket is
    pseudo_dirs = [""]  # noqa: RUF012
    k, fault, seen, failed = None, "once", [], None
    counting = threading.Lock()  # documents are read by several threads

    @classmethod
    def met(cls, name, request):
        with cls.counting:
            cls.seen.append(name)
            failing = len(cls.seen) == cls.k or (cls.failed is not None and cls.fault == "from then on")
            if failing:
                cls.failed = cls.failed or name
        if not failing:
            return request()
        if cls.fault == "answer lost":
            request()
        raise ConnectionResetError(f"{name} was reset")

    def cat_file(self, *args, **kwargs):
        return self.met("get", lambda: super(FaultyFileSystem, self).cat_file(*args, **kwargs))

    def pipe_file(self, *args, **kwargs):
        return self.met("put", lambda: super(FaultyFileSystem, self).pipe_file(*args, **kwargs))

    def info(self, *args, **kwargs):
        return self.met("head", lambda: super(FaultyFileSystem, self).info(*args, **kwargs))

    def ls(self, *args, **kwargs):
        return self.met("list", lambda: super(FaultyFileSystem, self).ls(*args, **kwargs))

    def cp_file(self, *args, **kwargs):
        return self.met("copy", lambda: super(FaultyFileSystem, self).cp_file(*args, **kwargs))

    def rm_file(self, *args, **kwargs):
        return self.met("delete", lambda: super(FaultyFileSystem, self).rm_file(*args, **kwargs))

    def _open(self, path, mode="rb", **kwargs):
        if mode != "wb" or kwargs.get("data") is not None:
            return super()._open(path, mode, **kwargs)
        file = Upload(self, self._strip_protocol(path))
        file.mode = mode
        return file


class Upload(MemoryFile):
    """Visible once it is closed."""

    ended = False

    def close(self):
        if not self.ended:
            FaultyFileSystem.met("upload", self.commit)
            self.ended = True

    def discard(self):
        self.ended = True


@pytest.fixture(autouse=True)
def bucket(monkeypatch):
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    monkeypatch.setattr(retries, "pause_seconds", lambda attempts, at_least: 0.0)
    yield
    FaultyFileSystem.k = None
    FaultyFileSystem.store.clear()


class Job:
    """What is done to a dataset in the bucket: `before()`, once, and `step(acknowledged)`, until it ends."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder
        getattr(self, f"before_{name}", lambda: None)()
        self.store = {key: file.getvalue() for key, file in FaultyFileSystem.store.items()}
        self.folders = list(FaultyFileSystem.pseudo_dirs)
        self.owed = set(self.found())
        self.wanted = self.run(set())

    def found(self):
        there = {}
        for url in (URL, *OTHERS):
            if open_store(url).list(""):
                there |= digests(url, damaged=self.name == "repair")
        return there

    def again(self):
        """Go back to the state before."""
        files = FaultyFileSystem
        files.store.clear()
        files.pseudo_dirs[:] = self.folders
        for key, data in self.store.items():
            files.store[key] = MemoryFile(files(), key, data)
        shutil.rmtree(self.folder / "out", ignore_errors=True)

    def run(self, acknowledged):
        """Run it to its end; return what is there then."""
        getattr(self, self.name)(acknowledged)
        command("verify", URL, "--level", "full", "-q")
        sealed = seal(URL).snapshot.content_digest
        return sealed, {path.name: path.read_bytes() for path in (self.folder / "out").glob("*.safetensors")}

    def write(self, acknowledged):
        put(URL, range(JOB), every=3, acknowledged=acknowledged)

    def before_convert(self):
        for number in range(2):
            connector_file(self.folder / "source" / f"s{number}.safetensors", number)

    def convert(self, acknowledged):
        command("convert", self.folder / "source", URL, "--from", "vllm", "--layer-ids", "1,3", "--workers", "1")
        acknowledged |= {"s0", "s1"}

    def before_export(self):
        put(URL, range(2))
        seal(URL)

    def export(self, acknowledged):
        command("export", URL, self.folder / "out", "--to", "safetensors", "--workers", "1")

    def before_merge(self):
        for at, url in enumerate((URL, *OTHERS)):
            put(url, range(2 * at, 2 * at + 2))
            seal(url)

    def merge(self, acknowledged):
        command("merge", URL, *OTHERS)

    before_move = before_merge

    def move(self, acknowledged):
        # In a bucket nothing is left of an emptied one; that it never was there is an error.
        there = [url for url in OTHERS if open_store(url).list("")]
        if there:
            command("merge", URL, *there, "--move")
        assert not any(open_store(url).list("hsfmt/manifests") for url in OTHERS)

    def before_compact(self):
        put(URL, range(4), every=2)
        seal(URL)

    def compact(self, acknowledged):
        command("compact", URL, "-q")

    def before_gc(self):
        self.before_compact()
        self.compact(None)

    def gc(self, acknowledged):
        command("gc", URL, "--older-than", "0s", "--force", "--keep-snapshots", "1")

    def before_repair(self):
        put(URL, range(4), every=2, codec="none")
        seal(URL)
        key = next(key for key in FaultyFileSystem.store if key.endswith("hidden_states/c/0/0/0"))
        data = bytearray(FaultyFileSystem.store[key].getvalue())
        data[5] ^= 0x10
        FaultyFileSystem.store[key] = MemoryFile(FaultyFileSystem(), key, bytes(data))

    def repair(self, acknowledged):
        command("repair", URL, "-q", codes=(0, 1))


JOBS = ("write", "convert", "export", "merge", "move", "compact", "gc", "repair")


def disturbed(job, k, fault):
    """Run the job with a fault, and again without if it did not end; return what became of the first run."""
    files = FaultyFileSystem
    job.again()
    files.k, files.fault, files.seen, files.failed = k, fault, [], None
    acknowledged, error, found = set(), None, None
    try:
        found = job.run(acknowledged)
    except (HsfmtError, CommandError) as caught:
        error = caught
    files.k, files.failed, failed = None, None, files.failed
    if error is not None:
        assert isinstance(error, StorageError) or "expected the storage to work" in str(error), error
        there = job.found()
        assert acknowledged | job.owed <= set(there), (k, fault)
        found = job.run(acknowledged)
    assert found == job.wanted, (k, fault)
    there = job.found()
    assert acknowledged | job.owed <= set(there), (k, fault)
    assert there.items() <= conditions.EXPECTED.items(), (k, fault)
    return failed, error


@pytest.mark.parametrize(
    ("name", "fault", "step"),
    [
        *(("write", fault, 23) for fault in FAULTS),
        *((name, "answer lost", 97) for name in JOBS[1:]),
        *(pytest.param(name, fault, 1, marks=pytest.mark.deep) for name in JOBS for fault in FAULTS),
    ],
)
def test_requests_fail(monkeypatch, tmp_path, name, fault, step):
    """Every `step`-th one, and the last of each kind."""
    put(tmp_path / "whole", range(JOB))
    monkeypatch.setattr(conditions, "EXPECTED", digests(tmp_path / "whole"))
    job = Job(name, tmp_path)
    job.again()
    FaultyFileSystem.seen = []
    job.run(set())
    requests = FaultyFileSystem.seen
    last = {kind: k for k, kind in enumerate(requests, 1)}
    ended, failed = {}, []
    for k in sorted({*range(1, len(requests), step), *last.values()}):
        kind, error = disturbed(job, k, fault)
        failed += [kind] if kind else []
        if error is not None:
            ended.setdefault(kind, []).append(str(error))
    assert len(failed) >= len(requests) // step - 2
    assert set(failed) >= {"get", "head", "list"}
    if fault == "from then on":
        assert sum(map(len, ended.values())) == len(failed), "no run can end well"
    else:
        # An upload that was streamed is no request that can be repeated here: drivers do that.
        assert set(ended) <= {"upload"}, ended


def test_the_size_of_an_upload_is_asked_for_again(monkeypatch):
    """An answer that is lost costs a request, not the part."""
    store = open_store(URL)
    writer = store.open_object("parts/x")
    writer.write(b"data")
    FaultyFileSystem.seen, FaultyFileSystem.fault, FaultyFileSystem.failed = [], "once", None
    FaultyFileSystem.k = 2  # close, then info
    writer.commit()
    assert FaultyFileSystem.failed == "head"
    assert store.read("parts/x", 10) == b"data"
