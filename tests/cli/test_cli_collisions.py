"""Ids that the dataset has already: the same sample is skipped, another one is never lost silently."""

import os
import platform
import shutil
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from hsfmt import DatasetWriter
from hsfmt.cli import progress
from hsfmt.cli.converting import collisions, committed_copies
from hsfmt.cli.converting import run as conversion
from hsfmt.cli.converting import work as conversion_work
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.sources.base import Source
from hsfmt.writers.sample_files import FileTensor, write_sample_file

LAYERS = ("--layer-ids", "2,4,5,8")
HIDDEN = 16


def states(seed: int, n_tokens: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((n_tokens, 4, HIDDEN), np.float32)
    return values.astype(ml_dtypes.bfloat16)


def save(path: Path, seed: int, n_tokens: int) -> None:
    """Write a file as vLLM's connector does; another seed gives other states under the same token ids."""
    tensors = {
        "hidden_states": FileTensor("bfloat16", states(seed, n_tokens).view(np.uint16)),
        "token_ids": FileTensor("int64", np.arange(n_tokens)),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_sample_file(path, tensors, {}, overwrite=True)


def change_later(path: Path) -> None:
    """Give a file a time of change after that of any part; the clock of the files may be coarser than ours."""
    later = time.time() + 60
    os.utime(path, (later, later))


@pytest.fixture
def ranks(tmp_path) -> Path:
    """rank0 and rank1, each with r_0 to r_3 of equal lengths and different states; rank1 has r_4 too."""
    for rank in (0, 1):
        for n in range(4 + rank):
            save(tmp_path / "ranks" / f"rank{rank}" / f"r_{n}.safetensors", 100 * rank + n, n + 2)
    return tmp_path / "ranks"


@pytest.fixture
def loads(monkeypatch) -> list[str]:
    """Keys of the items that are read from here on."""
    keys: list[str] = []
    real = Source.load
    monkeypatch.setattr(Source, "load", lambda self, item, **how: keys.append(item.key) or real(self, item, **how))
    return keys


def contents(dataset: Path) -> dict[str, bytes]:
    """Every sample of the sealed snapshot: id to the bytes of its states."""
    reader = SampleReader(dataset)
    return {reader.sample_ids[i]: np.asarray(reader.read(i).hidden_states).tobytes() for i in range(len(reader))}


def expected(rank: int, n: int, prefix: str = "") -> dict[str, bytes]:
    return {f"{prefix}r_{i}": states(100 * rank + i, i + 2).tobytes() for i in range(n)}


def tree(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file())


def counts(**given: int) -> dict[str, int]:
    return {"sample": 0, "skipped": 0, "hole": 0, "failed": 0, "not_reached": 0, **given}


@pytest.mark.parametrize("workers", [1, 2])
def test_folders_of_equal_ids_are_refused(hsfmt, ranks, tmp_path, workers):
    hsfmt("convert", ranks / "rank0", tmp_path / "d", *LAYERS)
    before = tree(tmp_path / "d")
    report = hsfmt.json("convert", ranks / "rank1", tmp_path / "d", *LAYERS, "--workers", workers, code=1)
    assert report["counts"]["sample"] == report["counts"]["skipped"] == 0
    assert 1 <= report["counts"]["failed"] == len(report["conflicts"]) <= (1 if workers == 1 else 4)
    assert sum(report["counts"].values()) == 5
    assert report["snapshot"] is None
    problem = report["error"][0]
    n = int(problem["where"].removeprefix("r_").removesuffix(".safetensors"))
    assert problem["samples"] == [f"r_{n}"]
    assert f"'r_{n}'" in problem["expected"]
    assert f"{ranks}/rank0/r_{n}.safetensors" in problem["expected"]
    assert "--id-prefix rank1/" in problem["remedy"]
    assert tree(tmp_path / "d") == before, "a conflict shows before anything is written"
    assert contents(tmp_path / "d") == expected(0, 4)


def test_text_of_a_conflict(hsfmt, ranks, tmp_path):
    hsfmt("convert", ranks / "rank0", tmp_path / "d", *LAYERS)
    result = hsfmt("convert", ranks / "rank1", tmp_path / "d", *LAYERS, code=1)
    assert "error: r_0.safetensors: expected the committed sample 'r_0'" in result.stderr
    assert "--id-prefix rank1/" in result.stderr
    assert "Run the same command again" not in result.stderr, "it would meet the same conflict"
    assert "nothing was committed; not sealed" in result.stderr
    assert "  conflicts:\n    r_0.safetensors: " in result.stdout


@pytest.mark.parametrize("workers", [1, 2])
def test_all_conflicts_at_once(hsfmt, ranks, tmp_path, workers):
    hsfmt("convert", ranks / "rank0", tmp_path / "d", *LAYERS)
    flags = ("--on-bad", "hole", "--workers", workers)
    report = hsfmt.json("convert", ranks / "rank1", tmp_path / "d", *LAYERS, *flags, code=1)
    assert report["counts"] == counts(sample=1, failed=4)
    assert [conflict["id"] for conflict in report["conflicts"]] == ["r_0", "r_1", "r_2", "r_3"]
    assert [problem["where"] for problem in report["error"]] == [f"r_{n}.safetensors" for n in range(4)]
    assert report["files"]["failed"] == 4
    assert report["holes"] == []
    assert report["snapshot"] is None
    assert contents(tmp_path / "d") == expected(0, 4), "what readers see is as it was"
    # It does not become right by trying again.
    again = hsfmt.json("convert", ranks / "rank1", tmp_path / "d", *LAYERS, *flags, code=1)
    assert again["counts"] == counts(skipped=1, failed=4)


def test_a_prefix_keeps_folders_apart(hsfmt, ranks, tmp_path):
    whole = hsfmt.json("convert", ranks, tmp_path / "whole", *LAYERS)
    assert whole["counts"] == counts(sample=9), "within one folder the paths are the ids"
    for rank in (0, 1):
        flags = ("--id-prefix", f"rank{rank}/")
        report = hsfmt.json("convert", ranks / f"rank{rank}", tmp_path / "d", *LAYERS, *flags)
        assert report["counts"] == counts(sample=4 + rank)
    assert report["snapshot"]["counts"]["samples"] == 9
    assert contents(tmp_path / "d") == expected(0, 4, "rank0/") | expected(1, 5, "rank1/")
    assert report["snapshot"]["content_digest"] == whole["snapshot"]["content_digest"]
    reader = SampleReader(tmp_path / "d")
    part, row = reader.locate(reader.index_of("rank1/r_4"))
    assert part.manifest.producer["options"]["id_prefix"] == "rank1/"
    assert part.index.metadata(row)["source"] == "r_4.safetensors"


def test_a_prefix_is_part_of_the_id(hsfmt, ranks, tmp_path):
    (ranks / "rank1" / "r_1.safetensors").write_bytes(b"")
    flags = ("--id-prefix", "rank1/", "--on-bad", "hole")
    report = hsfmt.json("convert", ranks / "rank1", tmp_path / "d", *LAYERS, *flags)
    assert [hole["id"] for hole in report["holes"]] == ["rank1/r_1"]
    listed = hsfmt.json("ls", tmp_path / "d")["samples"]
    assert [row["id"] for row in listed] == ["rank1/r_0", "rank1/r_2", "rank1/r_3", "rank1/r_4"]
    assert "rank1/r_2" in hsfmt("cat", tmp_path / "d", "rank1/r_2").stdout
    assert "rank1/r_1" in hsfmt("ls", tmp_path / "d", "--holes").stdout
    hsfmt("cat", tmp_path / "d", "r_2", code=3)


@pytest.mark.parametrize("prefix", ["", "a\nb", "\udcff", "x" * 4094])
def test_bad_prefixes(hsfmt, ranks, tmp_path, prefix):
    result = hsfmt("convert", ranks / "rank0", tmp_path / "d", *LAYERS, "--id-prefix", prefix, code=2)
    assert "--id-prefix" in result.stderr
    assert not (tmp_path / "d").exists()


def test_resuming_in_place_reads_nothing_again(hsfmt, ranks, tmp_path, loads):
    hsfmt("convert", ranks / "rank0", tmp_path / "d", *LAYERS)
    assert len(loads) == 4
    loads.clear()
    report = hsfmt.json("convert", ranks / "rank0", tmp_path / "d", *LAYERS)
    assert report["counts"] == counts(skipped=4)
    assert report["warnings"] == []
    save(ranks / "rank0" / "r_9.safetensors", 9, 3)
    report = hsfmt.json("convert", ranks / "rank0", tmp_path / "d", *LAYERS)
    assert report["counts"] == counts(sample=1, skipped=4)
    assert loads == ["r_9.safetensors"]


def test_the_same_file_by_another_way(hsfmt, ranks, tmp_path, loads):
    """A prefix that makes the ids of the parent folder's conversion goes on with it."""
    hsfmt("convert", ranks / "rank0", tmp_path / "d", *LAYERS, "--id-prefix", "rank0/")
    loads.clear()
    report = hsfmt.json("convert", ranks, tmp_path / "d", *LAYERS)
    assert report["counts"] == counts(sample=5, skipped=4)
    assert loads == [f"rank1/r_{n}.safetensors" for n in range(5)]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_copy_elsewhere_is_compared(hsfmt, ranks, tmp_path, loads, workers):
    first = hsfmt.json("convert", ranks / "rank0", tmp_path / "d", *LAYERS)
    shutil.copytree(ranks / "rank0", tmp_path / "copy")
    save(tmp_path / "copy" / "r_9.safetensors", 9, 3)
    (tmp_path / "copy" / "r_9.safetensors").rename(tmp_path / "r_9.safetensors")
    loads.clear()
    report = hsfmt.json("convert", tmp_path / "copy", tmp_path / "d", *LAYERS, "--workers", workers)
    assert report["counts"] == counts(skipped=4)
    assert report["conflicts"] == []
    assert report["snapshot"]["fingerprint"] == first["snapshot"]["fingerprint"]
    if workers == 1:
        assert loads == [f"r_{n}.safetensors" for n in range(4)]
    assert any("4 ids of this source" in text and str(ranks / "rank0") in text for text in report["warnings"])
    # What is new in the copy is taken as ever.
    (tmp_path / "r_9.safetensors").rename(tmp_path / "copy" / "r_9.safetensors")
    report = hsfmt.json("convert", tmp_path / "copy", tmp_path / "d", *LAYERS, "--workers", workers)
    assert report["counts"] == counts(sample=1, skipped=4)


def test_progress_says_that_it_compares(hsfmt, ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "_INTERVAL_SECONDS", 0.0)
    hsfmt("convert", ranks / "rank0", tmp_path / "d", *LAYERS)
    (ranks / "rank0").rename(ranks / "moved")
    lines = hsfmt("convert", ranks / "moved", tmp_path / "d", *LAYERS).stderr.splitlines()
    assert sum(line.startswith("comparing with samples that came from another place: ") for line in lines) == 4
    assert not any(line.startswith("converting: ") for line in lines)


def test_a_changed_file_in_a_copy(hsfmt, ranks, tmp_path):
    hsfmt("convert", ranks / "rank0", tmp_path / "d", *LAYERS)
    shutil.copytree(ranks / "rank0", tmp_path / "copy")
    save(tmp_path / "copy" / "r_2.safetensors", 7, 4)
    for flags, expected_counts in (
        ((), counts(skipped=2, failed=1, not_reached=1)),
        (("--on-bad", "hole"), counts(skipped=3, failed=1)),
    ):
        report = hsfmt.json("convert", tmp_path / "copy", tmp_path / "d", *LAYERS, *flags, code=1)
        assert report["counts"] == expected_counts
        assert [problem["where"] for problem in report["error"]] == ["r_2.safetensors"]
        assert [conflict["file"] for conflict in report["conflicts"]] == ["r_2.safetensors"]
    assert contents(tmp_path / "d") == expected(0, 4)


def test_other_token_ids_are_a_conflict(hsfmt, ranks, tmp_path):
    hsfmt("convert", ranks / "rank0", tmp_path / "d", *LAYERS)
    shutil.copytree(ranks / "rank0", tmp_path / "copy")
    tensors = {
        "hidden_states": FileTensor("bfloat16", states(2, 4).view(np.uint16)),
        "token_ids": FileTensor("int64", np.arange(4) + 1),
    }
    write_sample_file(tmp_path / "copy" / "r_2.safetensors", tensors, {}, overwrite=True)
    report = hsfmt.json("convert", tmp_path / "copy", tmp_path / "d", *LAYERS, "--on-bad", "hole", code=1)
    assert [conflict["id"] for conflict in report["conflicts"]] == ["r_2"]


def test_a_file_that_changed_in_place(hsfmt, ranks, tmp_path, loads):
    hsfmt("convert", ranks / "rank0", tmp_path / "d", *LAYERS)
    loads.clear()
    change_later(ranks / "rank0" / "r_1.safetensors")
    report = hsfmt.json("convert", ranks / "rank0", tmp_path / "d", *LAYERS)
    assert report["counts"] == counts(skipped=4), "touched, but the same"
    assert loads == ["r_1.safetensors"]
    save(ranks / "rank0" / "r_1.safetensors", 7, 3)
    change_later(ranks / "rank0" / "r_1.safetensors")
    report = hsfmt.json("convert", ranks / "rank0", tmp_path / "d", *LAYERS, code=1)
    assert report["error"][0]["where"] == "r_1.safetensors"


def test_the_same_path_on_another_host(hsfmt, ranks, tmp_path, monkeypatch):
    hsfmt("convert", ranks / "rank0", tmp_path / "d", *LAYERS)
    (ranks / "rank0").rename(ranks / "other")
    (ranks / "rank1").rename(ranks / "rank0")
    monkeypatch.setattr(platform, "node", lambda: "another")
    save(ranks / "rank0" / "r_4.safetensors", 104, 6)
    # A clock that is behind: the files seem older than the part, as they may on another machine.
    for path in (ranks / "rank0").iterdir():
        os.utime(path, (1e9, 1e9))
    report = hsfmt.json("convert", ranks / "rank0", tmp_path / "d", *LAYERS, "--on-bad", "hole", code=1)
    assert report["counts"] == counts(sample=1, failed=4)


def test_ids_of_an_unknown_origin(hsfmt, ranks, tmp_path):
    options = {"layers": [2, 4, 5, 8], "hidden_size": HIDDEN, "final_norm": "pre"}
    with DatasetWriter(tmp_path / "d", **options) as writer:
        writer.write("r_0", np.arange(2), states(0, 2), metadata={"source": "r_0.safetensors"})
        writer.write("r_1", np.arange(3), states(99, 3))
        writer.write("r_2", np.arange(4), states(2, 4), [0, 0, 1, 1])
    report = hsfmt.json("convert", ranks / "rank0", tmp_path / "d", *LAYERS, "--on-bad", "hole", code=1)
    assert report["counts"] == counts(sample=1, skipped=1, failed=2)
    assert "an unknown origin" in report["conflicts"][0]["reason"]
    assert [conflict["id"] for conflict in report["conflicts"]] == ["r_1", "r_2"], "other states, and another mask"


def test_what_readers_get_counts(hsfmt, ranks, tmp_path):
    """An own copy behind another folder's of the same id is not there for readers."""
    names = iter(["20260101t000000z-0000000000000000"])
    hsfmt("convert", ranks / "rank1", tmp_path / "d", *LAYERS)
    options = {"layers": [2, 4, 5, 8], "hidden_size": HIDDEN, "final_norm": "pre", "part_names": lambda: next(names)}
    with DatasetWriter(tmp_path / "e", **options) as writer:
        writer.write("r_0", np.arange(2), states(0, 2))
    for kind in ("parts", "hsfmt/manifests", "hsfmt/index"):
        for path in (tmp_path / "e" / kind).iterdir():
            if path.name != "zarr.json":
                (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / "d" / kind / path.name)
    report = hsfmt.json("convert", ranks / "rank1", tmp_path / "d", *LAYERS, "--on-bad", "hole", code=1)
    assert report["counts"] == counts(skipped=4, failed=1)
    assert report["conflicts"][0]["id"] == "r_0"


def test_a_dry_run_says_that_it_would_compare(hsfmt, ranks, tmp_path, loads):
    hsfmt("convert", ranks / "rank0", tmp_path / "d", *LAYERS)
    loads.clear()
    report = hsfmt.json("convert", ranks / "rank1", tmp_path / "d", *LAYERS, "--dry-run")
    assert report["counts"] == counts(sample=1, skipped=4)
    assert any("compared" in text and "rank0" in text for text in report["warnings"])
    assert loads == []


@pytest.mark.parametrize(("flags", "failed"), [((), 1), (("--on-bad", "hole"), 2)], ids=str)
def test_a_bad_file_has_nothing_to_compare(hsfmt, ranks, tmp_path, flags, failed):
    hsfmt("convert", ranks / "rank0", tmp_path / "d", *LAYERS)
    shutil.copytree(ranks / "rank0", tmp_path / "copy")
    for n in (1, 3):
        (tmp_path / "copy" / f"r_{n}.safetensors").write_bytes(b"")
    report = hsfmt.json("convert", tmp_path / "copy", tmp_path / "d", *LAYERS, *flags, code=1)
    assert report["counts"]["failed"] == failed
    assert report["counts"]["hole"] == 0
    assert report["error"][0]["where"].startswith("r_1.safetensors")
    assert contents(tmp_path / "d") == expected(0, 4)


def test_a_sample_that_filled_anothers_hole(hsfmt, ranks, tmp_path):
    good = (ranks / "rank0" / "r_2.safetensors").read_bytes()
    (ranks / "rank0" / "r_2.safetensors").write_bytes(b"")
    hsfmt("convert", ranks / "rank0", tmp_path / "d", *LAYERS, "--on-bad", "hole")
    hsfmt.json("convert", ranks / "rank1", tmp_path / "d", *LAYERS, "--on-bad", "hole", code=1)
    (ranks / "rank0" / "r_2.safetensors").write_bytes(good)
    report = hsfmt.json("convert", ranks / "rank0", tmp_path / "d", *LAYERS, code=1)
    assert report["error"][0]["where"] == "r_2.safetensors"
    assert "rank1/r_2.safetensors" in report["error"][0]["expected"]


def test_an_interrupted_comparison(hsfmt, ranks, tmp_path, monkeypatch):
    hsfmt("convert", ranks / "rank0", tmp_path / "d", *LAYERS)
    (ranks / "rank0").rename(ranks / "moved")
    real, calls = collisions.make_sample, iter(range(2))

    def interrupted(*args, **kwargs):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(collisions, "make_sample", interrupted)
    report = hsfmt.json("convert", ranks / "moved", tmp_path / "d", *LAYERS, code=130)
    # What a slice found out is lost with it, as in a conversion.
    assert report["counts"] == counts(not_reached=4)


@pytest.mark.parametrize("other", ["rank1", "copy"])
def test_a_conversion_that_was_faster(hsfmt, ranks, tmp_path, monkeypatch, other):
    """Another conversion commits the ids between our plan and our first file."""
    shutil.copytree(ranks / "rank0", ranks / "copy")
    real, first = conversion.convert_slice, iter([True])

    def slow(task, numbers, board):
        if next(first, False):
            hsfmt("convert", ranks / other, tmp_path / "d", *LAYERS)
        return real(task, numbers, board)

    monkeypatch.setattr(conversion, "convert_slice", slow)
    code = 0 if other == "copy" else 1
    report = hsfmt.json("convert", ranks / "rank0", tmp_path / "d", *LAYERS, "--on-bad", "hole", code=code)
    assert report["counts"] == (counts(skipped=4) if other == "copy" else counts(failed=4))
    assert len(report["conflicts"]) == (0 if other == "copy" else 4)


@pytest.mark.parametrize("other", ["rank1", "copy"])
def test_conversions_at_once(hsfmt, ranks, tmp_path, monkeypatch, other):
    """Another conversion commits the ids while ours has them in its open part: readers get one of the two."""
    shutil.copytree(ranks / "rank0", ranks / "copy")
    real, first = DatasetWriter.close, iter([True])

    def close(self, **kwargs):
        if next(first, False):
            hsfmt("convert", ranks / other, tmp_path / "d", *LAYERS)
        real(self, **kwargs)

    monkeypatch.setattr(DatasetWriter, "close", close)
    code = 0 if other == "copy" else 1
    report = hsfmt.json("convert", ranks / "rank0", tmp_path / "d", *LAYERS, code=code)
    assert report["written"]["samples"] == 4
    assert report["counts"] == (counts(sample=4) if other == "copy" else counts(failed=4))
    if code:
        assert [conflict["id"] for conflict in report["conflicts"]] == [f"r_{n}" for n in range(4)]
        assert "--id-prefix rank0/" in report["error"][0]["remedy"]


def test_what_a_clashing_conversion_committed_is_said(hsfmt, ranks, tmp_path, monkeypatch):
    real, first = DatasetWriter.close, iter([True])

    def close(self, **kwargs):
        if next(first, False):
            hsfmt("convert", ranks / "rank1", tmp_path / "d", *LAYERS)
        real(self, **kwargs)

    monkeypatch.setattr(DatasetWriter, "close", close)
    result = hsfmt("convert", ranks / "rank0", tmp_path / "d", *LAYERS, code=1)
    assert "4 samples committed, 4 of them under an id of another's; not sealed." in result.stderr


def scaled(path: Path, scale: float) -> None:
    patterns = np.arange(3 * 4 * HIDDEN, dtype=np.uint8).reshape(3, 4, HIDDEN) % 100
    tensors = {
        "hidden_states": FileTensor("float8_e4m3fn", patterns),
        "hidden_states_scales": FileTensor("float32", np.full((3, 1, 1), scale, np.float32)),
        "token_ids": FileTensor("int64", np.arange(3)),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_sample_file(path, tensors, {})


def test_scales_are_part_of_the_content(hsfmt, tmp_path):
    for name, scale in (("a", 1.0), ("same", 1.0), ("b", 2.0)):
        scaled(tmp_path / name / "r_0.safetensors", scale)
    hsfmt("convert", tmp_path / "a", tmp_path / "d", *LAYERS)
    assert hsfmt.json("convert", tmp_path / "same", tmp_path / "d", *LAYERS)["counts"] == counts(skipped=1)
    report = hsfmt.json("convert", tmp_path / "b", tmp_path / "d", *LAYERS, code=1)
    assert "other scales" in report["error"][0]["got"]


def test_rows_without_states_are_no_conflict(hsfmt, data_dir, tmp_path):
    """The copy has nothing there that could be lost."""
    source = data_dir / "speculators" / "0.9.0"
    first = hsfmt.json("convert", source, tmp_path / "d", *LAYERS)
    shutil.copytree(source, tmp_path / "copy")
    removed = min((tmp_path / "copy" / "hidden_states").glob("hs_*.safetensors"))
    removed.unlink()
    report = hsfmt.json("convert", tmp_path / "copy", tmp_path / "d", *LAYERS)
    assert report["counts"]["skipped"] == first["counts"]["sample"]
    assert report["counts"]["sample"] == report["counts"]["failed"] == 0


def test_a_hole_that_another_conversion_fills_meanwhile(hsfmt, ranks, tmp_path, monkeypatch):
    (ranks / "rank0" / "r_1.safetensors").write_bytes(b"")
    for n in (0, 2, 3, 4):
        (ranks / "rank1" / f"r_{n}.safetensors").unlink()
    real, first = DatasetWriter.close, iter([True])

    def close(self, **kwargs):
        if next(first, False):
            hsfmt("convert", ranks / "rank1", tmp_path / "d", *LAYERS)
        real(self, **kwargs)

    monkeypatch.setattr(DatasetWriter, "close", close)
    report = hsfmt.json("convert", ranks / "rank0", tmp_path / "d", *LAYERS, "--on-bad", "hole")
    assert report["counts"] == counts(sample=3, hole=1)
    report = hsfmt.json("convert", ranks / "rank0", tmp_path / "d", *LAYERS, "--on-bad", "hole", code=1)
    assert report["counts"] == counts(skipped=3, failed=1)


def test_another_folder_under_the_same_path_is_compared(hsfmt, ranks, tmp_path, loads):
    """Renaming a folder changes nothing at the files in it, which may be older than the first run."""
    hsfmt("convert", ranks / "rank0", tmp_path / "d", *LAYERS)
    loads.clear()
    (ranks / "rank0").rename(ranks / "old")
    (ranks / "rank1").rename(ranks / "rank0")
    report = hsfmt.json("convert", ranks / "rank0", tmp_path / "d", *LAYERS, "--on-bad", "hole", code=1)
    assert report["counts"] == counts(sample=1, failed=4)
    assert sorted(loads) == [f"r_{n}.safetensors" for n in range(5)]


def test_another_folder_above_the_source_is_compared(hsfmt, ranks, tmp_path):
    for rank in (0, 1):
        (tmp_path / f"node{rank}").mkdir()
        (ranks / f"rank{rank}").rename(tmp_path / f"node{rank}" / "states")
    hsfmt("convert", tmp_path / "node0" / "states", tmp_path / "d", *LAYERS)
    (tmp_path / "node0").rename(tmp_path / "old")
    (tmp_path / "node1").rename(tmp_path / "node0")
    report = hsfmt.json("convert", tmp_path / "node0" / "states", tmp_path / "d", *LAYERS, "--on-bad", "hole", code=1)
    assert report["counts"] == counts(sample=1, failed=4)


@pytest.mark.parametrize("what", ["folder", "files"])
def test_what_links_lead_to_is_compared(hsfmt, ranks, tmp_path, loads, what):
    """The link stays as it is, or is made anew; what it leads to is another folder."""
    (tmp_path / "source").mkdir()
    (ranks / "rank1" / "r_4.safetensors").unlink()
    if what == "folder":
        (tmp_path / "source" / "cur").symlink_to(ranks / "rank0", target_is_directory=True)
    else:
        for path in (ranks / "rank0").iterdir():
            (tmp_path / "source" / path.name).symlink_to(path)
    hsfmt("convert", tmp_path / "source", tmp_path / "d", *LAYERS)
    loads.clear()
    assert hsfmt.json("convert", tmp_path / "source", tmp_path / "d", *LAYERS)["counts"] == counts(skipped=4)
    assert loads == []
    if what == "folder":
        (tmp_path / "source" / "cur").unlink()
        (tmp_path / "source" / "cur").symlink_to(ranks / "rank1", target_is_directory=True)
    else:
        (ranks / "rank0").rename(ranks / "old")
        (ranks / "rank1").rename(ranks / "rank0")
    report = hsfmt.json("convert", tmp_path / "source", tmp_path / "d", *LAYERS, "--on-bad", "hole", code=1)
    assert report["counts"] == counts(failed=4)


def test_folders_of_one_source_that_were_exchanged_are_compared(hsfmt, ranks, tmp_path):
    hsfmt("convert", ranks, tmp_path / "d", *LAYERS)
    for old, new in (("rank0", "rank"), ("rank1", "rank0"), ("rank", "rank1")):
        (ranks / old).rename(ranks / new)
    report = hsfmt.json("convert", ranks, tmp_path / "d", *LAYERS, "--on-bad", "hole", code=1)
    assert report["counts"]["failed"] == 8


@pytest.mark.parametrize("recorded", ["none", "too many"])
def test_without_a_record_of_the_folders_all_is_compared(hsfmt, ranks, tmp_path, loads, monkeypatch, recorded):
    if recorded == "none":
        monkeypatch.setattr(conversion_work, "folders_of", lambda *_: [])
    else:
        monkeypatch.setattr(committed_copies, "_MAX_FOLDERS", 0)
    hsfmt("convert", ranks / "rank0", tmp_path / "d", *LAYERS)
    loads.clear()
    report = hsfmt.json("convert", ranks / "rank0", tmp_path / "d", *LAYERS)
    assert report["counts"] == counts(skipped=4)
    assert loads == [f"r_{n}.safetensors" for n in range(4)]


SPLIT = (*LAYERS, "--split-long", 5)


def test_ids_like_those_of_windows_are_refused_by_name(hsfmt, tmp_path):
    for name, n_tokens in (("a", 12), ("a#0", 3), ("a#1", 3)):
        save(tmp_path / "s" / f"{name}.safetensors", 1, n_tokens)
    result = hsfmt("convert", tmp_path / "s", tmp_path / "d", *SPLIT, code=2)
    assert "a.safetensors" in result.stderr
    assert "a#0" in result.stderr
    assert not (tmp_path / "d").exists()
    assert hsfmt.json("convert", tmp_path / "s", tmp_path / "d", *LAYERS)["counts"] == counts(sample=3)
    # All three are there as they are: nothing is to be cut any more.
    report = hsfmt.json("convert", tmp_path / "s", tmp_path / "d", *SPLIT, code=1)
    assert report["error"][0]["samples"] == ["a"]


def test_a_committed_id_like_that_of_a_window_is_refused_by_name(hsfmt, tmp_path):
    save(tmp_path / "one" / "a#1.safetensors", 1, 3)
    save(tmp_path / "two" / "a.safetensors", 2, 12)
    first = hsfmt.json("convert", tmp_path / "one", tmp_path / "d", *LAYERS)
    result = hsfmt("convert", tmp_path / "two", tmp_path / "d", *SPLIT, code=2)
    assert "'a#1' of the dataset" in result.stderr
    assert len(list((tmp_path / "d" / "hsfmt/manifests").iterdir())) == first["written"]["parts"]
