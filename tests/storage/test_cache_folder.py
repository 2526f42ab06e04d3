"""The folder of the local cache: names, quotas, reservations, and all that other hands may do to it."""

import errno
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hsfmt.storage import cache_folder
from hsfmt.storage.cache_entries import ABANDONED_SECONDS, read_entry
from hsfmt.storage.cache_folder import CacheFolder
from hsfmt.storage.cache_layout import (
    LAYOUT_FILE,
    EntryName,
    charged,
    key_of,
    layout_bytes,
    leaf,
    n_folders_for,
    named_nbytes,
    parse_layout,
)

KIB = 1 << 10
MIB = 1 << 20


def entry(number, nbytes=8 * KIB):
    return EntryName(key_of("test", str(number)), nbytes), bytes([number % 256]) * nbytes


def fill(folder, *numbers, nbytes=8 * KIB):
    """Insert one by one; return how many were."""
    return sum(folder.insert([entry(number, nbytes)]) for number in numbers)


def present(folder, numbers, nbytes=8 * KIB):
    return [number for number in numbers if folder.locate(entry(number, nbytes)[0])]


def path_of(folder, number, nbytes=8 * KIB):
    path = folder.locate(entry(number, nbytes)[0])
    assert path is not None
    return path


def age(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.fixture
def folder(tmp_path):
    return CacheFolder(str(tmp_path / "a" / "cache"), MIB)


def test_number_of_subfolders():
    assert [n_folders_for(limit) for limit in (1, 1 << 29, (1 << 29) + 1, 1 << 30, 10 << 30)] == [1, 2, 2, 4, 32]
    assert n_folders_for(1 << 50) == 256


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"folders": 4}', '{"hsfmt_cache": 2, "folders": 4}', '{"hsfmt_cache": 1, "folders": 3}'],
)
def test_a_file_that_is_no_layout(text):
    assert parse_layout(text.encode()) is None
    assert parse_layout(layout_bytes(8)) == 8


@pytest.mark.parametrize(
    "name", ["", "x", "a" * 32, f"{'a' * 32}-", f"{'A' * 32}-1", f"{'a' * 31}-1", f"{'a' * 32}-1.tmp"]
)
def test_foreign_names(name):
    assert named_nbytes(name) is None


def test_entries_come_back(folder):
    name, body = entry(1)
    assert folder.locate(name) is None
    assert not Path(folder.path).exists()
    assert folder.insert([(name, body), entry(2)]) == 2
    assert folder.insert([(name, body)]) == 0
    again = CacheFolder(folder.path, MIB)
    assert read_entry(again.locate(name), name.nbytes) == body
    assert again.find(name.key) == name
    assert again.find(key_of("test", "9")) is None
    usage = again.usage()
    assert (usage.n_entries, usage.nbytes, usage.n_unfinished) == (2, 16 * KIB, 0)
    assert time.time() - 100 < usage.oldest <= usage.newest <= time.time() + 1


