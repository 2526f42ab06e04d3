"""`transfer` between folders: only what differs, nothing lost, and refusals before anything is written."""

import json
import os
import threading

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from gc_merge_kills import supersede, write
from repair_cases import contents

from hsfmt import compact, layout, seal, transfer
from hsfmt.catalog import read_pointer
from hsfmt.cli.main import main
from hsfmt.errors import CorruptionError, HeaderMismatchError, NotFoundError, StorageError, UsageError
from hsfmt.maintenance import part_copies
from hsfmt.maintenance.collect import collect
from hsfmt.maintenance.hub_limits import check_hub_limits
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store
from hsfmt.storage.copying import BLOCK_NBYTES, WINDOW_NBYTES, blocks_in_order
from hsfmt.storage.local import LocalStore


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def source(tmp_path):
    url = tmp_path / "source"
    write(url, ["a", "b"], "p-one")
    write(url, ["c"], "p-two")
    seal(url, retract=["b"], attachments={"d2t": np.arange(4)})
    return url


def files(url):
    return {str(path.relative_to(url)): path.read_bytes() for path in sorted(url.rglob("*")) if path.is_file()}


def current(url):
    """What lies there but for former snapshots and attachments."""
    fingerprint = read_pointer(open_store(url)).fingerprint.rpartition(":")[2]
    return {
        name: data
        for name, data in files(url).items()
        if not name.startswith((f"{layout.SNAPSHOTS}/", f"{layout.ATTACHMENTS}/")) or fingerprint in name
    }


def test_the_destination_is_the_same_dataset(tmp_path, source):
    report = transfer(source, tmp_path / "d")
    assert current(tmp_path / "d") == current(source)
    assert contents(tmp_path / "d") == contents(source)
    assert verify(str(tmp_path / "d"), level="full").ok
    assert (report.parts, report.present, report.changed) == (("p-one", "p-two"), (), True)
    assert report.copied_nbytes == report.missing_nbytes > 0 == report.present_nbytes
    assert report.server_copied_nbytes == report.read_back_nbytes == 0
    for name in files(tmp_path / "d"):
        assert (tmp_path / "d" / name).stat().st_nlink == 1, "a copy of its own"


def test_only_what_differs_is_copied(tmp_path, source):
    transfer(source, tmp_path / "d")
    before = {name: (tmp_path / "d" / name).stat().st_mtime_ns for name in files(tmp_path / "d")}
    report = transfer(source, tmp_path / "d")
    assert (report.files, report.parts, report.changed, report.copied_nbytes) == (0, (), False, 0)
    assert {name: (tmp_path / "d" / name).stat().st_mtime_ns for name in files(tmp_path / "d")} == before
    write(source, ["e"], "p-three")
    report = transfer(source, tmp_path / "d")
    assert report.parts == ("p-three",)
    assert report.present == ("p-one", "p-two")
    touched = {name for name in files(tmp_path / "d") if (tmp_path / "d" / name).stat().st_mtime_ns != before.get(name)}
    assert all("p-three" in name or name.startswith("hsfmt/") for name in touched)
    assert not any("p-one" in name for name in touched)
    assert current(tmp_path / "d") == current(source)


def test_dry_run_writes_nothing(tmp_path, source):
    report = transfer(source, tmp_path / "d", dry_run=True)
    assert not (tmp_path / "d").exists()
    assert (report.dry_run, report.changed, report.parts) == (True, True, ("p-one", "p-two"))
    assert transfer(source, tmp_path / "d").copied_nbytes == report.missing_nbytes
    before = files(tmp_path / "d")
    write(source, ["e"], "p-three")
    assert transfer(source, tmp_path / "d", dry_run=True).parts == ("p-three",)
    assert files(tmp_path / "d") == before


def test_a_part_that_was_copied_in_part_goes_on(tmp_path, source):
    transfer(source, tmp_path / "whole")
    (tmp_path / "d").mkdir()
    some = [name for name in files(source) if "p-one" in name and "manifests" not in name][::2]
    for name in some:
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_bytes((source / name).read_bytes())
    (tmp_path / "d" / some[0]).write_bytes(b"cut")
    report = transfer(source, tmp_path / "d")
    assert report.present_nbytes == sum((source / name).stat().st_size for name in some[1:]) > 0
    assert current(tmp_path / "d") == current(source)


def test_an_older_snapshot_by_its_fingerprint(tmp_path, source):
    first = read_pointer(open_store(source)).fingerprint
    was = contents(source)
    write(source, ["e"], "p-three")
    report = transfer(source, tmp_path / "d", snapshot=first)
    assert report.fingerprint == first == read_pointer(open_store(tmp_path / "d")).fingerprint
    assert contents(tmp_path / "d") == was
    assert verify(str(tmp_path / "d"), level="full").ok
    assert transfer(source, tmp_path / "d").parts == ("p-three",)
    with pytest.raises(UsageError, match="p-three"):
        transfer(source, tmp_path / "d", snapshot=first)
    with pytest.raises(NotFoundError):
        transfer(source, tmp_path / "e", snapshot="xxh3_128:" + "0" * 32)
    with pytest.raises(UsageError, match="live"):
        transfer(source, tmp_path / "e", snapshot="live")
    assert not (tmp_path / "e").exists()


