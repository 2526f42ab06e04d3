"""A small dataset with everything in it, and ways to damage and to forge it."""

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hsfmt import DatasetWriter, seal
from hsfmt.catalog import load_index, read_header
from hsfmt.digests import digest
from hsfmt.index import PartIndex
from hsfmt.layout import index_path, manifest_path
from hsfmt.manifest import FileEntry, parse_manifest
from hsfmt.storage import open_store
from hsfmt.writers.extras import Extra

LAYERS, HIDDEN = (1, 3), 8
EXTRAS = {
    "weight": Extra("token", "float32"),
    "score": Extra("sample", "float64"),
    "topk": Extra("ragged", "int32", (2,)),
}


def states(n_tokens, seed=0):
    """Finite bfloat16 patterns [token, layer, hidden]."""
    return np.random.default_rng(seed).integers(1, 0x7000, (n_tokens, len(LAYERS), HIDDEN)).astype(np.uint16)


def write_sample(writer, name, n_tokens, seed):
    """Write a sample; every third has no score, every other no topk."""
    writer.write(
        name,
        np.arange(n_tokens) + seed,
        states(n_tokens, seed),
        None if seed % 4 == 3 else np.arange(n_tokens) % 2,
        {"seed": seed, "half": 0.5},
        weight=np.linspace(0, 1, n_tokens, dtype=np.float32),
        score=None if seed % 3 == 2 else seed / 3,
        topk=None if seed % 2 else np.full((seed + 1, 2), seed, np.int32),
    )


def open_writer(path, **settings):
    names = itertools.count()
    prefix = settings.pop("prefix", "part")
    defaults = {
        "layers": LAYERS,
        "hidden_size": HIDDEN,
        "final_norm": "pre",
        "extras": EXTRAS,
        "chunk_tokens": 4,
        "shard_tokens": 8,
        "model": "tiny",
        "part_names": lambda: f"{prefix}-{next(names)}",
    }
    return DatasetWriter(path, **defaults | settings)


def build(path, n_parts=2, n_samples=3, first_seed=0, **settings):
    with open_writer(path, **settings) as writer:
        seed = first_seed
        for part in range(n_parts):
            for sample in range(n_samples):
                write_sample(writer, f"s{part}-{sample}", 3 + seed, seed)
                seed += 1
            writer.hole(f"hole-{part}", "the engine gave nothing")
            writer.commit()
    return Path(path)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    """Two parts of three samples, with extras of every kind and a hole each, sealed. Read only."""
    return build(tmp_path_factory.mktemp("verification") / "dataset")


@pytest.fixture
def dataset(pristine, tmp_path):
    """A copy to damage."""
    return shutil.copytree(pristine, tmp_path / "dataset")


@pytest.fixture(scope="session")
def build_dataset() -> Callable[..., Path]:
    """`build(path, n_parts, n_samples, first_seed, **settings of the writer)`."""
    return build


@pytest.fixture(scope="session")
def add_part():
    """Commit one more part of one sample."""

    def add(path, name="late", *, sample_id=None, seal=False, n_tokens=5, **settings):
        with open_writer(path, prefix=name, seal=seal, **settings) as writer:
            write_sample(writer, sample_id or f"{name}-0", n_tokens, 7)

    return add


@pytest.fixture
def files():
    """Return the paths of all files of a dataset, relative and sorted."""
    return lambda root: sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


@contextmanager
def kept(path: Path) -> Iterator[bytes]:
    """Put a file's bytes back at the end."""
    data = path.read_bytes()
    try:
        yield data
    finally:
        path.write_bytes(data)


@pytest.fixture(scope="session")
def keep():
    """Context manager that puts a file's bytes back."""
    return kept


class Forger:
    """Changes a part's contents and signs everything again, as a broken writer would."""

    def __init__(self, root: Path, part: str = "part-0") -> None:
        self.root = root
        self.part = part
        self.store = open_store(root)
        self.header = read_header(self.store)
        self.manifest = parse_manifest((root / manifest_path(part)).read_bytes(), part, "manifest")
        self.index: PartIndex = load_index(self.store, self.manifest)

    def shard(self, column: str, number: int = 0) -> str:
        return f"parts/{self.part}/{column}/{self.manifest.columns[column].shard_key(number)}"

    def set_file(self, path: str, data: bytes) -> None:
        (self.root / path).write_bytes(data)
        entries = (e if e.path != path else FileEntry(path, len(data), digest(data)) for e in self.manifest.files)
        self.manifest = replace(self.manifest, files=tuple(entries))

    def set_index(self, **tables) -> None:
        self.index = replace(self.index, **tables)

    def sign(self, *, reseal: bool = True) -> None:
        """Write index and manifest, and seal afresh."""
        self.set_file(index_path(self.part), self.index.to_bytes(self.part))
        self.manifest = replace(self.manifest, stored=None)
        (self.root / manifest_path(self.part)).write_bytes(self.manifest.to_bytes())
        if reseal:
            (self.root / "hsfmt/manifest.json").unlink(missing_ok=True)
            shutil.rmtree(self.root / "hsfmt/snapshots")
            seal(self.root)


@pytest.fixture(scope="session")
def forge():
    """`forge(root, part)` gives a forger."""
    return Forger


@pytest.fixture
def forger(dataset):
    """A forger at work on the copy's first part."""
    return Forger(dataset)
