"""What the remote bench measures beside reading: DataLoaders, the local cache, writing, requests. Each in a process."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from peers.hsfmt_dataset import write_dataset
from remote_link import Place
from remote_peers import Batches, with_following
from remote_worker import Cost, cpu_seconds, load_place

PART_NBYTES, PARTS_IN_FLIGHT = 8 << 20, 3  # as hsfmt uploads
_LOOK_SECONDS = 0.005


def memory_of(pid: int) -> dict[str, int]:
    """Return what /proc says of a process's memory, in bytes: Rss, Pss, Private_Dirty, ..."""
    lines = (Path("/proc") / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}


def _cpu_of(pid: int) -> float:
    words = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def same_items(items: list[Any]) -> list[Any]:
    """Collate nothing."""
    return items


class Loader:
    """A DataLoader with two workers over S3; they stay up between epochs.

    Parameters
    ----------
    place, files
        The dataset.
    method
        How workers start: "fork" or "spawn".
    """

    def __init__(self, place: Place, files: str, method: str) -> None:
        self.place, self.files, self.method = place, files, method
        self.loader: Any = None

    def epoch(self, batches: Batches) -> tuple[Cost, list[tuple[int, int]]]:
        """Read all batches; return the cost, and (RSS, private memory) of each worker after it."""
        from torch.utils.data import DataLoader

        from hsfmt import HiddenStateDataset

        if self.loader is None:
            dataset = HiddenStateDataset(self.place.url(self.files), storage_options=self.place.options, cache_dir="")
            self.sampler = with_following(batches)
            self.loader = DataLoader(
                dataset, batch_sampler=self.sampler, num_workers=2, multiprocessing_context=self.method,
                collate_fn=same_items, persistent_workers=True, prefetch_factor=2,
            )  # fmt: skip
            for _ in self.loader:  # starts the workers, which is not what is measured
                pass
        self.sampler[:] = with_following(batches)
        pids = [process.pid for process in multiprocessing.active_children() if process.pid]
        cpu = cpu_seconds() + sum(map(_cpu_of, pids))
        began, nbytes = time.perf_counter(), 0
        for items in self.loader:
            nbytes += sum(item["hidden_states"].nbytes for item in items)
        seconds = time.perf_counter() - began
        cpu = cpu_seconds() + sum(map(_cpu_of, pids)) - cpu
        del items
        memory = [memory_of(pid) for pid in pids]
        return Cost(seconds, cpu, nbytes), [(m["Rss"], m["Private_Clean"] + m["Private_Dirty"]) for m in memory]


class Half:
    """One of two processes that read a dataset together, each its half of every batch.

    Parameters
    ----------
    url
        The dataset.
    options
        Storage options; None: a local one.
    cache_dir
        The local cache; "": none.
    half
        0 or 1.
    """

    def __init__(self, url: str, options: dict[str, Any] | None, cache_dir: str, half: int) -> None:
        import torch  # noqa: F401  not what is measured

        from hsfmt import HiddenStateDataset

        self.dataset = HiddenStateDataset(url, storage_options=options, cache_dir=cache_dir, n_threads=1)
        self.half = half

    def epoch(self, batches: Batches) -> tuple[Cost, int]:
        """Read this half of the batches; return the cost, and how many chunks the cache lacked."""
        cache = self.dataset.reader.cache
        before = cache.n_misses if cache else 0
        cpu, began, nbytes = cpu_seconds(), time.perf_counter(), 0
        for batch in with_following([batch[self.half :: 2] for batch in batches]):
            for item in self.dataset.__getitems__(batch):
                nbytes += item["hidden_states"].nbytes
        seconds = time.perf_counter() - began
        if cache:
            cache.drain()
        return Cost(seconds, cpu_seconds() - cpu, nbytes), (cache.n_misses if cache else 0) - before


@dataclass(frozen=True, slots=True)
class Written:
    """What writing took: the cost, and the most anonymous memory beyond what the process had before, in bytes."""

    cost: Cost
    memory: int


