"""Writers of tiny datasets, and samples for them."""

import os

import ml_dtypes
import numpy as np
import pytest

from hsfmt import DatasetWriter

NATIVE = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}


@pytest.fixture(autouse=True)
def no_fsync(request, monkeypatch):
    """Spare the disk: no test here cuts the power; test_writer_durability.py, which keeps it, holds the order."""
    if not getattr(request.module, "KEEP_FSYNC", False):
        monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def url(tmp_path):
    return str(tmp_path / "dataset")


@pytest.fixture
def open_writer(url):
    """Open a writer with small settings, all of which a test may replace; close them when the test failed to."""
    writers = []

    def make(**settings):
        target = settings.pop("url", url)
        defaults = {"layers": [1, 3], "hidden_size": 8, "final_norm": "pre", "dtype": "float32", "seal": False}
        writer = DatasetWriter(target, **{**defaults, **settings})
        writers.append(writer)
        return writer

    yield make
    for writer in writers:
        writer.abort()


@pytest.fixture
def states():
    """Make finite states [token, layer, hidden] that differ in every element and by seed."""

    def make(n_tokens, n_layers=2, hidden_size=8, dtype="float32", seed=0):
        rng = np.random.default_rng(seed)
        return rng.standard_normal((n_tokens, n_layers, hidden_size), np.float32).astype(NATIVE[dtype])

    return make
