"""What verification says of datasets in good order, and of those in flight."""

import json
import multiprocessing
import os
import shutil

import numpy as np
import pytest

from hsfmt import seal
from hsfmt.errors import NotFoundError, UsageError
from hsfmt.readers.verification import LEVELS, Report, verify
from hsfmt.storage.local import LocalStore


@pytest.mark.parametrize("level", LEVELS)
def test_a_sound_dataset_has_no_problem_at_any_level(pristine, level):
    report = verify(pristine, level=level)
    assert report.ok
    assert report.problems == ()
    assert report.level == level
    assert report.fingerprint.startswith("xxh3_128:")


def test_counts_are_of_what_was_looked_at(pristine, files):
    quick, complete, full = (verify(pristine, level=level).counts for level in LEVELS)
    for counts in (quick, complete, full):
        assert (counts.parts, counts.samples, counts.tokens) == (2, 6, sum(range(3, 9)))
        assert counts.files == len(files(pristine))
    assert quick.chunks == complete.chunks == 0
    documents = [p for p in files(pristine) if p.startswith(("parts/part", "hsfmt/index")) and "/c/" not in p]
    assert quick.nbytes == sum((pristine / path).stat().st_size for path in documents)
    in_parts = [p for p in files(pristine) if p.startswith(("parts/part", "hsfmt/index"))]
    assert complete.nbytes == full.nbytes == sum((pristine / path).stat().st_size for path in in_parts)
    assert full.chunks > 40


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_every_codec_and_dtype_verifies(tmp_path, codec, dtype):
    import ml_dtypes

    from hsfmt import DatasetWriter

    kind = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}.get(dtype, dtype)
    values = np.random.default_rng(0).normal(size=(1000, 3, 64)).astype(kind)
    extras = {"hidden_states_scale": np.ones(1000, np.float32)} if dtype == "float8_e4m3fn" else {}
    with DatasetWriter(
        tmp_path / "d",
        layers=[0, 1, 2],
        hidden_size=64,
        final_norm="unknown",
        dtype=dtype,
        codec=codec,
        chunk_tokens=96,
    ) as writer:
        writer.write("a", np.zeros(1000, np.int64), values, **extras)
    report = verify(tmp_path / "d", level="full")
    assert report.problems == ()
    assert report.counts.chunks > 3 * 1000 // 96


def test_worker_processes_give_the_same_report(dataset, keep):
    for part in ("part-0", "part-1"):
        path = dataset / f"parts/{part}/hidden_states/c/0/0/0"
        data = bytearray(path.read_bytes())
        data[9] ^= 1
        path.write_bytes(data)
    alone, pooled = verify(dataset, level="full"), verify(dataset, level="full", workers=2)
    assert alone.errors
    assert alone == pooled


class DyingStore(LocalStore):
    """Kills the process that reads a certain part."""

    def read_into(self, path, offset, buffer):
        if path.startswith("parts/part-1") and multiprocessing.parent_process() is not None:
            os._exit(1)
        super().read_into(path, offset, buffer)


def test_a_worker_that_dies_is_a_finding(pristine):
    report = verify(DyingStore(pristine), level="full", workers=2)
    assert {finding.code for finding in report.errors} == {"not_checked"}
    assert "hsfmt/manifests/part-1.json" in {finding.path for finding in report.errors}
    assert "fewer workers" in report.errors[0].got


