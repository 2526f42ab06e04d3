"""What BatchOrder looks at of a dataset, without one."""

from types import SimpleNamespace

import numpy as np


class Stub:
    """Samples of these lengths, cut into parts of about equal size."""

    def __init__(self, lengths, parts=2, *, fingerprint=f"xxh3_128:{0:032x}", is_live=False, part=None) -> None:
        n = len(lengths)
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.fingerprint = fingerprint
        self.part = np.asarray(np.arange(n) * parts // max(n, 1) if part is None else part, dtype=np.int32)
        row = [int((self.part[:i] == p).sum()) for i, p in enumerate(self.part)] if n < 1000 else np.arange(n)
        snapshot = SimpleNamespace(part=self.part, row=np.asarray(row, dtype=np.int32))
        self.reader = SimpleNamespace(is_live=is_live, snapshot=snapshot)

    def __len__(self):
        return len(self.lengths)

    @property
    def sample_ids(self):
        return [f"id-{number:03}" for number in range(len(self))]


def lognormal(n, median=1400, longest=8192, seed=0):
    """Lengths as real datasets have them."""
    lengths = np.random.default_rng(seed).lognormal(np.log(median), 0.65, n)
    return np.clip(lengths.astype(np.int64), 16, longest)