class Writing:
    """Writes the samples to S3, in a process of its own for each call, so that memory begins at the same.

    Parameters
    ----------
    place
        Where.
    samples
        Numbers of the samples that are written.
    """

    def __init__(self, place: Place, samples: Sequence[int]) -> None:
        import s3fs
        import torch  # noqa: F401  imported before memory is looked at

        import hsfmt  # noqa: F401

        self.place, self.samples = place, samples
        self.source = load_place(place)
        self.fs = s3fs.S3FileSystem(**place.options, config_kwargs={"max_pool_connections": 64})
        self._write("none", "warmed_up", samples[:1])  # what is imported and connected is not what is measured
        self.fs.rm(f"{place.bucket}/warmed_up", recursive=True)

    @property
    def nbytes(self) -> int:
        """Bytes of the states."""
        return sum(self.source.sample(number).nbytes for number in self.samples)

    def writer(self, codec: str) -> Written:
        """Write them with DatasetWriter."""
        files = f"written_{codec}"
        return self._measured(lambda: self._write(codec, files, self.samples), files)

    def _write(self, codec: str, files: str, samples: Sequence[int]) -> None:
        from peers.base import LAYERS, as_tensor

        from hsfmt import DatasetWriter

        settings: Any = {"layers": range(LAYERS), "hidden_size": self.place.hidden, "final_norm": "pre", "codec": codec}
        with DatasetWriter(self.place.url(files), storage_options=self.place.options, **settings) as writer:
            for number in samples:
                states = as_tensor(self.source.sample(number))
                writer.write(f"s{number}", range(len(states)), states)

    def push(self, files: str) -> Written:
        """Copy a local dataset of them to S3."""
        from hsfmt import transfer

        def push() -> None:
            transfer(self.place.folder / files, self.place.url("pushed"), destination_options=self.place.options)

        return self._measured(push, "pushed")

    def raw(self, n_objects: int) -> Written:
        """Upload the same bytes by s3fs's client in 8 MiB parts, three in flight for each of so many objects."""
        start, stop = self.source.starts[self.samples[0]], self.source.starts[self.samples[-1] + 1]
        values = self.source.bits[start:stop].reshape(-1)
        shares = [_parts(share) for share in np.array_split(values, n_objects)]

        def put() -> None:
            with ThreadPoolExecutor(n_objects) as pool:
                list(pool.map(self._put, range(n_objects), shares))

        return self._measured(put, "raw")

    def _put(self, number: int, parts: Sequence[Any]) -> None:
        names = {"Bucket": self.place.bucket, "Key": f"raw/{number}"}
        upload = self.fs.call_s3("create_multipart_upload", **names)["UploadId"]

        def send(one: int) -> dict[str, Any]:
            part = {"PartNumber": one + 1, "UploadId": upload}
            answer = self.fs.call_s3("upload_part", **names, **part, Body=parts[one].tobytes())
            return {"PartNumber": one + 1, "ETag": answer["ETag"]}

        with ThreadPoolExecutor(PARTS_IN_FLIGHT) as pool:
            done = list(pool.map(send, range(len(parts))))
        self.fs.call_s3("complete_multipart_upload", **names, UploadId=upload, MultipartUpload={"Parts": done})

    def _measured(self, write: Callable[[], None], files: str) -> Written:
        nbytes = self.nbytes
        with _Peak() as peak:
            cpu, began = cpu_seconds(), time.perf_counter()
            write()
            cost = Cost(time.perf_counter() - began, cpu_seconds() - cpu, nbytes)
        with suppress(FileNotFoundError):
            self.fs.rm(f"{self.place.bucket}/{files}", recursive=True)
        return Written(cost, peak.nbytes)


def _parts(values: Any) -> list[Any]:
    step = PART_NBYTES // values.itemsize
    return [values[start : start + step] for start in range(0, len(values), step)]


class _Peak:
    """Looks at this process's anonymous memory until it is left; what is mapped of files does not count."""

    def __enter__(self) -> Self:
        self._over = threading.Event()
        self._before = self._most = self._now()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def nbytes(self) -> int:
        """The most, beyond what there was before."""
        return self._most - self._before

    def _look(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            self._most = max(self._most, self._now())

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


class Opening:
    """Opens a dataset, then reads one sample: between the two calls its requests are counted from outside."""

    def __init__(self, place: Place, files: str, client: str) -> None:
        os.environ["HSFMT_REMOTE"] = client
        self.place, self.files = place, files

    def open(self) -> None:
        """Open it."""
        from hsfmt import HiddenStateDataset

        self.dataset = HiddenStateDataset(self.place.url(self.files), storage_options=self.place.options, cache_dir="")

    def sample(self, number: int) -> None:
        """Read the first sample."""
        self.dataset[number]


def make_dataset(folder: Path, place: Place, samples: Sequence[int], codec: str) -> None:
    """Write some of the samples as a local dataset."""
    from peers.base import Source

    source = load_place(place)
    lengths = tuple(source.lengths[number] for number in samples)
    first = samples[0]
    assert list(samples) == list(range(first, first + len(samples))), "they lie one after another"
    start = source.starts[first]
    write_dataset(folder, Source(source.bits[start : start + sum(lengths)], lengths), codec)
