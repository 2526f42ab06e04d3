"""`hsfmt convert` over sources that need no torch: counts, policies, resuming, room, refusals."""

import io
import json
import os
import shutil
import signal
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from hsfmt.cli import progress
from hsfmt.errors import StorageError
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.storage.local import LocalStore
from hsfmt.writers.dataset_writer import DatasetWriter
from hsfmt.writers.sample_files import FileTensor, write_sample_file

LAYERS = ("--layer-ids", "2,4,5,8")


def connector_file(path: Path, n_tokens: int, hidden: int = 16, *, bad: bool = False) -> None:
    """A file as vLLM's connector writes it."""
    values = np.arange(n_tokens * 4 * hidden) % 127
    states = values.astype(np.float32).reshape(n_tokens, 4, hidden).astype(ml_dtypes.bfloat16)
    if bad:
        states[-1, -1, -1] = np.nan
    tensors = {
        "hidden_states": FileTensor("bfloat16", states.view(np.uint16)),
        "token_ids": FileTensor("int64", np.arange(n_tokens)),
    }
    write_sample_file(path, tensors, {})


@pytest.fixture
def source(tmp_path) -> Path:
    """Twelve files of 1 to 12 tokens, a lock, a request output that is none, and a stray."""
    folder = tmp_path / "source"
    (folder / "sub").mkdir(parents=True)
    for n in range(12):
        connector_file(folder / ("sub" if n % 2 else ".") / f"r{n}.safetensors", n + 1)
    (folder / "r0.safetensors.lock").touch()
    (folder / "notes.json").write_text("{}")
    return folder


