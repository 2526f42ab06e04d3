"""A drafter's vocabulary as SpecForge, AngelSlim and speculators 0.4 keep it: d2t int64 [draft], t2d bool [target].

Draft token i is token i + d2t[i], and t2d marks those tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hsfmt.errors import Problem
from hsfmt.writers.targets.speculators_vocab import attached, vocab_problems

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hsfmt.writers.targets.base import ExportJob

_TYPES = {"d2t": np.int64, "t2d": np.bool_}


def tables(job: ExportJob) -> dict[str, NDArray[Any]]:
    """Return d2t and t2d as both programs have them, from the attachments; nothing where the dataset has none."""
    found = attached(job)
    return {name: found[name].astype(kind) for name, kind in _TYPES.items() if name in found}


def mapping_problems(job: ExportJob) -> list[Problem]:
    """Say what is wrong with the attachments that the mapping is made of."""
    problems = vocab_problems(job)
    found = tables(job)
    if problems or not found:
        return problems
    tokens = np.arange(len(found["d2t"])) + found["d2t"]
    if np.array_equal(np.flatnonzero(found["t2d"]), tokens):
        return []
    expected = "d2t with the distance from each draft token to its token, and t2d with those tokens marked"
    return [Problem("attachments d2t, t2d", expected, "others")]


def unmapped(job: ExportJob) -> list[str]:
    """Name the attachments that a mapping has no place for."""
    return [f"attachment {name}" for name in job.attachments if name.removesuffix(".npy").split("-")[0] not in _TYPES]
