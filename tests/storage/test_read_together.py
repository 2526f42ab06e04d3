"""Objects read one after the other, fetched together: each once, in few round trips, within bounds."""

import pytest

from hsfmt.errors import CorruptionError, NotFoundError
from hsfmt.storage import read_together as module
from hsfmt.storage.local import LocalStore
from hsfmt.storage.read_together import read_together


class Recording(LocalStore):
    """A store that is read as remote ones are."""

    is_local = False

    def __init__(self, root):
        super().__init__(root)
        self.together, self.alone = [], []

    def read(self, path, max_nbytes):
        self.alone.append(path)
        return super().read(path, max_nbytes)

    def read_many(self, requests):
        self.together.append([path for path, _ in requests])
        return [LocalStore.read(self, path, max_nbytes) for path, max_nbytes in requests]


@pytest.fixture
def store(tmp_path):
    found = Recording(tmp_path)
    for number in range(200):
        found.write(f"{number}", b"%d" % number)
    return found


def documents(numbers, nbytes=3):
    return [(f"{number}", nbytes) for number in numbers]


def test_each_is_read_once_in_few_round_trips(store):
    files = read_together(store, documents(range(200)))
    assert [files.read(f"{number}", 10) for number in range(200)] == [b"%d" % number for number in range(200)]
    assert [len(paths) for paths in store.together] == [8, 16, 32, 64, 64, 16]
    assert store.alone == []


def test_a_local_store_needs_none_of_it(tmp_path):
    store = LocalStore(tmp_path)
    assert read_together(store, documents([1])) is store


def test_no_more_bytes_than_allowed_are_fetched_together(store, monkeypatch):
    """One that is larger goes alone; one of unknown size counts as a mebibyte."""
    monkeypatch.setattr(module, "MAX_NBYTES", 10)
    files = read_together(store, [("0", 4), ("1", 6), ("2", 1), ("3", 100), ("4", None), ("5", 1), ("6", 1)])
    for number in range(7):
        assert files.read(f"{number}", 200) == b"%d" % number
    assert store.together == [["0", "1"], ["5", "6"]]
    assert store.alone == ["2", "3", "4"]


def test_those_that_were_not_wanted_are_let_go_of(store):
    files = read_together(store, documents(range(30)))
    assert files.read("0", 10) == b"0"
    assert files.read("20", 10) == b"20"
    assert store.together == [[f"{n}" for n in range(8)], [f"{n}" for n in range(20, 30)]]
    assert files.read("3", 10) == b"3"
    assert store.alone == ["3"]


def test_who_reads_again_or_something_else_asks_the_storage(store):
    files = read_together(store, documents(range(3)))
    assert files.read("1", 10) == b"1"
    store.write("1", b"new")
    assert files.read("1", 10) == b"new"
    assert files.read("100", 10) == b"100"
    assert store.alone == ["1", "100"]


@pytest.mark.parametrize("number", [0, 3, 7])
def test_errors_are_those_of_one_alone(store, number):
    """Of the very object, at its turn, whatever was fetched with it."""
    store.remove(f"{number}")
    files = read_together(store, documents(range(8)))
    for before in range(number):
        assert files.read(f"{before}", 10) == b"%d" % before
    with pytest.raises(NotFoundError) as caught:
        files.read(f"{number}", 10)
    assert caught.value.problems[0].where == f"{number}"


def test_one_that_is_larger_than_said_is_refused_at_its_turn(store):
    files = read_together(store, documents(range(8)) + documents([150], nbytes=2))
    assert [files.read(f"{number}", 3) for number in range(8)]
    with pytest.raises(CorruptionError, match="at most 2 bytes"):
        files.read("150", 2)