def manifests(dataset: Path) -> list[str]:
    folder = dataset / "hsfmt" / "manifests"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def files_of(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


def everything_adds_up(report: dict, source: Path) -> None:
    """Every file of the folder is counted once, and every item has one outcome."""
    files, counts = dict(report["files"]), report["counts"]
    assert files.pop("total") == sum(files.values()) == files_of(source)
    assert len(report["holes"]) == counts["hole"]
    assert len(report["strays"]) == files["stray"]
    assert report["written"]["samples"] <= counts["sample"]


def test_real_vllm_folder(hsfmt, vllm, tmp_path):
    report = hsfmt.json("convert", vllm, tmp_path / "d", *LAYERS)
    assert report["counts"] == {"sample": 8, "skipped": 0, "hole": 0, "failed": 0, "not_reached": 0}
    assert report["files"] == {
        "sample": 16, "skipped": 0, "hole": 0, "failed": 0, "not_reached": 0, "duplicate": 0, "container": 0,
        "support": 1, "stray": 0, "deleted": 0, "total": 17,
    }  # fmt: skip
    everything_adds_up(report, vllm)
    assert report["written"]["tokens"] == report["snapshot"]["counts"]["tokens"] == 537
    assert report["header"]["layers"] == [2, 4, 5, 8]
    assert report["header"]["final_norm"] == "pre"
    assert any("no loss masks" in warning for warning in report["warnings"])
    reader = SampleReader(tmp_path / "d")
    assert reader.read(0).metadata["source"] == "0-8d971ed6.safetensors"
    assert reader.locate(3)[0].manifest.producer["source_kind"] == "vllm"
    assert reader.locate(3)[0].manifest.producer["command"][:2] == ["hsfmt", "convert"]


def test_layers_are_demanded_where_the_format_does_not_say(hsfmt, vllm, tmp_path):
    result = hsfmt("convert", vllm, tmp_path / "d", code=2)
    assert "--layer-ids" in result.stderr
    assert "eagle_aux_hidden_state_layer_ids" in result.stderr
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("flags", [("--layer-ids", "2,4,5"), ("--layer-ids", "2,8,4,5"), ("--layer-ids", "a")])
def test_wrong_layers(hsfmt, vllm, tmp_path, flags):
    hsfmt("convert", vllm, tmp_path / "d", *flags, code=2)


def test_a_norm_that_contradicts_the_format(hsfmt, vllm, tmp_path):
    result = hsfmt("convert", vllm, tmp_path / "d", *LAYERS, "--final-norm", "post", code=2)
    assert "the source fixes it" in result.stderr


def test_bad_files_raise(hsfmt, vllm_negative, tmp_path):
    report = hsfmt.json("convert", vllm_negative, tmp_path / "d", *LAYERS, code=1)
    assert report["counts"] == {"sample": 4, "skipped": 0, "hole": 0, "failed": 1, "not_reached": 3}
    everything_adds_up(report, vllm_negative)
    assert "only its .lock" in report["error"][0]["got"]
    assert report["snapshot"] is None
    # What was taken before the bad file is kept, and the next run goes on behind it.
    again = hsfmt.json("convert", vllm_negative, tmp_path / "d", *LAYERS, code=1)
    assert again["counts"] == {"sample": 0, "skipped": 4, "hole": 0, "failed": 1, "not_reached": 3}
    assert len(manifests(tmp_path / "d")) == 1


def test_bad_files_become_holes(hsfmt, vllm_negative, tmp_path):
    report = hsfmt.json("convert", vllm_negative, tmp_path / "d", *LAYERS, "--on-bad", "hole")
    assert report["counts"] == {"sample": 4, "skipped": 0, "hole": 4, "failed": 0, "not_reached": 0}
    everything_adds_up(report, vllm_negative)
    assert all("only its .lock" in hole["reason"] for hole in report["holes"])
    facts = hsfmt.json("info", tmp_path / "d")
    assert [hole["id"] for hole in facts["holes"]] == [hole["id"] for hole in report["holes"]]
    # Holes are tried again, and recorded once.
    again = hsfmt.json("convert", vllm_negative, tmp_path / "d", *LAYERS, "--on-bad", "hole")
    assert again["counts"] == {"sample": 0, "skipped": 4, "hole": 4, "failed": 0, "not_reached": 0}
    assert len(manifests(tmp_path / "d")) == 1
    assert again["snapshot"]["fingerprint"] == report["snapshot"]["fingerprint"]


def test_a_hole_is_filled_later(hsfmt, vllm_negative, vllm, tmp_path):
    source = Path(shutil.copytree(vllm_negative, tmp_path / "source"))
    hsfmt("convert", source, tmp_path / "d", *LAYERS, "--on-bad", "hole")
    (source / "manifest_from_request_outputs.json").unlink()
    shutil.copy(vllm / "4-aba895fd.safetensors", source / "4-8fbe1c60.safetensors")
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--on-bad", "hole")
    assert report["counts"] == {"sample": 1, "skipped": 4, "hole": 3, "failed": 0, "not_reached": 0}
    facts = hsfmt.json("info", tmp_path / "d")
    assert (facts["samples"], len(facts["holes"])) == (5, 3)


def test_workers_make_the_same_content(hsfmt, source, tmp_path):
    one = hsfmt.json("convert", source, tmp_path / "one", *LAYERS)
    two = hsfmt.json("convert", source, tmp_path / "two", *LAYERS, "--workers", 2)
    for report in (one, two):
        everything_adds_up(report, source)
    assert one["counts"] == two["counts"]
    assert two["written"]["parts"] > one["written"]["parts"] == 1
    assert one["snapshot"]["content_digest"] == two["snapshot"]["content_digest"]
    ids = [[row["id"] for row in hsfmt.json("ls", tmp_path / name)["samples"]] for name in ("one", "two")]
    assert ids[0] == ids[1]
    assert ids[0][:3] == ["r0", "r2", "r4"]


def test_workers_stop_at_a_bad_file(hsfmt, source, tmp_path):
    (source / "r4.safetensors").write_bytes(b"")
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--workers", 2, code=1)
    everything_adds_up(report, source)
    assert report["counts"]["failed"] == 1
    assert report["error"][0]["where"].startswith("r4.safetensors")
    connector_file(source / "r4.new.safetensors", 5)
    (source / "r4.new.safetensors").rename(source / "r4.safetensors")
    again = hsfmt.json("convert", source, tmp_path / "d", *LAYERS)
    assert again["counts"]["sample"] + again["counts"]["skipped"] == 12
    fresh = hsfmt.json("convert", source, tmp_path / "fresh", *LAYERS)
    assert again["snapshot"]["content_digest"] == fresh["snapshot"]["content_digest"]


def interrupt_after(n: int, monkeypatch) -> None:
    real, calls = DatasetWriter.write, iter(range(n))

    def write(self, *args, **kwargs):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(DatasetWriter, "write", write)


def test_interruption_and_resume(hsfmt, source, tmp_path, monkeypatch):
    whole = hsfmt.json("convert", source, tmp_path / "whole", *LAYERS)
    with monkeypatch.context() as patch:
        interrupt_after(5, patch)
        # A part ends with the fourth file.
        result = hsfmt("convert", source, tmp_path / "d", *LAYERS, "--part-size", "2000B", code=130)
    assert "interrupted" in result.stderr
    assert "Run the same command again to go on" in result.stderr
    kept = len(hsfmt.json("ls", tmp_path / "d")["samples"])
    assert kept == 4
    read = []
    real = DatasetWriter.write
    monkeypatch.setattr(DatasetWriter, "write", lambda self, key, *a, **k: read.append(key) or real(self, key, *a, **k))
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS)
    assert len(read) == 12 - kept, "a file whose sample is committed is not read again"
    assert report["counts"]["skipped"] == kept
    assert report["snapshot"]["content_digest"] == whole["snapshot"]["content_digest"]


