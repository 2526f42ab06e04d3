"""Verification in slices, under a time limit, from the command line: what it goes on with and what it says."""

import itertools
import json
import os
import re
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hsfmt import seal
from hsfmt.cli.main import main
from hsfmt.manifest import parse_manifest
from hsfmt.readers.verification import objects, verify
from hsfmt.readers.verification.records import _digest
from hsfmt.readers.verification.report import Counts, Coverage, Report
from hsfmt.storage.local import LocalStore

HOUR, NONE = timedelta(hours=1), timedelta(0)


def shards(root):
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if "/c/" in p.as_posix() and p.is_file())


def flip(path, at=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def body(state):
    return json.loads(state.read_bytes())["body"]


def write_body(state, changed):
    state.write_text(json.dumps({"body": changed, "digest": _digest(changed), "format": "hsfmt-verified-1"}))


@pytest.fixture(scope="module")
def one_part(tmp_path_factory, build_dataset):
    """One part of nine samples in a dozen shards of states: samples that lie in up to three of them."""
    return build_dataset(tmp_path_factory.mktemp("limits") / "dataset", n_parts=1, n_samples=9, shard_tokens=4)


@pytest.fixture
def long_part(one_part, tmp_path):
    """A copy to damage."""
    return shutil.copytree(one_part, tmp_path / "long")


class Watched(LocalStore):
    """Notes which shards are read, and in which order."""

    def __init__(self, root):
        super().__init__(root)
        self.order = []

    def read_into(self, path, offset, buffer):
        super().read_into(path, offset, buffer)
        if "/c/" in path and path not in self.order:
            self.order.append(path)


# --- slices ----------------------------------------------------------------------------------------------------------


def test_one_part_is_spread_over_processes(long_part, monkeypatch):
    """The report of a damaged part is the same, whether its slices are checked here or by two processes."""
    from hsfmt.readers.verification import work

    tasks = []
    spread = work.spread
    monkeypatch.setattr(work, "spread", lambda run, todo, *rest: (tasks.extend(todo), spread(run, todo, *rest))[1])
    states = [path for path in shards(long_part) if "/hidden_states/" in path]
    assert len(states) > 8
    for path in (states[0], states[4], states[5]):
        flip(long_part / path)
    flip(long_part / "parts/part-0/input_ids/c/3", 3)
    (long_part / states[7]).unlink()
    one, two = (verify(long_part, level="full", workers=n).to_json() for n in (1, 2))
    assert len(tasks) == len(states)
    assert one == two
    assert {problem["where"] for problem in one["problems"] if problem["severity"] == "error"} == {
        states[0], states[4], states[5], states[7], "parts/part-0/input_ids/c/3",
    }  # fmt: skip


def test_slices_count_every_chunk_once(one_part):
    manifest = parse_manifest((one_part / "hsfmt/manifests/part-0.json").read_bytes(), "part-0", "manifest")
    counts = verify(one_part, level="full").counts
    assert counts.chunks == sum(column.n_chunks for column in manifest.columns.values())
    assert counts.nbytes > sum((one_part / path).stat().st_size for path in shards(one_part))


def test_faults_of_samples_are_put_together(long_part, forge):
    """A fault that samples of several slices share is one finding, with all of them in order."""
    forger = forge(long_part)
    wrong = np.array(forger.index.content_digest)
    wrong[[0, 4, 8]] ^= 1
    forger.set_index(content_digest=wrong)
    forger.sign()
    report = verify(long_part, level="full", workers=2)
    (finding,) = [f for f in report.errors if f.code == "content_digest"]
    assert finding.samples == ("s0-0", "s0-4", "s0-8")
    assert "2 more samples likewise" in finding.got


def test_a_sample_of_tier_full_computes_digests(long_part, forge):
    """Each subset finds the wrong digests of the samples that begin in it; together they find all, each once."""
    forger = forge(long_part)
    wrong = np.array(forger.index.content_digest)
    wrong ^= 1
    forger.set_index(content_digest=wrong)
    forger.sign()
    found = []
    for n in (1, 2, 3):
        report = verify(long_part, level="full", sample=f"{n}/3")
        found += [name for f in report.errors if f.code == "content_digest" for name in f.samples]
    assert sorted(found) == [f"s0-{n}" for n in range(9)]


def test_damage_beside_a_chosen_slice_is_reported(long_part):
    """A sample that begins in a chosen slice and can't be read to its end is no silence."""
    states = [path for path in shards(long_part) if "/hidden_states/" in path]
    (long_part / states[5]).write_bytes(b"")
    reports = [verify(long_part, level="full", sample=f"{n}/{len(states)}") for n in range(1, len(states) + 1)]
    assert {f.path for report in reports for f in report.errors} == {states[5]}
    assert all(report.errors for report in reports)  # its size tells, in any case


def test_a_flip_beside_a_chosen_slice_is_reported(long_part):
    states = [path for path in shards(long_part) if "/hidden_states/" in path]
    flip(long_part / "parts/part-0/hidden_states/c/6/0/0", 20)
    seen = [
        bool(verify(long_part, level="full", sample=f"{n}/{len(states)}").errors) for n in range(1, len(states) + 1)
    ]
    assert 2 <= sum(seen) < len(seen)  # the slice of that file, and those whose samples reach into it


# --- a limit in time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["complete", "full"])
def test_damage_does_not_starve_the_rest(dataset, tmp_path, level):
    """Never read first, the longest ago next, damaged last; and what is damaged stays an error until read again."""
    damaged = [shards(dataset)[0], shards(dataset)[9]]
    for path in damaged:
        flip(dataset / path)
    options = {"level": level, "max_duration": NONE, "state": tmp_path / "state"}
    n_units = sum("/hidden_states/" in path for path in shards(dataset)) if level == "full" else len(shards(dataset))
    store = Watched(dataset)
    reports = [verify(store, **options) for _ in range(n_units)]
    assert set(store.order) == set(shards(dataset))
    assert all(len(report.errors) <= len(later.errors) for report, later in itertools.pairwise(reports))
    assert {f.path for f in reports[-1].errors} == set(damaged)
    # A new pass: what is damaged comes last, and is no less an error before.
    again = Watched(dataset)
    for n in range(n_units - 1):
        report = verify(again, **options)
        assert {f.path for f in report.errors} == set(damaged), n
        assert not report.whole
        assert any("not read again by this one" in f.got for f in report.errors)
        if level == "complete" and n < n_units - 2:
            assert not set(again.order) & set(damaged)
    # Once the files are whole again they are unknown, and read first.
    for path in damaged:
        flip(dataset / path)
    third = Watched(dataset)
    report = verify(third, **options)
    report = verify(third, **options)
    assert set(damaged) <= set(third.order)
    assert report.ok


def test_a_sample_keeps_its_seed_until_the_pass_ends(dataset, tmp_path):
    options = {"level": "complete", "sample": "40%", "max_duration": NONE, "state": tmp_path / "state"}
    seeds, read = [], 0
    for _ in range(len(shards(dataset))):
        coverage = verify(dataset, **options).coverage
        seeds.append(coverage.selection["seed"])
        read += coverage.read_nbytes
        if "max-duration was over" not in coverage.skipped:
            break
    total = coverage.total_nbytes
    assert len(seeds) > 2
    assert len(set(seeds)) == 1
    assert 0.2 * total < read <= 0.4 * total
    new = {verify(dataset, **options | {"state": tmp_path / "state"}).coverage.selection["seed"] for _ in range(2)}
    assert seeds[0] not in new
    assert len(new) == 1
    given = verify(dataset, **options | {"seed": 3}).coverage.selection["seed"]
    assert given == 3


# --- records ---------------------------------------------------------------------------------------------------------


def test_records_with_a_right_digest_that_say_anything(dataset, tmp_path):
    """Nothing in the file of records makes a verification fail, and none but a true record vouches for a file."""
    state = tmp_path / "state"
    options = {"level": "complete", "max_duration": NONE, "max_age": HOUR, "state": state}
    verify(dataset, **options | {"max_duration": HOUR})
    good = body(state)
    name, record = next(iter(good["records"].items()))
    lies = [{"time": value} for value in (None, "now", [], {}, True, float("nan"), float("inf"), -1, 2**70, -(10**400))]
    lies += [{"level": value} for value in (None, 1, [], {}, "", "quick", "Full")]
    lies += [{"binding": value} for value in (None, [], {}, "", record["binding"] | {"nbytes": 1})]
    lies += [{"binding": record["binding"] | {key: None}} for key in record["binding"]]
    for lie in lies:
        write_body(state, good | {"records": good["records"] | {name: record | lie}})
        report = verify(dataset, **options)
        assert report.ok
        assert report.coverage.read_files == 1, lie
    for findings in (1, [1], [{}], [{"severity": "error"}], [{"code": [], "where": []}], "x", [[[]]]):
        write_body(state, good | {"records": good["records"] | {name: record | {"findings": findings, "level": 1}}})
        assert verify(dataset, **options).ok
    for member in ("pass", "seed", "key", "records", "url"):
        for value in (None, [], {}, "x", 1e300, -1):
            write_body(state, good | {member: value})
            assert verify(dataset, **options | {"sample": "50%"}).ok


@pytest.mark.parametrize("place", ["folder", "file", "loop"])
def test_records_that_cannot_be_kept_are_an_info(dataset, tmp_path, place):
    state = tmp_path / "state"
    if place == "folder":
        state.mkdir()
    elif place == "file":
        (tmp_path / "no").touch()
        state = tmp_path / "no" / "state"
    else:
        state.symlink_to(state)
        state = state / "below"
    report = verify(dataset, level="complete", max_age=HOUR, state=state)
    assert report.ok
    assert {(f.severity, f.code) for f in report.problems} == {("info", "records")}
    assert "--state" in report.problems[0].remedy
    assert report.coverage.read_files == len(shards(dataset))


def test_a_dataset_that_is_read_only(dataset, tmp_path):
    before = {path: (path.stat().st_mtime_ns, path.is_dir()) for path in [dataset, *dataset.rglob("*")]}
    for path in before:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        for level in ("complete", "full"):
            report = verify(dataset, level=level, max_age=HOUR, max_duration=HOUR, state=tmp_path / level)
            assert report.problems == ()
            assert verify(dataset, level=level, max_age=HOUR, state=tmp_path / level).coverage.read_files == 0
        assert before == {path: (path.stat().st_mtime_ns, path.is_dir()) for path in [dataset, *dataset.rglob("*")]}
    finally:
        for path in before:
            path.chmod(0o755)


def test_a_remote_object_that_changed_is_read_again(dataset, tmp_path):
    """Of the same size, from another time: where the storage tells the time of change, a record is bound to it."""
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(dataset), "/verify-changed", recursive=True)
    try:
        options = {"level": "complete", "max_age": HOUR, "state": tmp_path / "state"}
        assert verify("memory://verify-changed", **options).coverage.read_files == len(shards(dataset))
        assert verify("memory://verify-changed", **options).coverage.read_files == 0
        path = shards(dataset)[3]
        flip(dataset / path)
        memory.put(str(dataset / path), f"/verify-changed/{path}")
        report = verify("memory://verify-changed", **options)
        assert [f.path for f in report.errors] == [path]
        assert report.coverage.read_files == 1
    finally:
        memory.rm("/verify-changed", recursive=True)


