"""A sample as .pt and .safetensors: real dtypes, read back by torch and safetensors themselves."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hsfmt import DatasetWriter
from hsfmt.writers.sample_files import FileTensor, write_sample_file


@pytest.fixture(scope="module")
def states() -> torch.Tensor:
    """All bit patterns of bfloat16, [token, layer, hidden]."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(1024, 2, 32)


@pytest.fixture
def url(states, tmp_path) -> str:
    path = str(tmp_path / "d")
    settings = {"layers": [1, 2], "hidden_size": 32, "final_norm": "post", "nonfinite": "keep"}
    extras = {"weight": {"kind": "token", "dtype": "float32"}, "note": {"kind": "ragged", "dtype": "uint8"}}
    with DatasetWriter(path, model="m", extras=extras, **settings) as writer:
        mask = np.arange(1024) % 2
        writer.write("s", np.arange(1024), states, mask, {"turn": 1}, weight=np.ones(1024, np.float32))
    return path


def patterns(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def test_safetensors(hsfmt, url, states, tmp_path):
    out = tmp_path / "s.safetensors"
    hsfmt("cat", url, "s", "-o", out)
    data = load_file(out)
    assert data["hidden_states"].dtype == torch.bfloat16
    assert torch.equal(patterns(data["hidden_states"]), patterns(states))
    assert torch.equal(data["input_ids"], torch.arange(1024))
    assert torch.equal(data["loss_mask"], torch.arange(1024) % 2 == 1)
    assert torch.equal(data["weight"], torch.ones(1024))
    with safe_open(out, "pt") as file:
        known = json.loads(file.metadata()["hsfmt"])
    assert (known["sample_id"], known["layers"], known["final_norm"]) == ("s", [1, 2], "post")
    assert (known["metadata"], known["nulls"], known["model"]) == ({"turn": 1}, ["note"], {"name": "m"})


def test_pt(hsfmt, url, states, tmp_path):
    hsfmt("cat", url, "s", "-o", tmp_path / "s.pt", "--layers", "2")
    data = torch.load(tmp_path / "s.pt", weights_only=True)
    assert torch.equal(patterns(data["hidden_states"]), patterns(states[:, 1:].contiguous()))
    assert data["loss_mask"].dtype == torch.bool
    assert data["hsfmt"]["layers"] == [2]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float16", "float32", "float64", "uint16", "uint64", "int8", "bool"])
def test_dtypes(tmp_path, suffix, name):
    dtype = getattr(torch, name)
    width = dtype.itemsize
    bits = np.arange(2 if name == "bool" else 256).astype(f"u{width}").reshape(2, -1).T  # strided
    write_sample_file(tmp_path / f"x{suffix}", {"x": FileTensor(name, bits)}, {})
    data = load_file(tmp_path / "x.safetensors") if suffix == ".safetensors" else torch.load(tmp_path / "x.pt")
    assert data["x"].dtype == dtype
    assert data["x"].contiguous().view(torch.uint8).numpy().tobytes() == bits.tobytes()


def test_nothing_half_written_is_left(tmp_path, monkeypatch):
    def fail(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space left"):
        write_sample_file(tmp_path / "x.pt", {"x": FileTensor("uint8", np.zeros(3, np.uint8))}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_url_is_no_file_to_write(hsfmt, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in (["cat", url, "s", "-o", "s3://bucket/s.npz"], ["card", url, "--output", "s3://bucket/README.md"]):
        assert "a URL; it is written to a local file" in hsfmt(*command, code=2).stderr
    assert not (tmp_path / "s3:").exists()
