"""Read the same samples through hsfmt and through what people would use instead, in one run, and print the ratios.

    python bench/read_peers.py [--samples 8] [--tokens 1024] [--rounds 5] [--folder DIR] [--json FILE]

Data: synthetic bf16 states with the compression statistics of real ones (bench/synth.py), hidden size 7168, 4 layers.
Every reader delivers whole samples [token, layer, hidden] bf16, in the same shuffled order; rounds are interleaved, the
page cache is warm, figures are medians. A memory map delivers nothing until it is copied out, so safetensors is
measured with that copy. "checks" says whether the reader compares every byte with a digest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import tensorstore as ts
import torch
import zarr
from synth import synth_hidden

import hsfmt
from hsfmt import DatasetWriter, HiddenStateDataset
from hsfmt.zarr_dtypes import register

LAYERS, HIDDEN = 4, 7168


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to read: name, whether bytes are compared with digests, and a function from sample number to tensor."""

    name: str
    checks: str
    read: Callable[[int], Any]


def make_files(folder: Path, samples: list[torch.Tensor]) -> None:
    """Write the samples in every peer's format."""
    for i, states in enumerate(samples):
        ids = torch.arange(len(states))
        (folder / f"{i}.bin").write_bytes(states.view(torch.uint8).numpy().tobytes())
        safetensors.torch.save_file({"hidden_states": states, "token_ids": ids}, folder / f"{i}.safetensors")
        torch.save({"hidden_states": states, "input_ids": ids}, folder / f"{i}.pt")
    for codec in ("none", "zstd"):
        url = folder / codec
        with DatasetWriter(url, layers=range(LAYERS), hidden_size=HIDDEN, final_norm="pre", codec=codec) as writer:
            for i, states in enumerate(samples):
                writer.write(f"s{i}", np.arange(len(states)), states)


