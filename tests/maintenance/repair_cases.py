"""A small dataset with everything in it, what it holds, and ways to damage it."""

import itertools
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hsfmt import DatasetWriter, canonical, digests
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.writers.extras import Extra

LAYERS, HIDDEN = (1, 3), 8
EXTRAS = {
    "weight": Extra("token", "float32"),
    "score": Extra("sample", "float64"),
    "topk": Extra("ragged", "int32", (2,)),
    "flag": Extra("sample", "bool"),
}


def open_writer(path, prefix="part", **settings):
    names = itertools.count()
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


def write_sample(writer, name, n_tokens, seed, *, plain=False):
    """Write a sample; some have no mask, score or topk, plain ones no extras at all."""
    rng = np.random.default_rng(seed)
    extras = {
        "weight": np.linspace(0, 1, n_tokens, dtype=np.float32),
        "score": None if seed % 3 == 2 else seed / 3,
        "topk": None if seed % 2 else np.full((seed + 1, 2), seed, np.int32),
        "flag": bool(seed % 2),
    }
    writer.write(
        name,
        np.arange(n_tokens) + seed,
        rng.integers(1, 0x7000, (n_tokens, len(LAYERS), HIDDEN)).astype(np.uint16),
        None if seed % 4 == 3 else np.arange(n_tokens) % 2,
        {"seed": seed, "half": 0.5},
        **({} if plain else extras),
    )


def build(path, n_parts=2, n_samples=3, first_seed=0, seal=True, **settings):
    with open_writer(path, seal=seal, **settings) as writer:
        seed = first_seed
        for part in range(n_parts):
            for sample in range(n_samples):
                write_sample(writer, f"s{part}-{sample}", 3 + seed % 7, seed, plain=settings.get("extras") == {})
                seed += 1
            writer.hole(f"hole-{part}", "the engine gave nothing")
            writer.commit()
    return Path(path)


def contents(root, snapshot=None):
    """Return id to everything that a reader gives of the sample, as bytes."""
    reader = SampleReader(root, snapshot=snapshot)
    found = {}
    for number in range(len(reader)):
        sample = reader.read(number)
        part, row = reader.locate(number)
        found[sample.sample_id] = (
            sample.input_ids.tobytes(),
            sample.loss_mask.tobytes(),
            sample.hidden_states.tobytes(),
            tuple((k, None if v is None else (v.dtype.str, v.shape, v.tobytes())) for k, v in sample.extras.items()),
            sample.meta,
            int(part.index.source_index[row]),
            int(part.index.loss_mask_given[row]),
            part.index.content_digest[row].tobytes(),
            part.index.extra_digest[row].tobytes(),
        )
    reader.close()
    return found


def flip(path):
    flip_at(path, path.stat().st_size // 2)


def flip_at(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


DAMAGES = {"flip": flip, "truncate": truncate, "delete": Path.unlink, "empty": empty}


def files_of(root):
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def tree(root):
    return {name: (root / name).read_bytes() for name in files_of(root)}


@contextmanager
def without_fsync():
    """Spare the disk: these tests cut no power."""
    real = os.fsync
    os.fsync = lambda fd: None
    try:
        yield
    finally:
        os.fsync = real


def unsealed(root, work):
    """Do it, and take the seal at its end back, as if it had been stopped just before."""
    pointer, folder = (root / "hsfmt/manifest.json").read_bytes(), root / "hsfmt/snapshots"
    snapshots = set(folder.iterdir())
    done = work(root)
    (root / "hsfmt/manifest.json").write_bytes(pointer)
    for made in set(folder.iterdir()) - snapshots:
        shutil.rmtree(made)
    return done


def join(root, other):
    """Put the parts of another dataset of the same header into this one, as a merge does."""
    for folder in ("parts", "hsfmt/index", "hsfmt/manifests"):
        shutil.copytree(other / folder, root / folder, dirs_exist_ok=True)


def edit_manifest(root, part, **members):
    """Write a manifest with other members and a right digest."""
    path = root / f"hsfmt/manifests/{part}.json"
    document = canonical.loads(path.read_bytes(), part) | members
    del document["digest"]
    document["digest"] = digests.digest(canonical.dumps(document))
    path.write_bytes(canonical.dumps(document))
    return document["digest"]
