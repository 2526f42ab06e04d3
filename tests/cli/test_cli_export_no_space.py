"""hsfmt export and cat: storage that refuses to write on is the storage's error, whichever library was writing."""

import resource
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest
from export_sources import for_target

from hsfmt import DatasetWriter, seal
from hsfmt.writers.targets.registry import TARGET_NAMES

PRE = ("speculators", "speculators-fp8", "speculators-pt", "vllm")
LIMIT = 16 << 10


@contextmanager
def small_files():
    """Within this no file gets longer than LIMIT, as on a full disk; Python ignores the signal that goes with it.

    The test run's own output, which may go to a file too, is written outside of it.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def make(url, name, n_tokens=100):
    layers = [8] if name == "eagle-ge" else [1, 2, 5, 8]
    norm = "pre" if name in PRE else "post"
    rng = np.random.default_rng(0)
    with DatasetWriter(url, layers=layers, hidden_size=256, final_norm=norm, model="m") as writer:
        states = rng.standard_normal((n_tokens, len(layers), 256)).astype(ml_dtypes.bfloat16)
        writer.write("s", np.arange(n_tokens), states, np.ones(n_tokens, np.uint8))


WORDS = {
    "speculators-fp8": [("--cast", "float8_e4m3fn")],
    "specforge-dflash": [("--layers", "1,2")],
    "specforge-eagle3": [(), ("--option", "compression=gzip")],
}


@pytest.mark.parametrize(
    ("name", "words"), [for_target(name, words) for name in TARGET_NAMES for words in WORDS.get(name, [()])], ids=str
)
def test_every_target_ends_with_the_storages_error(hsfmt, tmp_path, name, words):
    make(tmp_path / "d", name)
    hsfmt("export", tmp_path / "d", tmp_path / "warm", "--to", name, *words)
    with small_files():
        document = hsfmt.json("export", tmp_path / "d", tmp_path / "out", "--to", name, *words, code=3)
    (problem,) = document["error"]
    assert (problem["expected"], problem["got"]) == ("the storage to work", "File too large")
    assert document["complete"] is False
    assert not list((tmp_path / "out").rglob(".hsfmt-*"))


@pytest.mark.torch
def test_the_counts_of_a_vocabulary(hsfmt, tmp_path):
    make(tmp_path / "d", "speculators", n_tokens=1)
    seal(tmp_path / "d", attachments={"token_freq": np.ones(20_000, np.int64)})
    with small_files():
        document = hsfmt.json("export", tmp_path / "d", tmp_path / "out", "--to", "speculators", code=3)
    assert document["error"][0]["got"] == "File too large"
    assert document["counts"]["written"] == 1


@pytest.mark.parametrize("suffix", [pytest.param("pt", marks=pytest.mark.torch), "npz", "safetensors"])
def test_cat(hsfmt, tmp_path, suffix):
    make(tmp_path / "d", "safetensors")
    with small_files():
        result = hsfmt("cat", tmp_path / "d", "s", "-o", tmp_path / f"s.{suffix}", code=3)
    assert "File too large" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
