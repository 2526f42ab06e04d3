"""Which rank this process is, and whether all ranks mean the same order; without importing torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from hsfmt.errors import Problem, UsageError
from hsfmt.readers.sample_requests import integer


def rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return both as given, else those of torch.distributed where it is initialised, else 0 and 1.

    Raises
    ------
    UsageError
        Only one is given, or they contradict each other; or the process was launched as one of several and
        torch.distributed is not initialised yet, so that every rank would take itself for the only one.
    """
    if (rank is None) != (world_size is None):
        raise UsageError.at("rank and world_size", expected="both or neither", got=f"{rank} and {world_size}")
    if rank is not None and world_size is not None:
        world_size = integer(world_size, "world_size", "an integer from 1 on", 1)
        rank = integer(rank, "rank", f"0 to {world_size - 1}", 0)
        if rank >= world_size:
            raise UsageError.at("rank", expected=f"0 to {world_size - 1}", got=str(rank))
        return rank, world_size
    distributed = _initialised()
    if distributed is not None:
        return int(distributed.get_rank()), int(distributed.get_world_size())
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched.isdecimal() and int(launched) > 1:
        raise UsageError.at(
            "rank and world_size",
            expected="torch.distributed to be initialised",
            got=f"WORLD_SIZE={launched} in the environment and no process group",
            remedy="call torch.distributed.init_process_group() first, or say rank= and world_size=",
        )
    return 0, 1


def check_all_ranks_agree(rank: int, world_size: int, values: Mapping[str, Any]) -> None:
    """Compare `values` over the ranks of torch.distributed: a collective, so that all of them fail if one differs.

    Nothing is compared where torch.distributed is not initialised, or has another number of processes than ranks take
    batches (those of a tensor parallel training, say): then there is no group to ask.

    Raises
    ------
    UsageError
        A value differs, two processes are the same rank, or the ranks can't be asked.
    """
    distributed = _initialised()
    if world_size == 1 or distributed is None or distributed.get_world_size() != world_size:
        return
    gathered: list[Any] = [None] * world_size
    try:
        distributed.all_gather_object(gathered, (rank, dict(values)))
    except RuntimeError as error:
        raise UsageError.at(
            "torch.distributed",
            expected=f"an answer of each of {world_size} ranks",
            got=str(error)[:300],
            remedy="make the order on all ranks, with NCCL after torch.cuda.set_device(), or say fingerprint= on all",
        ) from error
    ranks = [of_one[0] for of_one in gathered]
    problems = []
    if sorted(ranks) != list(range(world_size)):
        problems.append(Problem("rank", f"0 to {world_size - 1}, each once", f"{ranks}", "leave rank= to torch"))
    first = gathered[0][1]
    for key, expected in first.items():
        others = [(number, of_one.get(key)) for number, (_, of_one) in enumerate(gathered)]
        differ = [f"{value!r} on rank {number}" for number, value in others if value != expected]
        if differ:
            got = ", ".join(differ[:4]) + (f" … ({len(differ)} in all)" if len(differ) > 4 else "")
            problems.append(Problem(f"{key} of the order", f"{expected!r}, as on rank 0", got, _SAME))
    if problems:
        raise UsageError(problems)


_SAME = "give all ranks the same settings, and the same dataset: snapshot= takes a fingerprint"


def _initialised() -> Any:
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed if distributed and distributed.is_available() and distributed.is_initialized() else None
