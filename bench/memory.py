"""Open a snapshot of a million samples, run it through workers for three epochs, and print time and memory.

    python bench/memory.py [--samples 1000000] [--workers 8] [--epochs 3] [--methods fork spawn] [--json FILE]

The samples are tiny (one token each): what is measured is what the number of samples costs, not their tensors. In each
epoch every number of a permutation goes to a worker, which adds up the lengths and reads 16 samples of each thousand.
Memory is that of /proc/<pid>/smaps_rollup: RSS counts pages that processes share in each of them, PSS divides them, and
private ones are those of one process alone.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt import DatasetWriter, HiddenStateDataset, digests, layout, seal
from hsfmt.catalog import committed_parts, load_index, load_manifest, read_header
from hsfmt.storage import open_store
from hsfmt.storage.local import LocalStore
from hsfmt.tables import pack_strings

BATCH, READ_PER_BATCH = 1000, 16


def make(folder: Path, n_samples: int, n_parts: int = 20) -> None:
    """Write a sealed dataset of samples of one token: one part by the writer, linked under other names and ids."""
    rows = -(-n_samples // n_parts)
    with DatasetWriter(folder, layers=[1], hidden_size=8, final_norm="pre", codec="none") as writer:
        writer.write("template", np.arange(rows), np.zeros((rows, 1, 8), np.uint16).view(_bfloat16()))
    store = open_store(folder)
    (template,) = committed_parts(store)
    manifest = load_manifest(store, template, read_header(store))
    index = load_index(store, manifest)
    for number in range(n_parts):
        part = f"{template[:-4]}{number:04x}"
        n = min(rows, n_samples - number * rows)
        ids, id_offsets = pack_strings([f"conversation-{number * rows + row:08}".encode() for row in range(n)])
        sources = np.arange(number * rows, number * rows + n)
        data = replace(
            index, ids=ids, id_offsets=id_offsets, source_index=sources,
            token_offsets=np.append(np.arange(n), rows), n_supervised=np.append(np.ones(n - 1, int), rows - n + 1),
            loss_mask_given=np.zeros(n, np.uint8), meta=np.frombuffer(b"{}" * n, np.uint8),
            meta_offsets=np.arange(n + 1) * 2, content_digest=np.zeros((n, 16), np.uint8),
            extra_digest=np.zeros((n, 16), np.uint8),
        ).to_bytes(part)  # fmt: skip
        shutil.copytree(folder / "parts" / template, folder / "parts" / part, copy_function=os.link)
        files = [replace(entry, path=entry.path.replace(template, part)) for entry in manifest.files]
        at = next(i for i, entry in enumerate(files) if entry.path == layout.index_path(part))
        files[at] = replace(files[at], nbytes=len(data), digest=digests.digest(data))
        copy = replace(manifest, part=part, files=tuple(files), counts=replace(manifest.counts, samples=n), stored=None)
        store.write(layout.index_path(part), data)
        store.write(layout.manifest_path(part), copy.to_bytes())
    if f"{template[:-4]}{0:04x}" != template:
        shutil.rmtree(folder / "parts" / template)
        (folder / layout.manifest_path(template)).unlink()
        (folder / layout.index_path(template)).unlink()
    (folder / layout.POINTER).unlink()
    shutil.rmtree(folder / "hsfmt" / "snapshots")
    seal(folder)


def _bfloat16() -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16


def memory(pid: int | str = "self") -> dict[str, int]:
    """Return RSS, PSS and private bytes of a process."""
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value, _ = line.split()
        fields[name[:-1]] = int(value) << 10
    private = fields["Private_Clean"] + fields["Private_Dirty"]
    return {"rss": fields["Rss"], "pss": fields["Pss"], "private": private}


class CountingStore(LocalStore):
    """Counts the files read."""

    n_read = 0

    def read(self, path: str, max_nbytes: int) -> bytes:
        """Read a whole file."""
        self.n_read += 1
        return super().read(path, max_nbytes)


def opening(url: str) -> dict[str, Any]:
    """Measure what a reader of numbers and ids pays."""
    store = CountingStore(url)
    HiddenStateDataset.__getitem__  # noqa: B018  loads the module
    rows: dict[str, Any] = {}
    before, start = memory()["rss"], time.perf_counter()

    def note(name: str) -> None:
        nonlocal start
        rows[name] = {"seconds": time.perf_counter() - start, "rss": memory()["rss"] - before, "files": store.n_read}
        start = time.perf_counter()

    dataset = HiddenStateDataset(store)
    note("open")
    n = len(dataset.lengths)
    note("lengths")
    rows["pickled"] = len(pickle.dumps(dataset))
    start = time.perf_counter()
    dataset.index_of(dataset.sample_ids[n // 2])
    note("index_of")
    start = time.perf_counter()
    rows["pickled_live"] = len(pickle.dumps(HiddenStateDataset(url, snapshot="live")))
    rows["seconds_live"] = time.perf_counter() - start
    return rows


class Traffic:
    """Numbers go to the workers and sums of lengths come back."""

    def __init__(self, dataset: HiddenStateDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, numbers: npt.NDArray[np.int64]) -> int:
        """Read some of the samples."""
        items = self.dataset.__getitems__([int(number) for number in numbers[:READ_PER_BATCH]])
        return int(self.dataset.lengths[numbers].sum()) + 0 * len(items)


class Order:
    """A permutation in batches, as arrays."""

    def __init__(self, n: int) -> None:
        self.n, self.epoch = n, 0

    def __len__(self) -> int:
        return (self.n + BATCH - 1) // BATCH

    def __iter__(self) -> Any:
        self.epoch += 1
        order = np.random.default_rng(self.epoch).permutation(self.n)
        return iter(np.array_split(order, len(self)))


def as_is(batch: Any) -> Any:
    """Keep a batch as it is."""
    return batch


def epochs(url: str, method: str, n_workers: int, n_epochs: int) -> list[dict[str, Any]]:
    """Return memory of parent and workers after each epoch."""
    from torch.utils.data import DataLoader

    warnings.filterwarnings("ignore", "This DataLoader will create")  # there may be fewer cores than workers
    dataset = HiddenStateDataset(url)
    total = int(dataset.lengths.sum())
    loader = DataLoader(
        Traffic(dataset),  # type: ignore[arg-type]
        batch_sampler=Order(len(dataset)), num_workers=n_workers, collate_fn=as_is, persistent_workers=True,
        multiprocessing_context=method, timeout=300,
    )  # fmt: skip
    rows = []
    for epoch in range(1, n_epochs + 1):
        start = time.perf_counter()
        if sum(loader) != total:
            raise SystemExit("an epoch is not all of the samples")
        workers = [memory(worker.pid) for worker in loader._iterator._workers]  # type: ignore[union-attr]  # noqa: SLF001
        rows.append({
            "method": method, "epoch": epoch, "seconds": time.perf_counter() - start, "parent": memory(),
            **{f"workers_{key}": sum(worker[key] for worker in workers) for key in ("rss", "pss", "private")},
        })  # fmt: skip
    return rows


def in_a_fresh_process(*argv: str) -> Any:
    """Run a part of this script, so that nothing of another one is in its memory."""
    done = subprocess.run([sys.executable, __file__, *argv], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=["fork", "spawn"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--make", type=Path, help="only write the dataset, into this folder")
    parser.add_argument("--opening", help=argparse.SUPPRESS)
    parser.add_argument("--loading", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        make(args.make, args.samples)
        return
    if args.opening:
        print(json.dumps(opening(args.opening)))
        return
    if args.loading:
        print(json.dumps(epochs(*args.loading, args.workers, args.epochs)))
        return
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        url = str(Path(folder) / "dataset")
        make(Path(url), args.samples)
        made = time.perf_counter() - start
        found = {"samples": args.samples, "seconds_to_make": made, "opening": in_a_fresh_process("--opening", url)}
        workers = "--workers", str(args.workers), "--epochs", str(args.epochs)
        found["epochs"] = [row for way in args.methods for row in in_a_fresh_process("--loading", url, way, *workers)]
    show(found, args.workers)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def show(found: dict[str, Any], n_workers: int) -> None:
    """Print the tables."""
    mib = 1 << 20
    opened = found["opening"]
    print(f"{found['samples']:,} samples, made in {found['seconds_to_make']:.0f} s\n")
    print("| step | files read so far | seconds | RSS growth so far, MiB |\n|---|---:|---:|---:|")
    for step in ("open", "lengths", "index_of"):
        row = opened[step]
        print(f"| {step} | {row['files']} | {row['seconds']:.3f} | {row['rss'] / mib:.0f} |")
    live = opened["pickled_live"] / mib
    print(f'\nPickled: {opened["pickled"]:,} bytes; snapshot="live": {live:.0f} MiB, {opened["seconds_live"]:.1f} s\n')
    print(f"| start | epoch | seconds | parent RSS | PSS | {n_workers} workers RSS | PSS | private (MiB) |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in found["epochs"]:
        keys = [row["parent"]["rss"], row["parent"]["pss"], *(row[f"workers_{k}"] for k in ("rss", "pss", "private"))]
        figures = " | ".join(f"{value / mib:.0f}" for value in keys)
        print(f"| {row['method']} | {row['epoch']} | {row['seconds']:.1f} | {figures} |")


if __name__ == "__main__":
    main()
