"""Ctrl-C and SIGTERM that wait until somebody asks for them."""

import signal
import subprocess
import sys
import threading

import pytest

from hsfmt.interruptions import interruptions_wait


class Ended(BaseException):
    """A handler of SIGTERM was called."""


@pytest.fixture(autouse=True)
def handlers():
    """SIGTERM raises Ended; both signals are handled afterwards as before."""
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def end(*_):
        raise Ended

    signal.signal(signal.SIGTERM, end)
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Ended)])
def test_one_waits_until_it_is_asked_for(number, kind):
    handler = signal.getsignal(number)
    steps = []
    with pytest.raises(kind), interruptions_wait() as interrupt:  # noqa: PT012
        interrupt()
        signal.raise_signal(number)
        steps.append("went on")
        interrupt()
        steps.append("never")
    assert steps == ["went on"]
    assert signal.getsignal(number) is handler


def test_one_that_nobody_asked_for_comes_at_the_end():
    with pytest.raises(KeyboardInterrupt), interruptions_wait():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_does_not_make_it_go_away():
    with pytest.raises(KeyboardInterrupt) as caught, interruptions_wait():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        raise ValueError("another error")
    assert isinstance(caught.value.__context__, ValueError)


def test_what_follows_the_first_is_the_same_one():
    steps = []
    with pytest.raises(KeyboardInterrupt), interruptions_wait() as interrupt:  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        try:
            interrupt()
        finally:
            signal.raise_signal(signal.SIGINT)
            steps.append("the end is not disturbed")
    assert steps == ["the end is not disturbed"]


def test_the_second_strikes_at_once_where_that_is_asked_for():
    steps = []
    with pytest.raises(KeyboardInterrupt), interruptions_wait(second_strikes=True):  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        steps.append("waits")
        signal.raise_signal(signal.SIGINT)
        steps.append("never")
    assert steps == ["waits"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_third_ctrl_c_ends_the_process():
    script = """
import signal
from hsfmt.interruptions import interruptions_wait
with interruptions_wait():
    for n in range(3):
        print(n, flush=True)
        signal.raise_signal(signal.SIGINT)
    print("still there")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.split() == ["0", "1", "2"]
    assert done.returncode == -signal.SIGINT


def test_a_signal_without_a_python_handler_is_left_alone():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with interruptions_wait() as interrupt:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        signal.raise_signal(signal.SIGTERM)
        interrupt()


def test_a_handler_that_sets_another_is_obeyed():
    def deaf(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Ended

    signal.signal(signal.SIGTERM, deaf)
    with pytest.raises(Ended), interruptions_wait() as interrupt:  # noqa: PT012
        signal.raise_signal(signal.SIGTERM)
        interrupt()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_other_threads_change_nothing():
    seen = []

    def look():
        with interruptions_wait() as interrupt:
            interrupt()
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
