"""tensorstore, on hsfmt's arrays: it reads bfloat16 and our codecs natively."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from peers.base import Peer, Request, Source
from peers.blosc_chunks import array_folder
from peers.hsfmt_dataset import write_dataset


class _Ours(Peer):
    packages = ("tensorstore",)
    checks = "crc32c"
    returns = "a new array"
    own_threads = True
    codec = ""

    def make(self, folder: Path, source: Source) -> None:
        write_dataset(folder, source, self.codec)

    def open(self, folder: Path, lengths: Sequence[int], hidden: int, n_threads: int) -> None:
        import tensorstore as ts

        # cache_pool 0: every read really reads, as with all the others.
        context = ts.Context(
            {
                "data_copy_concurrency": {"limit": n_threads},
                "file_io_concurrency": {"limit": n_threads},
                "cache_pool": {"total_bytes_limit": 0},
            }
        )
        spec = {"driver": "zarr3", "kvstore": f"file://{array_folder(folder).absolute()}/"}
        self.store = ts.open(spec, open=True, context=context).result()
        self.starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()

    def read(self, request: Request, out: Any = None) -> Any:
        first = self.starts[request.sample]
        return self.store[first + request.start : first + request.stop, request.planes].read().result()


class OursNone(_Ours):
    """The array of hsfmt's dataset."""

    name, place, files, codec = "tensorstore, hsfmt's none array", 25, "hsfmt_none", "none"
    timed_start = False


class OursZstd(_Ours):
    """The array of hsfmt's dataset."""

    name, place, files, codec = "tensorstore, hsfmt's zstd array", 26, "hsfmt_zstd", "zstd"
