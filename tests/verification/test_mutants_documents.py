"""Checks of documents against each other, as functions of values: which one is blamed, and for what."""

import itertools

import pytest

from hsfmt.header import make_header
from hsfmt.layout import ROOT_METADATA
from hsfmt.readers.verification.attachments import parse_attachments
from hsfmt.readers.verification.complete import shown
from hsfmt.readers.verification.documents import check_headers
from hsfmt.readers.verification.report import Findings

DIGEST = f"xxh3_128:{'0' * 31}1"
ONE, TWO, THREE = (
    make_header(layers=[1, 2], hidden_size=4, final_norm="pre", dtype="float32", model=model) for model in "abc"
)


def entry(name, **members):
    return {"digest": DIGEST, "name": name, "nbytes": 5} | members


def test_attachments_become_files():
    findings = Findings()
    first, second = parse_attachments([entry("a.npy", nbytes=0), entry("b.npy")], findings, "s")
    assert (first.path, first.nbytes, first.digest) == (f"hsfmt/attachments/{'0' * 31}1/a.npy", 0, DIGEST)
    assert (second.path, second.nbytes) == (f"hsfmt/attachments/{'0' * 31}1/b.npy", 5)
    assert findings.items == []


@pytest.mark.parametrize(
    "listed",
    [
        None, {}, [None], ["a.npy"], [entry("a.npy", digest="1")], [entry("a.npy", nbytes=-1)],
        [entry("a.npy", nbytes=True)], [entry("a.npy", nbytes=5.0)], [entry("../a.npy")], [entry("A.npy")],
        [entry("x" * 65)], [entry("b.npy"), entry("a.npy")], [entry("a.npy"), entry("a.npy")],
    ],
)  # fmt: skip
def test_attachments_that_are_none(listed):
    findings = Findings()
    parse_attachments(listed, findings, "s")
    assert [(item.severity, item.code, item.where) for item in findings.items] == [
        ("error", "malformed", "s: attachments")
    ]


@pytest.mark.parametrize(
    ("root", "others", "sealed", "blamed"),
    [
        (ONE, {"a": ONE, "b": ONE}, True, []),
        (ONE, {}, False, []),
        (None, {"a": ONE, "b": ONE}, True, []),
        (None, {"a": ONE, "b": TWO}, True, [ROOT_METADATA]),
        (ONE, {"a": ONE, "b": TWO}, True, ["b"]),
        (ONE, {"a": TWO, "b": TWO}, True, [ROOT_METADATA]),
        (ONE, {"a": TWO, "b": TWO}, False, [ROOT_METADATA, "a", "b"]),
        (ONE, {"a": TWO, "b": THREE}, True, ["a", "b"]),
    ],
)
def test_which_header_is_blamed(root, others, sealed, blamed):
    findings = Findings()
    check_headers(findings, root, others, sealed=sealed)
    assert [item.where for item in findings.items] == blamed
    assert {(item.severity, item.code) for item in findings.items} <= {("error", "header")}
    told = [item.got for item in findings.items if root is not None]
    assert all("model" in got and "instead of" in got for got in told)


def test_names_that_can_not_be_printed_are_escaped():
    for name in map("".join, itertools.product("aé\n\x1b\udc80", repeat=2)):
        assert shown(name).isprintable()
        assert (shown(name) == name) == name.isprintable()
    assert shown("a\nb") == r"a\nb"
