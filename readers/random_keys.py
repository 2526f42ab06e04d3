"""Random 64-bit keys that are the same on every machine and with every release of NumPy.

NumPy promises that of a bit generator's raw stream, but neither of `Generator.permutation` nor of seeding: so the key
of a Philox generator is a digest of ours, and what is shuffled is sorted by its raw output.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

_TAG = "hsfmt:order:1"


class RandomKeys:
    """The random keys of one epoch.

    Parameters
    ----------
    seed, epoch
        Any integers; others give keys that have nothing to do with these.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._name = f"{_TAG}:{seed}:{epoch}"

    def draw(self, purpose: str, n: int) -> npt.NDArray[np.uint64]:
        """Return uint64 [n]; the same purpose, the same keys.

        Sorted by them stably, n things are in an order that is as likely as any other.
        """
        key = xxhash.xxh3_128_intdigest(f"{self._name}:{purpose}".encode("ascii"))
        raw: npt.NDArray[np.uint64] = np.random.Philox(key=key).random_raw(n)
        return raw
