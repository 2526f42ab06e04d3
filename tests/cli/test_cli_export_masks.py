"""A loss mask that nobody gave stays one that nobody gave, sample by sample, through files and back."""

import ml_dtypes
import numpy as np
import pytest
import torch

from hsfmt import DatasetWriter

MASK = np.array([0, 0, 0, 1, 1], np.uint8)


@pytest.fixture
def mixed(tmp_path):
    """A sample with a mask, one without, and one whose mask of ones was given; two of them in one part."""
    states = np.ones((5, 4, 8), ml_dtypes.bfloat16)
    with DatasetWriter(tmp_path / "d", layers=[2, 4, 6, 8], hidden_size=8, final_norm="pre") as writer:
        writer.write("given", np.arange(5), states, MASK)
        writer.write("none", np.arange(5), states)
        writer.commit()
        writer.write("ones", np.arange(5), states, np.ones(5, np.uint8))
    return tmp_path / "d"


def given(hsfmt, url):
    return {sample["id"]: sample["loss_mask_given"] for sample in hsfmt.json("ls", "-l", url)["samples"]}


KNOWN = {"given": True, "none": False, "ones": True}


@pytest.mark.parametrize("to", ["safetensors", "npz", "modelopt"])
def test_an_export_and_back(hsfmt, mixed, tmp_path, to):
    assert given(hsfmt, mixed) == KNOWN
    report = hsfmt.json("export", mixed, tmp_path / "out", "--to", to)
    assert any(warning.startswith("1 sample came without a loss mask") for warning in report["warnings"])
    layers = ["--layer-ids", "2,4,6,8"] if to == "modelopt" else []
    hsfmt("convert", tmp_path / "out", tmp_path / "back", *layers)
    assert given(hsfmt, tmp_path / "back") == KNOWN
    hsfmt("export", tmp_path / "back", tmp_path / "again", "--to", "modelopt")
    found = {path.stem: torch.load(path, weights_only=True) for path in (tmp_path / "again").iterdir()}
    assert {name: "loss_mask" in record for name, record in found.items()} == KNOWN
    assert found["given"]["loss_mask"].tolist() == MASK.tolist()
    assert found["ones"]["loss_mask"].tolist() == [1] * 5


def test_a_mask_with_zeros_was_given_whatever_the_file_says(hsfmt, mixed, tmp_path):
    hsfmt("export", mixed, tmp_path / "out", "--to", "safetensors")
    path = tmp_path / "out" / "given.safetensors"
    path.write_bytes(path.read_bytes().replace(rb"\"loss_mask_given\": true", rb"\"loss_mask_given\":false"))
    hsfmt("convert", tmp_path / "out", tmp_path / "back")
    assert given(hsfmt, tmp_path / "back") == KNOWN


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_cat_says_it_as_an_export_does(hsfmt, mixed, tmp_path, suffix):
    (tmp_path / "cat").mkdir()
    for name in KNOWN:
        hsfmt("cat", mixed, name, "-o", tmp_path / "cat" / f"{name}.{suffix}")
    hsfmt("convert", tmp_path / "cat", tmp_path / "back")
    assert given(hsfmt, tmp_path / "back") == KNOWN