def test_an_interruption_commits_nothing_of_the_open_part(hsfmt, source, tmp_path, monkeypatch):
    interrupt_after(5, monkeypatch)
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, code=130)
    assert report["counts"]["not_reached"] == 12
    assert manifests(tmp_path / "d") == []


@pytest.fixture
def large(tmp_path) -> Path:
    """300 files of 4 MiB."""
    source = tmp_path / "large"
    source.mkdir()
    connector_file(source / "0.safetensors", 2048, 256)
    for n in range(1, 300):
        os.link(source / "0.safetensors", source / f"{n}.safetensors")
    return source


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c(process, large, tmp_path, workers):
    source = large
    running = process("convert", source, tmp_path / "d", *LAYERS, "--workers", workers, start_new_session=True)
    deadline = time.monotonic() + 300
    while not list((tmp_path / "d").glob("parts/*/hidden_states")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGINT)  # as the terminal does: to the workers too
    _, stderr = running.communicate(timeout=300)
    assert running.returncode == 130, stderr
    assert "interrupted" in stderr
    assert "Traceback" not in stderr
    assert manifests(tmp_path / "d") == []


def manifests_at_least(n: int, dataset: Path) -> None:
    deadline = time.monotonic() + 300
    while len(manifests(dataset)) < n and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.parametrize("whole_group", [True, False], ids=["group", "parent"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_what_was_committed_before_an_end_is_reported(hsfmt, process, large, tmp_path, workers, sent, whole_group):
    flags = ("--workers", workers, "--part-size", "64MiB", "--json")
    running = process("convert", large, tmp_path / "d", *LAYERS, *flags, start_new_session=True)
    manifests_at_least(3, tmp_path / "d")
    (os.killpg if whole_group else os.kill)(running.pid, sent)
    stdout, stderr = running.communicate(timeout=300)
    code = 130 if sent == signal.SIGINT else 143
    assert running.returncode == code, stderr
    assert stderr.splitlines()[-2] == ("interrupted" if code == 130 else "terminated (SIGTERM)")
    assert "Traceback" not in stderr
    assert "leaked" not in stderr
    report = json.loads(stdout)
    assert report["exit_code"] == code
    live = hsfmt.json("info", tmp_path / "d", "--snapshot", "live")
    n = live["samples"]
    assert n > 0
    assert report["counts"] == {"sample": n, "skipped": 0, "hole": 0, "failed": 0, "not_reached": 300 - n}
    written = report["written"]
    assert (written["samples"], written["tokens"], written["parts"]) == (n, live["tokens"], live["parts"])
    assert written["raw_nbytes"] == live["states"]["raw_nbytes"]
    assert stderr.splitlines()[-1].startswith(f"{n} samples committed, and kept; not sealed. Run the same command")


def test_sigterm_while_workers_start(process, large, tmp_path):
    for delay in (0.3, 0.8, 1.2):
        flags = ("--workers", 2, "--json")
        running = process("convert", large, tmp_path / "d", *LAYERS, *flags, start_new_session=True)
        time.sleep(delay)
        os.killpg(running.pid, signal.SIGTERM)
        _, stderr = running.communicate(timeout=300)
        assert running.returncode in (143, -signal.SIGTERM), stderr  # the latter before Python has imported all
        assert "Traceback" not in stderr
        assert "leaked" not in stderr
        assert manifests(tmp_path / "d") == []


def test_a_killed_worker(process, large, tmp_path):
    flags = ("--workers", 2, "--part-size", "64MiB", "--json")
    running = process("convert", large, tmp_path / "d", *LAYERS, *flags)
    manifests_at_least(2, tmp_path / "d")
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    workers = [pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(int(workers[0]), signal.SIGKILL)
    stdout, stderr = running.communicate(timeout=300)
    assert running.returncode == 3, stderr
    report = json.loads(stdout)
    assert "fewer --workers" in report["error"][0]["remedy"]
    assert report["counts"]["sample"] == report["written"]["samples"] > 0


def test_few_files_get_few_workers(hsfmt, source, tmp_path):
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--workers", 40)
    assert report["workers"] == 2
    assert report["counts"]["sample"] == 12
    text = hsfmt("convert", source, tmp_path / "e", *LAYERS, "--workers", 40, "--dry-run").stdout
    assert "2 of 40: the files are too few" in text
    text = hsfmt("convert", source, tmp_path / "e", *LAYERS, "--workers", 2, "--dry-run").stdout
    assert "too few" not in text


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda path, good: path.write_bytes(good[:-8]), "--on-bad hole"),
        (lambda path, _: connector_file(path, 3, bad=True), "--nonfinite hole"),
        (lambda path, _: connector_file(path, 3, hidden=8), "--on-bad hole"),
    ],
    ids=["truncated", "nan", "other width"],
)
def test_what_to_do_about_a_bad_file(hsfmt, source, tmp_path, change, remedy):
    path = source / "r2.safetensors"
    good = path.read_bytes()
    path.unlink()
    change(path, good)
    result = hsfmt("convert", source, tmp_path / "d", *LAYERS, code=1)
    assert "Run the same command" not in result.stderr, "it would meet the same file"
    assert "1 sample committed, and kept; not sealed." in result.stderr
    assert remedy in result.stderr
    (problem,) = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, code=1)["error"]
    assert problem["where"].startswith("r2.safetensors")
    assert remedy in problem["remedy"]
    assert "nonfinite=" not in problem["remedy"], "that is for those who call the writer"
    path.write_bytes(good)
    assert hsfmt.json("convert", source, tmp_path / "d", *LAYERS)["counts"]["sample"] == 11


