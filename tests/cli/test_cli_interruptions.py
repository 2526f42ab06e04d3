"""Ctrl-C and SIGTERM end a command wherever they strike, in a finalizer too, where Python drops the exception."""

import signal
import sys
import threading
import weakref

import pytest

from hsfmt.cli import info
from hsfmt.cli.termination import Terminated, no_interruption_is_lost, sigterm_interrupts

NEVER = 60  # seconds: long enough that the interruption comes before


class Struck:
    """Something that is finalized while a signal comes."""

    def __init__(self, number):
        self.number = number

    def __del__(self):
        signal.raise_signal(self.number)


def in_finalizer(number):
    Struck(number)  # gone at once


def in_callback(number):
    watched = Struck.__new__(Struck)
    watched.number = signal.SIGURG  # nobody handles that
    seen = weakref.ref(watched, lambda _: signal.raise_signal(number))
    del watched
    assert seen() is None


@pytest.fixture(autouse=True)
def sigterm():
    """SIGTERM is left as it was: whoever was ended by one is deaf to the next."""
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)


def struck(strike, number):
    with sigterm_interrupts(), no_interruption_is_lost():
        strike(number)
        threading.Event().wait(NEVER)


@pytest.mark.parametrize("strike", [in_finalizer, in_callback])
@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_one_that_was_dropped_comes_again(strike, number, kind):
    hook = sys.unraisablehook
    with pytest.raises(kind):
        struck(strike, number)
    assert sys.unraisablehook is hook


def test_a_command_ends_with_it(hsfmt, tmp_path, monkeypatch):
    def slow(*_, **__):
        in_finalizer(signal.SIGINT)
        threading.Event().wait(NEVER)

    monkeypatch.setattr(info, "open_dataset", slow)
    assert hsfmt.json("info", tmp_path, code=130)["error"][0]["got"] == "an interruption"


def test_what_else_is_dropped_goes_where_it_went(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: seen.append(dropped.exc_value))

    class Wrong:
        def __del__(self):
            raise ValueError("no interruption")

    with no_interruption_is_lost():
        Wrong()
        timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert [str(error) for error in seen] == ["no interruption"]
    assert not timers


def test_other_threads_are_left_alone():
    hooks = []

    def look():
        with no_interruption_is_lost():
            hooks.append(sys.unraisablehook)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert hooks == [sys.unraisablehook]