# --- what is said ----------------------------------------------------------------------------------------------------


def test_parts_at_tier_quick(dataset):
    report = verify(dataset, level="quick", parts=["part-0"])
    assert report.ok
    assert not report.whole
    assert "%" not in report.verdict
    flip(dataset / "hsfmt/index/part-1.safetensors")
    assert verify(dataset, level="quick", parts=["part-0"]).ok
    assert not verify(dataset, level="quick").ok


@pytest.mark.parametrize(
    "name", ["hsfmt/index/part-1.safetensors", "parts/part-1/zarr.json", "parts/part-1/score/zarr.json"]
)
def test_tier_quick_checks_all_documents(dataset, name):
    flip(dataset / name)
    assert {f.path for f in verify(dataset, level="quick").errors} == {name}


def test_an_old_snapshot_of_a_superseded_part_that_is_damaged(dataset, add_part):
    """Nothing is served from it: a warning, at every tier, whatever of it is damaged."""
    add_part(dataset, "new")
    path = dataset / "hsfmt/manifests/new-0.json"
    old = parse_manifest((dataset / "hsfmt/manifests/part-0.json").read_bytes(), "part-0", "manifest")
    new = parse_manifest(path.read_bytes(), "new-0", "manifest")
    path.write_bytes(replace(new, replaces={"part-0": old.digest()}, stored=None).to_bytes())
    seal(dataset)
    index = dataset / "hsfmt/index/part-0.safetensors"
    data = index.read_bytes()
    for damaged in (data[:-1], data[:99] + bytes([data[99] ^ 1]) + data[100:], b"", None):
        index.unlink() if damaged is None else index.write_bytes(damaged)
        for level in ("quick", "complete", "full"):
            report = verify(dataset, level=level)
            assert report.ok, report.errors
            assert "hsfmt/index/part-0.safetensors" in {f.path for f in report.of("warning")}


