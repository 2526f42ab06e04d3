"""`hsfmt convert --delete-source`: a file goes once its samples are committed and were read again, and never before."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import hsfmt as hsfmt_package
from hsfmt import layout
from hsfmt.cli.boards import LocalBoard
from hsfmt.cli.converting import converted_sources, deletion, rereading
from hsfmt.cli.converting.deletion import Containers, Removed, all_stamps, check_deletable, stamps
from hsfmt.cli.progress import Progress
from hsfmt.errors import CorruptionError, SourceError, StorageError, UsageError
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.sources.base import Source, SourceItem, SourceSample
from hsfmt.readers.sources.folder import Folder
from hsfmt.readers.sources.vllm import VllmSource
from hsfmt.storage.local import LocalStore
from hsfmt.writers.dataset_writer import DatasetWriter
from hsfmt.writers.sample_files import FileTensor, write_sample_file

LAYERS = ("--from", "vllm", "--layer-ids", "2,5")
ROW_NBYTES = 2 * 16 * 2


def connector_file(path: Path, n_tokens: int, seed: int, *, bad: bool = False) -> None:
    values = np.random.default_rng(seed).standard_normal((n_tokens, 2, 16), np.float32)
    states = values.astype(ml_dtypes.bfloat16)
    if bad:
        states[-1, -1, -1] = np.nan
    tensors = {
        "hidden_states": FileTensor("bfloat16", states.view(np.uint16)),
        "token_ids": FileTensor("int64", np.arange(n_tokens)),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_sample_file(path, tensors, {}, overwrite=True)


@pytest.fixture
def source(tmp_path) -> Path:
    """Ten files of 40 tokens in two folders, one with a lock beside it, and a stray."""
    folder = tmp_path / "source"
    for n in range(10):
        connector_file(folder / ("sub" if n % 2 else ".") / f"r{n}.safetensors", 40, n)
    (folder / "r0.safetensors.lock").touch()
    (folder / "notes.json").write_text("{}")
    return folder


@pytest.fixture
def whole(hsfmt, source, tmp_path) -> str:
    """Content digest of a conversion that deletes nothing."""
    report = hsfmt.json("convert", source, tmp_path / "whole", *LAYERS)
    return report["snapshot"]["content_digest"]


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("flags", [(), ("--workers", 2), ("--part-size", "5KiB")], ids=["one", "two", "parts"])
def test_files_go_and_samples_stay(hsfmt, source, whole, tmp_path, flags):
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--delete-source", *flags)
    assert report["snapshot"]["content_digest"] == whole
    assert files_of(source) == ["notes.json"]
    assert report["counts"]["sample"] == 10
    assert report["files"]["deleted"] == 11, "the lock goes with its file"
    assert report["files"]["total"] == sum(n for fate, n in report["files"].items() if fate != "total") == 12
    assert report["fates"]["notes.json"] == "stray"
    assert report["fates"]["sub/r3.safetensors"] == "deleted"
    assert hsfmt.json("verify", tmp_path / "d", "--level", "full")["ok"]
    assert (source / "sub").is_dir(), "folders stay"


def test_all_files_gone_is_no_error(hsfmt, source, whole, tmp_path):
    hsfmt("convert", source, tmp_path / "d", *LAYERS, "--delete-source")
    (source / "notes.json").unlink()
    assert files_of(source) == []
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--delete-source")
    assert report["snapshot"]["content_digest"] == whole
    assert len(report["deleted_before"]) == 10
    assert sum(report["counts"].values()) == 0
    text = hsfmt("convert", source, tmp_path / "d", *LAYERS, "--delete-source")
    assert "everything is converted" in text.stdout
    assert "10 samples" in text.stderr
    assert "neither in the dataset" not in text.stderr
    plain = hsfmt.json("convert", source, tmp_path / "d", *LAYERS)
    assert (plain["snapshot"]["content_digest"], len(plain["deleted_before"])) == (whole, 10)
    hsfmt("convert", source, tmp_path / "other", *LAYERS, "--delete-source", code=3)


def test_all_files_gone_is_held_to_what_the_user_says(hsfmt, source, tmp_path):
    hsfmt("convert", source, tmp_path / "d", *LAYERS, "--delete-source")
    hsfmt("convert", source, tmp_path / "d", "--layer-ids", "3,6", "--delete-source", code=2)
    hsfmt("convert", source, tmp_path / "d", *LAYERS, "--final-norm", "post", "--delete-source", code=2)
    hsfmt("convert", source, tmp_path / "d", *LAYERS, "--from", "pt", "--delete-source", code=3)


def test_files_that_others_removed_are_no_success(hsfmt, source, tmp_path, monkeypatch):
    stop_after(4, monkeypatch)
    hsfmt("convert", source, tmp_path / "d", *LAYERS, "--delete-source", "--part-size", "3KiB", code=130)
    monkeypatch.undo()
    for path in list(source.rglob("*.safetensors")):
        path.unlink()
    (source / "r0.safetensors.lock").unlink(missing_ok=True)
    result = hsfmt("convert", source, tmp_path / "d", *LAYERS, "--delete-source")
    assert "6 of them are neither in the dataset nor in the folder" in result.stderr


def stop_after(n: int, monkeypatch) -> None:
    real, calls = DatasetWriter.write, iter(range(n))

    def write(self, *args, **kwargs):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(DatasetWriter, "write", write)


@pytest.mark.parametrize("n", [0, 1, 4, 9])
def test_interrupted_and_resumed(hsfmt, source, whole, tmp_path, monkeypatch, n):
    with monkeypatch.context() as patch:
        stop_after(n, patch)
        hsfmt("convert", source, tmp_path / "d", *LAYERS, "--delete-source", "--part-size", "3KiB", code=130)
    gone = 10 - len(list(source.rglob("*.safetensors")))
    assert gone == n
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--delete-source")
    assert report["snapshot"]["content_digest"] == whole
    assert report["counts"]["sample"] == 10 - n
    assert len(report["deleted_before"]) == n
    assert report["counts"]["failed"] == report["counts"]["hole"] == 0
    assert files_of(source) == ["notes.json"]


def test_files_committed_before_are_read_again_and_deleted(hsfmt, source, whole, tmp_path):
    hsfmt("convert", source, tmp_path / "d", *LAYERS)
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--delete-source")
    assert report["counts"]["skipped"] == 10
    assert report["files"]["deleted"] == 11
    assert report["snapshot"]["content_digest"] == whole
    assert files_of(source) == ["notes.json"]


def test_files_committed_before_go_only_once_their_manifests_are_durable(hsfmt, source, tmp_path, monkeypatch):
    """Whoever committed them may have been killed before it had synced the name of its manifest."""
    hsfmt("convert", source, tmp_path / "d", *LAYERS)
    calls = []
    unlink, fsync = Path.unlink, os.fsync

    def unlinked(path, *args, **kwargs):
        calls.append(path.name)
        return unlink(path, *args, **kwargs)

    def synced(fd):
        calls.append(str(Path(f"/proc/self/fd/{fd}").readlink().relative_to(tmp_path)))
        return fsync(fd)

    monkeypatch.setattr(Path, "unlink", unlinked)
    monkeypatch.setattr(os, "fsync", synced)
    hsfmt("convert", source, tmp_path / "d", *LAYERS, "--delete-source")
    gone = [at for at, call in enumerate(calls) if call.endswith(".safetensors") and "/" not in call]
    assert len(gone) == 10
    (part,) = (path.name for path in (tmp_path / "d" / "parts").iterdir() if path.is_dir())
    folders = {"d/hsfmt/manifests", "d/hsfmt/index", f"d/parts/{part}", f"d/parts/{part}/hidden_states/c/0/0"}
    assert folders <= set(calls[: gone[0]])


def test_files_committed_before_are_deleted_and_the_command_is_given_again(hsfmt, source, whole, tmp_path, monkeypatch):
    """The parts say nothing of a deletion that came after them; the first run of it ends before its seal."""
    (source / "notes.json").unlink()
    hsfmt("convert", source, tmp_path / "d", *LAYERS, "--no-seal")

    def ends(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hsfmt.cli.converting.run._finish", ends)
        hsfmt("convert", source, tmp_path / "d", *LAYERS, "--delete-source", code=130)
    assert files_of(source) == []
    for _ in range(2):
        report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--delete-source")
        assert report["snapshot"]["content_digest"] == whole
    hsfmt("convert", source, tmp_path / "d", *LAYERS, code=3)


def test_an_emptied_folder_of_which_not_all_was_committed_is_no_success(hsfmt, source, tmp_path, monkeypatch):
    stop_after(4, monkeypatch)
    hsfmt("convert", source, tmp_path / "d", *LAYERS, "--part-size", "3KiB", code=130)
    monkeypatch.undo()
    shutil.rmtree(source)
    source.mkdir()
    hsfmt("convert", source, tmp_path / "d", *LAYERS, "--delete-source", code=3)
    # Samples of another folder make up for none.
    for n in range(10):
        connector_file(tmp_path / "other" / f"o{n}.safetensors", 40, 100 + n)
    hsfmt("convert", tmp_path / "other", tmp_path / "d", *LAYERS)
    hsfmt("convert", source, tmp_path / "d", *LAYERS, "--delete-source", code=3)


def test_a_file_that_is_another_now_stays(hsfmt, source, tmp_path):
    hsfmt("convert", source, tmp_path / "d", *LAYERS)
    old = (source / "r4.safetensors").stat()
    connector_file(source / "r4.safetensors", 40, 99)
    os.utime(source / "r4.safetensors", ns=(old.st_atime_ns, old.st_mtime_ns))
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--delete-source", "--on-bad", "hole", code=1)
    assert [conflict["id"] for conflict in report["conflicts"]] == ["r4"]
    assert files_of(source) == ["notes.json", "r4.safetensors"]


def test_holes_and_bad_files_stay(hsfmt, source, tmp_path):
    connector_file(source / "r2.safetensors", 3, 5, bad=True)
    (source / "sub" / "r3.safetensors").write_bytes(b"")
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--delete-source", "--on-bad", "hole")
    assert files_of(source) == ["notes.json", "r2.safetensors", "sub/r3.safetensors"]
    assert report["fates"]["r2.safetensors"] == report["fates"]["sub/r3.safetensors"] == "hole"
    # The holes are tried again although no good file is left that shows what the source means.
    (source / "r2.safetensors").unlink()
    again = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--delete-source", "--on-bad", "hole")
    assert again["counts"] == {"sample": 0, "skipped": 0, "hole": 1, "failed": 0, "not_reached": 0}
    stopped = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--delete-source", code=1)
    assert stopped["error"][0]["where"].startswith("sub/r3.safetensors")
    assert files_of(source) == ["notes.json", "sub/r3.safetensors"]


def test_a_bad_file_stops_and_keeps_the_rest(hsfmt, source, tmp_path):
    (source / "r4.safetensors").write_bytes(b"")
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--delete-source", code=1)
    left = [path for path in files_of(source) if path.endswith(".safetensors")]
    assert report["counts"]["sample"] + len(left) == 10
    assert "r4.safetensors" in left
    committed = {row["id"] for row in hsfmt.json("ls", tmp_path / "d")["samples"]}
    assert committed == {f"{'sub/' if n % 2 else ''}r{n}" for n in range(10)} - {path[:-12] for path in left}


def test_what_is_read_again_decides(hsfmt, source, tmp_path, monkeypatch):
    """A disk that returns other bytes than were written: nothing is deleted."""
    real = LocalStore.read_into

    def flipped(self, path, offset, buffer):
        real(self, path, offset, buffer)
        if path.endswith("/c/0/0/0"):
            buffer[len(buffer) // 2] ^= 1

    before = files_of(source)
    monkeypatch.setattr(LocalStore, "read_into", flipped)
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--delete-source", code=1)
    monkeypatch.undo()
    assert files_of(source) == before
    assert "the source's files were kept" in report["error"][0]["remedy"]
    assert report["files"]["deleted"] == 0


def test_the_digest_of_what_was_read_decides(hsfmt, source, tmp_path, monkeypatch):
    """A writer that stores another sample than it was given, with digests that fit: nothing is deleted."""
    real = DatasetWriter.write

    def other(self, sample_id, ids, states, *args, **kwargs):
        return real(self, sample_id, ids, states[::-1].copy(), *args, **kwargs)

    before = files_of(source)
    monkeypatch.setattr(DatasetWriter, "write", other)
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--delete-source", code=1)
    assert files_of(source) == before
    assert "as converted" in report["error"][0]["expected"]


def test_the_files_are_dropped_from_memory_before_they_are_read(hsfmt, source, tmp_path, monkeypatch):
    dropped, real = [], os.posix_fadvise
    monkeypatch.setattr(
        rereading.os, "posix_fadvise", lambda fd, *a: dropped.append(os.fstat(fd).st_ino) or real(fd, *a)
    )
    hsfmt("convert", source, tmp_path / "d", *LAYERS, "--delete-source")
    shards = {path.stat().st_ino for path in (tmp_path / "d" / "parts").rglob("c/**/*") if path.is_file()}
    assert shards <= set(dropped)


def test_a_file_that_changes_meanwhile_stays(hsfmt, source, tmp_path, monkeypatch):
    real = DatasetWriter.write

    def write(self, sample_id, *args, **kwargs):
        if sample_id == "r6":
            os.utime(source / "r6.safetensors", (1, 1))
        return real(self, sample_id, *args, **kwargs)

    monkeypatch.setattr(DatasetWriter, "write", write)
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--delete-source")
    assert files_of(source) == ["notes.json", "r6.safetensors"]
    assert any("changed after they were read" in text for text in report["warnings"])
    assert report["fates"]["r6.safetensors"] == "sample"


@pytest.mark.parametrize("what", ["file", "folder"])
def test_links_are_refused(hsfmt, source, tmp_path, what):
    elsewhere = tmp_path / "elsewhere"
    connector_file(elsewhere / "x.safetensors", 4, 3)
    target = elsewhere if what == "folder" else elsewhere / "x.safetensors"
    (source / ("linked" if what == "folder" else "x.safetensors")).symlink_to(target)
    before = files_of(source)
    result = hsfmt("convert", source, tmp_path / "d", *LAYERS, "--delete-source", code=2)
    assert "a link" in result.stderr
    assert files_of(source) == before
    assert not (tmp_path / "d").exists()


def test_a_folder_that_can_not_be_written_to_is_refused(hsfmt, source, tmp_path, monkeypatch):
    monkeypatch.setattr(deletion.os, "access", lambda path, mode: not str(path).endswith("sub"))
    result = hsfmt("convert", source, tmp_path / "d", *LAYERS, "--delete-source", code=2)
    assert "sub: expected a folder that files can be deleted from" in result.stderr
    assert not (tmp_path / "d").exists()


def test_a_remote_dataset_is_read_again_too(hsfmt, source, whole):
    report = hsfmt.json("convert", source, "memory://deleting", *LAYERS, "--delete-source")
    assert report["snapshot"]["content_digest"] == whole
    assert files_of(source) == ["notes.json"]


def test_dry_run_deletes_nothing(hsfmt, source, tmp_path):
    before = files_of(source)
    result = hsfmt("convert", source, tmp_path / "d", *LAYERS, "--delete-source", "--dry-run")
    assert "would be" in result.stdout
    assert files_of(source) == before


def test_peak_disk(hsfmt, tmp_path, monkeypatch):
    """At no moment are there more than two shards beside the source's size: looked at before each call that frees."""
    source, dataset = tmp_path / "source", tmp_path / "d"
    for n in range(64):
        connector_file(source / f"r{n}.safetensors", 512, n)
    start, shard, peak = used(source), 4 * 512 * ROW_NBYTES, 0
    real_unlink, real_link = os.unlink, os.link

    def look():
        nonlocal peak
        peak = max(peak, used(source) + used(dataset))

    monkeypatch.setattr(os, "unlink", lambda *a, **k: (look(), real_unlink(*a, **k))[1])
    monkeypatch.setattr(os, "link", lambda *a, **k: (look(), real_link(*a, **k))[1])
    flags = ("--delete-source", "--part-size", f"{shard}B", "--codec", "none")
    hsfmt("convert", source, dataset, *LAYERS, *flags)
    monkeypatch.undo()
    n_parts = sum(path.is_dir() for path in (dataset / "parts").iterdir())
    assert n_parts >= 16
    # What the small files of the parts take is no shard, but grows with the parts.
    small = sum(
        path.stat().st_size for path in dataset.rglob("*") if path.is_file() and "hidden_states/c" not in str(path)
    )
    assert start < peak <= start + 2 * shard + small
    # Without the option the same needs the source's size once more.
    assert used(dataset) > 8 * shard


