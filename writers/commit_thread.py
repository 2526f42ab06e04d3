"""The thread that makes ended parts durable, one after the other, while the next one is being written.

Spec: rules WRITE-1 and WRITE-6.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from hsfmt.tables import pack_strings
from hsfmt.writers.part_writer import PartWriter, iter_ids

_log = logging.getLogger("hsfmt")
_MAX_WAITING = 2

_Packed = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


class CommitThread:
    """Commits parts in the order they ended, and keeps the ids that became durable. Called under the writer's lock.

    Parameters
    ----------
    where
        The dataset, for the log.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="hsfmt-commit")
        self._waiting: list[Future[None]] = []
        self._durable: list[_Packed] = []

    def submit(self, part: PartWriter) -> None:
        """Hand over an ended part."""
        self._waiting.append(self._executor.submit(self._finish, part))

    def check(self) -> None:
        """Raise what a part failed with, if one did."""
        while self._waiting and self._waiting[0].done():
            self._waiting.pop(0).result()

    def limit(self) -> None:
        """Wait until few parts are left: each holds its last rows in memory, and a thread."""
        while len(self._waiting) > _MAX_WAITING:
            self._waiting.pop(0).result()

    def wait(self) -> None:
        """Wait until all parts are durable; raise what one failed with."""
        while self._waiting:
            self._waiting.pop(0).result()

    def take_ids(self) -> list[str]:
        """Return the ids that became durable since the last call."""
        packed, self._durable = self._durable, []
        return [sample_id for ids in packed for sample_id in iter_ids(ids)]

    def close(self) -> None:
        """End the thread once it is idle; say which failures nobody has been told of."""
        self._executor.shutdown(wait=True)
        for future in self._waiting:
            if (error := future.exception()) is not None:
                _log.error("%s: a part could not be committed: %s", self._where, error)

    def _finish(self, part: PartWriter) -> None:
        manifest = part.finish()
        _log.info("%s: committed part %s: %s", self._where, manifest.part, manifest.counts)
        # Only an atomic append: this thread must not wait for the writer's lock, whose holder may wait for it.
        self._durable.append(pack_strings(part.ids))
