"""Sets of ids in flat memory, against Python's own."""

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsfmt import idset
from hsfmt.digests import id_key
from hsfmt.idset import IdSet

IDS = st.lists(st.text(max_size=3), max_size=40)


@given(st.lists(st.tuples(st.booleans(), IDS), max_size=6))
def test_it_is_a_set(steps):
    ids, model = IdSet(), set()
    for at_once, batch in steps:
        if at_once:
            ids.update([sample_id.encode() for sample_id in batch])
        else:
            for sample_id in batch:
                ids.add(sample_id)
        model |= set(batch)
        assert len(ids) == len(model)
        assert all(sample_id in ids for sample_id in model)
    assert all((probe in ids) == (probe in model) for probe in ("", "a", "\0", "aa", "é", "never seen"))


def test_merging_keeps_each_once(monkeypatch):
    monkeypatch.setattr(idset, "_MERGE_AT", 7)
    ids = IdSet()
    for number in range(500):
        ids.add(f"s{number % 250}")
        assert len(ids) == min(number + 1, 250)
    ids.update(f"s{number}".encode() for number in range(200, 300))
    assert len(ids) == 300
    assert all(f"s{number}" in ids for number in range(300))
    assert "s300" not in ids


def test_only_text_can_be_in_it():
    ids = IdSet()
    ids.add("a")
    assert all(odd not in ids for odd in (b"a", None, 5, ["a"], "\ud800", "a\ud800"))


def test_keys_that_share_a_half_are_told_apart(monkeypatch):
    keys = {"a": b"\1" * 16, "b": b"\1" * 8 + b"\2" * 8, "c": b"\2" * 8 + b"\1" * 8, "d": b"\1" * 8 + b"\3" * 8}
    monkeypatch.setattr(idset, "id_key", lambda data: keys.get(data.decode(), id_key(data)))
    ids = IdSet()
    ids.update([b"a", b"b", b"a"])
    assert len(ids) == 2
    assert ["a" in ids, "b" in ids, "c" in ids, "d" in ids] == [True, True, False, False]
    ids.update([b"c", b"d", b"b"])
    assert len(ids) == 4
    assert np.all(np.diff(ids._ids.high.astype(object)) >= 0)


def step_by_step(function, act):
    """Call a function, and `act` before each of its instructions, and of those of the functions in its module."""

    def trace(frame, event, arg):
        if frame.f_code.co_filename != idset.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            act()
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        return function()
    finally:
        sys.settrace(former)


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="Python 3.12 gives no events for each instruction")
def test_who_asks_during_a_merge_finds_all_of_it():
    ids = IdSet()
    ids.update([b"merged", b"too"])
    ids.add("recent")
    asked = []

    def ask():
        asked.append(len(ids))
        assert "merged" in ids
        assert "recent" in ids

    step_by_step(lambda: ids.update([b"a", b"b"]), ask)
    assert len(asked) > 50
    assert sorted(set(asked)) == [3, 5]
    assert asked == sorted(asked)


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="Python 3.12 gives no events for each instruction")
def test_a_merge_while_somebody_asks_hides_nothing():
    for step in itertools.count():
        ids = IdSet()
        ids.update([b"b", b"c"])
        ids.add("a")
        steps = itertools.count()

        def merge(ids=ids, steps=steps, step=step):
            if next(steps) == step:
                ids.update(b"other-%d" % number for number in range(20))

        asked = [step_by_step(lambda wanted=wanted, ids=ids: wanted in ids, merge) for wanted in "abc"]
        assert asked == [True, True, True]
        if next(steps) <= step:
            break
    assert step > 50


MEMORY = """
import sys
sys.path.insert(0, sys.argv[1])
from hsfmt.idset import IdSet
def rss():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS"))
ids = IdSet()
ids.update(b"warm-%d" % n for n in range(10))
before = rss()
n = 2_000_000
for start in range(0, n, 500_000):
    ids.update(b"conversation-%012d" % number for number in range(start, start + 500_000))
assert len(ids) == n + 10
grown = rss() - before
for number in range(0, 2000):
    assert f"conversation-{number * 1000:012d}" in ids
    assert f"conversation-{n + number:012d}" not in ids
print(grown)
"""


def test_two_million_ids_take_sixteen_bytes_each(run_python, repo_root):
    assert int(run_python(MEMORY, str(repo_root))) < 3 * 16 * 2_000_000
