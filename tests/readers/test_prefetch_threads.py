"""Reading ahead: in order, so many at a time, errors at their turn; nobody is at work after the end."""

import _thread
import dis
import functools
import gc
import itertools
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from contextlib import suppress

import pytest

from hsfmt.errors import CorruptionError, UsageError
from hsfmt.readers import read_ahead
from hsfmt.readers.read_ahead import Batches, ReadAhead


class Interrupt(BaseException):
    pass


class Work:
    """What the threads do, recorded."""

    def __init__(self, seconds=0.0):
        self.begun = []
        self.ended = []
        self.seconds = seconds

    def __call__(self, item):
        self.begun.append(item)
        time.sleep(self.seconds)
        if isinstance(item, BaseException):
            raise item
        self.ended.append(item)
        return item * 10

    @property
    def busy(self):
        return len(self.begun) > len(self.ended)


def ahead(source, work, **options):
    return Batches(ReadAhead(iter(source), work, **options), lambda state: None)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = _thread._count()
    yield
    deadline = time.monotonic() + 300
    while _thread._count() > before and time.monotonic() < deadline:
        time.sleep(0.002)
    assert _thread._count() <= before


def until(condition):
    deadline = time.monotonic() + 300
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


@pytest.fixture
def alarm():
    """SIGALRM raises Interrupt in the main thread; yields a function that sends it there."""

    def strike(*_):
        raise Interrupt

    former = signal.signal(signal.SIGALRM, strike)
    yield lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
    signal.signal(signal.SIGALRM, former)


@pytest.mark.parametrize(("depth", "n_threads"), [(1, 1), (2, 1), (3, 3), (8, 3), (2, 9)])
@pytest.mark.parametrize("n_items", [0, 1, 50])
def test_all_come_in_order(depth, n_threads, n_items):
    work = Work()
    batches = ahead(
        range(n_items), lambda item: time.sleep(item % 3 / 1000) or work(item), depth=depth, n_threads=n_threads
    )
    assert list(batches) == [item * 10 for item in range(n_items)]
    assert sorted(work.begun) == list(range(n_items))
    assert list(batches) == [], "an iterator at its end stays there"


@pytest.mark.parametrize(("depth", "n_threads"), [(1, 1), (3, 1), (4, 2)])
def test_no_more_is_made_than_depth_allows(depth, n_threads):
    work = Work()
    with ahead(itertools.count(), work, depth=depth, n_threads=n_threads) as batches:
        for taken in range(20):
            until(lambda taken=taken: len(work.ended) == depth + taken)
            time.sleep(0.002)
            assert len(work.begun) == depth + taken
            assert next(batches) == taken * 10


@pytest.mark.parametrize(
    "error", [CorruptionError.at("x", expected="a", got="b"), KeyboardInterrupt(), MemoryError(), ValueError()]
)
@pytest.mark.parametrize("n_threads", [1, 3])
def test_an_error_comes_at_its_turn(error, n_threads):
    work = Work()
    batches = ahead([0, 1, 2, error, *range(4, 100)], work, depth=3, n_threads=n_threads)
    assert [next(batches) for _ in range(3)] == [0, 10, 20]
    with pytest.raises(type(error)) as raised:
        next(batches)
    assert raised.value is error
    assert sorted(work.begun, key=str) == sorted([*work.ended, error], key=str), "nobody is at work"
    assert len(work.begun) <= 3 + 1 + 3, "what comes after is left out"
    with pytest.raises(UsageError, match=type(error).__name__):
        next(batches)


@pytest.mark.parametrize("place", ["source", "state", "settle"])
def test_an_error_elsewhere_comes_at_its_turn(place):
    calls = itertools.count()

    def third_fails(*_):
        if next(calls) == 2:
            raise OSError(place)

    def source():
        for item in range(100):
            if place == "source":
                third_fails()
            yield item

    options = {} if place == "source" else {place: third_fails}
    batches = ahead(source(), Work(), depth=2, **options)
    made = 3 if place == "settle" else 2
    assert [next(batches) for _ in range(made)] == [0, 10, 20][:made]
    with pytest.raises(OSError, match=place):
        next(batches)


def test_stop_iteration_out_of_the_work_is_no_end():
    """A generator's would be taken for the end, and the batches that follow for never there."""
    batches = ahead([1, StopIteration(), 3], Work())
    assert next(batches) == 10
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(batches)


