"""zarr-python: an array of its own, and hsfmt's arrays, with its own pipeline and with that of zarrs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from peers.base import Peer, Request, Source
from peers.blosc_chunks import array_folder
from peers.hsfmt_dataset import write_dataset


class _Zarr(Peer):
    packages: tuple[str, ...] = ("zarr",)
    preload = ("zarr",)
    own_threads = True
    returns = "a new array"
    # With "strict", what zarrs can't do fails; otherwise it would go to zarr-python's pipeline without a word.
    pipeline: ClassVar[dict[str, Any]] = {"path": "zarr.core.codec_pipeline.BatchedCodecPipeline", "strict": False}

    def open(self, folder: Path, lengths: Sequence[int], hidden: int, n_threads: int) -> None:
        import zarr
        from numcodecs import blosc

        # All of them: the codecs run in the first, the store's requests are bounded by the second.
        zarr.config.set({"threading.max_workers": n_threads, "async.concurrency": n_threads})
        zarr.config.set({f"codec_pipeline.{key}": value for key, value in self.pipeline.items()})
        blosc.set_nthreads(n_threads)
        self.starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        self.array = zarr.open_array(self.path(folder), mode="r")

    def path(self, folder: Path) -> Path:
        """Return the array's folder."""
        return folder / "array"

    def read(self, request: Request, out: Any = None) -> Any:
        first = self.starts[request.sample]
        return self.array[first + request.start : first + request.stop, request.planes]


class Defaults(_Zarr):
    """The codecs that zarr-python takes by itself, in chunks of the shape that hsfmt has; uint16 for want of bf16."""

    name, place = "zarr-python, default codecs, uint16", 20
    files = "zarr"

    def make(self, folder: Path, source: Source) -> None:
        import zarr

        chunks = (min(256, len(source.bits)), 1, source.hidden)
        array = zarr.create_array(folder / "array", shape=source.bits.shape, dtype="uint16", chunks=chunks)
        array[:] = source.bits


class _Ours(_Zarr):
    checks = "crc32c"
    codec = ""

    def make(self, folder: Path, source: Source) -> None:
        write_dataset(folder, source, self.codec)

    def open(self, folder: Path, lengths: Sequence[int], hidden: int, n_threads: int) -> None:
        from hsfmt.zarr_dtypes import register

        register()
        super().open(folder, lengths, hidden, n_threads)

    def path(self, folder: Path) -> Path:
        return array_folder(folder)


class OursNone(_Ours):
    """The array of hsfmt's dataset."""

    name, place, files, codec = "zarr-python, hsfmt's none array", 21, "hsfmt_none", "none"


class OursZstd(_Ours):
    """The array of hsfmt's dataset."""

    name, place, files, codec = "zarr-python, hsfmt's zstd array", 22, "hsfmt_zstd", "zstd"
    timed_start = False


class _Zarrs(_Ours):
    """zarrs' pipeline refuses bfloat16: its zarr.json says uint16 here, beside links to the very same shards."""

    packages = ("zarr", "zarrs")
    pipeline: ClassVar[dict[str, Any]] = {"path": "zarrs.ZarrsCodecPipeline", "strict": True}

    def path(self, folder: Path) -> Path:
        array = array_folder(folder)
        copy = folder.parent / f"{folder.name}_as_uint16"
        if not (copy / "zarr.json").exists():
            shutil.rmtree(copy, ignore_errors=True)
            copy.mkdir()
            (copy / "c").symlink_to(array / "c")
            document = json.loads((array / "zarr.json").read_text())
            document["data_type"], document["fill_value"] = "uint16", 0
            (copy / "zarr.json").write_text(json.dumps(document))
        return copy


class ZarrsNone(_Zarrs):
    """The array of hsfmt's dataset, as uint16."""

    name, place, files, codec = "zarr-python + zarrs, hsfmt's none array, as uint16", 23, "hsfmt_none", "none"
    timed_start = False


class ZarrsZstd(_Zarrs):
    """The array of hsfmt's dataset, as uint16."""

    name, place, files, codec = "zarr-python + zarrs, hsfmt's zstd array, as uint16", 24, "hsfmt_zstd", "zstd"
