"""Feed a device with packed batches in every way that a trainer might, in one run, and print what arrives.

    python bench/feed.py [--gb 3] [--hidden 7168] [--tokens 4096] [--budget 330] [--folder DIR] [--json FILE]

Data: synthetic bf16 states with the compression statistics of real ones (bench/synth.py), 4 layers. All loaders deliver
the same packed batches in the same shuffled order to the GPU, or where there is none to ordinary memory, on little data
unless told otherwise; the first batch of each is compared with that of the plainest one. Limits are measured in the
same run. What does not fit into the budget of seconds is left out and said so.

"first batch" counts from the making of the loader, worker processes included. Warm rates count from the fourth batch
on, cold ones everything in one epoch. "stall" is the part of the time in which a step of the given length was not
computing. hsfmt compares every byte with a digest, torch.load and safetensors none.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from feed_data import CODECS, LAYERS, Files, Pack, fingerprint, make_files
from machine import describe
from measure import drop_from_cache
from torch.utils.data import DataLoader

from hsfmt import HiddenStateDataset
from hsfmt.readers.device import DevicePrefetcher
from hsfmt.readers.order import BatchOrder
from hsfmt.readers.packing import PackingCollator
from hsfmt.readers.prefetch import Prefetcher

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
N_WARM_UP = 3
N_BATCHES = 1000


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to feed. `readers` are worker processes of a DataLoader, threads of a Prefetcher."""

    loader: str
    codec: str
    readers: int
    pinned: bool
    cold: bool = False
    step_ms: float = 0.0


@dataclass(slots=True)
class Result:
    """What one pass delivered; `problem` says why not."""

    setting: Setting
    tokens_per_s: float = 0.0
    gb_per_s: float = 0.0
    first_batch_s: float = 0.0
    stall: float = 0.0
    n_batches: int = 0
    problem: str = ""


@dataclass(slots=True)
class Bench:
    """What all passes share."""

    folder: Path
    n_tokens: int
    hidden: int
    seconds: float
    deadline: float
    n_samples: int = 0
    epoch: list[list[int]] = field(default_factory=list)
    order: list[list[int]] = field(default_factory=list)
    lengths: Any = None
    expected: list[int] = field(default_factory=list)
    in_cache: set[str] = field(default_factory=set)

    def plan(self) -> None:
        """Draw the batches."""
        dataset = HiddenStateDataset(self.folder / "none")
        self.lengths = dataset.lengths
        order = BatchOrder(dataset, n_tokens=self.n_tokens, shift=1)
        while len(self.order) < N_BATCHES:
            self.order += list(order)
            self.epoch = self.epoch or list(self.order)
        files = Files(self.folder, "pt", self.n_samples)
        self.expected = fingerprint(Pack(self.n_tokens)([files[index] for index in self.epoch[0]]))

    def cache(self, setting: Setting) -> None:
        """Bring the page cache into the state that a setting asks for."""
        if setting.cold:
            drop_from_cache(self.folder)
            self.in_cache.clear()
        elif setting.codec not in self.in_cache:
            wanted = f"{setting.codec}/**/*" if setting.codec in CODECS else f"*.{setting.codec}"
            buffer = np.empty(4 << 20, np.uint8)
            for path in self.folder.glob(wanted):
                if path.is_file():
                    with path.open("rb", buffering=0) as file:
                        while file.readinto(buffer):
                            pass
            self.in_cache.add(setting.codec)

    def loader(self, setting: Setting) -> Any:
        """Return the loader of a setting."""
        order = self.epoch if setting.cold else self.order
        workers: dict[str, Any] = {"num_workers": setting.readers, "pin_memory": setting.pinned}
        if setting.codec in ("pt", "safetensors"):
            files = Files(self.folder, setting.codec, self.n_samples)
            return DataLoader(files, batch_sampler=order, collate_fn=Pack(self.n_tokens), **workers)
        threads = setting.readers if setting.loader.startswith("Prefetcher") else None
        dataset = HiddenStateDataset(self.folder / setting.codec, n_threads=threads)
        collator = PackingCollator(dataset, self.n_tokens, view="eagle3")
        if threads is not None:
            n_readers = 2 if setting.loader.endswith("two batches") else 1
            return Prefetcher(collator, order, device=DEVICE, pin_memory=setting.pinned, n_readers=n_readers)
        loader = DataLoader(range(len(dataset)), batch_sampler=order, collate_fn=collator, **workers)  # type: ignore[arg-type,var-annotated]
        return DevicePrefetcher(loader, DEVICE) if "DevicePrefetcher" in setting.loader else loader

    def rate(self, result: Result, n_tokens: int, seconds: float) -> None:
        """Note what was delivered."""
        result.tokens_per_s = n_tokens / seconds
        result.gb_per_s = n_tokens * LAYERS * self.hidden * 2 / seconds / 1e9