def test_room_is_asked_for_two_shards_not_for_all(hsfmt, source, tmp_path, monkeypatch):
    monkeypatch.setattr(LocalStore, "free_nbytes", lambda _: 20_000)
    hsfmt("convert", source, tmp_path / "d", *LAYERS, code=3)
    hsfmt("convert", source, tmp_path / "d", *LAYERS, "--delete-source", "--part-size", "8KiB")
    assert files_of(source) == ["notes.json"]


def test_another_disk_needs_room_for_all(hsfmt, source, tmp_path, monkeypatch):
    from hsfmt.cli.converting import work as conversion_work

    monkeypatch.setattr(LocalStore, "free_nbytes", lambda _: 20_000)
    monkeypatch.setattr(conversion_work, "_device", lambda folder: folder)
    hsfmt("convert", source, tmp_path / "d", *LAYERS, "--delete-source", "--part-size", "8KiB", code=3)


def test_the_real_folder(hsfmt, vllm, tmp_path):
    source = Path(shutil.copytree(vllm, tmp_path / "source"))
    kept = hsfmt.json("convert", vllm, tmp_path / "kept", "--layer-ids", "2,4,5,8")
    report = hsfmt.json("convert", source, tmp_path / "d", "--layer-ids", "2,4,5,8", "--delete-source")
    assert report["snapshot"]["content_digest"] == kept["snapshot"]["content_digest"]
    assert files_of(source) == ["manifest_from_request_outputs.json"], "support files stay"
    # The request outputs still name the files: they are known to be converted, not missing.
    again = hsfmt.json("convert", source, tmp_path / "d", "--layer-ids", "2,4,5,8", "--delete-source")
    assert again["counts"] == {"sample": 0, "skipped": 8, "hole": 0, "failed": 0, "not_reached": 0}
    assert again["snapshot"]["content_digest"] == kept["snapshot"]["content_digest"]


