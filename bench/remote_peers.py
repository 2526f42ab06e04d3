"""What reads the samples out of S3: the raw clients and hsfmt; others are in remote_arrays.py and remote_shards.py."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from peers.base import Source
from peers.hsfmt_dataset import write_dataset
from remote_link import Place

CONCURRENCY = 32  # requests in flight: hsfmt's own, and what all others are set to
Delivered = Iterator[tuple[int | None, Any]]
Batches = Sequence[Sequence[int]]
Range = tuple[str, int, int]


class RemotePeer:
    """One way to read.

    Attributes
    ----------
    name
        In the table. Empty: a base class.
    packages
        Modules that it imports.
    files
        Folder of the bucket; peers of the same one read the same objects.
    checks
        What it compares with a digest while it reads.
    order
        "random" or "its own".
    fresh
        Opened anew for each pass, outside of what is timed: it keeps what it has read.
    """

    name: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()
    files: ClassVar[str] = ""
    checks: ClassVar[str] = "nothing"
    order: ClassVar[str] = "random"
    fresh: ClassVar[bool] = False

    def make(self, folder: Path, source: Source) -> None:
        """Write the objects into a folder."""
        raise NotImplementedError

    def open(self, place: Place) -> None:
        """Open what `make` wrote, in the bucket."""
        raise NotImplementedError

    def read(self, batches: Batches) -> Delivered:
        """Yield (number of the sample, its states as bf16 patterns [token, layer, hidden]); what is taken is dropped.

        Raw clients yield (None, bytes).
        """
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what it holds."""


class _Raw(RemotePeer):
    """The very ranges that hsfmt asks for, 32 at a time, without a pause between batches."""

    @staticmethod
    def ranges_file(place: Place, files: str) -> Path:
        """Return where the ranges of each batch are written down."""
        return place.folder / f"{files}.ranges.json"

    def open(self, place: Place) -> None:
        known = json.loads(self.ranges_file(place, self.files).read_text())
        self.ranges = {tuple(batch): [tuple(one) for one in ranges] for batch, ranges in known}
        self.loop = asyncio.new_event_loop()
        self.start(place)

    def start(self, place: Place) -> None:
        """Connect."""
        raise NotImplementedError

    async def get(self, key: str, start: int, nbytes: int) -> Any:
        """Return the bytes of a range."""
        raise NotImplementedError

    def read(self, batches: Batches) -> Delivered:
        wanted = iter([one for batch in batches for one in self.ranges[tuple(batch)]])
        counts: list[int] = []

        async def worker() -> None:
            for path, start, nbytes in wanted:
                counts.append(len(memoryview(await self.get(f"{self.files}/{path}", start, nbytes))))

        async def all_of_them() -> None:
            await asyncio.gather(*[worker() for _ in range(CONCURRENCY)])

        self.loop.run_until_complete(all_of_them())
        yield from ((None, range(n)) for n in counts)

    def close(self) -> None:
        self.loop.close()


class _RawObstore(_Raw):
    packages: ClassVar[tuple[str, ...]] = ("obstore",)

    def start(self, place: Place) -> None:
        self.store = obstore_bucket(place)

    async def get(self, key: str, start: int, nbytes: int) -> Any:
        import obstore

        return await obstore.get_range_async(self.store, key, start=start, length=nbytes)


class _RawAiobotocore(_Raw):
    packages: ClassVar[tuple[str, ...]] = ("aiobotocore",)

    def start(self, place: Place) -> None:
        from aiobotocore.config import AioConfig
        from aiobotocore.session import get_session

        config = AioConfig(max_pool_connections=2 * CONCURRENCY)
        self.bucket = place.bucket
        self.context = get_session().create_client(
            "s3", endpoint_url=place.endpoint, aws_access_key_id=place.key, aws_secret_access_key=place.secret,
            region_name="us-east-1", config=config,
        )  # fmt: skip
        self.client = self.loop.run_until_complete(self.context.__aenter__())

    async def get(self, key: str, start: int, nbytes: int) -> Any:
        answer = await self.client.get_object(Bucket=self.bucket, Key=key, Range=f"bytes={start}-{start + nbytes - 1}")
        async with answer["Body"] as body:
            return await body.read()

    def close(self) -> None:
        self.loop.run_until_complete(self.context.__aexit__(None, None, None))
        super().close()


class RawObstoreNone(_RawObstore):
    name, files = "raw GETs, obstore, of the none ranges", "hsfmt_none"


class RawObstoreZstd(_RawObstore):
    name, files = "raw GETs, obstore, of the zstd ranges", "hsfmt_zstd"


class RawAiobotocoreNone(_RawAiobotocore):
    name, files = "raw GETs, aiobotocore, of the none ranges", "hsfmt_none"


