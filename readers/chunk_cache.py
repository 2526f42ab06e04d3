"""Decoded chunks of narrow columns (ids, masks, scales): neighbours in a chunk are often read after another."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from hsfmt.readers.process_state import ForkAware

Array = npt.NDArray[Any]
Key = tuple[int, str, int]


class ChunkCache(ForkAware):
    """Checked, decoded chunks by (part number, column, chunk row), the least recently used dropped first.

    Parameters
    ----------
    max_nbytes
        Most bytes of all arrays together.
    """

    def __init__(self, max_nbytes: int) -> None:
        super().__init__()
        self._max_nbytes = max_nbytes
        self._arrays: OrderedDict[Key, Array] = OrderedDict()
        self.after_fork()

    def after_fork(self) -> None:
        """Take a new lock; what is cached stays. Another thread may have been halfway through a change."""
        self._lock = threading.Lock()
        self._nbytes = sum(array.nbytes for array in self._arrays.values())

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._nbytes

    def get(self, key: Key) -> Array | None:
        """Return the chunk, read-only, if it is here."""
        with self._lock:
            array = self._arrays.get(key)
            if array is not None:
                self._arrays.move_to_end(key)
            return array

    def put(self, key: Key, array: npt.NDArray[np.generic]) -> None:
        """Keep a chunk, which nobody may write to any more."""
        array.flags.writeable = False
        with self._lock:
            if key in self._arrays:
                return
            self._arrays[key] = array
            self._nbytes += array.nbytes
            self._trim()

    def _trim(self) -> None:
        while self._arrays and self._nbytes > self._max_nbytes:
            _, oldest = self._arrays.popitem(last=False)
            self._nbytes -= oldest.nbytes
