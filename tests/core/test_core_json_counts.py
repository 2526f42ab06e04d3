"""How many values a JSON document may hold, counted before it is parsed."""

import json
import random
import re

import pytest

from hsfmt import canonical
from hsfmt.canonical import MAX_VALUES
from hsfmt.errors import FormatError

STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
# With quotes, marks, escapes and what is not ASCII in all places.
TEXTS = ("", '"', "\\", '\\"', ',[{"', '\\\\"', "]}:", "\u1234,", "[" * 20, "a\n")


def array(marks: int) -> bytes:
    """Return a JSON array of this many commas and brackets."""
    return b"[" + b",".join([b"1"] * marks) + b"]"


def refused(data: bytes, most: int) -> bool:
    try:
        canonical.check_n_values(data, "x")
    except FormatError as error:
        return error.problems[0].expected == f"JSON of at most {most} values"
    return False


def made(choose: random.Random, depth: int = 0) -> object:
    kind = choose.randrange(6 if depth < 5 else 2)
    if kind == 0:
        return "".join(choose.choices(TEXTS, k=3))
    if kind == 1:
        return choose.randrange(-5, 1000)
    members = [made(choose, depth + 1) for _ in range(choose.randrange(5))]
    return members if kind < 4 else {f"{i}{choose.choice(TEXTS)}": member for i, member in enumerate(members)}


def test_as_many_values_as_the_cap_are_taken_and_one_more_is_not():
    assert array(3) == b"[1,1,1]"
    assert len(canonical.loads(array(MAX_VALUES), "x")) == MAX_VALUES
    for data in (array(MAX_VALUES + 1), array(MAX_VALUES).replace(b"1,", b"{},", 1)):
        with pytest.raises(FormatError, match=f"at most {MAX_VALUES} values"):
            canonical.loads(data, "x")


@pytest.mark.parametrize("mark", ["[", "{", ","])
def test_each_mark_counts_outside_of_strings_only(monkeypatch, mark):
    monkeypatch.setattr(canonical, "MAX_VALUES", 100)
    data = b'["' + mark.encode() * 101 + b'"]'
    assert canonical.loads(data, "x") == [mark * 101]
    assert refused(mark.encode() * 101, 100)
    assert not refused(mark.encode() * 100, 100)


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64, 1 << 20])
def test_the_count_is_that_of_what_is_no_string(monkeypatch, piece):
    """Wherever the pieces end that it is counted in: in a string, and between a backslash and what it escapes."""
    monkeypatch.setattr(canonical, "_PIECE_NBYTES", piece)
    choose, escapes = random.Random(piece), 0
    for _ in range(100):
        data = json.dumps(made(choose), ensure_ascii=choose.random() < 0.5).encode()
        outside = STRING.sub(b"", data)
        marks = sum(map(outside.count, (b",", b"[", b"{")))
        monkeypatch.setattr(canonical, "MAX_VALUES", marks)
        assert not refused(data, marks)
        if marks:
            monkeypatch.setattr(canonical, "MAX_VALUES", marks - 1)
            assert refused(data, marks - 1)
        escapes += data.count(b"\\")
    assert escapes > 500


def test_what_is_refused_is_read_no_further_than_it_takes(monkeypatch):
    seen = []
    count = canonical._n_marks
    monkeypatch.setattr(
        canonical, "_n_marks", lambda piece, **inside: (seen.append(len(piece)), count(piece, **inside))[1]
    )
    assert refused(b"[" + b"[]," * (8 << 20) + b"[]]", MAX_VALUES)
    assert sum(seen) == 1 << 20
