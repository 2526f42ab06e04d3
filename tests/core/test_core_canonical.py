"""Canonical JSON: one byte form, and a parser that takes no other."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsfmt import canonical
from hsfmt.errors import FormatError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | INTEGERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(DOCUMENTS)
def test_documents_come_back_and_have_one_form(document):
    data = canonical.dumps(document)
    assert canonical.loads(data, "x") == document
    assert json.loads(data) == document
    assert canonical.dumps(canonical.loads(data, "x")) == data


@given(st.dictionaries(TEXT, INTEGERS, min_size=2, max_size=5))
def test_the_order_of_insertion_does_not_matter(document):
    reordered = dict(reversed(document.items()))
    assert canonical.dumps(document) == canonical.dumps(reordered)


def test_the_bytes():
    document = {"b": [1, True, None, -0], "a": {"é": "\u2028\n\x00\U0001f600"}, "A": ""}
    assert canonical.dumps(document) == (
        b'{"A":"","a":{"\xc3\xa9":"\xe2\x80\xa8\\n\\u0000\xf0\x9f\x98\x80"},"b":[1,true,null,0]}'
    )


@pytest.mark.parametrize(
    "document",
    [
        1.0,
        {"a": 1.5},
        float("nan"),
        2**63,
        -(2**63) - 1,
        {1: 2},
        {None: 2},
        "\ud800",
        {"\udfff": 1},
        {"a": {1, 2}},
        {"a": b"x"},
        ...,
    ],
    ids=repr,
)
def test_what_has_no_canonical_form_is_refused(document):
    with pytest.raises(FormatError):
        canonical.dumps(document)


def nested(depth, leaf=1):
    for _ in range(depth):
        leaf = [leaf]
    return leaf


def test_nesting_is_bounded():
    assert canonical.loads(canonical.dumps(nested(32)), "x") == nested(32)
    for document in (nested(33), {"a": nested(32)}):
        with pytest.raises(FormatError, match="nesting of at most 32"):
            canonical.dumps(document)
    circle = []
    circle.append(circle)
    with pytest.raises(FormatError, match="nesting"):
        canonical.dumps(circle)
    assert canonical.loads(b"[" * 33 + b"]" * 33, "x") == nested(32, []), "the innermost lies within 32 others"
    for depth in (34, 5_000, 500_000):
        with pytest.raises(FormatError):
            canonical.loads(b"[" * depth + b"]" * depth, "x")


REFUSED = {
    "duplicate keys": b'{"a":1,"a":1}',
    "duplicate keys deep inside": b'{"a":[{"b":1,"b":2}]}',
    "NaN": b'{"a":NaN}',
    "Infinity": b'{"a":Infinity}',
    "-Infinity": b'{"a":-Infinity}',
    "a float": b'{"a":1.0}',
    "an exponent": b'{"a":1e3}',
    "a huge exponent": b'{"a":1e999}',
    "65 bits": b'{"a":9223372036854775808}',
    "very many digits": b'{"a":' + b"9" * 10_000 + b"}",
    "negative zero": b'{"a":-0}',
    "white space": b'{"a": 1}',
    "a line end": b'{"a":1}\n',
    "another order": b'{"b":1,"a":1}',
    "an escape that need not be": b'{"a":"\\u0041"}',
    "an escaped slash": b'{"a":"\\/"}',
    "a lone surrogate": b'{"a":"\\ud800"}',
    "Latin-1": b'{"a":"\xe9"}',
    "an overlong form": b'{"a":"\xc0\xaf"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "two documents": b"{}{}",
    "a trailing comma": b'{"a":1,}',
    "a comment": b'{"a":1}//',
    "single quotes": b"{'a':1}",
    "a raw control character": b'{"a":"\x01"}',
    "nothing": b"",
    "cut short": b'{"a":',
    "NUL bytes": b"\0\0\0\0",
}


@pytest.mark.parametrize("case", REFUSED)
def test_any_other_bytes_are_refused(case):
    with pytest.raises(FormatError) as caught:
        canonical.loads(REFUSED[case], "hsfmt/x.json")
    (problem,) = caught.value.problems
    assert problem.where == "hsfmt/x.json"
    assert len(str(problem)) < 700, "a hostile document does not fill the screen"


def test_metadata_may_have_floats_and_any_spacing():
    document = {"b": 1.5, "a": [1e-300, -0.0]}
    data = canonical.dumps_metadata(document)
    assert canonical.loads(data, "x", metadata=True) == document
    assert canonical.loads(b' {"b": 1.50, "a": [] }', "x", metadata=True) == {"a": [], "b": 1.5}
    for bad in (b'{"a":NaN}', b'{"a":1,"a":2}', b'{"a":1e999}', b'{"a":9223372036854775808}'):
        with pytest.raises(FormatError):
            canonical.loads(bad, "x", metadata=True)
    for bad in (float("inf"), float("nan")):
        with pytest.raises(FormatError, match="finite"):
            canonical.dumps_metadata({"a": bad})


@pytest.mark.parametrize("data", [b"<!DOCTYPE html><html></html>", b" \n<?xml version='1.0'?><Error/>", b"<"])
def test_a_page_instead_of_a_document_is_called_one(data):
    with pytest.raises(FormatError, match=r"zarr.json: expected strict JSON, got .*, of a web page or another doc"):
        canonical.loads(data, "zarr.json")
