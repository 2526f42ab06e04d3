"""Arrays and files, whose samples are read by range: zarr-python, tensorstore and safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from peers.base import LAYERS, Source, as_tensor
from remote_link import Place
from remote_peers import CONCURRENCY, Batches, Delivered, RemotePeer, obstore_bucket

CHUNK_ROWS = 256
SHARD_ROWS = 64 * CHUNK_ROWS


class _InThreads(RemotePeer):
    """Samples read in threads: the next ones are under way while one is taken."""

    n_threads: ClassVar[int] = CONCURRENCY // 2

    def sample(self, number: int) -> Any:
        """Return one sample."""
        raise NotImplementedError

    def read(self, batches: Batches) -> Delivered:
        numbers = [number for batch in batches for number in batch]
        with ThreadPoolExecutor(self.n_threads) as pool:
            yield from zip(numbers, pool.map(self.sample, numbers), strict=True)


class _Zarr(_InThreads):
    """Chunks of 256 tokens and all layers in shards of 64 of them, as uint16: there is no bfloat16."""

    packages: ClassVar[tuple[str, ...]] = ("zarr",)
    files = "zarr"
    compressed = False

    def make(self, folder: Path, source: Source) -> None:
        import zarr

        chunks = (CHUNK_ROWS, LAYERS, source.hidden)
        settings: dict[str, Any] = {} if self.compressed else {"compressors": None}
        array = zarr.create_array(
            folder / "array", shape=source.bits.shape, dtype="uint16", chunks=chunks, shards=(SHARD_ROWS, *chunks[1:]),
            **settings,
        )  # fmt: skip
        array[:] = source.bits

    def open(self, place: Place) -> None:
        import zarr

        zarr.config.set({"async.concurrency": CONCURRENCY})
        self.starts = np.concatenate([[0], np.cumsum(place.lengths)]).tolist()
        self.array = zarr.open_array(self.store(place), mode="r")

    def store(self, place: Place) -> Any:
        """Return zarr's store."""
        raise NotImplementedError

    def sample(self, number: int) -> Any:
        return self.array[self.starts[number] : self.starts[number + 1]]


class ZarrFsspec(_Zarr):
    name, packages = "zarr-python, FsspecStore", ("zarr", "s3fs")

    def store(self, place: Place) -> Any:
        from zarr.storage import FsspecStore

        options = {**place.options, "config_kwargs": {"max_pool_connections": 2 * CONCURRENCY}}
        return FsspecStore.from_url(f"{place.url(self.files)}/array", storage_options=options, read_only=True)


class ZarrObject(_Zarr):
    name, packages = "zarr-python, ObjectStore", ("zarr", "obstore")

    def store(self, place: Place) -> Any:
        from zarr.storage import ObjectStore

        return ObjectStore(obstore_bucket(place, f"{self.files}/array"), read_only=True)


class ZarrZstd(ZarrObject):
    name, files, compressed, checks = "zarr-python, ObjectStore, its default zstd", "zarr_zstd", True, "nothing"


class Tensorstore(RemotePeer):
    """The samples of a batch are asked for together; the cache holds shard indexes, and little else."""

    name, packages, files = "tensorstore, the array of zarr-python", ("tensorstore",), "zarr"
    cache_nbytes = 64 << 20

    def make(self, folder: Path, source: Source) -> None:
        ZarrFsspec().make(folder, source)

    def open(self, place: Place) -> None:
        import tensorstore as ts

        place.set_environment()
        self.starts = np.concatenate([[0], np.cumsum(place.lengths)]).tolist()
        context = ts.Context(
            {
                "s3_request_concurrency": {"limit": CONCURRENCY},
                "cache_pool": {"total_bytes_limit": self.cache_nbytes},
            }
        )
        kvstore = {
            "driver": "s3", "bucket": place.bucket, "path": f"{self.files}/array/", "endpoint": place.endpoint,
            "aws_region": "us-east-1",
        }  # fmt: skip
        self.array = ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True, context=context).result()

    def read(self, batches: Batches) -> Delivered:
        def ask(batch: Sequence[int]) -> list[tuple[int, Any]]:
            return [(number, self.array[self.starts[number] : self.starts[number + 1]].read()) for number in batch]

        for batch, asked in _one_ahead(batches, ask):
            assert len(batch) == len(asked)
            yield from ((number, future.result()) for number, future in asked)


def _one_ahead(batches: Batches, ask: Any) -> Iterator[tuple[Sequence[int], list[Any]]]:
    """Ask for a batch before the one before it is handed out."""
    former: tuple[Sequence[int], list[Any]] | None = None
    for batch in batches:
        asked = ask(batch)
        if former is not None:
            yield former
        former = (batch, asked)
    if former is not None:
        yield former


class SafetensorsFiles(_InThreads):
    """A file a sample, read whole through fsspec and parsed."""

    name, packages, files = "safetensors, whole files by s3fs", ("safetensors", "torch", "s3fs"), "safetensors"

    def make(self, folder: Path, source: Source) -> None:
        import torch
        from safetensors.torch import save_file

        for number, length in enumerate(source.lengths):
            tensors = {"hidden_states": as_tensor(source.sample(number).copy()), "token_ids": torch.arange(length)}
            save_file(tensors, folder / f"{number}.safetensors")

    def open(self, place: Place) -> None:
        import s3fs

        self.root = f"{place.bucket}/{self.files}"
        settings = {"max_pool_connections": 2 * CONCURRENCY}
        self.fs = s3fs.S3FileSystem(**place.options, config_kwargs=settings)

    def sample(self, number: int) -> Any:
        import torch
        from safetensors.torch import load

        states = load(self.fs.cat_file(f"{self.root}/{number}.safetensors"))["hidden_states"]
        return states.view(torch.uint16).numpy()


class SafetensorsRanges(SafetensorsFiles):
    """Headers are read when it is opened, then one range a sample."""

    name, packages = "safetensors, ranges by obstore", ("safetensors", "obstore")

    def open(self, place: Place) -> None:
        self.bucket = obstore_bucket(place, self.files)
        self.hidden = place.hidden
        with ThreadPoolExecutor(self.n_threads) as pool:
            self.places = list(pool.map(self._where, range(len(place.lengths))))

    def _where(self, number: int) -> tuple[int, int]:
        import obstore

        path = f"{number}.safetensors"
        head = bytes(obstore.get_range(self.bucket, path, start=0, length=4096))
        nbytes = int.from_bytes(head[:8], "little")
        start, stop = json.loads(head[8 : 8 + nbytes])["hidden_states"]["data_offsets"]
        return 8 + nbytes + start, 8 + nbytes + stop

    def sample(self, number: int) -> Any:
        import obstore

        start, stop = self.places[number]
        body = obstore.get_range(self.bucket, f"{number}.safetensors", start=start, end=stop)
        return np.frombuffer(memoryview(body), np.uint16).reshape(-1, LAYERS, self.hidden)
