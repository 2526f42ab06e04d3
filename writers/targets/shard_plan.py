"""Which samples share a file of a format that puts many into one, and the sidecar with the ids that it can't hold."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import numpy as np

from hsfmt.errors import Problem
from hsfmt.writers.targets.atomic import writing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from hsfmt.writers.targets.base import ExportJob

SAMPLE_LIST = "hsfmt_samples.jsonl"
_UNITS = {"": 1, **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}}
_SIZE = re.compile(r"([0-9]{1,15})\s*([a-z]*)")


def plan_shards(nbytes: NDArray[np.int64], limit: int) -> list[range]:
    """Put samples into shards in their order: as many as fit the limit, and at least one.

    >>> plan_shards(np.array([3, 3, 3, 9, 1]), 7)
    [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    """
    ends = np.concatenate([[0], np.cumsum(nbytes, dtype=np.int64)])
    shards, start = [], 0
    while start < len(nbytes):
        stop = max(start + 1, int(np.searchsorted(ends, ends[start] + limit, side="right")) - 1)
        shards.append(range(start, stop))
        start = stop
    return shards


def size_option(options: Mapping[str, str], name: str, default: int) -> int:
    """Return a size that the user gave in bytes or as 64GiB; 0 if it is none.

    >>> size_option({"size": "64 GiB"}, "size", 1), size_option({}, "size", 7), size_option({"size": "many"}, "size", 7)
    (68719476736, 7, 0)
    """
    if name not in options:
        return default
    match = _SIZE.fullmatch(options[name].strip().lower())
    return int(match[1]) * _UNITS[match[2]] if match and match[2] in _UNITS else 0


def size_problems(options: Mapping[str, str], name: str) -> list[Problem]:
    """Say whether what the user gave for a size is none."""
    if size_option(options, name, 1) > 0:
        return []
    return [Problem(f"--option {name}", "a size like 64GiB or 1048576", repr(options[name]))]


def write_sample_list(job: ExportJob) -> str:
    """Write the sidecar: a JSON object a line, in the order of the samples, with the id and the number of tokens.

    The trainers don't read it. Returns its path, relative to the folder.
    """
    with writing(job.folder / SAMPLE_LIST) as file:
        for sample_id, n_tokens in zip(job.sample_ids, job.n_tokens.tolist(), strict=True):
            file.write(json.dumps({"id": sample_id, "n_tokens": n_tokens}).encode() + b"\n")
    return SAMPLE_LIST
