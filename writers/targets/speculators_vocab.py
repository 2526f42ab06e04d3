"""What speculators 0.8 and later keep beside a dataset for a drafter with a vocabulary of its own.

`d2t-{V}.npy` int64 [draft vocabulary V], `t2d-{V}.npy` bool [target vocabulary], and `token_freq.pt`: a dict of token
id to its number of supervised occurrences. They come from dataset-level attachments of these names; a count of 0 is
left out of the dict.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from hsfmt.errors import Problem
from hsfmt.writers.targets.atomic import writing
from hsfmt.writers.tensor_files import save_torch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from hsfmt.writers.targets.base import ExportJob

FREQUENCIES = "token_freq.pt"
_KINDS = {"d2t": "iu", "t2d": "biu", "token_freq": "iu"}


def attached(job: ExportJob) -> dict[str, NDArray[np.generic]]:
    """Return the attachments that speculators has a place for, by role: d2t, t2d, token_freq."""
    return {role: job.attachments[names[0]] for role, names in _of_role(job).items()}


def _of_role(job: ExportJob) -> dict[str, list[str]]:
    """Return the names of the attachments that may be of each role; of equal ones the first."""
    found: dict[str, list[str]] = {}
    for name, array in job.attachments.items():
        role = name.removesuffix(".npy").split("-")[0]
        if role in _KINDS and not any(np.array_equal(job.attachments[other], array) for other in found.get(role, ())):
            found.setdefault(role, []).append(name)
    return found


def vocab_problems(job: ExportJob) -> list[Problem]:
    """Say what is wrong with the attachments, and whether torch is missing to write one."""
    problems = [
        Problem(
            f"attachments {', '.join(names)}",
            f"one that is {role}",
            str(len(names)),
            f"let go of the others: hsfmt seal URL --drop-attachment {names[-1]}",
        )
        for role, names in _of_role(job).items()
        if len(names) > 1
    ]
    found = attached(job)
    for role, array in found.items():
        if array.ndim != 1 or array.dtype.kind not in _KINDS[role] or not array.size:
            got = f"{array.dtype.name} {list(array.shape)}"
            problems.append(Problem(f"attachment {role}", "whole numbers, shape [vocabulary]", got))
    if ("d2t" in found) != ("t2d" in found):
        (lone,) = {"d2t", "t2d"} & set(found)
        remedy = f"let go of it: hsfmt seal URL --drop-attachment {_of_role(job)[lone][0]}"
        expected = "d2t and t2d together, as speculators takes them"
        problems.append(Problem(f"attachment {lone}", expected, "one of them", remedy))
    elif "d2t" in found and int(np.count_nonzero(found["t2d"])) != len(found["d2t"]):
        got = f"{np.count_nonzero(found['t2d'])} of t2d and {len(found['d2t'])} of d2t"
        problems.append(Problem("attachments d2t, t2d", "draft vocabularies of one size", got))
    if "token_freq" in found and find_spec("torch") is None:
        problems.append(Problem(FREQUENCIES, "torch, which writes it", "none", "pip install 'hsfmt[convert]'"))
    return problems


def vocab_paths(job: ExportJob) -> tuple[str, ...]:
    """Return the names of the files that `write_vocab` writes."""
    return tuple(_names(attached(job)).values())


def write_vocab(job: ExportJob) -> tuple[str, ...]:
    """Write the files into the folder; return their names.

    Raises
    ------
    OSError
        The storage fails.
    """
    found = attached(job)
    names = _names(found)
    for role, name in names.items():
        if role == "token_freq":
            _write_counts(job.folder / name, found[role])
            continue
        with writing(job.folder / name) as file:
            np.lib.format.write_array(file, found[role].astype(np.int64 if role == "d2t" else np.bool_))
    return tuple(names.values())


def _names(found: Mapping[str, NDArray[np.generic]]) -> dict[str, str]:
    n = len(found.get("d2t", ()))
    return {role: FREQUENCIES if role == "token_freq" else f"{role}-{n}.npy" for role in sorted(found)}


def _write_counts(path: Path, counts: NDArray[np.generic]) -> None:
    tokens = np.flatnonzero(counts)
    with writing(path) as file:
        save_torch(dict(zip(tokens.tolist(), counts[tokens].tolist(), strict=True)), file)
