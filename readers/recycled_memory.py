"""Memory for what is handed out; that of items which are gone is used again.

Fresh memory costs more than reading into it: each page is zeroed on its first touch. An allocation comes back when no
array, tensor or view over it is left, wherever in the program, and no sooner.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from hsfmt.readers.process_state import ForkAware

Bytes = npt.NDArray[np.uint8]

_ALIGNMENT_NBYTES = 64
_MIN_NBYTES = 1 << 20
_MAX_KEPT_NBYTES = 1 << 30


class RecycledMemory(ForkAware):
    """Hands out memory and keeps what comes back.

    Memory comes back in whatever thread drops the last reference, perhaps one that is in `empty`, and an interrupt may
    strike anywhere: so all steps are atomic operations of deques, and there is no lock.

    Parameters
    ----------
    max_kept_nbytes
        Most bytes that wait to be used again.
    min_nbytes
        Smaller allocations are left to NumPy.
    """

    def __init__(self, max_kept_nbytes: int = _MAX_KEPT_NBYTES, min_nbytes: int = _MIN_NBYTES) -> None:
        super().__init__()
        self._max_kept_nbytes = max_kept_nbytes
        self._min_nbytes = min_nbytes
        self.after_fork()

    def after_fork(self) -> None:
        """Leave the parent's memory alone: to write to it would copy it first."""
        self._kept: dict[int, deque[Bytes]] = {}
        self._sizes: deque[int] = deque()  # of all that is kept, the oldest first

    @property
    def nbytes_kept(self) -> int:
        """Bytes that wait to be used again."""
        return sum(self._sizes.copy())

    def empty(self, nbytes: int) -> Bytes:
        """Return uint8 [nbytes], uninitialised, aligned to 64 bytes.

        Raises
        ------
        MemoryError
            There is not enough.
        """
        if nbytes < self._min_nbytes:
            return _aligned(np.empty(nbytes + _ALIGNMENT_NBYTES, np.uint8), nbytes)
        size = allocated_nbytes(nbytes)
        try:
            buffer = self._kept[size].pop()
        except (KeyError, IndexError):
            buffer = np.empty(size, np.uint8)
        else:
            with suppress(ValueError):
                self._sizes.remove(size)
        # A view of a view refers to the array that owns the memory; only what is no array, a memoryview, stays between,
        # so that `lent` lives as long as anything made of it.
        lent = buffer.view()
        weakref.finalize(lent, self._give_back, buffer).atexit = False
        return _aligned(np.frombuffer(lent.data, np.uint8), nbytes)

    def _give_back(self, buffer: Bytes) -> None:
        self._kept.setdefault(len(buffer), deque()).append(buffer)
        self._sizes.append(len(buffer))
        with suppress(KeyError, IndexError):
            while self.nbytes_kept > self._max_kept_nbytes:
                self._kept[self._sizes.popleft()].popleft()


def _aligned(buffer: Bytes, nbytes: int) -> Bytes:
    start = -buffer.ctypes.data % _ALIGNMENT_NBYTES
    return buffer[start : start + nbytes]


def allocated_nbytes(nbytes: int) -> int:
    """Return how many bytes an allocation of `nbytes` takes."""
    return _size(nbytes) + _ALIGNMENT_NBYTES


def _size(nbytes: int) -> int:
    """Round up by an eighth at most: few sizes, so that memory fits the next item too. Untouched pages cost nothing."""
    step = 1 << max(0, nbytes.bit_length() - 4)
    return -(-nbytes // step) * step


MEMORY = RecycledMemory()
