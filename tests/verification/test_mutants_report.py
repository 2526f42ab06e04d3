"""Reports as values: what counts as whole, how findings are put together and told."""

import dataclasses

import pytest

from hsfmt.readers.verification.report import Counts, Coverage, Finding, Findings, Report


def coverage(*, total=1000, read=0, known=0, skipped=None, selection=None):
    return Coverage(selection or {}, 10, total, 1, read, skipped or {}, known)


@pytest.mark.parametrize(
    ("of", "fraction", "whole"),
    [
        (coverage(read=1000), 1.0, True),
        (coverage(read=600, known=400, skipped={"max-age": [4, 400]}), 1.0, True),
        (coverage(read=600, known=300, skipped={"max-age": [3, 300], "not chosen": [1, 100]}), 0.9, False),
        (coverage(read=600, skipped={"not chosen": [4, 400]}), 0.6, False),
        (coverage(read=1000, selection={"parts": ["p"]}), 1.0, False),
        (coverage(total=0), 1.0, True),
    ],
)  # fmt: skip
def test_what_is_whole(of, fraction, whole):
    assert (of.fraction, of.whole) == (pytest.approx(fraction), whole)
    assert {key: of.to_json()[key] for key in ("fraction", "whole")} == {"fraction": of.fraction, "whole": whole}
    report = Report("u", "full", None, (), Counts(), of)
    assert report.whole is whole
    assert (report.verdict == "fine") is whole


def test_a_share_that_rounds_to_all_is_not_called_all():
    nearly = coverage(total=10_000, read=9_999, skipped={"not chosen": [1, 1]})
    assert Report("u", "full", None, (), Counts(), nearly).verdict == (
        "fine so far, sample of more than 99.9 % of the data"
    )
    half = coverage(read=500, skipped={"not chosen": [1, 500]})
    assert Report("u", "full", None, (), Counts(), half).verdict == "fine so far, sample of 50 % of the data"


def test_damage_is_damage_however_little_was_read():
    finding = Finding("error", "digest", "a", "b", "c")
    for of in (None, coverage(read=1000), coverage(read=1, skipped={"not chosen": [9, 999]})):
        report = Report("u", "complete", None, (finding,), Counts(), of)
        assert (report.verdict, report.ok) == ("DAMAGED", False)
    warned = Report("u", "complete", None, (dataclasses.replace(finding, severity="warning"),), Counts())
    assert (warned.verdict, warned.ok, warned.errors) == ("fine", True, ())
    assert len(warned.of("warning")) == 1


def test_counts_are_added_each_to_its_own():
    counts = Counts(1, 2, 3, 4, 5, 6)
    counts.add(Counts(10, 20, 30, 40, 50, 60))
    assert counts == Counts(11, 22, 33, 44, 55, 66)


@pytest.mark.parametrize(("n", "shown"), [(1, "s0"), (5, "s0, s1, s2, s3, s4"), (6, "s0, s1, s2, s3, s4 …")])
def test_a_finding_names_five_samples(n, shown):
    finding = Finding("error", "digest", "f: m", "x", "y", "do", tuple(f"s{i}" for i in range(n)))
    assert str(finding) == f"error[digest] f: m: expected x, got y [{n} sample(s): {shown}] — do"
    assert finding.path == "f"
    assert str(Finding("info", "digest", "f", "x", "y")) == "info[digest] f: expected x, got y"


def test_long_findings_are_cut():
    findings = Findings()
    findings.error("digest", "f", expected="x", got="y" * 2000)
    assert findings.items[0].got == "y" * 1000


def test_samples_go_to_errors_about_the_file_that_have_none():
    findings = Findings()
    for severity, where, samples in (
        ("error", "f: m", ()),
        ("error", "f", ("z",)),
        ("warning", "f", ()),
        ("error", "g", ()),
    ):
        findings.add(severity, "digest", where, expected="x", got="y", samples=samples)
    findings.fill_samples("f", iter(["a", "b"]))
    assert [item.samples for item in findings.items] == [("a", "b"), ("z",), (), ()]
    assert [findings.has_error(path) for path in ("f", "g", "h", "f: m")] == [True, True, False, False]
    assert [item.where for item in findings.items_of("warning")] == ["f"]


def test_errors_come_first_then_places():
    findings = Findings()
    for severity, where, got in (("info", "a", "1"), ("error", "b", "1"), ("error", "a", "2"), ("error", "a", "1")):
        findings.add(severity, "digest", where, expected="x", got=got)
    assert [(item.severity, item.where, item.got) for item in findings.ordered()] == [
        ("error", "a", "1"), ("error", "a", "2"), ("error", "b", "1"), ("info", "a", "1"),
    ]  # fmt: skip


def test_of_superseded_parts_only_errors_become_warnings():
    findings = Findings()
    for severity in ("error", "warning", "info"):
        findings.add(severity, "digest", severity, expected="x", got="y")
    before = [item.remedy for item in findings.items]
    findings.about_superseded()
    assert [item.severity for item in findings.items] == ["warning", "warning", "info"]
    assert findings.items[0].remedy != before[0]
    assert [item.remedy for item in findings.items][1:] == before[1:]
