"""Token ids for formats that hold them as int32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hsfmt.errors import SampleError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hsfmt.writers.targets.base import ExportSample


def int32_ids(sample: ExportSample) -> NDArray[np.int32]:
    """Return the token ids of a sample, int32 [token].

    Raises
    ------
    SampleError
        One is negative or 2^31 or more.
    """
    ids = sample.input_ids
    bad = np.flatnonzero((ids < 0) | (ids >= 2**31))
    if bad.size:
        got = f"{ids[bad[0]]} at token {bad[0]}"
        raise SampleError.at(f"{sample.sample_id}[input_ids]", expected="token ids from 0 to 2^31 - 1", got=got)
    return ids.astype(np.int32)
