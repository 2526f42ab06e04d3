"""MDS and litdata: what fetches whole shards into a local folder, in random order and in an order of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from peers.base import LAYERS, Source
from peers.mds import import_streaming
from remote_link import Place
from remote_peers import Batches, Delivered, RemotePeer

_SHARD_NBYTES = 64 << 20  # MDS's and litdata's default


class _Shards(RemotePeer):
    fresh = True
    n_threads = 8

    def open(self, place: Place) -> None:
        place.set_environment()
        self.hidden = place.hidden
        self.cache = Path(tempfile.mkdtemp(prefix="cache-", dir=place.folder))
        self.open_dataset(place)

    def open_dataset(self, place: Place) -> None:
        """Open it over an empty cache."""
        raise NotImplementedError

    def record(self, item: Any) -> tuple[int, Any]:
        """Return (number, states) of an item."""
        raise NotImplementedError

    def item(self, number: int) -> Any:
        """Return an item of the dataset."""
        return self.dataset[number]

    def read(self, batches: Batches) -> Delivered:
        numbers = [number for batch in batches for number in batch]
        if self.order == "random":
            with ThreadPoolExecutor(self.n_threads) as pool:
                yield from map(self.record, pool.map(self.item, numbers))
        else:
            yield from map(self.record, islice(self.items(), len(numbers)))

    def items(self) -> Iterator[Any]:
        """Iterate in its own order."""
        return iter(self.dataset)

    def close(self) -> None:
        self.dataset: Any = None
        shutil.rmtree(self.cache, ignore_errors=True)


class Mds(_Shards):
    """Uncompressed shards of up to 64 MiB."""

    name, packages, files = "mosaicml-streaming, MDS", ("streaming", "torch", "boto3"), "mds"

    def make(self, folder: Path, source: Source) -> None:
        columns = {"number": "int", "states": "bytes"}
        with import_streaming().MDSWriter(out=str(folder), columns=columns, size_limit=_SHARD_NBYTES) as writer:
            for number in range(len(source.lengths)):
                writer.write({"number": number, "states": source.sample(number).tobytes()})

    def open_dataset(self, place: Place) -> None:
        import_streaming().base.util.clean_stale_shared_memory()
        self.dataset = import_streaming().StreamingDataset(
            remote=place.url(self.files), local=str(self.cache), shuffle=False, batch_size=1, num_canonical_nodes=1,
            predownload=16,
        )  # fmt: skip

    def record(self, item: Any) -> tuple[int, Any]:
        return int(item["number"]), np.frombuffer(item["states"], np.uint16).reshape(-1, LAYERS, self.hidden)


class MdsInOrder(Mds):
    name, order = "mosaicml-streaming, MDS, in its own order", "its own"


class Litdata(_Shards):
    """Uncompressed chunks of up to 64 MB, of int16."""

    name, packages, files = "litdata", ("litdata", "torch", "boto3"), "litdata"
    n_threads = 1  # its reader is not made for several

    def make(self, folder: Path, source: Source) -> None:
        import torch
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(str(folder), chunk_bytes=_SHARD_NBYTES)
        for number in range(len(source.lengths)):
            states = torch.from_numpy(source.sample(number).view(np.int16).copy())
            writer[number] = {"number": number, "hidden_states": states}
        writer.done()
        writer.merge()

    def open_dataset(self, place: Place) -> None:
        import litdata
        from litdata.streaming import downloader

        # It reads by obstore, and has no setting for a server without TLS, as this one is.
        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # noqa: SLF001
        options = {
            "aws_access_key_id": place.key, "aws_secret_access_key": place.secret, "endpoint_url": place.endpoint,
        }  # fmt: skip
        self.dataset = litdata.StreamingDataset(
            place.url(self.files), cache_dir=str(self.cache), storage_options=options, max_pre_download=4
        )

    def record(self, item: Any) -> tuple[int, Any]:
        return int(item["number"]), item["hidden_states"].numpy().view(np.uint16).copy()


class LitdataInOrder(Litdata):
    name, order = "litdata, in its own order", "its own"
