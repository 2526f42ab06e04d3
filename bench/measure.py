"""One process for each peer and number of threads: it reads what it is told to and says what that took."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import mmap
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from cases import Case
from peers import all_peers
from peers.base import LAYERS, Peer, Request, Source


@dataclass(frozen=True, slots=True)
class Cost:
    """What one pass over a case took.

    Attributes
    ----------
    seconds
        From the first read to the last.
    cpu
        CPU seconds of the whole process in that time, user and system.
    asked
        Bytes that it read by system calls; what is mapped is not among them.
    from_disk
        Bytes that came from the disk, so 0 if all was in the page cache.
    each
        Seconds of each read, in the case's order.
    """

    seconds: float
    cpu: float
    asked: int
    from_disk: int
    each: tuple[float, ...]


def thread_limits(n_threads: int) -> dict[str, str]:
    """Return the environment that says how many threads a library may have."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS", "BLOSC_NTHREADS")
    return dict.fromkeys(names, str(n_threads))


def limit_threads(n_threads: int) -> None:
    """Hold this process to that many threads of each library; the process did nothing so far but import torch."""
    os.environ.update(thread_limits(n_threads))
    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(n_threads)


def missing_package(peer: type[Peer]) -> str | None:
    """Return the first of its packages that is not installed."""
    return next((name for name in peer.packages if importlib.util.find_spec(name) is None), None)


def _each_file(folder: Path, action: Callable[[int], None]) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                action(descriptor)
            finally:
                os.close(descriptor)


def drop_from_cache(folder: Path) -> None:
    """Ask the kernel to forget the pages of all files of a folder; they are clean since `make_files`."""
    _each_file(folder, lambda descriptor: os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED))


def _io() -> tuple[int, int]:
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"]), int(counters["read_bytes"])


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Reader:
    """A peer that is open, with as many objects as it takes for the threads.

    Parameters
    ----------
    peer
        The class.
    folder
        Its files.
    source
        What they hold.
    n_threads
        1 or 2.
    """

    def __init__(self, peer: type[Peer], folder: Path, source: Source, n_threads: int) -> None:
        self.peer, self.source, self.folder, self.n_threads = peer, source, folder, n_threads
        self.objects: list[Peer] = []
        self.open()

    def open(self) -> None:
        """Open the peer, if it is not."""
        while len(self.objects) < (1 if self.peer.own_threads else self.n_threads):
            self.objects.append(self.peer())
            self.objects[-1].open(self.folder, self.source.lengths, self.source.hidden, self.n_threads)

    def close(self) -> None:
        """Let go of all files."""
        while self.objects:
            self.objects.pop().close()

    def check(self, case: Case) -> str | None:
        """Compare everything that the peer delivers with the source, bit for bit; return what differs."""
        self.open()
        for one in self.objects:
            read, _ = self._reading(one, case)
            for requests in case.reads:
                value = read(requests)
                problem = self._difference(one, case, requests, value)
                if problem:
                    return problem
        return None

    def run(self, case: Case, order: Sequence[int]) -> Cost:
        """Read everything once, in this order."""
        self.open()
        each = [0.0] * len(case.reads)
        readings = [self._reading(one, case) for one in self.objects]

        def part(worker: int, turns: Iterator[int]) -> None:
            read, keep = readings[worker]
            value = None
            for number in turns:
                began = time.perf_counter()
                value = read(case.reads[number])
                each[number] = time.perf_counter() - began
            del value, keep

        turns = _Shared(order)
        io, cpu, start = _io(), _cpu(), time.perf_counter()
        if len(self.objects) == 1:
            part(0, turns)
        else:
            with ThreadPoolExecutor(len(self.objects)) as pool:
                list(pool.map(part, range(len(self.objects)), [turns] * len(self.objects)))
        seconds, cpu = time.perf_counter() - start, _cpu() - cpu
        asked, from_disk = (after - before for after, before in zip(_io(), io, strict=True))
        return Cost(seconds, cpu, asked, from_disk, tuple(each))

    def _reading(self, one: Peer, case: Case) -> tuple[Callable[[Sequence[Request]], Any], Any]:
        """Return the function that does one read of a case, and the memory that it reads into."""
        if case.budget:
            buffers = one.buffers(case.budget)
            return lambda requests: one.batch(requests, case.budget, buffers), buffers
        if not one.reused:
            return lambda requests: one.read(requests[0]), None
        import torch

        rows = max(read[0].stop - read[0].start for read in case.reads)
        memory = torch.zeros(rows * case.reads[0][0].n_planes * self.source.hidden, dtype=torch.bfloat16)

        def read(requests: Sequence[Request]) -> Any:
            shape = (requests[0].stop - requests[0].start, requests[0].n_planes, self.source.hidden)
            return one.read(requests[0], memory[: shape[0] * shape[1] * shape[2]].view(shape))

        return read, memory

    def _difference(self, one: Peer, case: Case, requests: Sequence[Request], value: Any) -> str | None:
        if not case.budget:
            same = np.array_equal(one.bits(value, requests[0]), self.source.asked(requests[0]))
            return None if same else f"{requests[0]} differs from what was written"
        first, last = (_bits(tensor) for tensor in value)
        at = 0
        for request in requests:
            states = self.source.asked(request)
            rows = slice(at, at + len(states))
            if not np.array_equal(first[rows], states[:, :-1].reshape(len(states), -1)):
                return f"{request} differs in a batch"
            if not np.array_equal(last[rows], states[:, -1]):
                return f"{request} differs in a batch, last layer"
            at += len(states)
        if len(first) != case.budget or len(last) != case.budget or first[at:].any() or last[at:].any():
            return f"the padding of a batch of {len(requests)} samples"
        return None


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.view(torch.uint16).numpy()