def test_verdicts():
    def verdict(level, read, total, parts):
        coverage = Coverage({"parts": ["p"]} if parts else {}, 9, total, 1, read, {}, 0)
        return Report("url", level, None, (), Counts(), coverage).verdict

    assert verdict("complete", 5, 10, True) == "fine so far, sample of 50 % of the data"
    assert verdict("quick", 0, 0, True).startswith("fine so far, of other parts")
    assert verdict("full", 10, 10, False) == "fine"
    assert verdict("full", 1, 10**6, True) == "fine so far, sample of 0.0001 % of the data"
    assert verdict("full", 10**6 - 1, 10**6, True) == "fine so far, sample of more than 99.9 % of the data"
    assert "100" not in verdict("complete", 10, 10, True)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no posix_fadvise here")
def test_a_second_read_is_one_of_the_device(dataset, monkeypatch):
    """Each file that disagrees is dropped from the page cache once it was read, and before it is read again."""
    path = max(shards(dataset), key=lambda name: (dataset / name).stat().st_size)
    advised, advise = [], os.posix_fadvise

    def noted(fd, offset, length, advice):
        advised.append((Path(f"/proc/self/fd/{fd}").readlink(), offset, length, advice))
        return advise(fd, offset, length, advice)

    monkeypatch.setattr(objects.os, "posix_fadvise", noted)
    for level in ("complete", "full"):
        flip(dataset / path)
        advised.clear()
        assert not verify(dataset, level=level).ok
        assert ((dataset / path).resolve(), 0, 0, os.POSIX_FADV_DONTNEED) in advised
        flip(dataset / path)
        advised.clear()
        assert verify(dataset, level=level).ok
        assert not [call for call in advised if call[3] == os.POSIX_FADV_DONTNEED]


