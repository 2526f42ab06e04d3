"""`--delete-source` over the formats whose samples share files, or are listed in a file of their own."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from hsfmt.writers.dataset_writer import DatasetWriter

IDS = ("--layer-ids", "2,4,5,8")
# Folder under tests/data -> (flags, what stays).
FOLDERS = {
    "deepspec/target_cache": (IDS, {"manifest.json", "samples.idx"}),
    "verl_speco/listed": ((*IDS, "--final-norm", "post"), None),
    "automodel/dense": (("--layer-ids", "2,4,5"), None),
    "saelens/post_float32": ((), None),
    "specforge/v020_eagle3_gz": (IDS, None),
    "speculators/0.9.0": (IDS, None),
    "speculators/0.4.0": ((), None),
    "vllm/vllm032_bf16_prompt": (IDS, {"manifest_from_request_outputs.json"}),
}


def data_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(params=FOLDERS)
def folder(request, data_dir, tmp_path) -> tuple[Path, tuple[str, ...], set[str] | None]:
    flags, stays = FOLDERS[request.param]
    return Path(shutil.copytree(data_dir / request.param, tmp_path / "source")), flags, stays


@pytest.mark.torch
def test_deleted_and_run_again(hsfmt, folder, tmp_path):
    source, flags, stays = folder
    whole = hsfmt.json("convert", source, tmp_path / "whole", *flags)
    report = hsfmt.json("convert", source, tmp_path / "d", *flags, "--delete-source")
    assert report["snapshot"]["content_digest"] == whole["snapshot"]["content_digest"]
    left = data_files(source)
    assert left == {path for path, fate in report["fates"].items() if fate != "deleted"}
    assert {report["fates"][path] for path in left} <= {"support", "stray", "hole"}
    assert stays in (None, left)
    assert report["files"]["deleted"] >= 2
    again = hsfmt.json("convert", source, tmp_path / "d", *flags, "--delete-source")
    assert again["snapshot"]["content_digest"] == whole["snapshot"]["content_digest"]
    assert again["counts"]["failed"] == again["counts"]["sample"] == again["counts"]["not_reached"] == 0
    assert again["counts"]["hole"] == whole["counts"]["hole"]
    assert len(again["deleted_before"]) == whole["counts"]["sample"]
    assert data_files(source) == left


@pytest.mark.torch
@pytest.mark.parametrize("n", [1, 2, 4])
def test_interrupted(hsfmt, folder, tmp_path, monkeypatch, n):
    source, flags, _ = folder
    whole = hsfmt.json("convert", source, tmp_path / "whole", *flags)
    before = data_files(source)
    real, calls = DatasetWriter.write, iter(range(n))

    def write(self, *args, **kwargs):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(DatasetWriter, "write", write)
        hsfmt("convert", source, tmp_path / "d", *flags, "--delete-source", "--part-size", "1KiB", code=130)
    assert data_files(source) <= before
    report = hsfmt.json("convert", source, tmp_path / "d", *flags, "--delete-source")
    assert report["snapshot"]["content_digest"] == whole["snapshot"]["content_digest"]
    assert report["counts"]["failed"] == report["counts"]["not_reached"] == 0
    assert report["counts"]["hole"] == whole["counts"]["hole"]
    kinds = {"support", "stray", "hole"}
    assert data_files(source) == {path for path, fate in whole["fates"].items() if fate in kinds}


def activation_cache(root: Path) -> Path:
    """A cache as dictionary_learning's forks write it: five texts, of which the third lies in both shards."""
    import torch

    for layer, name in enumerate(("layer_5_out", "layer_10_out")):
        folder = root / name
        folder.mkdir(parents=True)
        values = (np.arange(23 * 8).reshape(23, 8) / 9 + 100 * layer).astype(np.float16)
        for k, rows in enumerate((values[:9], values[9:])):
            rows.tofile(folder / f"shard_{k}.memmap")
            meta = {"shape": list(rows.shape), "dtype": "torch.float16"}
            (folder / f"shard_{k}.meta").write_text(json.dumps(meta))
        config = {"d_model": 8, "shuffle_shards": False, "total_size": 23, "shard_count": 2}
        (folder / "config.json").write_text(json.dumps(config))
    torch.save(torch.arange(23) * 3, root / "tokens.pt")
    torch.save(torch.tensor([0, 4, 7, 15, 20, 23]), root / "sequence_ranges.pt")
    return root


CACHE = ("--layer-ids", "6,11", "--final-norm", "pre", "--delete-source")
SHARDS = [f"{name}/shard_{k}.memmap" for name in ("layer_5_out", "layer_10_out") for k in (0, 1)]


@pytest.mark.torch
@pytest.mark.parametrize("left", [SHARDS[:1], SHARDS[1:2], SHARDS[2:], SHARDS[:3], SHARDS[1:]])
def test_a_run_killed_while_it_deleted_files_that_go_together(hsfmt, tmp_path, left):
    source = activation_cache(tmp_path / "source")
    kept = shutil.copytree(source, tmp_path / "kept")
    whole = hsfmt.json("convert", source, tmp_path / "d", *CACHE)
    stays = data_files(source)
    assert stays == data_files(kept) - set(SHARDS)
    for path in left:
        shutil.copy2(kept / path, source / path)
    again = hsfmt.json("convert", source, tmp_path / "d", *CACHE)
    assert again["snapshot"]["content_digest"] == whole["snapshot"]["content_digest"]
    assert again["counts"]["failed"] == again["counts"]["hole"] == 0
    assert data_files(source) == stays
    assert {path for path, fate in again["fates"].items() if fate == "deleted"} == set(left)


@pytest.mark.torch
def test_files_that_are_newer_than_the_run_that_is_gone_on_with_stay(hsfmt, tmp_path):
    source = activation_cache(tmp_path / "source")
    kept = shutil.copytree(source, tmp_path / "kept")
    hsfmt("convert", source, tmp_path / "d", *CACHE)
    shutil.copy(kept / SHARDS[1], source / SHARDS[1])
    hsfmt("convert", source, tmp_path / "d", *CACHE)
    assert (source / SHARDS[1]).is_file()


@pytest.mark.torch
def test_without_the_option_deleted_rows_are_converted_already(hsfmt, data_dir, tmp_path):
    """A source lists the rows whose files are gone; they are no holes, whichever options come next."""
    source = tmp_path / "source"
    shutil.copytree(data_dir / "speculators" / "0.9.0", source)
    flags = ("--layer-ids", "1,2,3,4")
    whole = hsfmt.json("convert", source, tmp_path / "d", *flags, "--delete-source")
    assert whole["files"]["deleted"] > 0
    again = hsfmt.json("convert", source, tmp_path / "d", *flags)
    assert again["snapshot"]["fingerprint"] == whole["snapshot"]["fingerprint"]
    assert again["counts"]["failed"] == again["counts"]["sample"] == again["counts"]["not_reached"] == 0
    assert again["counts"]["hole"] <= whole["counts"]["hole"]
    assert len(again["deleted_before"]) == whole["counts"]["sample"]
