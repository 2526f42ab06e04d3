"""Batches that follow, read ahead: within bounds, errors at their turn, nothing kept that nobody will ask for."""

import _thread
import copy
import os
import pickle
import random
import threading
import time

import pytest

from hsfmt.errors import CorruptionError
from hsfmt.readers import batches_ahead
from hsfmt.readers.batches_ahead import Batch, BatchesAhead
from hsfmt.readers.order import BatchOrder


class Work:
    """Reads batches of numbers: each is as many bytes as the number, and reading waits until `gate` is set."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.begun = []
        self.ended = []

    def __call__(self, numbers):
        self.begun.append(numbers[0])
        assert self.gate.wait(300)
        self.ended.append(numbers[0])
        if numbers[0] < 0:
            raise CorruptionError.at("x", expected=f"{numbers[0]}", got="b")
        return [number * 10 for number in numbers]


def batches(numbers):
    """As an order gives them: each with all that follow."""
    return [Batch([number], [[later] for later in numbers[i + 1 :]]) for i, number in enumerate(numbers)]


def until(condition):
    deadline = time.monotonic() + 300
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = _thread._count()
    yield
    until(lambda: _thread._count() <= before)


def one_byte(_):
    return 1


def nothing(_):
    pass


def test_what_follows_is_read_while_a_batch_is_used():
    work, ahead = Work(), BatchesAhead(3)
    order = batches(list(range(10)))
    assert ahead.take(order[0], work, one_byte, nothing) == [0]
    until(lambda: len(work.ended) == 4)
    assert sorted(work.begun) == [0, 1, 2, 3]
    for number in range(1, 10):
        assert ahead.take(order[number], work, one_byte, nothing) == [number * 10]
    assert sorted(work.begun) == list(range(10)), "each was read once"
    assert ahead.held_nbytes == 0


def test_no_more_bytes_are_ahead_than_allowed():
    """Whatever the sizes; a batch that is larger than all that is read when it is asked for."""
    rng = random.Random(0)
    numbers = [rng.randrange(1, 50) for _ in range(100)]
    numbers[30] = 1000
    work, ahead, most = Work(), BatchesAhead(100), []

    def read(read_numbers):
        most.append(ahead.held_nbytes)
        return work(read_numbers)

    for batch in batches(numbers):
        assert ahead.take(batch, read, lambda numbers: numbers[0], nothing) == [batch[0] * 10]
        most.append(ahead.held_nbytes)
    assert 50 < max(most) <= 100


class Cached:
    """Reads numbers: those from `first` to `last` come from the storage, all others out of a cache."""

    def __init__(self, first, last):
        self.stored = range(first, last + 1)
        self.nbytes = 0
        self.threads = {}

    def __call__(self, numbers):
        if numbers[0] in self.stored:
            self.nbytes += 100
        self.threads[numbers[0]] = threading.current_thread() is threading.main_thread()
        return [number * 10 for number in numbers]


def test_what_is_cached_is_not_read_ahead():
    read, ahead = Cached(100, 109), BatchesAhead(4)
    for batch in batches(list(range(200))):
        found = ahead.take(batch, read, one_byte, nothing, lambda: read.nbytes)
        assert found == [batch[0] * 10]
        until(lambda: not any(waiting.stage.busy for waiting in list(ahead._waiting.values())))
    inline = [number for number, is_main in sorted(read.threads.items()) if is_main]
    # Those after 35 and 145 were to begin when 32 in a row had been cached; 101 when 100 was being fetched.
    assert inline == [0, *range(36, 102), *range(146, 200)]


@pytest.mark.parametrize("every", [2, 10, 30])
def test_what_is_cached_in_part_is_read_ahead(every):
    """Also while what is not takes long to come, and all between is there at once."""
    read, ahead = Cached(0, -1), BatchesAhead(8)
    read.stored = range(0, 300, every)
    for batch in batches(list(range(300))):
        assert ahead.take(batch, read, one_byte, nothing, lambda: read.nbytes) == [batch[0] * 10]
    assert [number for number, is_main in sorted(read.threads.items()) if is_main] == [0]


def test_without_a_cache_all_is_read_ahead():
    read, ahead = Cached(0, -1), BatchesAhead(4)
    for batch in batches(list(range(20))):
        assert ahead.take(batch, read, one_byte, nothing) == [batch[0] * 10]
    assert [number for number, is_main in read.threads.items() if is_main] == [0]


def test_what_there_is_no_room_for_is_prepared():
    """One batch at a time, the first of them; what goes wrong there is no error."""
    work, ahead, prepared = Work(), BatchesAhead(2), []

    def prepare(numbers):
        prepared.append(numbers[0])
        raise CorruptionError.at("x", expected="a", got="b")

    for batch in batches([1, 2, 3, 4, 5, 6]):
        assert ahead.take(batch, work, one_byte, prepare) == [batch[0] * 10]
        until(lambda: ahead._prepared is not None and not ahead._prepared.stage.busy)
    assert prepared == [4, 5, 6]


def test_what_was_given_up_counts_until_it_has_ended():
    work, ahead = Work(), BatchesAhead(2)
    order = batches([1, 2, 3])
    assert ahead.take(order[0], work, one_byte, nothing) == [10]
    until(lambda: len(work.ended) == 3)
    work.gate.clear()
    slow = [Batch([number], [[number + 1]]) for number in (10, 20)]
    taker = threading.Thread(target=lambda: ahead.take(slow[0], work, one_byte, nothing))
    taker.start()
    until(lambda: 11 in work.begun)
    assert ahead.held_nbytes == 1, "what it held before is gone"
    other = threading.Thread(target=lambda: ahead.take(slow[1], work, one_byte, nothing))
    other.start()
    until(lambda: 21 in work.begun)
    assert ahead.held_nbytes == 2
    ahead.close()
    assert ahead.held_nbytes == 2, "two threads are at work"
    work.gate.set()
    taker.join()
    other.join()
    until(lambda: ahead.held_nbytes == 0)


def test_an_error_comes_when_its_batch_is_asked_for():
    work, ahead = Work(), BatchesAhead(10)
    order = batches([1, -2, 3, -4])
    assert ahead.take(order[0], work, one_byte, nothing) == [10]
    until(lambda: len(work.ended) == 4)
    with pytest.raises(CorruptionError, match="-2"):
        ahead.take(order[1], work, one_byte, nothing)
    assert ahead.take(order[2], work, one_byte, nothing) == [30]
    ahead.close()
    assert ahead.held_nbytes == 0


def test_another_order_than_was_said():
    """What is asked for comes all the same; what is not in the order any more is given up."""
    work, ahead = Work(), BatchesAhead(4)
    order = batches(list(range(8)))
    assert ahead.take(order[0], work, one_byte, nothing) == [0]
    until(lambda: len(work.ended) == 5)
    assert ahead.take(order[6], work, one_byte, nothing) == [60]
    until(lambda: 7 in work.ended)
    assert ahead.held_nbytes == 1
    assert ahead.take(Batch([7]), work, one_byte, nothing) == [70]
    assert work.begun.count(7) == 1
    assert ahead.held_nbytes == 0


def test_the_same_batch_twice():
    """As where the last round of an epoch is filled up from its beginning."""
    work, ahead = Work(), BatchesAhead(10)
    for batch in batches([1, 2, 2, 1, 1]):
        assert ahead.take(batch, work, one_byte, nothing) == [batch[0] * 10]


def test_many_takers():
    work, ahead = Work(), BatchesAhead(5)
    order = batches(list(range(200)))
    found = []

    def take(start):
        found.extend(ahead.take(batch, work, one_byte, nothing) for batch in order[start::4])

    takers = [threading.Thread(target=take, args=(start,)) for start in range(4)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join()
    assert sorted(found) == [[number * 10] for number in range(200)]
    ahead.close()


@pytest.mark.parametrize("worker", [0, 1, 2])
def test_workers_share_the_bound(monkeypatch, worker):
    """Each reads what will come to it: every third batch."""
    monkeypatch.setattr(batches_ahead, "n_loader_workers", lambda: 3)
    work, ahead = Work(), BatchesAhead(6)
    assert ahead.take(batches(list(range(30)))[worker], work, one_byte, nothing) == [worker * 10]
    until(lambda: len(work.ended) == 3)
    assert sorted(work.begun) == [worker, worker + 3, worker + 6]
    ahead.close()


def test_no_more_batches_are_ahead_than_allowed(monkeypatch):
    """However small they are: each is a thread at first, and a descriptor in a worker."""
    work, ahead = Work(), BatchesAhead(1000)
    assert ahead.take(batches(list(range(200)))[0], work, one_byte, nothing) == [0]
    until(lambda: len(work.ended) == 33)
    assert ahead.held_nbytes == 32
    ahead.close()
    monkeypatch.setattr(batches_ahead, "n_loader_workers", lambda: 4)
    assert ahead.take(batches(list(range(200)))[0], work, one_byte, nothing) == [0]
    assert ahead.held_nbytes == 8
    ahead.close()


def test_copies_and_children_begin_anew():
    work, ahead = Work(), BatchesAhead(10)
    order = batches(list(range(5)))
    ahead.take(order[0], work, one_byte, nothing)
    for again in (pickle.loads(pickle.dumps(ahead)), copy.deepcopy(ahead)):
        assert (again.max_nbytes, again.held_nbytes) == (10, 0)
    until(lambda: len(work.ended) == 5)
    child = os.fork()
    if not child:
        good = ahead.held_nbytes == 0 and ahead.take(order[1], work, one_byte, nothing) == [10]
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert ahead.take(order[1], work, one_byte, nothing) == [10]
    assert work.begun.count(1) == 1, "nothing is lost here by that"
    ahead.close()


def test_a_batch_goes_to_workers_with_what_follows():
    batch = Batch([1, 2], [[3], [4, 5]])
    again = pickle.loads(pickle.dumps(batch))
    assert (type(again), again, again.following) == (Batch, [1, 2], [[3], [4, 5]])


class Lengths:
    """What an order looks at of a dataset."""

    fingerprint = "xxh3_128:" + "0" * 32

    def __init__(self, dataset, n_tokens_ahead):
        self.reader, self.lengths, self.n_tokens_ahead = dataset, dataset.lengths, n_tokens_ahead
        self.fingerprint = dataset.fingerprint

    def __len__(self):
        return len(self.lengths)


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_order_says_what_follows(write, world_size):
    """On its rank, in its epoch: the next batch, and more as far as the tokens go; all else is as of other orders."""
    from hsfmt.readers.sample_reader import SampleReader

    reader = SampleReader(write().url)
    options = {"n_samples": 2, "seed": 5, "rank": 0, "world_size": world_size, "fingerprint": reader.fingerprint}
    plain = list(BatchOrder(Lengths(reader, 0), **options))
    assert not any(isinstance(batch, Batch) for batch in plain)
    for n_tokens in (1, 100, 10_000):
        order = BatchOrder(Lengths(reader, n_tokens), **options)
        iterator = iter(order)
        found = list(iterator)
        assert found == plain
        for number, batch in enumerate(found):
            following = plain[number + 1 :]
            fitting = [n for n in range(len(following) + 1) if n <= 1 or tokens(reader, following[:n]) <= n_tokens]
            assert batch.following == following[: fitting[-1]]
        iterator = iter(BatchOrder(Lengths(reader, n_tokens), **options))
        next(iterator)
        again = BatchOrder(Lengths(reader, 0), **options)
        again.load_state_dict(iterator.state_dict())
        assert list(again) == plain[1:]


def tokens(reader, listed):
    return sum(int(reader.lengths[number]) for batch in listed for number in batch)
