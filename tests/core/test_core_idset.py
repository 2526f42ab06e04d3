"""Sets of ids in flat memory, against Python's own."""

import numpy as np
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
    assert np.all(np.diff(ids._high.astype(object)) >= 0)


MEMORY = """
import sys, time
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
start = time.perf_counter()
for number in range(0, 2000):
    assert f"conversation-{number * 1000:012d}" in ids
    assert f"conversation-{n + number:012d}" not in ids
seconds = (time.perf_counter() - start) / 4000
print(grown, seconds)
"""


def test_two_million_ids_take_sixteen_bytes_each(run_python, repo_root):
    grown, seconds = map(float, run_python(MEMORY, str(repo_root)).split())
    assert grown < 3 * 16 * 2_000_000
    assert seconds < 1e-3, "a question does not cost a copy of the set"
