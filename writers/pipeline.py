"""The machinery between write() and the disk: encoding threads and a bound on the bytes in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hsfmt.codecs import crc32c, encode
from hsfmt.cores import n_cores
from hsfmt.digests import chunk_digest


class Encoded(NamedTuple):
    """An encoded chunk: payload, its xxh3_64, and the crc32c that follows it in the shard."""

    payload: bytes | memoryview
    digest: int
    crc: bytes


def encode_chunk(codec: str, chunk: npt.NDArray[np.generic]) -> Encoded:
    """Encode a C-contiguous chunk; runs in a pool thread."""
    payload = encode(codec, chunk)
    return Encoded(payload, chunk_digest(payload), crc32c(payload))


class ByteBudget:
    """A bound on bytes in flight; one request above the bound is let through alone.

    What is acquired must be on its way to the disk already: bytes that wait for more samples would block for ever.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._freed = threading.Condition()

    def acquire(self, nbytes: int) -> None:
        """Wait until `nbytes` fit."""
        with self._freed:
            while self._used and self._used + nbytes > self._limit:
                self._freed.wait()
            self._used += nbytes

    def release(self, nbytes: int) -> None:
        """Give `nbytes` back."""
        with self._freed:
            self._used -= nbytes
            self._freed.notify_all()


class Pipeline:
    """Threads that encode, shared by the parts of one writer; each part brings its own ordered output thread."""

    def __init__(self, threads: int | None, queue_nbytes: int) -> None:
        self.budget = ByteBudget(queue_nbytes)
        self._pool = ThreadPoolExecutor(threads or min(8, n_cores()), thread_name_prefix="hsfmt-encode")

    def encode(self, codec: str, chunk: npt.NDArray[np.generic]) -> Future[Encoded]:
        """Start encoding a chunk."""
        return self._pool.submit(encode_chunk, codec, chunk)

    def close(self) -> None:
        """End the threads once they are idle."""
        self._pool.shutdown(wait=True)


class OutputThread:
    """Runs tasks in order on one thread; after the first error the rest are skipped, their cleanups still run."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="hsfmt-output")
        self.error: BaseException | None = None

    def submit(self, task: Callable[[], None], cleanup: Callable[[], None]) -> None:
        """Queue a task; `cleanup` runs after it, whatever happened."""

        def run() -> None:
            try:
                if self.error is None:
                    task()
            except BaseException as error:  # noqa: BLE001  kept, and raised by the next call of the writer
                self.error = error
            finally:
                cleanup()

        self._executor.submit(run)

    def finish(self) -> None:
        """Wait for all tasks and raise the first error.

        Raises
        ------
        Exception
            Whatever a task raised first.
        """
        self._executor.shutdown(wait=True)
        self.check()

    def check(self) -> None:
        """Raise the first error so far."""
        if self.error is not None:
            raise self.error