# --- the command -----------------------------------------------------------------------------------------------------


def run(*argv):
    return CliRunner().invoke(main, ["verify", *map(str, argv)])


def test_the_command_takes_its_options(dataset, tmp_path):
    state = tmp_path / "state"
    done = run(dataset, "--sample", "20%", "--seed", 7, "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 0
    assert (report["whole"], report["coverage"]["selection"]) == (False, {"sample": "20%", "seed": 7})
    assert report["verdict"].startswith("fine so far, sample of")
    assert 0 < report["coverage"]["read_nbytes"] <= 0.2 * report["coverage"]["total_nbytes"]
    text = run(dataset, "--sample", "20%", "--seed", 7).stdout
    assert "asked for  sample 20%, seed 7" in text
    assert "not in the sample" in text
    report = json.loads(run(dataset, "--level", "full", "--part", "part-1", "--part", "part-0", "--json").stdout)
    assert report["coverage"]["selection"] == {"parts": ["part-0", "part-1"]}
    done = run(dataset, "--max-duration", "0s", "--max-age", "1.5h", "--state", state, "--json")
    report = json.loads(done.stdout)
    assert report["coverage"]["selection"] == {"max_duration_s": 0, "max_age_s": 5400}
    assert report["coverage"]["read_files"] == 1
    assert state.exists()
    text = run(dataset, "--max-duration", "2h", "--state", state, "-q").stdout
    assert "known from earlier runs" in text
    text = run(dataset, "--level", "quick", "--part", "part-1").stdout
    assert "of other parts than those asked for" in text
    assert "%" not in text


@pytest.mark.parametrize(
    "argv",
    [
        ["--sample", "0%"], ["--sample", "x"], ["--seed", "-1"], ["--seed", str(2**64)], ["--max-duration", "2"],
        ["--max-age", "-1d"], ["--max-age", "9" * 400 + "d"], ["--part", "nosuch"], ["--part", ""],
        ["--level", "quick", "--sample", "5%"], ["--level", "quick", "--max-duration", "1h"],
        ["--level", "quick", "--max-age", "1d"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_the_command_refuses(dataset, argv):
    done = run(dataset, *argv)
    assert done.exit_code == 2
    assert done.stdout == ""


def test_the_command_keeps_its_records_in_the_cache_folder(dataset, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run(dataset, "--max-age", "1d").exit_code == 0
    (state,) = (tmp_path / "cache/hsfmt/verified").iterdir()
    assert len(body(state)["records"]) == len(shards(dataset))
    flip(dataset / shards(dataset)[0])
    assert run(dataset, "--max-age", "1d").exit_code == 1


def test_the_report_for_programs_is_as_the_docs_say(dataset, tmp_path, repo_root):
    text = (repo_root / "docs/cli.md").read_text().partition("**The report for programs**")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`([a-z_.]+)`", row)}
    flip(dataset / "parts/part-0/zarr.json")
    options = ["--sample", "50%", "--max-duration", "1h", "--max-age", "1h", "--part", "part-0"]
    options += ["--state", tmp_path / "state"]
    done = run(dataset, *options, "--json")
    report = json.loads(done.stdout)
    members = {*report, *report["counts"], *report["problems"][0], *report["coverage"]["selection"]}
    members |= {f"coverage.{name}" for name in report["coverage"]}
    assert members <= documented
    words = {"error", "warning", "info", "quick", "fine"}
    assert documented - members == words
    assert (
        sum(files for files, _ in report["coverage"]["skipped"].values()) + report["coverage"]["read_files"]
        == (report["coverage"]["total_files"])
    )
    done = run(tmp_path / "nothing", "--json")
    assert (done.exit_code, list(json.loads(done.stdout))) == (3, ["error", "exit_code"])