class Step:
    """Something for the device to do, as long as asked for; on the CPU the waiting of a host that has a device.

    Parameters
    ----------
    milliseconds
        How long.
    """

    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = milliseconds
        self._n = 1
        if CUDA and milliseconds:
            self._matrix = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
            self._timed(3)
            self._n = max(1, round(milliseconds / (self._timed(20) / 20)))
            self.milliseconds = self._timed(self._n)

    def run(self) -> None:
        """Compute, and wait for it as a loop does that looks at its loss."""
        if CUDA:
            self._timed(self._n)
        else:
            time.sleep(self.milliseconds / 1e3)

    def _timed(self, n: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(n):
            torch.mm(self._matrix, self._matrix)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def on_device(batch: Any) -> Any:
    """Move a batch as training loops do; what is there already stays."""
    return {
        key: value.to(DEVICE, non_blocking=True) if torch.is_tensor(value) else value for key, value in batch.items()
    }


def finish() -> None:
    """Wait for the device."""
    if CUDA:
        torch.cuda.synchronize()


def feed(bench: Bench, setting: Setting) -> Result:
    """Run one pass."""
    bench.cache(setting)
    step = Step(setting.step_ms) if setting.step_ms else None
    began = time.perf_counter()
    loader = bench.loader(setting)
    iterator = iter(loader)
    try:
        return one_pass(bench, setting, iterator, step, began)
    finally:
        close(iterator, loader)


def one_pass(bench: Bench, setting: Setting, iterator: Iterator[Any], step: Step | None, began: float) -> Result:
    """Take batches and count."""
    result = Result(setting)
    n_skipped = 0 if setting.cold else N_WARM_UP
    n_tokens, start = 0, began
    for number, indices in enumerate(bench.epoch if setting.cold else bench.order):
        batch = on_device(next(iterator))
        if number == 0:
            finish()
            result.first_batch_s = time.perf_counter() - began
            if not setting.cold and fingerprint(batch) != bench.expected:
                result.problem = "the first batch differs from what was written"
                return result
        if step is not None:
            step.run()
        if number >= n_skipped:
            n_tokens += sum(int(bench.lengths[index]) - 1 for index in indices)
            result.n_batches += 1
        elif number + 1 == n_skipped:
            finish()
            start = time.perf_counter()
        if number >= n_skipped and not setting.cold and time.perf_counter() - start > bench.seconds:
            break
    finish()
    seconds = time.perf_counter() - start
    bench.rate(result, n_tokens, seconds)
    if step is not None:
        result.stall = max(0.0, 1 - result.n_batches * step.milliseconds / 1e3 / seconds)
    return result


def close(iterator: Any, loader: Any) -> None:
    """End workers and threads."""
    if hasattr(loader, "close"):
        loader.close()
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()  # noqa: SLF001  dropping the iterator does it too, but when is not said


def preads(bench: Bench, n_threads: int, *, cold: bool) -> Result:
    """Read the states' files into buffers that are used again: the limit of the storage."""
    result = Result(Setting("pread", "bin", n_threads, pinned=False, cold=cold))
    bench.cache(result.setting)
    files = [bench.folder / f"{index}.bin" for batch in bench.epoch for index in batch]
    size = max(file.stat().st_size for file in files)
    turns = iter(files if cold else [file for _ in range(200) for file in files])
    buffers = [np.zeros(size, np.uint8) for _ in range(n_threads)]
    start = time.perf_counter()

    def work(buffer: np.ndarray) -> int:
        done = 0
        for file in turns:
            done += pread(file, buffer)
            if not cold and time.perf_counter() - start > bench.seconds:
                break
        return done

    with ThreadPoolExecutor(n_threads) as pool:
        nbytes = sum(pool.map(work, buffers))
    bench.rate(result, nbytes // (LAYERS * bench.hidden * 2), time.perf_counter() - start)
    return result


def pread(file: Path, buffer: np.ndarray) -> int:
    """Read a whole file into a buffer; return its size."""
    descriptor = os.open(file, os.O_RDONLY)
    done = 0
    try:
        while count := os.preadv(descriptor, [memoryview(buffer)[done:]], done):
            done += count
    finally:
        os.close(descriptor)
    return done


def copies(bench: Bench, *, pinned: bool) -> Result:
    """Copy one batch's worth of bytes to the device again and again: the limit of the bus."""
    result = Result(Setting("copy to the device", "", 0, pinned=pinned))
    if not CUDA:
        result.problem = "no GPU"
        return result
    n = bench.n_tokens * LAYERS * bench.hidden
    source = torch.zeros(n, dtype=torch.bfloat16, pin_memory=pinned)
    target = torch.empty(n, dtype=torch.bfloat16, device=DEVICE)
    for _ in range(3):
        target.copy_(source, non_blocking=True)
    finish()
    start, n_copies = time.perf_counter(), 20
    for _ in range(n_copies):
        target.copy_(source, non_blocking=True)
    finish()
    bench.rate(result, n_copies * bench.n_tokens, time.perf_counter() - start)
    return result


def settings() -> Iterator[Setting]:
    """Yield all passes, those that matter most first."""
    pinned, kinds = CUDA, (*CODECS, "pt", "safetensors")
    for codec in CODECS:
        yield from (Setting("Prefetcher", codec, n, pinned) for n in (1, 2, 4, 8))
    for kind in kinds:
        yield from (Setting("DataLoader", kind, n, pinned) for n in (0, 2, 8))
    yield from stalls(pinned, 25.0)
    yield from (Setting("Prefetcher", codec, 8, pinned, cold=True) for codec in CODECS)
    yield from (Setting("DataLoader", kind, 8, pinned, cold=True) for kind in kinds)
    for codec in CODECS:
        yield from (Setting("Prefetcher, two batches", codec, n, pinned) for n in (4, 8))
        yield Setting("DataLoader + DevicePrefetcher", codec, 8, pinned)
    if CUDA:
        for codec in CODECS:
            yield from (Setting("Prefetcher", codec, n, pinned=False) for n in (1, 2, 4, 8))
            yield from (Setting("DataLoader", codec, n, pinned=False) for n in (0, 2, 8))
        yield from (Setting("DataLoader", kind, 8, pinned=False) for kind in kinds[2:])
    yield from stalls(pinned, 100.0)


def stalls(pinned: bool, step_ms: float) -> Iterator[Setting]:  # noqa: FBT001
    """Yield the passes with a step of that length."""
    for codec in CODECS:
        yield from (Setting("Prefetcher", codec, n, pinned, step_ms=step_ms) for n in (4, 8))
    for kind in (*CODECS, "pt", "safetensors"):
        yield Setting("DataLoader", kind, 8, pinned, step_ms=step_ms)
    yield Setting("DataLoader", "none", 0, pinned, step_ms=step_ms)


def run(bench: Bench) -> list[Result]:
    """Measure the limits, then everything while there is time."""
    results = [preads(bench, n, cold=False) for n in (1, 2, 4, 8)]
    results += [preads(bench, n, cold=True) for n in (1, 8)]
    results += [copies(bench, pinned=pinned) for pinned in (True, False)]
    for setting in settings():
        result = Result(setting, problem="left out: the time is up")
        if time.perf_counter() < bench.deadline:
            try:
                result = feed(bench, setting)
            except Exception as error:  # noqa: BLE001  whatever a loader raises goes into the table
                result.problem = f"{type(error).__name__}: {error}"[:120]
        gc.collect()
        results.append(result)
        print(line(result), flush=True)
    return results


COLUMNS = ("loader", "data", "readers", "pinned", "cache", "step, ms", "tokens/s", "GB/s", "first batch, s", "stall")


def line(result: Result) -> str:
    """Return a row of the table."""
    s = result.setting
    cells = [s.loader, s.codec, str(s.readers), "yes" if s.pinned else "no", "cold" if s.cold else "warm"]
    if result.problem:
        return f"| {' | '.join(cells)} | {f'{s.step_ms:.0f}' if s.step_ms else ''} | {result.problem} | | | |"
    first = f"{result.first_batch_s:.2f}" if result.first_batch_s else ""
    step, stall = (f"{s.step_ms:.0f}", f"{result.stall:.2f}") if s.step_ms else ("", "")
    cells += [step, f"{result.tokens_per_s:,.0f}", f"{result.gb_per_s:.2f}", first, stall]
    return f"| {' | '.join(cells)} |"


def table(bench: Bench, results: Sequence[Result]) -> str:
    """Return everything as markdown."""
    gb = sum(int(n) for n in bench.lengths) * LAYERS * bench.hidden * 2 / 1e9
    where = f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}" if CUDA else "no GPU: batches stay in memory"
    head = [
        *describe(bench.folder),
        f"{where}. {gb:.1f} GB of states, {bench.n_samples} samples; batches of {bench.n_tokens} tokens.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---|---|--:|---|---|--:|--:|--:|--:|--:|",
    ]
    return "\n".join([*head, *map(line, results)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--gb", type=float, default=3.0 if CUDA else 0.2)
    parser.add_argument("--hidden", type=int, default=7168 if CUDA else 1024)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=2.0 if CUDA else 0.5, help="of each pass")
    parser.add_argument("--budget", type=float, default=330.0, help="seconds for everything")
    parser.add_argument("--folder", type=Path, help="an empty folder for the data; by default a temporary one")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    deadline = time.perf_counter() + arguments.budget - 10
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench = Bench(Path(folder), arguments.tokens, arguments.hidden, arguments.seconds, deadline)
        start = time.perf_counter()
        bench.n_samples = make_files(bench.folder, int(arguments.gb * 1e9), bench.hidden, bench.n_tokens // 2)
        print(f"data made in {time.perf_counter() - start:.0f} s", flush=True)
        bench.plan()
        results = run(bench)
        print(f"\n{table(bench, results)}")
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
