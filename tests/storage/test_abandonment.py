"""What is waited for is given up with the work that waits for it, from any thread; other work goes on."""

import threading

import pytest
from test_arrivals import Requests

from hsfmt.errors import StorageError
from hsfmt.storage.abandonment import Abandonment
from hsfmt.storage.arrivals import ArrivalsInFlight


@pytest.fixture
def requests():
    return Requests()


def test_threads_that_wait_get_an_error(requests):
    """Each of them; not the end, which would be taken for all that there is."""
    work, raised = Abandonment(), []

    def wait():
        with work, ArrivalsInFlight(requests.fetch, [1, 1]) as found:
            try:
                list(found)
            except StorageError as error:
                raised.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    requests.wait(6)
    work.give_up()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    assert len(raised) == 3
    requests.wait(6)
    assert sorted(requests.cancelled) == [0, 0, 0, 1, 1, 1]


def test_what_arrived_before_can_still_be_taken(requests):
    work = Abandonment()
    with work, ArrivalsInFlight(requests.fetch, [1, 1]) as found:
        requests.wait(2)
        requests.answer(1)
        assert next(found)[0] == 1
        work.give_up()
        with pytest.raises(StorageError, match="given up"):
            next(found)


def test_what_begins_later_is_given_up_at_once(requests):
    work = Abandonment()
    work.give_up()
    with work, ArrivalsInFlight(requests.fetch, [1]) as found, pytest.raises(StorageError, match="given up"):
        next(found)


def test_other_work_goes_on(requests):
    """Of other threads, of this one afterwards, and of work within work."""
    outer, inner = Abandonment(), Abandonment()
    with outer:
        with inner:
            inner.give_up()
        with ArrivalsInFlight(requests.fetch, [1]) as found:
            requests.wait(1)
            requests.answer(0)
            assert list(found) == [(0, b"\0")]
    outer.give_up()
    with ArrivalsInFlight(requests.fetch, [1]) as found:
        requests.wait(1)
        requests.answer(0)
        assert list(found) == [(0, b"\0")]


def test_nothing_is_kept_of_what_was_taken(requests):
    work = Abandonment()
    with work, ArrivalsInFlight(requests.fetch, [1]) as found:
        requests.wait(1)
        requests.answer(0)
        assert list(found) == [(0, b"\0")]
    del found
    assert work._waited == {}
