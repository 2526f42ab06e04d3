"""Records of earlier runs, one unit at a time: what lets one be skipped, and what does not."""

import json

import pytest

from hsfmt.readers.verification.records import Records, default_state
from hsfmt.readers.verification.report import Finding, Findings
from hsfmt.readers.verification.selection import Unit
from hsfmt.storage import open_store

NOW = 1_000_000.0
HOUR = 3600.0


@pytest.fixture
def unit(tmp_path):
    (tmp_path / "dataset/parts").mkdir(parents=True)
    (tmp_path / "dataset/parts/shard").write_bytes(b"x" * 10)
    return Unit("p", ("parts/shard",), 10, "xxh3_128:1")


@pytest.fixture
def opened(tmp_path):
    """Open the records, as the next run would."""

    def open_records(key="k", url="dataset"):
        findings = Findings()
        records = Records(tmp_path / "state.json", open_store(tmp_path / url), findings, key)
        return records, findings

    return open_records


def bound(records, unit):
    return records.binding(unit, "xxh3_128:2")


@pytest.mark.parametrize(
    ("recorded", "asked", "holds"),
    [("complete", "complete", True), ("full", "complete", True), ("full", "full", True), ("complete", "full", False),
     ("doubtful", "complete", False), ("doubtful", "full", False)],
)  # fmt: skip
def test_a_record_vouches_for_its_level_and_those_below(opened, unit, recorded, asked, holds):
    records, _ = opened()
    binding = bound(records, unit)
    records.add(unit, binding, recorded, NOW)
    assert bool(records.holds(unit, binding, asked, NOW, HOUR)) is holds
    assert records.turn(unit, binding) == (2 if recorded == "doubtful" else 1, NOW)


def test_a_record_ages_and_one_of_the_future_is_not_believed(opened, unit):
    records, _ = opened()
    binding = bound(records, unit)
    records.add(unit, binding, "full", NOW)
    for later, holds in ((0, True), (HOUR, True), (HOUR + 0.5, False), (-0.5, False)):
        assert bool(records.holds(unit, binding, "full", NOW + later, HOUR)) is holds, later
    for time in (True, "1", None, -1.0, float(1 << 41)):
        records.add(unit, binding, "full", time)
        assert records.holds(unit, binding, "full", float(1 << 42), float(1 << 42)) == "", time
    records.add(unit, binding, "full", 0)
    assert records.holds(unit, binding, "full", 1.0, HOUR)


def test_without_an_age_only_this_pass_counts(opened, unit):
    records, _ = opened()
    binding = bound(records, unit)
    records.add(unit, binding, "full", NOW)
    records.save()
    again, findings = opened()
    assert findings.items == []
    assert again.holds(unit, binding, "full", NOW, None) == "read earlier in this pass"
    assert again.in_pass(unit, binding)
    other, _ = opened(key="another selection")
    assert other.holds(unit, binding, "full", NOW, None) == ""
    assert not other.in_pass(unit, binding)
    assert other.holds(unit, binding, "full", NOW, HOUR) == "verified within max-age"
    again.end_pass()
    assert again.holds(unit, binding, "full", NOW, None) == ""
    again.save()
    assert opened()[0].holds(unit, binding, "full", NOW, None) == ""


def test_a_pass_keeps_its_seed_and_the_next_one_draws(opened):
    records, _ = opened()
    assert records.seed_of_pass(5) == 5
    assert records.seed_of_pass(6) == 5
    records.save()
    assert opened()[0].seed_of_pass(7) == 5
    assert opened(key="another")[0].seed_of_pass(7) == 7
    records.end_pass()
    assert records.seed_of_pass(8) == 8
    for seed, kept in ((0, 0), (2**64 - 1, 2**64 - 1)):
        records.end_pass()
        records.seed_of_pass(seed)
        records.save()
        assert opened()[0].seed_of_pass(1) == kept


@pytest.mark.parametrize("change", ["size", "manifest", "digest", "paths"])
def test_what_changed_is_not_vouched_for(opened, unit, tmp_path, change):
    records, _ = opened()
    before = bound(records, unit)
    records.add(unit, before, "doubtful", NOW, [Finding("error", "digest", "parts/shard", "a", "b")])
    assert records.damage(unit, before) != []
    if change == "size":
        (tmp_path / "dataset/parts/shard").write_bytes(b"x" * 11)
    changed = {
        "manifest": lambda: records.binding(unit, "xxh3_128:3"),
        "digest": lambda: bound(records, Unit("p", unit.paths, 10, "xxh3_128:9")),
        "paths": lambda: bound(records, Unit("p", ("parts/shard", "parts/other"), 10, unit.digest)),
        "size": lambda: bound(records, unit),
    }[change]()
    assert changed != before
    assert records.turn(unit, changed) == (0, 0.0)
    assert records.damage(unit, changed) == []
    assert records.holds(unit, changed, "complete", NOW, HOUR) == ""


def test_damage_is_kept_as_it_was_said_up_to_a_hundred(opened, unit):
    records, _ = opened()
    binding = bound(records, unit)
    errors = [Finding("error", "digest", f"parts/{i}", "a", "b", "do", ("s1", "s2")) for i in range(120)]
    records.add(unit, binding, "doubtful", NOW, [Finding("warning", "nan", "w", "a", "b"), *errors])
    records.save()
    assert opened()[0].damage(unit, binding) == errors[:100]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _: "no JSON", "ignored"),
        (lambda _: json.dumps(["another"]), "another document"),
        (lambda text: text.replace("hsfmt-verified-1", "hsfmt-verified-2"), "another document"),
        (lambda text: text.replace('"level": "complete"', '"level": "full"'), "its digest"),
    ],
)
def test_a_file_that_is_not_what_was_written_counts_for_nothing(opened, unit, tmp_path, change, said):
    records, _ = opened()
    binding = bound(records, unit)
    records.add(unit, binding, "complete", NOW)
    records.save()
    file = tmp_path / "state.json"
    file.write_text(change(file.read_text()))
    again, findings = opened()
    assert [(item.severity, item.code) for item in findings.items] == [("info", "records")]
    assert said in findings.items[0].got
    assert again.holds(unit, binding, "complete", NOW, HOUR) == ""
    again.save()
    assert opened()[1].items == []


def test_records_of_another_dataset_count_for_nothing(opened, unit):
    records, _ = opened()
    binding = bound(records, unit)
    records.add(unit, binding, "full", NOW)
    records.save()
    again, findings = opened(url="other")
    assert "another dataset" in findings.items[0].got
    assert again.holds(unit, binding, "full", NOW, HOUR) == ""


def test_what_can_not_be_kept_is_said_once(opened, tmp_path):
    (tmp_path / "state.json").mkdir()
    records, findings = opened()
    findings.items.clear()
    records.save()
    records.save()
    assert [(item.severity, item.code) for item in findings.items] == [("info", "records")]
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


def test_each_url_has_a_file_of_its_own_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, two = default_state("s3://a"), default_state("s3://b")
    assert one != two
    assert one.parent == tmp_path / "hsfmt" / "verified"
    assert one == default_state("s3://a")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_state("s3://a") == tmp_path / "home" / ".cache" / "hsfmt" / "verified" / one.name