@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_is_made_before_the_first_good_sample(hsfmt, source, tmp_path, workers):
    for path in source.rglob("*.safetensors"):
        n_tokens = int(path.stem[1:]) + 1
        path.unlink()
        connector_file(path, n_tokens, bad=True)
    flags = ("--workers", workers)
    hsfmt("convert", source, tmp_path / "d", *LAYERS, *flags, code=1)
    assert not (tmp_path / "d").exists()
    # Another meaning is no matter then.
    hsfmt("convert", source, tmp_path / "d", "--layer-ids", "1,2,3,4", "--nonfinite", "keep", *flags)


def test_holes_before_the_first_good_sample_are_recorded(hsfmt, source, tmp_path):
    for n in (0, 2):
        (source / f"r{n}.safetensors").write_bytes(b"")
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--on-bad", "hole")
    assert report["counts"]["hole"] == 2
    assert [hole["id"] for hole in hsfmt.json("info", tmp_path / "d")["holes"]] == ["r0", "r2"]


def test_holes_before_a_bad_file_make_no_dataset(hsfmt, source, tmp_path):
    (source / "r0.safetensors").write_bytes(b"")
    (source / "r2.safetensors").unlink()
    connector_file(source / "r2.safetensors", 3, bad=True)
    flags = ("--on-bad", "hole", "--nonfinite", "raise")
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, *flags, code=1)
    assert report["counts"] == {"sample": 0, "skipped": 0, "hole": 0, "failed": 1, "not_reached": 11}
    assert not (tmp_path / "d").exists()


