"""The pool of the readers: what a signal handler raises at any moment leaves nothing at work and nothing locked."""

import ast
import dis
import functools
import gc
import itertools
import os
import signal
import sys
import threading
import time
import weakref
from contextlib import suppress

import numpy as np
import pytest
from written import assert_same

from hsfmt.errors import StorageError
from hsfmt.readers import delivery, scatter, threads
from hsfmt.readers.fetch import Fetcher
from hsfmt.readers.sample_reader import ReadOptions, SampleReader
from hsfmt.readers.threads import run_all, run_coming

# After these, CPython looks for signals whose handlers are due.
LOOKS_FOR_SIGNALS = ("CALL", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")
LOOPS = (ast.While, ast.For, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Interrupt(BaseException):
    pass


@pytest.fixture
def alarm():
    """SIGALRM raises Interrupt in the main thread; yields a function that sends it there."""

    def strike(*_):
        raise Interrupt

    former = signal.signal(signal.SIGALRM, strike)
    yield lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
    signal.signal(signal.SIGALRM, former)


@functools.cache
def instructions(code):
    """Instruction names by offset, and which exception handler covers each."""
    names = {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}
    entries = dis.Bytecode(code).exception_entries
    handlers = {at: [entry.target for entry in entries if entry.start <= at < entry.end] for at in names}
    return names, handlers


def interrupted(function, place):
    """Call a function and raise Interrupt at the place-th moment in threads.py where a signal can strike; return if so.

    A signal strikes at the end of an instruction, a tracer before the next one: where another handler covers that, the
    two are not the same, and the moment is left out. After a jump back it must not be so: some versions of Python leave
    the jump out of the handler that covers the loop.
    """
    moments = itertools.count()
    latest = {}

    def trace(frame, event, arg):
        if frame.f_code.co_filename != threads.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            names, handlers = instructions(frame.f_code)
            before, now = latest.get(frame), frame.f_lasti
            latest[frame] = now
            if before is None or not names[before].startswith(LOOKS_FOR_SIGNALS):
                return trace
            same = handlers[before] == handlers[now]
            assert same or "JUMP" not in names[before], f"an uncovered jump in line {frame.f_lineno}"
            if same and next(moments) == place:
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
    return False


class Work:
    """What was begun and what ended."""

    def __init__(self, seconds=0.001):
        self.begun, self.ended, self.seconds = [], [], seconds

    def __call__(self, item):
        self.begun.append(item)
        time.sleep(self.seconds)
        self.ended.append(item)


def run_one_by_one(work, items, n_threads, *, inline):
    """run_all, of items that come one after the other and end with `abandon`."""
    coming = Coming(items)

    def ending(item):
        try:
            work(item)
        except BaseException:
            coming.end()
            raise

    run_coming(ending, coming, n_threads, inline=inline, abandon=coming.end)


EITHER = (run_all, run_one_by_one)


class Coming:
    def __init__(self, items):
        self.items = iter(items)

    def __iter__(self):
        return self

    def __next__(self):
        time.sleep(0.001)
        return next(self.items)

    def end(self):
        self.items = iter(())


def within(seconds, function):
    """Fail instead of hanging."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive()


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="Python 3.12 gives no events for each instruction")
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("run_all", EITHER)
def test_an_interrupt_anywhere(monkeypatch, run_all, fresh):
    """The threads that are started by and by, and those that are there."""
    monkeypatch.setattr(threads, "_POOLS", threads._Pools())
    run_all(Work(), [1, 2], 2, inline=False)
    past = []
    for place in itertools.count():
        if fresh and place < 40:
            threads._POOLS.after_fork()
        work = Work()
        struck = interrupted(lambda work=work: run_all(work, [1, 2, 3], 2, inline=False), place)
        assert sorted(work.begun) == sorted(work.ended), "nobody is at work any more"
        past.append((work, list(work.begun)))
        again = Work(0)
        within(300, lambda again=again: run_all(again, [1, 2, 3, 4], 2, inline=False))
        assert sorted(again.ended) == [1, 2, 3, 4]
        if not struck:
            break
    assert place > 12
    assert sorted(work.ended) == [1, 2, 3]
    assert all(work.begun == begun for work, begun in past), "nobody went to work later"


def test_no_loop_turns_back_under_a_lock(repo_root):
    """Some versions of Python leave the jump out of what gives the lock back when a signal strikes there."""
    n_locks = 0
    for path in (repo_root / "readers").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.With) and any("_lock" in ast.unparse(item) for item in node.items):
                n_locks += 1
                inside = [at for statement in node.body for at in ast.walk(statement) if isinstance(at, LOOPS)]
                assert not inside, f"{path}:{inside[0].lineno}"
    assert n_locks > 8


@pytest.mark.parametrize("run_all", EITHER)
def test_threads_are_started_once(monkeypatch, run_all):
    monkeypatch.setattr(threads, "_POOLS", threads._Pools())
    for _ in range(50):
        run_all(Work(0), [1, 2, 3], 2, inline=False)
    assert threads._POOLS.get(2).n_started == 2


@pytest.mark.parametrize("run_all", EITHER)
@pytest.mark.parametrize("n_strikes", [1, 5])
def test_a_signal_takes_effect_when_the_work_in_hand_is_done(alarm, n_strikes, run_all):
    work = Work()

    def struck(item):
        work.begun.append(item)
        time.sleep(0.1)  # the caller waits by now: Python misses a signal between its last look and the wait
        for _ in range(n_strikes if item == 1 else 0):
            alarm()
            time.sleep(0.02)
        work.ended.append(item)

    with pytest.raises(Interrupt):
        run_all(struck, list(range(1, 100)), 2, inline=False)
    assert sorted(work.begun) == sorted(work.ended)
    assert 1 in work.begun
    assert len(work.begun) < 10, "the rest is left out"


@pytest.mark.parametrize(("run", "items"), [(run_all, list), (run_coming, Coming)])
def test_a_second_signal_strikes_what_the_first_one_ends(alarm, run, items):
    """As Ctrl-C and a launcher's SIGTERM that come together."""
    work, n_ends = Work(), []

    def slow(item):
        work.begun.append(item)
        if item == 1:
            time.sleep(0.1)
            alarm()
        time.sleep(0.3)
        work.ended.append(item)

    def end():
        n_ends.append(None)
        if len(n_ends) < 3:
            raise Interrupt

    with pytest.raises(Interrupt):
        run(slow, items([1, 2, 3, 4, 5]), 2, inline=False, abandon=end)
    assert sorted(work.begun) == sorted(work.ended), "nobody is at work any more"
    assert len(n_ends) == 3, "until it ended"


def test_a_signal_outranks_what_the_storage_failed_with(alarm):
    """A loop that tries again after such a failure would never hear of it."""
    done = []

    def items():
        yield 1
        time.sleep(0.1)
        raise StorageError.at("x", expected="a", got="b")

    def work(item):
        time.sleep(0.3)  # the failure is there by now, and the caller waits for us
        alarm()
        time.sleep(0.1)
        done.append(item)

    with pytest.raises(Interrupt):
        run_coming(work, items(), 2, inline=False, abandon=lambda: None)
    assert done == [1]
    with pytest.raises(StorageError):
        run_coming(done.append, items(), 2, inline=False, abandon=lambda: None)


def test_an_error_that_is_kept_keeps_nothing_that_was_handed_over():
    gc.collect()
    gc.disable()
    try:
        buffers = [Buffer() for _ in range(20)]
        kept = [weakref.ref(buffer) for buffer in buffers]
        coming = Coming([*enumerate(buffers)])
        del buffers

        def work(item):
            time.sleep(0.1)
            raise ValueError(item[0])

        with pytest.raises(ValueError, match=r"0|1") as caught:
            run_coming(work, coming, 2, inline=False, abandon=coming.end)
        coming.end()
        deadline = time.monotonic() + 300
        while sum(ref() is not None for ref in kept) > 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert sum(ref() is not None for ref in kept) <= 2, "those at work, to which tracebacks lead"
        assert caught.value.__traceback__ is not None
    finally:
        gc.enable()


@pytest.mark.parametrize("step", ["_deliver", pytest.param("_read_chunk", marks=pytest.mark.local)])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_nothing_is_written_to_out_after_an_interrupted_read(write, monkeypatch, alarm, codec, step):
    """Whether small chunks are read several at a time, or each straight to where it goes."""
    monkeypatch.setattr(delivery, "SMALL_CHUNK_NBYTES", 1 if step == "_read_chunk" else 1 << 20)
    monkeypatch.setattr(scatter, "MIN_ROW_NBYTES", 1)
    written = write(codec=codec)
    reader = SampleReader(written.url, options=ReadOptions(n_threads=2))
    reader.read_many(range(10))
    take = getattr(Fetcher, step)

    def slow(self, *rest):
        time.sleep(0.05)
        alarm()
        time.sleep(0.1)
        take(self, *rest)

    out = np.zeros((64, 3, 8), np.uint16)
    with monkeypatch.context() as patch:
        patch.setattr(Fetcher, step, slow)
        with pytest.raises(Interrupt):
            reader.read(7, out=out)
    out[:] = 7
    assert_same(reader.read(5, out=out[:33]), written.content["id-005"])
    kept = out.copy()
    time.sleep(0.3)
    np.testing.assert_array_equal(out, kept)
    assert_same(reader.read(7), written.content["id-007"])


def test_an_interrupted_process_exits(run_python, repo_root):
    code = """
    import faulthandler, signal, threading, time
    from hsfmt.readers.threads import run_all, run_coming
    faulthandler.dump_traceback_later(250, exit=True)
    def work(item):
        if item == 5:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.01)
    try:
        run_all(work, list(range(100)), 3, inline=False)
    except KeyboardInterrupt:
        print("interrupted")
    """
    assert run_python("if 1:" + code, path=repo_root).strip() == "interrupted"


def test_threads_that_outlive_the_main_one_go_on(run_python, repo_root):
    code = """
    import threading, time
    from hsfmt.readers.threads import run_all, run_coming
    def late():
        threading.main_thread().join()
        done = []
        run_all(done.append, list(range(10)), 2, inline=False)
        print(sorted(done))
    threading.Thread(target=late).start()
    """
    assert run_python("if 1:" + code, path=repo_root).strip() == str(list(range(10)))


@pytest.mark.parametrize("run_all", EITHER)
@pytest.mark.parametrize("kind", [ValueError, StopIteration, KeyboardInterrupt])
def test_what_work_raises_is_raised(kind, run_all):
    done = []

    def work(item):
        if item == 3:
            raise kind(item)
        time.sleep(0.01)
        done.append(item)

    with pytest.raises(kind, match="3"):
        run_all(work, list(range(1000)), 2, inline=False)
    assert len(done) < 500, "the rest is left out"


class Buffer:
    pass


@pytest.mark.parametrize("run_all", EITHER)
def test_nothing_is_kept_of_a_read_that_ended(run_all):
    """Nor until the garbage collector comes: buffers are large."""
    gc.collect()
    gc.disable()
    try:
        for failing in (False, True):
            buffer = Buffer()
            kept = weakref.ref(buffer)

            def work(item, buffer=buffer, failing=failing):
                if failing:
                    raise ValueError(f"{buffer} {item}")

            if failing:
                with suppress(ValueError):
                    run_all(work, [1, 2, 3], 2, inline=False)
            else:
                run_all(work, [1, 2, 3], 2, inline=False)
            del buffer, work
            deadline = time.monotonic() + 300  # the threads let go of it after the caller goes on
            while kept() is not None and time.monotonic() < deadline:
                time.sleep(0.001)
            assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("run_all", EITHER)
def test_with_fewer_threads_than_asked_for(monkeypatch, run_all):
    monkeypatch.setattr(threads, "_POOLS", threads._Pools())
    start, allowed = threads._thread.start_new_thread, [1]

    def limited(*args):
        if not allowed:
            raise RuntimeError("can't start new thread")
        allowed.pop()
        return start(*args)

    monkeypatch.setattr(threads._thread, "start_new_thread", limited)
    work = Work(0)
    run_all(work, [1, 2, 3, 4], 3, inline=False)
    assert work.ended == [1, 2, 3, 4]
    threads._POOLS.after_fork()
    run_all(work, [5, 6], 2, inline=False)  # none at all, as at the interpreter's exit from Python 3.12 on
    assert work.ended == [1, 2, 3, 4, 5, 6]


def test_cores_where_the_system_knows_no_affinity(write, monkeypatch):
    """As on macOS."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity")
    for reported, expected in ((2, 2), (64, 4), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda reported=reported: reported)
        assert threads.default_threads() == expected
    written = write([5])
    assert_same(SampleReader(written.url).read(0), written.content["id-000"])


@pytest.mark.parametrize(
    ("local_ranks", "expected"),
    [("1", 4), ("2", 4), ("4", 3), ("8", 1), ("64", 1), ("", 4), ("0", 4), ("-2", 4), ("two", 4), ("9" * 5000, 4)],
)
def test_the_ranks_of_a_machine_share_its_cores(monkeypatch, local_ranks, expected):
    monkeypatch.setattr(threads, "n_cores", lambda: 12)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_ranks)
    assert threads.default_threads() == expected