def test_progress_rises_to_the_total(pristine):
    calls = []
    verify(pristine, level="full", progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert calls[-1][0] == calls[-1][1] > 0
    assert {call[2] for call in calls} == {"part-0", "part-1"}


def test_the_report_is_json(dataset):
    (dataset / "parts/part-0/loss_mask/c/1").unlink()
    report = verify(dataset, level="complete")
    document = json.loads(json.dumps(report.to_json()))
    assert document["ok"] is False
    problem = document["problems"][0]
    assert problem["severity"] == "error"
    assert problem["code"] == "missing"
    assert problem["where"] == "parts/part-0/loss_mask/c/1"
    assert problem["samples"] == ["s0-2"]
    assert problem["remedy"]
    assert document["counts"]["parts"] == 2


def test_a_report_is_immutable_and_its_findings_read_well(dataset):
    (dataset / "parts/part-1/input_ids/c/1").unlink()
    report = verify(dataset, level="quick")
    assert isinstance(report, Report)
    (finding,) = report.errors
    assert str(finding).startswith("error[missing] parts/part-1/input_ids/c/1: expected a file of")
    assert finding.samples == ("s1-1", "s1-2")


def test_no_dataset_is_not_found(tmp_path):
    with pytest.raises(NotFoundError, match="an hsfmt dataset"):
        verify(tmp_path / "nothing")
    (tmp_path / "some.txt").write_text("x")
    with pytest.raises(NotFoundError):
        verify(tmp_path)


@pytest.mark.parametrize("wrong", [{"level": "deep"}, {"workers": 0}])
def test_wrong_arguments_are_refused(pristine, wrong):
    with pytest.raises(UsageError):
        verify(pristine, **wrong)


def test_a_dataset_never_sealed_is_a_warning(tmp_path, build_dataset):
    root = build_dataset(tmp_path / "d", seal=False)
    report = verify(root, level="full")
    assert report.ok
    assert [(f.severity, f.code) for f in report.problems] == [("warning", "never_sealed")]
    assert "seal" in report.problems[0].remedy


def test_an_empty_dataset_is_only_unsealed(tmp_path, build_dataset):
    root = build_dataset(tmp_path / "d", n_parts=0, seal=False)
    report = verify(root, level="full")
    assert [f.code for f in report.problems] == ["never_sealed"]
    assert report.counts.parts == 0


@pytest.mark.parametrize("level", LEVELS)
def test_parts_newer_than_the_seal_are_an_info(dataset, add_part, level):
    add_part(dataset)
    report = verify(dataset, level=level)
    assert report.ok
    (finding,) = report.problems
    assert (finding.severity, finding.code) == ("info", "newer_parts")
    assert "late-0" in finding.got
    seal(dataset)
    assert verify(dataset, level=level).problems == ()


def test_an_older_pointer_is_parts_newer_than_the_seal(dataset, add_part):
    old = (dataset / "hsfmt/manifest.json").read_bytes()
    add_part(dataset, seal=True)
    (dataset / "hsfmt/manifest.json").write_bytes(old)
    report = verify(dataset, level="full")
    assert [(f.severity, f.code) for f in report.problems] == [("info", "newer_parts")]


def test_duplicates_are_shadowed_and_verify(dataset, tmp_path, build_dataset):
    twin = build_dataset(tmp_path / "twin", n_parts=1, n_samples=3, prefix="twin")
    with_other_content = build_dataset(tmp_path / "other", n_parts=1, n_samples=1, prefix="zother", first_seed=5)
    for source in (twin, with_other_content):
        for path in [*source.glob("parts/*/**/*"), *source.glob("hsfmt/index/*"), *source.glob("hsfmt/manifests/*")]:
            if path.is_file():
                target = dataset / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
    sealed = seal(dataset, retract=["s0-2"])
    assert sealed.snapshot.counts["shadowed"] == 4
    assert sorted(sealed.snapshot.shadowed_same.tolist()) == [0, 1, 1, 1]
    assert sealed.snapshot.counts["retracted"] == 1
    for level in LEVELS:
        report = verify(dataset, level=level)
        (finding,) = report.problems
        assert (finding.severity, finding.code, finding.samples) == ("warning", "shadowed_different", ("s0-0",))
        assert report.counts.samples == 10
    seal(dataset, retract=["s0-0"])
    assert verify(dataset, level="full").problems == ()


def test_a_part_of_nothing_but_holes_verifies(dataset, build_dataset):
    build_dataset(dataset, n_parts=1, n_samples=0, prefix="holes")
    report = verify(dataset, level="full")
    assert report.problems == ()
    assert report.counts.parts == 3


def test_unfinished_work_is_an_info(dataset):
    shutil.copytree(dataset / "parts/part-0", dataset / "parts/part-9")
    shutil.copy(dataset / "hsfmt/index/part-0.safetensors", dataset / "hsfmt/index/part-9.safetensors")
    (dataset / "hsfmt/manifest.json.0123.tmp").write_bytes(b"{")
    (dataset / "parts/part-0/hidden_states/c/0/0/0.ab.tmp").write_bytes(b"x")
    report = verify(dataset, level="complete")
    assert report.ok
    assert sorted((f.code, f.where) for f in report.problems) == [
        ("temporary", "hsfmt/manifest.json.0123.tmp"),
        ("temporary", "parts/part-0/hidden_states/c/0/0/0.ab.tmp"),
        ("uncommitted", "parts/part-9"),
    ]
    assert verify(dataset, level="quick").problems == ()


def test_any_fsspec_url_verifies(pristine):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(pristine), "/verification-test", recursive=True)
    try:
        report = verify("memory://verification-test", level="full")
        assert report.problems == ()
        memory.rm("/verification-test/parts/part-0/weight/c/0")
        report = verify("memory://verification-test", level="quick")
        assert [f.code for f in report.errors] == ["missing"]
        with pytest.raises(UsageError, match=r"in this process's memory, got 2"):
            verify("memory://verification-test", workers=2)
    finally:
        memory.rm("/verification-test", recursive=True)
