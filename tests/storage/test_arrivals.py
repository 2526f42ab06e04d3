"""Many requests in flight: within bounds, in any order, and given up when nobody wants them."""

import asyncio
import gc
import threading
import time

import pytest

from hsfmt.errors import StorageError
from hsfmt.storage import arrivals
from hsfmt.storage.arrivals import ArrivalsInFlight


class Requests:
    """Answers when it is told to."""

    def __init__(self):
        self.begun, self.ended, self.cancelled = [], [], []
        self.gates = {}
        self.started = threading.Semaphore(0)

    async def fetch(self, number):
        gate = self.gates[number] = asyncio.Event()
        self.begun.append(number)
        self.started.release()
        try:
            await gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(number)
            self.started.release()
            raise
        self.ended.append(number)
        return bytes([number])

    def wait(self, n):
        for _ in range(n):
            assert self.started.acquire(timeout=300)

    def answer(self, number):
        arrivals.get_loop().call_soon_threadsafe(self.gates[number].set)


@pytest.fixture
def requests():
    return Requests()


def test_results_come_as_they_arrive(requests):
    with ArrivalsInFlight(requests.fetch, [1] * 3) as found:
        requests.wait(3)
        for number in (2, 0, 1):
            requests.answer(number)
            assert next(found) == (number, bytes([number]))
        assert list(found) == []
        assert list(found) == []


def test_no_more_requests_than_allowed(requests, monkeypatch):
    monkeypatch.setattr(arrivals, "MAX_REQUESTS", 2)
    with ArrivalsInFlight(requests.fetch, [1] * 4) as found:
        requests.wait(2)
        requests.answer(0)
        assert next(found)[0] == 0
        requests.wait(1)
        assert requests.begun == [0, 1, 2]


def test_no_more_bytes_held_than_allowed(requests, monkeypatch):
    """In flight or arrived and not taken; one that is larger than all that goes alone."""
    monkeypatch.setattr(arrivals, "MAX_HELD_NBYTES", 10)
    with ArrivalsInFlight(requests.fetch, [6, 4, 1, 100]) as found:
        requests.wait(2)
        for number in (0, 1):
            requests.answer(number)
        assert next(found)[0] == 0
        requests.wait(1)
        requests.answer(2)
        assert sorted(number for number, _ in (next(found), next(found))) == [1, 2]
        requests.wait(1)
        assert requests.begun == [0, 1, 2, 3]
        requests.answer(3)
        assert next(found)[0] == 3


def test_calls_share_the_limit_and_the_older_goes_first(requests, monkeypatch):
    """Each may hold one range whatever the others hold; what an older one waits for, a younger one does not take."""
    gc.collect()  # what earlier tests left holds something too
    monkeypatch.setattr(arrivals, "MAX_HELD_NBYTES", 10)
    younger = Requests()
    with ArrivalsInFlight(requests.fetch, [6, 6, 1]) as old, ArrivalsInFlight(younger.fetch, [3, 1]) as young:
        requests.wait(1)
        younger.wait(1)
        assert arrivals.held_nbytes() == 9
        younger.answer(0)
        assert next(young)[0] == 0
        younger.wait(1)  # it held nothing
        assert (requests.begun, younger.begun) == ([0], [0, 1])
        requests.answer(0)
        assert next(old)[0] == 0
        requests.wait(2)
        assert requests.begun == [0, 1, 2]
        assert arrivals.held_nbytes() == 8
    requests.wait(2)
    younger.wait(1)
    assert arrivals.held_nbytes() == 0