def test_parts_of_nothing_but_holes_come_along(tmp_path, source):
    from hsfmt import DatasetWriter

    with DatasetWriter(
        source, layers=[1, 2], hidden_size=8, final_norm="pre", codec="none", part_names=lambda: "p-holes"
    ) as writer:
        writer.hole("lost", "out of memory")
    assert transfer(source, tmp_path / "d").parts == ("p-holes", "p-one", "p-two")
    assert current(tmp_path / "d") == current(source)
    assert transfer(source, tmp_path / "d", verify="full").files == 0


def test_parts_that_are_newer_than_the_seal_stay_behind(tmp_path, source):
    write(source, ["e"], "p-three", seal=False)
    assert transfer(source, tmp_path / "d").parts == ("p-one", "p-two")
    write(tmp_path / "unsealed", ["e"], "p-four", seal=False)
    with pytest.raises(NotFoundError, match="hsfmt seal"):
        transfer(tmp_path / "unsealed", tmp_path / "e")
    assert not (tmp_path / "e").exists()


def refused(source, destination, match, error=UsageError):
    before = files(destination)
    with pytest.raises(error, match=match) as caught:
        transfer(source, destination)
    assert files(destination) == before
    return str(caught.value)


def test_a_different_dataset_is_refused(tmp_path, source):
    from hsfmt import DatasetWriter

    with DatasetWriter(tmp_path / "d", layers=[1, 2], hidden_size=8, final_norm="post", codec="none") as writer:
        writer.write("x", np.arange(3), np.ones((3, 2, 8), ml_dtypes.bfloat16))
    refused(source, tmp_path / "d", "final_norm", HeaderMismatchError)
    with DatasetWriter(
        tmp_path / "e", layers=[1, 2], hidden_size=8, final_norm="pre", codec="none", model="other/model"
    ) as writer:
        writer.write("x", np.arange(3), np.ones((3, 2, 8), ml_dtypes.bfloat16))
    refused(source, tmp_path / "e", "other/model|header", HeaderMismatchError)


def test_a_destination_with_samples_of_its_own_is_refused(tmp_path, source):
    write(tmp_path / "d", ["z"], "p-own")
    text = refused(source, tmp_path / "d", "p-own")
    assert f"hsfmt merge {tmp_path / 'd'} {source}" in text
    transfer(source, tmp_path / "e")
    write(tmp_path / "e", ["z"], "p-own")
    refused(source, tmp_path / "e", "p-own")
    write(tmp_path / "f", ["a"], "p-one", value=2)
    refused(source, tmp_path / "f", "another content: p-one")
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "holiday.jpg").write_bytes(b"x")
    refused(source, tmp_path / "g", "holiday.jpg")


def test_what_was_retracted_or_attached_there_is_not_undone(tmp_path, source):
    transfer(source, tmp_path / "d")
    seal(tmp_path / "d", retract=["c"])
    text = refused(source, tmp_path / "d", "retracted in the source too")
    assert "c" in text.partition("sample(s): ")[2]
    seal(source, retract=["c"])
    transfer(source, tmp_path / "d")
    assert contents(tmp_path / "d") == contents(source)
    seal(tmp_path / "d", attachments={"t2d": np.arange(3)})
    refused(source, tmp_path / "d", "t2d.npy")
    seal(source, attachments={"t2d": np.arange(3)})
    transfer(source, tmp_path / "d")
    assert current(tmp_path / "d").keys() == current(source).keys()


def test_compacted_sources_supersede_what_is_there(tmp_path, source):
    transfer(source, tmp_path / "d")
    compact(source)
    seal(source)
    report = transfer(source, tmp_path / "d")
    assert len(report.parts) == 1
    assert contents(tmp_path / "d") == contents(source)
    seal(tmp_path / "d")
    assert contents(tmp_path / "d") == contents(source), "what was superseded is not served again"


def test_a_chain_of_superseded_parts_comes_along(tmp_path, source):
    transfer(source, tmp_path / "d")
    supersede(source, "p-one", "p-mid")
    supersede(source, "p-mid", "p-new")
    seal(source)
    report = transfer(source, tmp_path / "d")
    assert report.parts == ("p-mid", "p-new")
    seal(tmp_path / "d")
    assert contents(tmp_path / "d") == contents(source)