class RawAiobotocoreZstd(_RawAiobotocore):
    name, files = "raw GETs, aiobotocore, of the zstd ranges", "hsfmt_zstd"


class _Hsfmt(RemotePeer):
    packages: ClassVar[tuple[str, ...]] = ("hsfmt", "torch", "s3fs")
    checks = "every byte"
    client: ClassVar[str] = "obstore"

    def make(self, folder: Path, source: Source) -> None:
        write_dataset(folder, source, self.files.removeprefix("hsfmt_"))

    def open(self, place: Place) -> None:
        from hsfmt import HiddenStateDataset

        os.environ["HSFMT_REMOTE"] = self.client
        self.dataset = HiddenStateDataset(place.url(self.files), storage_options=place.options, cache_dir="")

    def read(self, batches: Batches) -> Delivered:
        for batch in batches:
            yield from _states(batch, self.dataset.__getitems__(batch))

    def write_down_ranges(self, place: Place, batches: Batches) -> None:
        """Read the batches, and write down the ranges that the store was asked for."""
        store, noted = self.dataset.reader.store, []
        for number in self.dataset.reader.snapshot.part.tolist():
            self.dataset.reader.parts.get(number)
        read_each = store.read_each
        for batch in batches:
            ranges: list[Range] = []

            def noting(wanted: Sequence[Range], ranges: list[Range] = ranges) -> Any:
                ranges += wanted
                return read_each(wanted)

            store.read_each = noting  # type: ignore[method-assign]
            self.dataset.__getitems__(batch)
            noted.append((batch, ranges))
        store.read_each = read_each  # type: ignore[method-assign]
        _Raw.ranges_file(place, self.files).write_text(json.dumps(noted))


class _Prefetched(_Hsfmt):
    def read(self, batches: Batches) -> Delivered:
        from hsfmt.readers import Prefetcher

        ahead = Prefetcher(self.dataset.__getitems__, [list(batch) for batch in batches], n_readers=2, depth=2)
        for batch, items in zip(batches, ahead, strict=True):
            yield from _states(batch, items)


def _states(batch: Sequence[int], items: list[dict[str, Any]]) -> Delivered:
    import torch

    for number, item in zip(batch, items, strict=True):
        yield number, item["hidden_states"].view(torch.uint16).numpy()


class _Ahead(_Hsfmt):
    """As a BatchOrder hands batches out, with what follows: it is read ahead, up to 512 MiB."""

    def read(self, batches: Batches) -> Delivered:
        yield from super().read(with_following(batches))


def with_following(batches: Batches) -> list[list[int]]:
    """Return the batches as a BatchOrder hands them out."""
    from hsfmt.readers.batches_ahead import Batch

    lists = [list(batch) for batch in batches]
    return [Batch(batch, lists[number + 1 : number + 33]) for number, batch in enumerate(lists)]


class NoneAhead(_Ahead):
    name, files = "hsfmt none, BatchOrder", "hsfmt_none"


class NonePrefetched(_Prefetched):
    name, files = "hsfmt none, Prefetcher, 2 readers", "hsfmt_none"


class NoneBatches(_Hsfmt):
    name, files = "hsfmt none, nothing read ahead", "hsfmt_none"


class NoneFsspec(_Ahead):
    name, files, client = "hsfmt none, BatchOrder, fsspec", "hsfmt_none", "fsspec"


class ZstdAhead(_Ahead):
    name, files = "hsfmt zstd, BatchOrder", "hsfmt_zstd"


class ZstdPrefetched(_Prefetched):
    name, files = "hsfmt zstd, Prefetcher, 2 readers", "hsfmt_zstd"


class ZstdBatches(_Hsfmt):
    name, files = "hsfmt zstd, nothing read ahead", "hsfmt_zstd"


class ZstdFsspec(_Ahead):
    name, files, client = "hsfmt zstd, BatchOrder, fsspec", "hsfmt_zstd", "fsspec"


def obstore_bucket(place: Place, prefix: str = "") -> Any:
    """Return obstore's view of the bucket."""
    from obstore.store import S3Store

    return S3Store(
        place.bucket, prefix=prefix or None, endpoint=place.endpoint, access_key_id=place.key,
        secret_access_key=place.secret, region="us-east-1", client_options={"allow_http": True},
    )  # fmt: skip


def all_peers() -> dict[str, type[RemotePeer]]:
    """Return the peers by name, in order of their definition."""
    import remote_arrays
    import remote_shards

    modules = (globals(), vars(remote_arrays), vars(remote_shards))
    values: Iterable[Any] = [value for module in modules for value in module.values()]
    peers = [value for value in values if isinstance(value, type) and issubclass(value, RemotePeer) and value.name]
    return {peer.name: peer for peer in peers}