class _Shared(Iterator[int]):
    """Hands each number to one thread; list iterators are safe under the GIL."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = iter(list(order))

    def __next__(self) -> int:
        return next(self._order)


def serve(connection: Connection, name: str, folder: Path, source: tuple[Path, tuple[int, ...], int], n: int) -> None:
    """Answer the runner until it hangs up: (method, arguments) in, (value, None) or (None, what went wrong) out."""
    with contextlib.redirect_stdout(sys.stderr):
        limit_threads(n)
        reader: Reader | None = None
        while True:
            try:
                method, arguments = connection.recv()
            except EOFError:
                return
            try:
                if reader is None:
                    reader = Reader(all_peers()[name], folder, load_source(*source), n)
                connection.send((getattr(reader, method)(*arguments), None))
            except Exception as error:  # noqa: BLE001  whatever a library raises goes into the table
                connection.send((None, f"{type(error).__name__}: {error}"[:300]))


def load_source(path: Path, lengths: tuple[int, ...], hidden: int) -> Source:
    """Map the source that the runner wrote."""
    return Source(np.memmap(path, np.uint16, "r", shape=(sum(lengths), LAYERS, hidden)), lengths)


def make_files(name: str, folder: Path, source: tuple[Path, tuple[int, ...], int]) -> str | None:
    """Let a peer write its files; return what went wrong."""
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir()
    try:
        all_peers()[name]().make(partial, load_source(*source))
    except Exception as error:  # noqa: BLE001  whatever a library raises goes into the table
        return f"{type(error).__name__}: {error}"[:300]
    _each_file(partial, os.fsync)
    partial.rename(folder)
    return None


def first_sample(name: str, folder: Path, lengths: tuple[int, ...], hidden: int) -> float:
    """Return the seconds from the start of a Python process until it holds its first sample."""
    arguments = json.dumps([name, str(folder), lengths, hidden])
    command = [sys.executable, str(Path(__file__).with_name("first_sample.py")), arguments]
    start = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | thread_limits(1))
    if result.returncode:
        raise RuntimeError(result.stderr[-300:])
    return float(result.stdout.split()[-1]) - start


def resident_fraction(folder: Path) -> float:
    """Return which part of the files' pages is in the page cache, by mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    page, resident, total = mmap.PAGESIZE, 0, 0
    for path in folder.rglob("*"):
        nbytes = path.stat().st_size
        if not path.is_file() or not nbytes:
            continue
        array = np.memmap(path, np.uint8, "r")
        states = np.zeros(-(-nbytes // page), np.uint8)
        address = ctypes.c_void_p(array.ctypes.data)
        if libc.mincore(address, ctypes.c_size_t(nbytes), ctypes.c_void_p(states.ctypes.data)):
            raise OSError(ctypes.get_errno(), "mincore")
        resident += int((states & 1).sum())
        total += len(states)
    return resident / max(total, 1)