def test_a_chain_that_the_source_has_lost_is_refused(tmp_path, source):
    from datetime import timedelta

    transfer(source, tmp_path / "d")
    supersede(source, "p-one", "p-mid")
    supersede(source, "p-mid", "p-new")
    seal(source)
    collect(source, older_than=timedelta(0), force=True, keep_snapshots=1)
    assert not (source / "hsfmt/manifests/p-mid.json").exists()
    refused(source, tmp_path / "d", "p-one")


def test_the_source_itself_is_refused(tmp_path, source):
    for destination in (source, source / "inner", tmp_path, tmp_path / "source" / ".." / "source"):
        with pytest.raises(UsageError, match="beside the source"):
            transfer(source, destination)
    for settings in ({"verify": "most"}, {"connections": 0}, {"connections": 1000}):
        with pytest.raises(UsageError):
            transfer(source, tmp_path / "d", **settings)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
def test_a_damaged_source_commits_nothing_wrong(tmp_path, source, damage):
    shard = next(path for path in (source / "parts/p-two/hidden_states/c").rglob("*") if path.is_file())
    data = shard.read_bytes()
    if damage == "gone":
        shard.unlink()
    else:
        shard.write_bytes(data[:-1] if damage == "short" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises((CorruptionError, NotFoundError), match="p-two"):
        transfer(source, tmp_path / "d")
    assert not (tmp_path / "d/hsfmt/manifests/p-two.json").exists()
    assert read_pointer(open_store(tmp_path / "d")) is None
    shard.write_bytes(data)
    assert "p-two" in transfer(source, tmp_path / "d").parts
    assert current(tmp_path / "d") == current(source)


def test_what_comes_wrong_once_is_read_again(tmp_path, source):
    class Flaky(LocalStore):
        failed = 0

        def read_into(self, path, offset, buffer):
            super().read_into(path, offset, buffer)
            if "p-two/hidden_states/c" in path and not Flaky.failed:
                Flaky.failed += 1
                buffer[0] ^= 1

    transfer(Flaky(source), tmp_path / "d")
    assert Flaky.failed == 1
    assert current(tmp_path / "d") == current(source)


def test_full_reads_back_and_repairs_what_is_there(tmp_path, source):
    transfer(source, tmp_path / "d")
    shard = next(path for path in (tmp_path / "d/parts/p-two/hidden_states/c").rglob("*") if path.is_file())
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert transfer(source, tmp_path / "d").copied_nbytes == 0, "quick compares sizes of what is there"
    report = transfer(source, tmp_path / "d", verify="full")
    assert (report.rewritten, report.copied_nbytes) == (1, len(data))
    assert report.read_back_nbytes >= report.present_nbytes
    assert shard.read_bytes() == data
    shard.unlink()
    report = transfer(source, tmp_path / "d")
    assert (report.restored, report.parts, report.copied_nbytes) == (("p-two",), (), len(data))
    assert current(tmp_path / "d") == current(source)


def test_a_storage_that_does_not_keep_what_is_written_is_found_out(tmp_path, source):
    class Forgetful(LocalStore):
        def read_into(self, path, offset, buffer):
            super().read_into(path, offset, buffer)
            if "p-two/hidden_states/c" in path:
                buffer[0] ^= 1

    with pytest.raises(CorruptionError, match="does not keep"):
        transfer(source, Forgetful(tmp_path / "d"), verify="full")
    assert not (tmp_path / "d/hsfmt/manifests/p-two.json").exists()


def test_a_seal_meanwhile_is_not_overwritten(tmp_path, source):
    transfer(source, tmp_path / "d")
    write(source, ["e"], "p-three")

    def sealed_meanwhile(done, total, part):
        if not sealed:
            sealed.append(seal(tmp_path / "d", retract=["c"]).snapshot.fingerprint)

    sealed = []
    with pytest.raises(StorageError, match="run it again"):
        transfer(source, tmp_path / "d", progress=sealed_meanwhile)
    assert read_pointer(open_store(tmp_path / "d")).fingerprint == sealed[0]
    refused(source, tmp_path / "d", "retracted in the source too")


def test_an_interruption_ends_it_soon_and_loses_nothing(tmp_path, source):
    class Enough(KeyboardInterrupt):
        pass

    def stop(done, total, part):
        raise Enough

    with pytest.raises(Enough):
        transfer(source, tmp_path / "d", progress=stop)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("hsfmt-copy", "hsfmt-transfer"))]
    assert not list((tmp_path / "d/hsfmt").glob("manifests/*.json"))
    transfer(source, tmp_path / "d")
    assert current(tmp_path / "d") == current(source)


def test_no_space_is_said_before(tmp_path, source, monkeypatch):
    monkeypatch.setattr(LocalStore, "free_nbytes", lambda self: 1000)
    with pytest.raises(UsageError, match="free space"):
        transfer(source, tmp_path / "d")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK_NBYTES, WINDOW_NBYTES, WINDOW_NBYTES + 1, 3 * WINDOW_NBYTES - 5])
