"""Flip single bits in one sample stored in each format, read it back, and count how often nobody notices.

    python bench/bit_flips.py [--flips 2000]

A flip is silent when the reader returns other states than were written without raising, detected when it raises.
Flips that change nothing that is read (padding, unread metadata) count as neither.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import zarr
from synth import synth_hidden

from hsfmt import DatasetWriter, HiddenStateDataset
from hsfmt.zarr_dtypes import register

LAYERS, HIDDEN, TOKENS = 4, 512, 64
Read = Callable[[Path], torch.Tensor]


def write_pt(folder: Path, states: torch.Tensor) -> Read:
    torch.save({"hidden_states": states}, folder / "data_0.pt")
    return lambda at: torch.load(at / "data_0.pt", weights_only=True)["hidden_states"]


def write_safetensors(folder: Path, states: torch.Tensor) -> Read:
    safetensors.torch.save_file({"hidden_states": states}, folder / "hs_0.safetensors")
    return lambda at: safetensors.torch.load_file(at / "hs_0.safetensors")["hidden_states"]


def write_zarr(folder: Path, states: torch.Tensor) -> Read:
    bits = states.view(torch.uint16).numpy()
    zarr.create_array(folder / "a", shape=bits.shape, dtype=bits.dtype, chunks=(32, 1, HIDDEN), shards=bits.shape)[
        :
    ] = bits
    return lambda at: torch.from_numpy(np.asarray(zarr.open_array(at / "a", mode="r")[:])).view(torch.bfloat16)


def write_hsfmt(folder: Path, states: torch.Tensor) -> Read:
    with DatasetWriter(
        folder / "d", layers=range(LAYERS), hidden_size=HIDDEN, final_norm="pre", chunk_tokens=32
    ) as writer:
        writer.write("s", np.arange(TOKENS), states)
    return lambda at: HiddenStateDataset(at / "d")[0]["hidden_states"]


FORMATS = {
    ".pt (torch.load)": write_pt,
    "safetensors (load_file)": write_safetensors,
    f"Zarr sharded, defaults (zarr-python {zarr.__version__})": write_zarr,
    "hsfmt (HiddenStateDataset)": write_hsfmt,
}


def outcome(read: Read, folder: Path, states: torch.Tensor) -> str:
    """Read and compare: silent, detected or harmless."""
    try:
        got = read(folder)
    except Exception:  # noqa: BLE001  whatever a reader raises is a detection
        return "detected"
    same = (
        got.shape == states.shape
        and got.dtype == states.dtype
        and torch.equal(got.view(torch.int16), states.view(torch.int16))
    )
    return "harmless" if same else "silent"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=2000)
    flips = parser.parse_args().flips
    register()
    states = torch.from_numpy(synth_hidden(TOKENS, LAYERS, HIDDEN).view(np.int16)).view(torch.bfloat16)
    print(f"{'format':48} {'silent':>8} {'detected':>9} {'harmless':>9}   of {flips} flipped bits, all files, by size")
    for name, write in FORMATS.items():
        chosen = random.Random(0)
        counts = {"silent": 0, "detected": 0, "harmless": 0}
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            read = write(folder, states)
            files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
            contents = {path: path.read_bytes() for path in files}
            for _ in range(flips):
                path = chosen.choices(files, [len(contents[file]) for file in files])[0]
                damaged = bytearray(contents[path])
                damaged[chosen.randrange(len(damaged))] ^= 1 << chosen.randrange(8)
                path.write_bytes(damaged)
                counts[outcome(read, folder, states)] += 1
                path.write_bytes(contents[path])
        print(
            f"{name:48} "
            + " ".join(f"{count / flips:{width}.2%}" for count, width in zip(counts.values(), (8, 9, 9), strict=True))
        )


if __name__ == "__main__":
    main()