def test_a_dataset_of_holes_alone_may_be_removed(hsfmt, tmp_path):
    (tmp_path / "source").mkdir()
    connector_file(tmp_path / "source" / "a.safetensors", 3, bad=True)
    hsfmt("convert", tmp_path / "source", tmp_path / "d", *LAYERS, "--on-bad", "hole", code=1)
    result = hsfmt("convert", tmp_path / "source", tmp_path / "d", "--layer-ids", "1,2,3,4", code=2)
    assert "holds no samples" in result.stderr
    assert "use another dataset" not in result.stderr


@pytest.mark.parametrize("blank", [(slice(3, 6), slice(None)), (5, 1)], ids=["second-half", "one-state"])
@pytest.mark.parametrize("workers", [1, 2])
def test_states_that_were_never_filled_are_told(hsfmt, tmp_path, blank, workers):
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(20):
        states = np.full((6, 2, 4), number + 1, np.float32)
        states[0, 0, 0] = 0  # a zero alone is none
        if number == 7:
            states[blank] = 0
        tensors = {"hidden_states": FileTensor("float32", states), "token_ids": FileTensor("int64", np.arange(6))}
        write_sample_file(folder / f"s{number:02}.safetensors", tensors, {}, overwrite=True)
    flags = ("--from", "vllm", "--layer-ids", "1,3", "--workers", str(workers))
    report = hsfmt.json("convert", folder, tmp_path / "d", *flags)
    assert report["written"]["samples"] == 20
    assert report["written"]["with_zero_states"] == ["s07"]
    told = [warning for warning in report["warnings"] if "zero throughout" in warning]
    assert [warning.partition(" with ")[0] for warning in told] == ["1 sample"]
    assert told[0].endswith(": s07")


@pytest.mark.parametrize("place", ["x", "parts/x", "hsfmt"])
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry-run"])
def test_a_dataset_within_another_is_refused(hsfmt, source, dataset, place, dry):
    before = sorted(dataset.rglob("*"))
    result = hsfmt("convert", source, dataset / place, *LAYERS, *dry, code=2)
    assert str(dataset) in result.stderr
    assert sorted(dataset.rglob("*")) == before


def test_the_policy_on_nan_is_recorded(hsfmt, source, tmp_path):
    for flags, policy in (((), "raise"), (("--on-bad", "hole"), "hole"), (("--nonfinite", "keep"), "keep")):
        hsfmt("convert", source, tmp_path / policy, *LAYERS, *flags)
        (producer,) = hsfmt.json("info", tmp_path / policy)["producers"]
        assert producer["producer"]["options"]["nonfinite"] == policy


def test_dry_run_writes_nothing(hsfmt, source, tmp_path):
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--dry-run")
    assert report["dry_run"] is True
    assert report["counts"]["sample"] == 12
    everything_adds_up(report, source)
    tokens = sum(range(1, 13))
    assert report["estimate"]["exact"] is True
    assert report["estimate"]["raw_nbytes"] == tokens * (4 * 16 * 2 + 5)
    assert report["estimate"]["fits"] is True
    assert report["snapshot"] is None
    assert list(tmp_path.iterdir()) == [source]
    text = hsfmt("convert", source, tmp_path / "d", *LAYERS, "--dry-run").stdout
    assert "nothing was written" in text
    assert "from the files' headers" in text
    assert "at an assumed ratio" in text


def test_dry_run_of_a_resumed_conversion(hsfmt, source, dataset, vllm):
    before = sorted(dataset.rglob("*"))
    report = hsfmt.json("convert", vllm, dataset, *LAYERS, "--dry-run")
    assert report["counts"]["skipped"] == 8
    assert report["estimate"]["stored_nbytes"] == 0
    assert sorted(dataset.rglob("*")) == before


def test_dry_run_refuses_what_the_run_would(hsfmt, source, dataset):
    result = hsfmt("convert", source, dataset, *LAYERS, "--dry-run", code=2)
    assert "hidden_size" in result.stderr


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry-run"])
def test_no_room(hsfmt, source, tmp_path, monkeypatch, dry):
    monkeypatch.setattr(LocalStore, "free_nbytes", lambda _: 1000)
    result = hsfmt("convert", source, tmp_path / "d", *LAYERS, *dry, code=3)
    assert "1000 bytes free" in result.stderr
    assert "--force" in result.stderr
    assert not (tmp_path / "d").exists()
    document = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, *dry, code=3)
    assert "room" in document["error"][0]["expected"]