def test_blocks_come_in_order_whatever_order_they_arrive_in(nbytes):
    class Shuffled:
        most = held = 0

        def read_each(self, window):
            Shuffled.held += sum(n for _, _, n in window)
            Shuffled.most = max(Shuffled.most, Shuffled.held)
            return _Arrivals(window)

    class _Arrivals:
        def __init__(self, window):
            self.window = list(enumerate(window))[::-1]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            Shuffled.held -= sum(n for _, (_, _, n) in self.window)
            self.window = []

        def __iter__(self):
            for number, (_, offset, n) in self.window:
                yield number, offset.to_bytes(8) + bytes(n - 8) if n >= 8 else bytes(n)

    found = list(blocks_in_order(Shuffled(), "x", nbytes))
    assert sum(map(len, found)) == nbytes
    assert [int.from_bytes(block[:8]) for block in found if len(block) >= 8] == [
        at for at in range(0, nbytes, BLOCK_NBYTES) if min(BLOCK_NBYTES, nbytes - at) >= 8
    ]
    assert Shuffled.most <= 2 * WINDOW_NBYTES


def test_the_hub_gets_no_more_files_than_it_takes():
    assert check_hub_limits("s3://b/d", [f"a/{i}" for i in range(200_000)]) == []
    assert check_hub_limits("hf://datasets/o/n", ["a/b/c", "d"]) == []
    with pytest.raises(UsageError, match=r"100,000 files in a repository.*hsfmt compact"):
        check_hub_limits("hf://datasets/o/n", [f"{i // 5000}/{i}" for i in range(100_000)])
    with pytest.raises(UsageError, match="entries in the folder a/b, as"):
        check_hub_limits("hf://datasets/o/n", [f"a/b/{i}/0/0" for i in range(10_000)])
    warning, commits = check_hub_limits("hf://datasets/o/n", [f"a/{i}/0" for i in range(9_000)])
    assert "9,000 entries in the folder a" in warning
    assert "a commit of its own" in commits


def test_too_many_files_are_refused_before_anything_is_sent(source, monkeypatch):
    fs_url = "memory://hub-stand-in"
    monkeypatch.setattr("hsfmt.maintenance.hub_limits.MAX_FILES", 10)
    store = open_store(fs_url)
    store.url = "hf://datasets/o/n"
    with pytest.raises(UsageError, match="hsfmt compact"):
        transfer(source, store)
    assert list(store.walk("")) == []


def test_memory_is_stated(tmp_path, source):
    assert transfer(source, tmp_path / "d", connections=3).most_memory_nbytes == 64 + 3 * 40 << 20
    from hsfmt.storage import uploads

    assert (part_copies.WRITE_BEHIND_NBYTES, part_copies.IN_FLIGHT_NBYTES) == (
        uploads.PART_NBYTES,
        uploads.MOST_IN_FLIGHT_NBYTES,
    )


def run(*argv, code=0):
    result = CliRunner().invoke(main, [str(word) for word in argv])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.mark.parametrize("command", ["push", "pull"])
def test_the_commands(tmp_path, source, command):
    assert "would be up to date" in run(command, source, tmp_path / "d", "--dry-run")
    assert not (tmp_path / "d").exists()
    text = run(command, source, tmp_path / "d", "-q")
    assert "2 added, 0 there already" in text
    assert read_pointer(open_store(source)).fingerprint in text
    assert "up to date already" in run(command, source, tmp_path / "d", "--connections", "2", "--verify", "full")
    document = json.loads(run(command, source, tmp_path / "d", "--json"))
    assert document["present"] == ["p-one", "p-two"]
    assert document["changed"] is False
    run(command, source, code=2)
    run(command, source, source, code=2)
    run(command, tmp_path / "none", tmp_path / "e", code=3)
    run(command, source, tmp_path / "e", "--snapshot", "live", code=2)
    write(tmp_path / "f", ["z"], "p-own")
    run(command, source, tmp_path / "f", code=2)
    shard = next(path for path in (source / "parts/p-two/hidden_states/c").rglob("*") if path.is_file())
    shard.write_bytes(b"damaged")
    run(command, source, tmp_path / "g", code=1)


@pytest.mark.parametrize("below", ["", "/x", "/x/y"])
def test_a_file_is_no_destination(tmp_path, below):
    write(tmp_path / "a", ["x"], "p-a")
    (tmp_path / "file").write_text("mine")
    place = f"{tmp_path}/file{below}"
    for words in (["push", str(tmp_path / "a"), place], ["merge", place, str(tmp_path / "a")]):
        result = CliRunner().invoke(main, words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"error: {place}: expected a folder, or a name for one, got a file: {tmp_path}/file" in result.stderr
    assert (tmp_path / "file").read_text() == "mine"