class Shelf(Source):
    """A source whose samples lie in files of three: `a.bin`, `b.bin`, with a small file of its own each."""

    name = "shelf"
    summary = "for tests"

    def _list(self, folder):
        for index in range(6):
            shelf = "ab"[index // 3] + ".bin"
            self.items.append(SourceItem(f"{shelf}[{index % 3}]", index, f"s{index}", (), 1, shared=(shelf,)))

    def _look(self, item):
        raise NotImplementedError

    def _load(self, item):
        return SourceSample(item.sample_id, np.arange(3), np.zeros((3, 1, 1), np.float32))


@pytest.fixture
def shelf(tmp_path) -> Shelf:
    for name in "ab":
        (tmp_path / f"{name}.bin").write_bytes(b"data")
    return Shelf(Folder(tmp_path, (), (), ()), None)


def test_a_container_goes_with_its_last_sample(shelf):
    removed, containers = Removed(), Containers(shelf, all_stamps(shelf.root))
    containers.settle([0, 1, 3, 4], removed)
    assert removed.deleted == []
    containers.settle([1], removed)
    assert removed.deleted == []
    containers.settle([2], removed)
    assert removed.deleted == ["a.bin"]
    assert not (shelf.root / "a.bin").exists()
    containers.settle([3, 4], removed)
    assert (shelf.root / "b.bin").exists()


def test_a_container_that_changed_stays(shelf):
    removed, containers = Removed(), Containers(shelf, all_stamps(shelf.root))
    (shelf.root / "a.bin").write_bytes(b"other data")
    containers.settle([0, 1, 2], removed)
    assert (removed.deleted, removed.changed) == ([], ["a.bin"])
    assert (shelf.root / "a.bin").exists()


def test_linked_containers_are_refused(shelf):
    (shelf.root / "b.bin").rename(shelf.root / "c.bin")
    (shelf.root / "b.bin").symlink_to(shelf.root / "c.bin")
    check_deletable(shelf, [0, 1, 2])
    with pytest.raises(UsageError, match=r"b\.bin"):
        check_deletable(shelf, [3])


def test_a_file_that_can_not_be_deleted_says_so(tmp_path, monkeypatch):
    (tmp_path / "x").touch()
    monkeypatch.setattr(Path, "unlink", lambda _: (_ for _ in ()).throw(PermissionError(1, "Operation not permitted")))
    with pytest.raises(StorageError, match="Operation not permitted"):
        Removed().remove(tmp_path, ["x"], stamps(tmp_path, ["x"]))


def test_the_data_file_goes_last(tmp_path, monkeypatch):
    for name in ("x", "x.lock"):
        (tmp_path / name).touch()
    removed = Removed()
    removed.remove(tmp_path, ["x", "x.lock"], stamps(tmp_path, ["x", "x.lock"]))
    assert removed.deleted == ["x.lock", "x"]


def test_a_sample_that_no_part_holds(hsfmt, source, tmp_path):
    hsfmt("convert", source, tmp_path / "d", *LAYERS)
    reader = SampleReader(tmp_path / "d")
    part = reader.locate(0)[0].name
    store = LocalStore(tmp_path / "d")
    batch = deletion.Batch(Shelf(Folder(source, (), (), ()), None))
    batch.take(0, {"never": (b"0" * 16, b"0" * 16)}, [part])
    with pytest.raises(CorruptionError, match="never"):
        batch.delete(store, reader.header, Removed())


def test_boards_without_workers_wait_for_nothing():
    with LocalBoard(Progress("x")).room(1 << 60):
        assert LocalBoard(Progress("x")).order() == 0


@pytest.mark.parametrize(("workers", "sent"), [(1, signal.SIGINT), (2, signal.SIGTERM)])
def test_an_end_on_the_way_loses_nothing(hsfmt, process, tmp_path, workers, sent):
    source, dataset = tmp_path / "source", tmp_path / "d"
    connector_file(source / "0.safetensors", 32768, 0)
    for n in range(1, 120):
        os.link(source / "0.safetensors", source / f"{n}.safetensors")
    flags = ("--workers", workers, "--part-size", "12MiB", "--delete-source", "--json")
    running = process("convert", source, dataset, *LAYERS, *flags, start_new_session=True)
    deadline = time.monotonic() + 300
    while len(files_of(source)) == 120 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(running.pid, sent)
    stdout, stderr = running.communicate(timeout=300)
    assert running.returncode == (130 if sent == signal.SIGINT else 143), stderr
    assert "Traceback" not in stderr
    report, left = json.loads(stdout), files_of(source)
    assert report["files"]["deleted"] == 120 - len(left) > 0
    assert {path for path, fate in report["fates"].items() if fate != "deleted"} == set(left)
    live = {row["id"] for row in hsfmt.json("ls", dataset, "--snapshot", "live")["samples"]}
    assert {str(n) for n in range(120)} - {path.removesuffix(".safetensors") for path in left} <= live
    again = hsfmt.json("convert", source, dataset, *LAYERS, "--delete-source", "--part-size", "12MiB")
    assert again["snapshot"]["counts"]["samples"] == 120
    assert files_of(source) == []


def test_containers_that_go_together(shelf, monkeypatch):
    monkeypatch.setattr(Shelf, "needs_all_files", True)
    removed, containers = Removed(), Containers(shelf, all_stamps(shelf.root))
    containers.settle([0, 1, 2, 3, 4], removed)
    assert removed.deleted == []
    containers.settle([5], removed)
    assert sorted(removed.deleted) == ["a.bin", "b.bin"]


def test_a_folder_that_was_being_deleted_as_a_whole(hsfmt, data_dir, tmp_path):
    """Killed between two files that go together."""
    folder = data_dir / "saelens" / "post_float32"
    source = Path(shutil.copytree(folder, tmp_path / "source"))
    whole = hsfmt.json("convert", source, tmp_path / "d", "--delete-source")
    shutil.copy(folder / "data-00001-of-00002.arrow", source)
    again = hsfmt.json("convert", source, tmp_path / "d", "--delete-source")
    assert again["snapshot"]["content_digest"] == whole["snapshot"]["content_digest"]
    assert again["counts"]["hole"] == 0, "what the other file held is known"
    assert files_of(source) == ["dataset_info.json", "state.json"]
    assert len(again["deleted_before"]) == 8


def test_a_file_that_was_never_copied_is_a_failure(hsfmt, data_dir, tmp_path):
    source = Path(shutil.copytree(data_dir / "saelens" / "post_float32", tmp_path / "source"))
    (source / "data-00000-of-00002.arrow").unlink()
    for flags in ([], ["--delete-source"]):
        result = hsfmt("convert", source, tmp_path / "d", *flags, code=1)
        assert "data-00000-of-00002.arrow: expected the Arrow file that state.json names" in result.stderr
    assert (source / "data-00001-of-00002.arrow").is_file()
    assert hsfmt.json("convert", source, tmp_path / "d", "--on-bad", "hole")["counts"]["hole"] == 1


def test_a_folder_that_can_not_be_listed_any_more(hsfmt, source, whole, tmp_path, monkeypatch):
    """A source that needs all of its files: once all samples are committed, what is left of it is no failure."""
    hsfmt("convert", source, tmp_path / "d", *LAYERS, "--delete-source")
    connector_file(source / "r1.safetensors", 4, 1)

    def unlisted(*_):
        raise SourceError.at("state.json", expected="its files", got="others")

    monkeypatch.setattr(VllmSource, "_list", unlisted)
    assert "state.json" in hsfmt("convert", source, tmp_path / "d", *LAYERS, "--delete-source", code=1).stderr
    monkeypatch.setattr(VllmSource, "needs_all_files", True)
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--delete-source")
    assert report["snapshot"]["content_digest"] == whole
    assert report["fates"]["r1.safetensors"] == "stray"
    monkeypatch.setattr(converted_sources, "_samples", lambda _: {"r0", "r2"})
    assert "state.json" in hsfmt("convert", source, tmp_path / "d", *LAYERS, "--delete-source", code=1).stderr


def test_a_file_that_is_rewritten_with_its_size_and_time_stays(hsfmt, source, tmp_path, monkeypatch):
    path, real = source / "r2.safetensors", deletion.reread
    connector_file(tmp_path / "other.safetensors", 40, 99)
    other = (tmp_path / "other.safetensors").read_bytes()

    def slow(*args):
        found, status = real(*args), path.stat()
        assert len(other) == status.st_size
        path.write_bytes(other)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        return found

    monkeypatch.setattr(deletion, "reread", slow)
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--delete-source")
    assert path.read_bytes() == other
    assert files_of(source) == ["notes.json", "r2.safetensors"]
    assert any("1 file changed" in text and "r2.safetensors" in text for text in report["warnings"])


def test_a_container_that_changed_after_it_was_listed_stays(shelf):
    listed = all_stamps(shelf.root)
    (shelf.root / "a.bin").write_bytes(b"grew")
    (shelf.root / "b.bin").rename(shelf.root / "kept")
    (shelf.root / "b.bin").write_bytes(b"data")
    removed, containers = Removed(), Containers(shelf, listed)
    containers.settle(range(6), removed)
    assert removed.deleted == []
    assert sorted(removed.changed) == ["a.bin", "b.bin"]
    assert (shelf.root / "a.bin").read_bytes() == b"grew"


def test_a_container_that_was_not_there_when_the_folder_was_listed_stays(shelf):
    removed, containers = Removed(), Containers(shelf, {})
    containers.settle(range(6), removed)
    assert (removed.deleted, sorted(removed.changed)) == ([], ["a.bin", "b.bin"])


def test_stamps_are_of_all_files_before_they_are_listed(source):
    assert sorted(all_stamps(source)) == files_of(source)
    assert all_stamps(source) == stamps(source, files_of(source))
    (source / "link").symlink_to(source / "sub", target_is_directory=True)
    assert sorted(all_stamps(source)) == sorted([*files_of(source), "link"])
    assert all_stamps(source / "nothing") == {}


def test_links_to_one_file_go_all_of_them(hsfmt, tmp_path):
    connector_file(tmp_path / "source" / "a.safetensors", 5, 0)
    os.link(tmp_path / "source" / "a.safetensors", tmp_path / "source" / "b.safetensors")
    report = hsfmt.json("convert", tmp_path / "source", tmp_path / "d", *LAYERS, "--delete-source")
    assert report["files"]["deleted"] == 2
    assert files_of(tmp_path / "source") == []


@pytest.mark.parametrize("committed", [True, False])
def test_files_of_retracted_samples_stay(hsfmt, source, tmp_path, committed):
    hsfmt("convert", source, tmp_path / "d", *LAYERS)
    hsfmt_package.seal(str(tmp_path / "d"), retract=["r2", "sub/r3"])
    before = hsfmt.json("convert", source, tmp_path / "d", *LAYERS)
    assert before["counts"]["skipped"] == 10
    assert any("2 samples of this source retracted" in text and "r2, sub/r3" in text for text in before["warnings"])
    if not committed:
        for path in (tmp_path / "d" / layout.MANIFESTS).iterdir():
            path.unlink()
    report = hsfmt.json(
        "convert", source, tmp_path / "d", *LAYERS, "--delete-source", *(() if committed else ("--no-seal",))
    )
    assert files_of(source) == ["notes.json", "r2.safetensors", "sub/r3.safetensors"]
    assert report["files"]["deleted"] == 9
    assert any("their files are kept: r2, sub/r3" in text for text in report["warnings"])


@pytest.mark.parametrize("before", [True, False])
def test_a_file_that_another_conversion_deleted(hsfmt, source, tmp_path, monkeypatch, before):
    """It goes before it is read, or only after: then its sample is committed here too."""
    path, real = source / "r4.safetensors", Source.load

    def load(self, item, **how):
        sample = None if before else real(self, item, **how)
        if item.key == path.name:
            path.unlink()
        return sample or real(self, item, **how)

    monkeypatch.setattr(Source, "load", load)
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--delete-source", code=3 if before else 0)
    if before:
        (problem,) = report["error"]
        assert problem["where"] == "r4.safetensors"
        assert "another convert --delete-source" in problem["got"]
        assert "run this command again" in problem["remedy"]
    else:
        assert files_of(source) == ["notes.json"]
        assert not any("changed after" in text for text in report["warnings"])


def test_samples_that_two_conversions_committed_count_once(hsfmt, source, tmp_path):
    shutil.copytree(source, tmp_path / "kept")
    hsfmt("convert", source, tmp_path / "d", *LAYERS, "--delete-source")
    shutil.copytree(tmp_path / "kept", source, dirs_exist_ok=True)
    hsfmt("convert", source, tmp_path / "e", *LAYERS, "--delete-source", "--part-size", "5KiB")
    for folder in ("parts", "hsfmt/index", layout.MANIFESTS):
        shutil.copytree(tmp_path / "e" / folder, tmp_path / "d" / folder, dirs_exist_ok=True)
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS)
    assert report["snapshot"]["counts"]["shadowed"] == 10
    assert len(report["deleted_before"]) == 10
    assert any("the files of 10 samples were deleted" in text for text in report["warnings"])