def test_sizes_count_as_blocks(folder):
    assert [charged(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert fill(folder, *range(400), nbytes=1) == 400
    assert folder.usage().nbytes <= MIB


def test_the_least_recently_used_go(folder):
    assert fill(folder, *range(100)) == 100
    for number in range(100):
        age(path_of(folder, number), 10_000 - number)
    assert present(folder, [0]) == [0]  # and is used by that
    assert fill(folder, *range(100, 150)) == 50
    assert folder.usage().nbytes <= MIB
    left = present(folder, range(150))
    assert 0 in left
    assert set(range(100, 150)) <= set(left)
    assert left[1:] == list(range(left[1], 150)), "the older ones go first"


def test_use_is_noted_once_a_minute(folder):
    fill(folder, 1)
    path = path_of(folder, 1)
    age(path, 30)
    before = Path(path).stat().st_mtime_ns
    assert present(folder, [1])
    assert Path(path).stat().st_mtime_ns == before
    age(path, 70)
    assert present(folder, [1])
    assert time.time() - Path(path).stat().st_mtime < 30


def test_an_entry_above_the_limit_is_left_out(folder, caplog):
    caplog.set_level(logging.WARNING, "hsfmt")
    assert fill(folder, 1, 2, nbytes=MIB + 1) == 0
    assert fill(folder, 3) == 1
    assert len(caplog.records) == 1
    assert "hsfmt cache clear" in caplog.text


def test_a_batch_above_the_limit_is_within_it(folder):
    folder.insert([entry(number, 100 * KIB) for number in range(50)])
    assert 5 * 100 * KIB <= folder.usage().nbytes <= MIB


@pytest.mark.parametrize("nbytes", [0, 5000])
def test_reservations_of_the_killed(folder, nbytes):
    """They count until they are old."""
    fill(folder, 0)
    name, body = entry(1)
    path = f"{leaf(folder.path, 1, name.key)}/{name}"
    Path(path).write_bytes(body[:nbytes])
    assert folder.locate(name) is None
    assert folder.insert([(name, body)]) == 0, "another process may be writing it"
    assert Path(path).stat().st_size == nbytes
    assert folder.usage().n_unfinished == 1
    age(path, ABANDONED_SECONDS + 10)
    assert folder.insert([(name, body)]) == 1
    assert read_entry(path, name.nbytes) == body


def test_abandoned_reservations_make_room(folder):
    fill(folder, 0)
    for number in range(1, 100):
        name = entry(number)[0]
        path = f"{leaf(folder.path, 1, name.key)}/{name}"
        Path(path).touch()
        if number < 60:
            age(path, ABANDONED_SECONDS + 10)
    assert fill(folder, *range(100, 150)) == 50
    usage = folder.usage()
    assert usage.n_unfinished >= 40
    assert usage.nbytes + usage.n_unfinished * 8 * KIB <= MIB


def test_nothing_is_written_where_all_is_reserved(folder):
    fill(folder, 0)
    for number in range(1, 200):
        name = entry(number)[0]
        Path(f"{leaf(folder.path, 1, name.key)}/{name}").touch()
    assert fill(folder, *range(200, 220)) == 0
    assert folder.usage().n_unfinished == 199
    assert folder.writable


@pytest.mark.parametrize("damage", ["longer", "symlink", "old and short"])
def test_what_is_no_entry_is_removed(folder, tmp_path, damage):
    fill(folder, 1)
    name, body = entry(1)
    path = path_of(folder, 1)
    if damage == "longer":
        Path(path).write_bytes(body + b"x")
    elif damage == "symlink":
        target = tmp_path / "target"
        target.write_bytes(body)
        Path(path).unlink()
        Path(path).symlink_to(target)
        assert folder.locate(name) is None
        assert read_entry(path, name.nbytes) is None
        os.utime(path, (1, 1), follow_symlinks=False)
    else:
        os.truncate(path, 10)
        age(path, ABANDONED_SECONDS + 10)
    assert folder.locate(name) is None
    assert not os.path.lexists(path)
    assert fill(folder, 1) == 1
    assert read_entry(path, name.nbytes) == body


def test_neither_a_folder_nor_a_pipe_in_the_place_of_an_entry_stops_anyone(folder):
    fill(folder, 0)
    for number, make in ((1, os.mkdir), (2, os.mkfifo)):
        name, _ = entry(number)
        path = f"{leaf(folder.path, 1, name.key)}/{name}"
        make(path)
        assert folder.locate(name) is None
        assert read_entry(path, name.nbytes) is None
        folder.insert([entry(number)])
    assert fill(folder, *range(3, 300)) >= 200
    assert folder.usage().nbytes <= MIB + 8 * KIB


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk(folder, monkeypatch, caplog, number):
    caplog.set_level(logging.WARNING, "hsfmt")
    fill(folder, 0)
    real = os.write

    def write(fd, data):
        if len(data) > 4096:
            return real(fd, data[:4096])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cache_folder.os, "write", write)
    assert fill(folder, 1, 2, 3) == 0
    assert not folder.writable
    assert os.strerror(number) in caplog.text
    assert len(caplog.records) == 1
    usage = folder.usage()
    assert (usage.n_entries, usage.n_unfinished) == (1, 0), "what was begun is gone"
    monkeypatch.undo()
    monkeypatch.setattr(folder, "_paused_until", 0.0)  # a minute later
    assert fill(folder, 1, 2, 3) == 3
    assert present(folder, range(4)) == [0, 1, 2, 3]


_LIMITED = """
import resource, sys
from hsfmt.storage.cache_folder import CacheFolder
from hsfmt.storage.cache_layout import EntryName, key_of
folder = CacheFolder(sys.argv[1], 1 << 20)
small, large = (EntryName(key_of("x", str(n)), n) for n in (1000, 100_000))
assert folder.insert([(small, b"x" * 1000)]) == 1
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
assert folder.insert([(large, b"x" * 100_000)]) == 0
assert folder.failure
usage = folder.usage()
assert (usage.n_entries, usage.n_unfinished) == (1, 0), usage
print("fine")
"""


def test_a_file_that_the_system_does_not_let_grow(tmp_path, repo_root):
    command = [sys.executable, "-c", _LIMITED, str(tmp_path / "cache")]
    env = {**os.environ, "PYTHONPATH": str(repo_root)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_cache_that_can_only_be_read(folder, monkeypatch, caplog, number):
    caplog.set_level(logging.WARNING, "hsfmt")
    fill(folder, 1)
    age(path_of(folder, 1), 1000)
    name, body = entry(1)
    real = os.open

    def only_read(path, flags, *args):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(number, os.strerror(number), path)
        return real(path, flags, *args)

    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cache_folder.os, "open", only_read)
    for call in ("utime", "unlink", "mkdir", "rmdir"):
        monkeypatch.setattr(cache_folder.os, call, refuse)
    reader = CacheFolder(folder.path, MIB)
    assert read_entry(reader.locate(name), name.nbytes) == body
    assert fill(reader, 2, 3) == 0
    assert len(caplog.records) == 1
    assert os.strerror(number) in caplog.text


def test_a_file_in_the_place_of_the_cache(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "hsfmt")
    (tmp_path / "cache").write_bytes(b"something else")
    folder = CacheFolder(str(tmp_path / "cache"), MIB)
    assert folder.locate(entry(1)[0]) is None
    assert fill(folder, 1, 2) == 0
    assert folder.failure
    assert len(caplog.records) == 1
    assert (tmp_path / "cache").read_bytes() == b"something else"


def test_another_file_of_the_layout(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "hsfmt")
    folder = CacheFolder(str(tmp_path), MIB)
    (tmp_path / LAYOUT_FILE).write_text("{")
    assert fill(folder, 1, 2) == 0
    assert len(caplog.records) == 1
    folder.clear()
    monotonic = CacheFolder(str(tmp_path), MIB)
    assert fill(monotonic, 1, 2) == 2


def test_clear_leaves_other_files(folder):
    fill(folder, *range(20))
    strangers = ["notes.txt", "1/notes.txt", "1/00/notes.txt", f"1/00/{'a' * 32}-12.tmp"]
    for name in strangers:
        Path(folder.path, name).write_text("mine")
    assert fill(folder, *range(20, 300)) == 280
    assert folder.clear()[0] >= 100
    left = [path.relative_to(folder.path).as_posix() for path in Path(folder.path).rglob("*") if path.is_file()]
    assert sorted(left) == sorted(strangers)
    assert folder.clear() == (0, 0)


def test_cleared_while_in_use(folder):
    fill(folder, *range(20))
    other = CacheFolder(folder.path, 1 << 30)
    assert other.clear()[0] == 20
    assert present(folder, range(20)) == []
    assert fill(other, 1) == 1
    assert parse_layout(Path(folder.path, LAYOUT_FILE).read_bytes()) == 4
    assert fill(folder, 1, 2, 3) == 2
    assert present(folder, range(20)) == present(other, range(20)) == [1, 2, 3]


def test_a_lower_limit_holds_from_the_first_entry_on(tmp_path):
    large = CacheFolder(str(tmp_path), 1 << 30)
    assert fill(large, *range(40), nbytes=100 * KIB) == 40
    small = CacheFolder(str(tmp_path), 2 * MIB)
    assert fill(small, 40, nbytes=100 * KIB) == 1
    assert small.usage().nbytes <= 2 * MIB
    assert present(small, [40], nbytes=100 * KIB) == [40]


def test_the_number_of_subfolders_is_that_of_the_first(tmp_path):
    first = CacheFolder(str(tmp_path), 1 << 30)
    fill(first, *range(10))
    second = CacheFolder(str(tmp_path), MIB)
    assert present(second, range(10)) == list(range(10))
    fill(second, *range(10, 300))
    assert 0 < second.usage().nbytes <= MIB


def test_entries_of_a_former_layout_are_removed(tmp_path):
    folder = CacheFolder(str(tmp_path), MIB)
    fill(folder, *range(10))
    (tmp_path / LAYOUT_FILE).unlink()
    other = CacheFolder(str(tmp_path), 1 << 30)
    fill(other, 99)
    assert other.usage().n_entries == 1
    assert not (tmp_path / "1").exists()
