"""Every way out of a dataset: functions that read it by one path and return what they saw, to be compared by `==`."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from click.testing import CliRunner

from hsfmt import DatasetWriter, HiddenStateDataset, open_zarr, seal
from hsfmt.catalog import read_header
from hsfmt.cli.main import main
from hsfmt.idset import CommittedIds
from hsfmt.readers.packing import PackingCollator
from hsfmt.readers.sample_reader import ReadOptions, SampleReader
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store
from hsfmt.writers.extras import Extra

LAYERS, HIDDEN = (1, 3), 4
WRITTEN = ("a0", "a1", "b0", "b1")
EXTRAS = {"ragged": Extra("ragged", "int32"), "sample": Extra("sample", "float64"), "token": Extra("token", "float32")}
SETTINGS = {
    "layers": LAYERS,
    "hidden_size": HIDDEN,
    "final_norm": "pre",
    "extras": EXTRAS,
    "chunk_tokens": 2,
    "shard_tokens": 4,
    "model": "tiny",
    "threads": 1,
}
# One thread: what many do at a time is the matter of tests/readers.
OPTIONS = ReadOptions(n_threads=1)


class CommandFailedError(Exception):
    """A command of ours ended with one of its codes for errors; the text is all that it printed."""


@dataclass(frozen=True)
class Place:
    """A dataset under damage.

    Attributes
    ----------
    root, url
        Where it lies, and its copy in memory.
    old
        Fingerprint of the snapshot before the current one.
    warm
        A reader that read everything before the damage.
    scratch
        Folder for what a path writes.
    """

    root: Path
    url: str
    old: str
    warm: SampleReader
    scratch: Path


@dataclass(frozen=True)
class ReadPath:
    """A way out of the dataset; `writes` says that it may change the dataset, which is put right afterwards."""

    name: str
    read: Callable[[Place], Any]
    writes: bool = False
    remote: bool = False
    opens: bool = True


def plain(value: Any) -> Any:
    """Return a value as tuples and bytes, so that bit patterns are compared."""
    if isinstance(value, torch.Tensor):
        value = value.contiguous()
        return str(value.dtype), tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return tuple((key, plain(value[key])) for key in sorted(value))
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    return value


def everything(reader: SampleReader) -> Any:
    """Return all that a reader knows of all samples."""
    samples = reader.read_many(range(len(reader)))
    fields = ("sample_id", "input_ids", "loss_mask", "hidden_states", "extras", "metadata")
    return [[getattr(sample, field) for field in fields] for sample in samples], list(reader.sample_ids)


def _dataset(place: Place, use: Callable[[HiddenStateDataset], Any], **options: Any) -> Any:
    dataset = HiddenStateDataset(place.root, n_threads=1, **options)
    try:
        return use(dataset)
    finally:
        dataset.close()


def _reader(where: Any, use: Callable[[SampleReader], Any], snapshot: str | None = None) -> Any:
    reader = SampleReader(where, snapshot=snapshot, options=OPTIONS)
    try:
        return use(reader)
    finally:
        reader.close()


def _items(dataset: HiddenStateDataset) -> Any:
    return [dataset[index] for index in range(len(dataset))]


def _batch(dataset: HiddenStateDataset) -> Any:
    return dataset.__getitems__(range(len(dataset)))


def _windows(dataset: HiddenStateDataset) -> Any:
    return [dataset.read(index, 1, 2) for index in range(len(dataset))]


def _packed(dataset: HiddenStateDataset) -> Any:
    return [PackingCollator(dataset, None, view=view)(range(len(dataset))) for view in ("raw", "eagle3", "dflash")]


def _ids(reader: SampleReader) -> Any:
    return [(sample_id, reader.index_of(sample_id)) for sample_id in reader.sample_ids]


def _opened(reader: SampleReader) -> Any:
    return reader.header.to_json(), reader.fingerprint, reader.content_digest, reader.lengths


def _warm(place: Place) -> Any:
    """Parts, narrow chunks and ids come from memory, states from files."""
    return everything(place.warm)


def _zarr(place: Place) -> Any:
    arrays = open_zarr(place.root)
    names = ("hidden_states", "input_ids", "loss_mask", *EXTRAS)
    return arrays.token_starts, [getattr(arrays, name)[:] for name in names]


def _seal(place: Place) -> Any:
    snapshot = seal(place.root).snapshot
    return snapshot.fingerprint, snapshot.content_digest, _reader(place.root, everything)


def _committed(place: Place) -> Any:
    store = open_store(place.root)
    ids = CommittedIds(store, read_header(store))
    ids.refresh()
    return len(ids), sorted(ids), ids.next_source_index


def _resumed(place: Place) -> Any:
    """Write what is there already: a resuming producer must find that it is."""
    writer = DatasetWriter(place.root, on_duplicate="skip", seal=False, **SETTINGS)
    try:
        return [write_sample(writer, name, seed) for seed, name in enumerate(WRITTEN)]
    finally:
        writer.abort()


def write_sample(writer: DatasetWriter, name: str, seed: int) -> bool:
    """Write sample number `seed` of the dataset; whether it was new."""
    rng = np.random.default_rng(seed)
    n = 3 + seed % 2
    return writer.write(
        name,
        np.arange(n) + 1000 * seed,
        rng.integers(1, 0x7000, (n, len(LAYERS), HIDDEN)).astype(np.uint16),
        None if seed == 1 else np.arange(n) % 2,
        {"seed": seed},
        ragged=None if seed == 1 else np.arange(seed + 1, dtype=np.int32),
        sample=None if seed == 2 else seed / 3,
        token=rng.random(n, dtype=np.float32),
    )


def command(*words: object) -> str:
    """Return what a command prints; it runs in this process."""
    result = CliRunner().invoke(main, list(map(str, words)), prog_name="hsfmt")
    if result.exit_code in (1, 2, 3):
        raise CommandFailedError(result.output)
    assert result.exit_code == 0, f"exit code {result.exit_code}: {result.output}"
    return result.output


def _cat(place: Place) -> Any:
    target = place.scratch / "sample.npz"
    shown = [command("cat", place.root, "--index", index, "--json") for index in range(3)]
    command("cat", place.root, "a1", "-o", target, "--force")
    with np.load(target) as arrays:
        return shown, {name: arrays[name] for name in arrays.files}


def _ls(place: Place) -> Any:
    return command("ls", place.root, "-l", "--json"), command("ls", place.root), command("ls", place.root, "--holes")


def _info(place: Place) -> Any:
    facts = json.loads(command("info", place.root, "--json"))
    return facts, command("info", place.root)


def _export(place: Place) -> Any:
    target = place.scratch / "exported"
    try:
        command("export", place.root, target, "--to", "npz", "--quiet", "--json")
        return {path.name: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    finally:
        shutil.rmtree(target, ignore_errors=True)
        for journal in place.scratch.glob("exported.hsfmt-export*"):
            journal.unlink()


def _converted(place: Place) -> Any:
    """Convert one more sample into the dataset, seal and read: what was there before has to be there still."""
    source = place.scratch / "source"
    if not source.exists():
        source.mkdir()
        rng = np.random.default_rng(7)
        states = rng.integers(1, 0x3F80, (3, len(LAYERS), HIDDEN)).astype(np.uint16)
        tensors = {"hidden_states": torch.from_numpy(states).view(torch.bfloat16), "input_ids": torch.arange(3)}
        torch.save(tensors, source / "c0.pt")
    about = ["--layer-ids", "1,3", "--final-norm", "pre", "--model", SETTINGS["model"]]
    command("convert", source, place.root, "--from", "pt", *about, "--quiet")
    return _reader(place.root, everything)


def verified(level: str) -> Callable[[Place], Any]:
    """Return a path whose result is the findings."""
    return lambda place: verify(place.root, level=level).problems


def _remote(place: Place) -> Any:
    def use(reader: SampleReader) -> Any:
        return everything(reader), _ids(reader), reader.attachments()

    return _reader(place.url, use)


def _remote_verified(place: Place) -> Any:
    return verify(place.url, level="full").problems


EXTRA_NAMES = tuple(EXTRAS)
PATHS = [
    ReadPath("item", lambda p: _dataset(p, _items)),
    ReadPath("batch", lambda p: _dataset(p, _batch, extras=EXTRA_NAMES)),
    ReadPath("packed batch", lambda p: _dataset(p, _packed)),
    ReadPath("token window", lambda p: _dataset(p, _windows, extras=EXTRA_NAMES)),
    ReadPath("layer subset", lambda p: _dataset(p, _batch, layers=[3])),
    ReadPath("speculators view", lambda p: _dataset(p, _batch, view="speculators")),
    ReadPath("ids", lambda p: _reader(p.root, _ids)),
    ReadPath("extras and metadata", lambda p: _reader(p.root, everything)),
    ReadPath("opening", lambda p: _reader(p.root, _opened)),
    ReadPath("old snapshot", lambda p: _reader(p.root, everything, p.old)),
    ReadPath("live snapshot", lambda p: _reader(p.root, everything, "live")),
    ReadPath("attachments", lambda p: _reader(p.root, lambda reader: reader.attachments())),
    ReadPath("warm caches", _warm, opens=False),
    ReadPath("open_zarr", _zarr),
    ReadPath("remote", _remote, remote=True),
    ReadPath("cat", _cat),
    ReadPath("ls", _ls),
    ReadPath("info", _info),
    ReadPath("export", _export),
    ReadPath("committed ids", _committed),
    ReadPath("resuming writer", _resumed, writes=True),
    ReadPath("seal", _seal, writes=True),
    ReadPath("convert", _converted, writes=True),
    ReadPath("verify quick", verified("quick")),
    ReadPath("verify complete", verified("complete")),
    ReadPath("verify full", verified("full")),
    ReadPath("verify full, remote", _remote_verified, remote=True),
]