def test_the_state_is_of_what_was_taken():
    position = itertools.count(1)
    latest = []

    def source():
        for item in range(5):
            latest[:] = [next(position)]
            yield item
        latest[:] = ["end"]

    stage = ReadAhead(source(), Work(), state=lambda: latest[0], depth=4)
    states = []
    batches = Batches(stage, states.append)
    for number in range(1, 6):
        time.sleep(0.01)
        next(batches)
        assert states[-1] == number
    with pytest.raises(StopIteration):
        next(batches)
    assert states == [1, 2, 3, 4, 5, "end"]


@pytest.mark.parametrize("n_threads", [1, 2])
def test_nobody_is_at_work_after_close(n_threads):
    for taken in (0, 1, 3):
        work = Work(0.02)
        batches = ahead(range(100), work, depth=3, n_threads=n_threads)
        for _ in range(taken):
            next(batches)
        until(lambda work=work: work.busy)
        batches.close()
        assert not work.busy
        assert len(work.begun) <= taken + 3
        before = list(work.begun)
        time.sleep(0.05)
        assert work.begun == before
        batches.close()
        with pytest.raises(UsageError, match="close"):
            next(batches)


def test_leaving_the_loop_ends_the_threads_and_frees_what_was_made():
    class Made:
        pass

    kept, closed = [], []

    def make(_):
        made = Made()
        kept.append(weakref.ref(made))
        return made

    def source():
        try:
            yield from range(100)
        finally:
            closed.append(True)

    stage = ReadAhead(source(), make, depth=3)
    for made in Batches(stage, lambda state: None):
        assert made is kept[0]()
        until(lambda: len(kept) == 4)
        break
    until(lambda: closed)
    del made
    until(lambda: [reference() for reference in kept] == [None] * 4)


def test_an_exception_in_the_loop_ends_the_threads():
    def train():
        for batch in ahead(itertools.count(), Work()):
            if batch == 30:
                raise ZeroDivisionError

    with suppress(ZeroDivisionError):
        train()
    # The fixture looks for threads.


def test_the_garbage_collector_may_end_it_in_its_own_thread():
    """As part of a cycle it goes wherever the collector runs: in a thread too, which can't wait for itself."""
    holder = {}

    def make(item):
        if item == 3:
            holder.clear()
            gc.collect()
        return item

    batches = ahead(range(100), make, depth=2)
    cycle = [batches]
    cycle.append(cycle)
    holder["cycle"] = cycle
    assert [next(batches) for _ in range(2)] == [0, 1]
    del batches, cycle
    until(lambda: not holder)


@pytest.mark.parametrize("n_threads", [1, 2])
def test_an_interrupt_while_waiting_ends_it_when_the_work_in_hand_is_done(alarm, n_threads):
    work = Work()

    def struck(item):
        work.begun.append(item)
        time.sleep(0.1)  # the taker waits by now
        if item == 2:
            alarm()
        time.sleep(0.1)
        work.ended.append(item)
        return item

    batches = ahead(range(100), struck, depth=2, n_threads=n_threads)
    with pytest.raises(Interrupt):
        list(batches)
    assert sorted(work.begun) == sorted(work.ended)
    with pytest.raises(UsageError, match="Interrupt"):
        next(batches)


def test_interrupts_while_closing_take_effect_afterwards(alarm):
    work = Work()

    def slow(item):
        work.begun.append(item)
        until(lambda: batches._ahead._over)  # the other thread is in close(), and waits for this one
        for _ in range(5):
            time.sleep(0.03)
            alarm()
        time.sleep(0.1)
        work.ended.append(item)

    batches = ahead(range(100), slow, depth=1)
    until(lambda: work.begun)
    with pytest.raises(Interrupt):
        batches.close()
    assert not work.busy
    assert work.begun == [0]