def test_no_room_forced(hsfmt, source, tmp_path, monkeypatch):
    monkeypatch.setattr(LocalStore, "free_nbytes", lambda _: 1000)
    assert hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--force")["counts"]["sample"] == 12


def test_the_disk_fills_up_on_the_way(hsfmt, source, tmp_path, monkeypatch):
    real, calls = LocalStore.open_object, iter(range(5))

    def open_object(self, path):
        if next(calls, None) is None:
            raise StorageError.at(path, expected="the storage to work", got="No space left on device")
        return real(self, path)

    monkeypatch.setattr(LocalStore, "open_object", open_object)
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--part-size", "600B", code=3)
    monkeypatch.undo()
    everything_adds_up(report, source)
    kept = report["counts"]["sample"]
    assert report["counts"]["not_reached"] == 12 - kept
    assert len(manifests(tmp_path / "d")) == (1 if kept else 0)
    assert hsfmt.json("convert", source, tmp_path / "d", *LAYERS)["counts"]["skipped"] == kept


def test_strays_are_listed(hsfmt, source, tmp_path):
    result = hsfmt("convert", source, tmp_path / "d", *LAYERS)
    assert "notes.json" in result.stdout
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS)
    assert [stray["path"] for stray in report["strays"]] == ["notes.json"]