def make_plain_zarr(folder: Path, samples: list[torch.Tensor]) -> None:
    """Write one array with zarr-python's own defaults, of uint16 since it has no bfloat16."""
    bits = np.concatenate([states.view(torch.uint16).numpy() for states in samples])
    chunks, shards = (256, 1, HIDDEN), (-(-len(bits) // 256) * 256, LAYERS, HIDDEN)
    zarr.create_array(folder / "plain", shape=bits.shape, dtype=bits.dtype, chunks=chunks, shards=shards)[:] = bits


def stored_nbytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def raw_into(path: Path, buffer: torch.Tensor) -> torch.Tensor:
    """Read a whole file into a buffer with preadv: the limit of this machine."""
    view = memoryview(buffer.view(torch.uint8).numpy()).cast("B")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < len(view):
            done += os.preadv(descriptor, [view[done:]], done)
    finally:
        os.close(descriptor)
    return buffer


def array_folder(url: Path) -> Path:
    """Return the folder of the states' array in a dataset of one part."""
    (part,) = [entry for entry in (url / "parts").iterdir() if entry.is_dir()]
    return part / "hidden_states"


def make_peers(folder: Path, lengths: list[int]) -> list[Peer]:
    """Return every reader, hsfmt's first."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    spans = [slice(int(a), int(b)) for a, b in pairwise(starts)]
    reused = [torch.empty(n, LAYERS, HIDDEN, dtype=torch.bfloat16) for n in lengths]
    for buffer in reused:
        buffer.zero_()
    peers = []
    for codec in ("none", "zstd"):
        checked = HiddenStateDataset(folder / codec)
        unsafe = HiddenStateDataset(folder / codec, unsafe_skip_checks=True)
        peers += [
            Peer(f"hsfmt {codec}, fresh tensor", "every byte", lambda i, ds=checked: ds[i]["hidden_states"]),
            Peer(f"hsfmt {codec}, reused buffer", "every byte", lambda i, ds=checked: ds.read(i, out=reused[i])),
            Peer(f"hsfmt {codec}, reused, checks off", "no", lambda i, ds=unsafe: ds.read(i, out=reused[i])),
        ]
    peers += [
        Peer("raw preadv, reused buffer", "no", lambda i: raw_into(folder / f"{i}.bin", reused[i])),
        Peer("raw preadv, fresh tensor", "no", lambda i: raw_into(folder / f"{i}.bin", torch.empty_like(reused[i]))),
        Peer(
            "safetensors load_file, copied out",
            "no",
            lambda i: safetensors.torch.load_file(folder / f"{i}.safetensors")["hidden_states"].clone(),
        ),
        Peer("torch.load", "no", lambda i: torch.load(folder / f"{i}.pt", weights_only=True)["hidden_states"]),
    ]
    plain = zarr.open_array(folder / "plain", mode="r")
    peers.append(Peer("zarr-python, an array of its defaults", "no", lambda i: plain[spans[i]]))
    for codec in ("none", "zstd"):
        array = zarr.open_array(array_folder(folder / codec), mode="r")
        store = ts.open({"driver": "zarr3", "kvstore": f"file://{array_folder(folder / codec)}/"}, open=True).result()
        peers += [
            Peer(f"zarr-python {zarr.__version__}, same {codec} array", "crc32c", lambda i, a=array: a[spans[i]]),
            Peer(f"tensorstore, same {codec} array", "crc32c", lambda i, a=store: a[spans[i]].read().result()),
        ]
    return peers


def as_bits(value: Any) -> np.ndarray:
    """Return the bf16 patterns of whatever a peer delivers."""
    tensor = value["hidden_states"] if isinstance(value, dict) else value
    if isinstance(tensor, torch.Tensor):
        return tensor.view(torch.int16).numpy()
    return np.asarray(tensor).view(np.int16)


def measure(peers: list[Peer], samples: list[torch.Tensor], rounds: int) -> dict[str, float]:
    """Return name to median GB/s of raw states delivered; each peer's output is compared with the source once."""
    order = list(range(len(samples)))
    for peer in peers:
        for i in order:
            if not np.array_equal(as_bits(peer.read(i)), as_bits(samples[i])):
                sys.exit(f"{peer.name}: sample {i} differs from what was written")
    total = sum(states.nbytes for states in samples)
    seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for peer in random.Random(number).sample(peers, len(peers)):
            start = time.perf_counter()
            for i in order:
                peer.read(i)
            seconds[peer.name].append(time.perf_counter() - start)
    return {name: total / statistics.median(times) / 1e9 for name, times in seconds.items()}


def print_table(peers: list[Peer], speeds: dict[str, float]) -> None:
    """Print GB/s and ratios to the limit and to the peers that people use."""
    limit, fresh = speeds["raw preadv, reused buffer"], speeds["raw preadv, fresh tensor"]
    print(f"{'reader':44} {'checks':>10} {'GB/s':>7} {'of limit':>9} {'of fresh pread':>15}")
    for peer in sorted(peers, key=lambda peer: -speeds[peer.name]):
        speed = speeds[peer.name]
        print(f"{peer.name:44} {peer.checks:>10} {speed:7.2f} {speed / limit:9.2f} {speed / fresh:15.2f}")


def main() -> None:
    """Make the data, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    register()
    torch.set_num_threads(1)
    chosen = random.Random(0)
    lengths = [max(1, int(options.tokens * chosen.uniform(0.5, 1.5))) for _ in range(options.samples)]
    states = torch.from_numpy(synth_hidden(sum(lengths), LAYERS, HIDDEN).view(np.int16)).view(torch.bfloat16)
    samples = [part.clone() for part in states.split(lengths)]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        make_files(folder, samples)
        make_plain_zarr(folder, samples)
        stored = {name: stored_nbytes(folder / name) for name in ("none", "zstd", "plain")}
        peers = make_peers(folder, lengths)
        speeds = measure(peers, samples, options.rounds)
    raw = sum(part.nbytes for part in samples)
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, hsfmt {hsfmt.__version__}"
    )
    print(
        f"{options.samples} samples, {sum(lengths)} tokens, {raw / 1e9:.2f} GB raw; {options.rounds} rounds; {machine}"
    )
    names = {"none": "hsfmt none", "zstd": "hsfmt zstd", "plain": "Zarr defaults"}
    print("raw to stored bytes: " + ", ".join(f"{names[name]} {raw / size:.3f}" for name, size in stored.items()))
    print_table(peers, speeds)
    if options.json:
        options.json.write_text(
            json.dumps({"speeds": speeds, "raw_nbytes": raw, "stored": stored, "machine": machine}, indent=1)
        )


if __name__ == "__main__":
    main()