# After these, CPython looks for signals whose handlers are due.
LOOKS_FOR_SIGNALS = ("CALL", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")


@functools.cache
def instructions(code):
    """Instruction names by offset, and which exception handlers cover each."""
    names = {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}
    entries = dis.Bytecode(code).exception_entries
    return names, {at: [entry.target for entry in entries if entry.start <= at < entry.end] for at in names}


def callers(frame):
    """Names of the functions under way."""
    return [] if frame is None else [frame.f_code.co_name, *callers(frame.f_back)]


def interrupted(function, place):
    """Raise Interrupt at the place-th moment in read_ahead.py where a signal can strike this thread; return if so.

    As in test_threads.py. What happens in a finalizer is nobody's to handle, and left out.
    """
    moments = itertools.count()
    latest = {}

    def trace(frame, event, arg):
        if frame.f_code.co_filename != read_ahead.__file__ or "__del__" in callers(frame):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            names, handlers = instructions(frame.f_code)
            before, now = latest.get(frame), frame.f_lasti
            latest[frame] = now
            looks = before is not None and names[before].startswith(LOOKS_FOR_SIGNALS)
            if looks and handlers[before] == handlers[now] and next(moments) == place:
                raise Interrupt
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except Interrupt:
        return True
    finally:
        sys.settrace(former)
        latest.clear()  # the frames hold what is to be dropped
    return False


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="Python 3.12 gives no events for each instruction")
@pytest.mark.parametrize("n_stages", [1, 2])
def test_an_interrupt_anywhere(n_stages):
    """Nothing hangs, no batch is missing between those that came, and after close() nobody is at work."""
    for place in itertools.count():
        work, taken, closing, held = Work(0.001), [], [], []

        def loop(work=work, taken=taken, closing=closing, held=held):
            stage = ReadAhead(iter(range(100)), work, depth=2)
            if n_stages == 2:
                stage = ReadAhead(stage, int, depth=1)
            held.append(Batches(stage, lambda state: None))
            taken.extend(itertools.islice(held[0], 4))
            closing.append(True)
            held[0].close()

        struck = interrupted(loop, place)
        assert taken == [item * 10 for item in range(len(taken))]
        if closing and held[0]._ahead._over:  # else it struck before close() did anything
            assert not work.busy
            assert len(work.begun) <= 4 + 2 + n_stages
        held.clear()
        if not struck:
            break
    assert place > 40
    assert taken == [0, 10, 20, 30]


def test_close_lets_go_of_nothing_before_the_stage_below_has_ended():
    """An interrupt there would leave that one at work."""
    gate, begun, ended, released = threading.Event(), [], [], []

    def make(item):
        begun.append(item)
        assert item == 0 or gate.wait(300)
        ended.append(item)

    first = ReadAhead(itertools.count(), make, depth=2)
    second = ReadAhead(first, lambda item: item, depth=1)

    def release():
        if threading.current_thread() is closing:
            released.append(list(ended))

    second._release = release
    closing = threading.Thread(target=second.close)
    second.start()
    until(lambda: begun == [0, 1] and second._boxes.qsize() == 1)
    closing.start()
    deadline = time.monotonic() + 0.2
    while not released and time.monotonic() < deadline:
        time.sleep(0.001)
    gate.set()
    closing.join()
    assert released == [[0, 1]]
    del second._release
    first.close()


def test_a_fork_has_no_threads_to_take_from():
    batches = ahead(itertools.count(), Work(), depth=2)
    assert next(batches) == 0
    child = os.fork()
    if not child:
        try:
            batches.close()
            with pytest.raises(UsageError, match="fork"):
                next(batches)
            assert list(ahead(range(5), Work())) == [0, 10, 20, 30, 40]
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert next(batches) == 10
    batches.close()


def test_stages_on_each_other():
    first = ReadAhead(iter(range(20)), Work(), depth=2, state=lambda: None)
    settled = []
    second = ReadAhead(first, lambda item: item + 1, depth=1, settle=lambda: settled.append(1))
    batches = Batches(second, lambda state: None)
    assert list(batches) == [item * 10 + 1 for item in range(20)]
    assert len(settled) == 20


class LetGo(ReadAhead):
    """One whose last thread lets go of the source right after anybody looked at it."""

    @property
    def _source(self):
        source, self.kept = self.kept, None
        return source

    @_source.setter
    def _source(self, source):
        self.kept = source


def test_cancelling_while_the_last_thread_lets_go_of_the_source():
    first = ReadAhead(itertools.count(), int)
    second = LetGo(first, int)
    second.cancel()
    assert first.ended == second.ended == "close()"


@pytest.mark.parametrize("how", ["close", "drop"])
def test_the_end_of_a_stage_ends_the_one_below(how):
    work = Work(0.01)
    first = ReadAhead(itertools.count(), work, depth=2)
    batches = Batches(ReadAhead(first, lambda item: item, depth=1), lambda state: None)
    next(batches)
    if how == "close":
        batches.close()
        assert not work.busy
    del batches, first  # the fixture looks for threads