def test_a_foreign_folder_is_refused(hsfmt, source, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.tex").touch()
    result = hsfmt("convert", source, tmp_path / "d", *LAYERS, code=2)
    assert "thesis.tex" in result.stderr
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["thesis.tex"]


def test_a_file_as_destination(hsfmt, source, tmp_path):
    (tmp_path / "d").touch()
    hsfmt("convert", source, tmp_path / "d", *LAYERS, code=2)


@pytest.mark.parametrize("place", [".", "inside", ".."])
def test_a_dataset_within_its_source_is_refused(hsfmt, source, place):
    result = hsfmt("convert", source, source / place, *LAYERS, code=2)
    assert "apart from the source" in result.stderr


def test_another_meaning_is_refused(hsfmt, vllm, dataset):
    result = hsfmt("convert", vllm, dataset, "--layer-ids", "1,2,3,4", code=2)
    assert "layers" in result.stderr


def test_ids_of_another_source(hsfmt, source, tmp_path):
    hsfmt("convert", source, tmp_path / "d", *LAYERS)
    again = hsfmt.json("convert", source, tmp_path / "d", *LAYERS)
    assert not any("another place" in warning for warning in again["warnings"])
    source.rename(tmp_path / "elsewhere")
    report = hsfmt.json("convert", tmp_path / "elsewhere", tmp_path / "d", *LAYERS)
    assert any("12 ids of this source are in the dataset already" in warning for warning in report["warnings"])


def test_no_resume(hsfmt, source, tmp_path):
    hsfmt("convert", source, tmp_path / "d", *LAYERS, "--no-resume")
    result = hsfmt("convert", source, tmp_path / "d", *LAYERS, "--no-resume", code=2)
    assert "--no-resume" in result.stderr


def test_no_seal_and_expect(hsfmt, source, tmp_path):
    assert hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--no-seal")["snapshot"] is None
    hsfmt("info", tmp_path / "d", "--snapshot", "xxh3_128:" + 32 * "0", code=3)
    report = hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--expect", 13, code=1)
    assert report["snapshot"] is None
    assert "13 samples" in report["error"][0]["expected"]
    hsfmt("convert", source, tmp_path / "d", *LAYERS, "--expect", 13, "--no-seal", code=1)
    assert hsfmt.json("convert", source, tmp_path / "d", *LAYERS, "--expect", 12)["snapshot"]["counts"]["samples"] == 12


@pytest.fixture
def with_nan(source) -> Path:
    connector_file(source / "r2.new.safetensors", 3, bad=True)
    (source / "r2.new.safetensors").rename(source / "r2.safetensors")
    return source


@pytest.mark.parametrize(
    ("flags", "code", "samples", "holes"),
    [
        ((), 1, 1, 0),
        (("--on-bad", "hole"), 0, 11, 1),
        (("--nonfinite", "hole"), 0, 11, 1),
        (("--nonfinite", "keep"), 0, 12, 0),
        (("--on-bad", "hole", "--nonfinite", "raise"), 1, 1, 0),
    ],
    ids=str,
)
def test_nonfinite(hsfmt, with_nan, tmp_path, flags, code, samples, holes):
    report = hsfmt.json("convert", with_nan, tmp_path / "d", *LAYERS, *flags, code=code)
    everything_adds_up(report, with_nan)
    assert (report["counts"]["sample"], report["counts"]["hole"]) == (samples, holes)
    if code:
        assert report["error"][0]["where"].startswith("r2.safetensors")


def test_no_sample_at_all_is_an_error(hsfmt, tmp_path):
    (tmp_path / "source").mkdir()
    connector_file(tmp_path / "source" / "a.safetensors", 3, bad=True)
    report = hsfmt.json("convert", tmp_path / "source", tmp_path / "d", *LAYERS, "--on-bad", "hole", code=1)
    assert report["error"][0]["expected"] == "at least one sample"
    assert report["counts"]["hole"] == 1
    assert report["snapshot"] is None


def test_nothing_to_convert(hsfmt, tmp_path):
    (tmp_path / "empty").mkdir()
    hsfmt("convert", tmp_path / "empty", tmp_path / "d", code=3)
    hsfmt("convert", tmp_path / "none", tmp_path / "d", code=3)


def test_remote_destination(hsfmt, source):
    report = hsfmt.json("convert", source, "memory://cli-convert", *LAYERS)
    assert report["counts"]["sample"] == 12
    assert report["estimate"]["free_nbytes"] is None
    assert hsfmt.json("info", "memory://cli-convert")["samples"] == 12


def test_log_has_plain_lines(hsfmt, source, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "_INTERVAL_SECONDS", 0.0)
    lines = hsfmt("convert", source, tmp_path / "d", *LAYERS).stderr.splitlines()
    lines = [line for line in lines if line.startswith("converting: ")]
    assert len(lines) == 12
    assert "(100.0 %)" in lines[-1]
    assert "12 files" in lines[-1]
    for flag in ("--quiet", "--json"):
        assert "converting" not in hsfmt("convert", source, tmp_path / flag, *LAYERS, flag).stderr


def test_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    bar = progress.open_progress("converting", 10, shown=True)
    assert isinstance(bar, progress.BarProgress)
    with bar:
        bar.update(5, "[1] file")
        bar.total = 20
        bar.update(20)
    assert "converting" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("label", "note"),
    [
        ("verifying (complete)", "…3456789a"),
        ("converting", "12,345,678 files"),
        ("comparing with samples that came from another place", "99 files"),
    ],
)
def test_the_bar_fits_on_a_line(monkeypatch, label, note):
    from rich import console

    out = io.StringIO()
    terminal = console.Console
    monkeypatch.setattr(console, "Console", lambda **_: terminal(file=out, width=80, force_terminal=True))
    bar = progress.BarProgress(label, 987 << 30)
    with bar:
        bar.update(123 << 30, note)
        bar._bar.refresh()
        assert len(terminal(width=80).render_lines(bar._bar.get_renderable())) == 1
    assert "iB/s" in out.getvalue()
    assert " GB" not in out.getvalue()


def test_report_is_one_json_document(hsfmt, vllm_negative, tmp_path):
    result = hsfmt("convert", vllm_negative, tmp_path / "d", *LAYERS, "--json", code=1)
    assert json.loads(result.stdout)["error"]
    assert "error: " in result.stderr


def test_workers_end_with_a_killed_parent(process, large, tmp_path):
    running = process("convert", large, tmp_path / "d", *LAYERS, "--workers", 2, start_new_session=True)
    deadline = time.monotonic() + 300
    while len(list((tmp_path / "d").glob("parts/*/hidden_states"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    running.kill()
    # The pipes are at their end when nobody holds them any more.
    running.communicate(timeout=300)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            os.killpg(running.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        pytest.fail("a worker is left")
    # The one that began first may have come to its end before the other began.
    assert len(manifests(tmp_path / "d")) < 2