def test_calls_share_what_is_on_its_way(requests, monkeypatch):
    """What has arrived makes room for the next request, though nobody has taken it; what is held is counted apart."""
    gc.collect()
    monkeypatch.setattr(arrivals, "MAX_FLYING_NBYTES", 10)
    younger = Requests()
    with ArrivalsInFlight(requests.fetch, [6, 4, 2]) as old, ArrivalsInFlight(younger.fetch, [1, 1]) as young:
        requests.wait(2)
        younger.wait(1)
        assert (requests.begun, younger.begun) == ([0, 1], [0])
        requests.answer(1)
        requests.wait(1)
        younger.wait(1)
        assert (requests.begun, younger.begun) == ([0, 1, 2], [0, 1])
        assert arrivals.held_nbytes() == 14
        for number in (0, 2):
            requests.answer(number)
            younger.answer(number // 2)
        assert sorted(number for number, _ in old) == [0, 1, 2]
        assert sorted(number for number, _ in young) == [0, 1]


def test_what_was_taken_counts_until_it_is_let_go(requests, monkeypatch):
    gc.collect()
    monkeypatch.setattr(arrivals, "MAX_HELD_NBYTES", 4)
    with ArrivalsInFlight(requests.fetch, [2, 2, 1]) as found:
        requests.wait(2)
        requests.answer(0)
        assert found.take() == (0, b"\0")
        assert arrivals.held_nbytes() == 4
        found.let_go(0)
        requests.wait(1)
        assert requests.begun == [0, 1, 2]
        assert arrivals.held_nbytes() == 3
        requests.answer(1)
        requests.answer(2)
        assert sorted([found.take(), found.take()]) == [(1, b"\1"), (2, b"\2")]
        assert found.take() is None
        found.let_go(1)
        found.let_go(2)


def test_calls_share_the_number_of_requests(requests, monkeypatch):
    monkeypatch.setattr(arrivals, "MAX_ALL_REQUESTS", 3)
    younger = Requests()
    with ArrivalsInFlight(requests.fetch, [1] * 4) as old, ArrivalsInFlight(younger.fetch, [1] * 2) as young:
        requests.wait(3)
        younger.wait(1)
        assert (requests.begun, younger.begun) == ([0, 1, 2], [0])
        requests.answer(0)
        requests.answer(1)
        requests.wait(1)  # of four under way two have ended
        requests.answer(2)
        requests.answer(3)
        younger.wait(1)
        younger.answer(0)
        younger.answer(1)
        assert sorted(number for number, _ in old) == [0, 1, 2, 3]
        assert sorted(number for number, _ in young) == [0, 1]


def test_a_call_that_is_over_leaves_room_for_the_others(requests, monkeypatch):
    monkeypatch.setattr(arrivals, "MAX_HELD_NBYTES", 10)
    other = Requests()
    first = ArrivalsInFlight(requests.fetch, [9])
    requests.wait(1)
    with ArrivalsInFlight(other.fetch, [1, 5]) as found:
        other.wait(1)
        assert other.begun == [0]
        first.close()
        other.wait(1)
        for number in (0, 1):
            other.answer(number)
        assert sorted(number for number, _ in found) == [0, 1]
    assert requests.begun == [0]


@pytest.mark.parametrize("how", ["close", "drop"])
def test_what_nobody_wants_is_cancelled(requests, how):
    found = ArrivalsInFlight(requests.fetch, [1] * 3)
    requests.wait(3)
    if how == "close":
        found.close()
        assert list(found) == []
    else:
        del found
        gc.collect()
    requests.wait(3)
    assert sorted(requests.cancelled) == [0, 1, 2]


def test_closing_wakes_threads_that_wait(requests):
    found = ArrivalsInFlight(requests.fetch, [1] * 2)
    requests.wait(2)
    threads = [threading.Thread(target=list, args=(found,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    found.close()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()


def test_an_error_ends_it_and_cancels_the_rest(requests):
    async def fetch(number):
        if number == 1:
            raise KeyError(number)
        return await requests.fetch(number)

    with ArrivalsInFlight(fetch, [1] * 2) as found:
        with pytest.raises(KeyError):
            list(found)
        requests.wait(2)
        assert requests.cancelled == [0]
        assert list(found) == []


def test_on_the_loop_itself_it_would_wait_for_ever():
    async def inside():
        ArrivalsInFlight(None, [])

    with pytest.raises(StorageError, match="calls from other threads"):
        asyncio.run_coroutine_threadsafe(inside(), arrivals.get_loop()).result(300)


def test_a_close_that_was_interrupted_is_done_the_next_time(requests, monkeypatch):
    """What would still count as held would hold up all other calls for good."""
    found = ArrivalsInFlight(requests.fetch, [8] * 3)
    requests.wait(3)

    def struck():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(found._flight, "cancel", struck)
        with pytest.raises(KeyboardInterrupt):
            found.close()
    assert arrivals.held_nbytes() == 24
    found.close()
    requests.wait(3)
    assert sorted(requests.cancelled) == [0, 1, 2]
    deadline = time.monotonic() + 300
    while arrivals.held_nbytes() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert arrivals.held_nbytes() == 0
    found.close()