def test_where_no_thread_can_start_batches_are_made_when_they_are_taken(monkeypatch):
    def refused(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(read_ahead._thread, "start_new_thread", refused)
    work, settled = Work(), []
    batches = ahead([0, 1, 2, ValueError("three"), 4], work, depth=2, settle=lambda: settled.append(1))
    for number in range(3):
        assert next(batches) == number * 10
        assert work.begun == list(range(number + 1))
    with pytest.raises(ValueError, match="three"):
        next(batches)
    assert len(settled) == 3
    assert list(ahead(ReadAhead(iter(range(3)), work), work)) == [0, 100, 200]


EXIT = """
import atexit, faulthandler, itertools, sys, time
from hsfmt.readers.read_ahead import Batches, ReadAhead
faulthandler.dump_traceback_later(250, exit=True)
work = []
def make(item):
    work.append(item)
    time.sleep(0.05)
    work.pop()
    return item
def batches():
    return Batches(ReadAhead(itertools.count(), make, depth=2), lambda state: None)
"""
CASES = {
    "half-way": "held = batches(); print(next(held))",
    "in an exit handler": "atexit.register(lambda: print(next(batches())))",
    "by an exception": "held = batches(); print(next(held)); sys.excepthook = lambda *_: None; sys.exit(0)",
    "while others run": "held = [batches() for _ in range(5)]; print(next(held[0]))",
}


@pytest.mark.parametrize("code", CASES.values(), ids=CASES)
def test_the_interpreter_exits(run_python, repo_root, code):
    at_exit = "\natexit.register(lambda: None)\n"
    assert run_python(EXIT + at_exit + code, path=repo_root).strip() == "0"


def test_nobody_is_at_work_when_the_interpreter_goes(run_python, repo_root):
    # Registered before the module's own handler, so called after it.
    code = "import atexit\nat_work = []\natexit.register(lambda: print('at work:', at_work[0]))\n"
    code += EXIT + "at_work.append(work)\nheld = batches()\nnext(held)"
    assert run_python(code, path=repo_root).strip() == "at work: []"


def test_closing_at_exit_does_not_wait_for_ever(monkeypatch):
    release = threading.Event()
    batches = ahead(range(10), lambda _: release.wait(300), depth=1)
    monkeypatch.setattr(read_ahead, "_EXIT_SECONDS", 0.05)
    read_ahead._end_all()
    assert not release.is_set()
    release.set()
    batches.close()


@pytest.mark.parametrize("end", ["end", "error", "close"])
@pytest.mark.parametrize("n_threads", [0, 1, 2])
def test_it_ends_for_each_of_several_taking_threads(end, n_threads, monkeypatch):
    """Each batch goes to one of them; nobody waits for ever."""
    if n_threads == 0:
        monkeypatch.setattr(ReadAhead, "start", lambda self: None)
    broken = threading.Event()
    for _ in range(20):
        taken, ends = [], []
        items = {"end": range(30), "error": [*range(30), OSError("broken")], "close": itertools.count()}[end]
        batches = ahead(items, Work(), depth=3, n_threads=max(n_threads, 1))

        def take(batches=batches, taken=taken, ends=ends):
            try:
                for batch in batches:
                    taken.append(batch)
                    if batch == 300:
                        broken.set()
            except (OSError, UsageError) as error:
                ends.append(type(error))
            else:
                ends.append(None)

        broken.clear()
        takers = [threading.Thread(target=take, daemon=True) for _ in range(4)]
        for taker in takers:
            taker.start()
        if end == "close":
            assert broken.wait(300)
            batches.close()
        for taker in takers:
            taker.join(300)
            assert not taker.is_alive()
        assert len(set(taken)) == len(taken)
        if end != "close":
            assert sorted(taken) == [item * 10 for item in range(30)]
        # The error goes to one; meanwhile another one may find that nothing comes behind it, which is the end.
        allowed = {"end": {None}, "error": {OSError, UsageError, None}, "close": {UsageError}}[end]
        assert len(ends) == 4
        assert set(ends) <= allowed
        assert ends.count(OSError) == (end == "error")
        batches.close()


def test_threads_that_are_gone_without_a_word_end_the_iteration():
    """As for want of memory: with no entry that says so."""
    stage = ReadAhead(iter([]), Work())
    stage._n_started = 1
    stage._boxes.put(None)
    with pytest.raises(UsageError, match="threads"):
        next(stage)
    stage.close()


def test_a_source_that_fails_as_it_is_closed_does_not_hold_up_the_end(monkeypatch):
    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: dropped.append(str(error.exc_value)))

    def source():
        try:
            yield from range(10)
        finally:
            raise ValueError("no end")

    stage = ReadAhead(source(), Work(), depth=2)
    stage.start()
    next(stage)
    stage.cancel()
    while not dropped:  # its thread, the last one, closes the source
        time.sleep(0.001)
    stage.close()
    assert dropped == ["no end"]
    assert not stage.busy


def test_an_iteration_is_not_picklable():
    batches = ahead([1], Work())
    with pytest.raises(TypeError, match="threads"):
        pickle.dumps(batches)
    batches.close()
