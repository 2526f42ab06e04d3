"""How a conversion is cut into work: processes, slices, what each slice is told, and the room that it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePath

from hsfmt.cli.converting.collisions import Comparison
from hsfmt.cli.converting.committed_copies import FOLDERS, Copies, folders_of
from hsfmt.cli.converting.converted_sources import DELETES
from hsfmt.cli.converting.plan import Plan
from hsfmt.cli.converting.slices import Task
from hsfmt.cli.estimate import Estimate
from hsfmt.cores import n_cores
from hsfmt.manifest import PartManifest

# Below either a further worker takes longer to start than it saves.
_WORKER_ITEMS, _WORKER_NBYTES = 8, 64 << 20
_QUEUE_NBYTES, _LEAST_QUEUE_NBYTES = 256 << 20, 16 << 20


def n_workers(plan: Plan, numbers: list[int]) -> int:
    """Return how many of the workers asked for are worth their start."""
    worthwhile = max(-(-len(numbers) // _WORKER_ITEMS), -(-total_nbytes(plan, numbers) // _WORKER_NBYTES))
    return max(1, min(plan.request.workers, worthwhile, len(numbers)))


def total_nbytes(plan: Plan, numbers: list[int]) -> int:
    """Return the bytes of items."""
    return sum(plan.source.items[n].nbytes for n in numbers)


def cut_slices(plan: Plan, numbers: list[int], total: int, workers: int) -> list[list[int]]:
    """Cut the items into runs of about equal bytes, no larger than a part, at least one a worker."""
    if workers == 1 and not plan.request.delete_source:
        return [numbers]
    target = min(plan.request.part_size, max(1, -(-total // workers)))
    slices: list[list[int]] = [[]]
    filled = 0
    for number in numbers:
        nbytes = plan.source.items[number].nbytes
        if slices[-1] and filled + nbytes > target:
            slices.append([])
            filled = 0
        slices[-1].append(number)
        filled += nbytes
    return slices


def needed_room(plan: Plan, whole: Estimate) -> Estimate:
    """Return the estimate with what has to be free: not for all of it where each source file goes in its turn."""
    if not (plan.request.delete_source and plan.store.is_local):
        return whole
    if _device(plan.store.url) != _device(str(plan.source.root)):
        return whole
    largest, containers = 0, Counter[str]()
    for number in plan.pending:
        item = plan.source.items[number]
        largest = max(largest, item.nbytes)
        containers.update(dict.fromkeys(item.shared, item.nbytes))
    # A part a worker, larger by its last sample; and what has to be whole before a file of many samples can go.
    held = max(largest, *containers.values(), 0)
    peak = n_workers(plan, plan.pending) * (plan.request.part_size + held)
    return replace(whole, stored_nbytes=min(whole.stored_nbytes, peak))


def _device(folder: str) -> int:
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    return path.stat().st_dev


def conversion_task(plan: Plan, workers: int) -> Task:
    """Return what the slices that convert are told."""
    request, header, meaning = plan.request, plan.header, plan.meaning
    nonfinite = request.nonfinite or request.on_bad
    producer = {
        **meaning.producer,
        "command": list(request.command),
        "host": plan.origin.host,
        "options": {
            **plan.origin.options,
            "id_prefix": request.id_prefix,
            "nonfinite": nonfinite,
            DELETES: request.delete_source,
            "min_loss_tokens": request.reshaping.min_loss_tokens,
            "on_bad": request.on_bad,
            "part_nbytes": request.part_size,
            "workers": workers,
        },
        "source": plan.origin.folder,
        "source_files": sum(len(item.paths) for item in plan.source.items)
        + sum(support.role == "container" for support in plan.source.support),
        FOLDERS: folders_of(plan.source, plan.origin.folder, plan.pending),
        "source_items": len(plan.source.items),
        "source_kind": plan.source.name,
        "source_nbytes": sum(item.nbytes for item in plan.source.items),
        "started": plan.started.isoformat(timespec="microseconds"),
    }
    if meaning.model:
        producer["source_model"] = meaning.model
    cores = n_cores()
    writer = {
        "layers": header.layers,
        "hidden_size": header.hidden_size,
        "final_norm": header.final_norm,
        "dtype": header.dtype,
        "model": header.model,
        "tokenizer": header.tokenizer,
        "scaling": header.scaling,
        "codec": request.codec,
        "part_nbytes": request.part_size,
        "part_seconds": None,
        "producer": producer,
        "on_duplicate": "skip",
        "nonfinite": "keep" if nonfinite == "keep" else "raise",
        "seal": False,
        "threads": None if workers == 1 else max(1, min(8, cores // workers)),
        "queue_nbytes": _queue_nbytes(request.memory_nbytes, workers),
        "extras": meaning.extras,
    }
    return Task(
        source=plan.source,
        store=plan.store,
        header=header,
        writer=writer,
        on_bad=request.on_bad,
        nonfinite=nonfinite,
        recorded_holes=committed_holes(plan.manifests),
        reshaping=request.reshaping,
        unfinished=plan.copies.unfinished(),
        kept=plan.retracted,
        remedy=_conflict_remedy(plan),
        delete=request.delete_source,
    )


def _queue_nbytes(memory_nbytes: int | None, workers: int) -> int:
    """Return the bytes that a worker may have between its samples and the disk: a quarter of its share at most."""
    if memory_nbytes is None:
        return _QUEUE_NBYTES
    return max(_LEAST_QUEUE_NBYTES, min(_QUEUE_NBYTES, memory_nbytes // (4 * workers)))


def comparison(plan: Plan, copies: Copies) -> Comparison:
    """Return what the slices that compare are told."""
    request = plan.request
    return Comparison(
        source=plan.source,
        store=plan.store,
        header=plan.existing or plan.header,
        copies=copies,
        reshaping=request.reshaping,
        on_bad=request.on_bad,
        remedy=_conflict_remedy(plan),
        delete=request.delete_source,
        kept=plan.retracted,
    )


def _conflict_remedy(plan: Plan) -> str:
    prefix = plan.request.id_prefix
    if prefix is None:
        name = PurePath(plan.origin.folder).name
        remedy = f"where folders have equal ids, give each its own: --id-prefix {name}/"
    else:
        remedy = f"give this folder another --id-prefix than {prefix!r}"
    return f"{remedy}; a newer version of the same sample needs a dataset of its own"


def committed_holes(manifests: Mapping[str, PartManifest]) -> dict[str, str]:
    """Return id to reason of all holes that are committed."""
    return {key: reason for manifest in manifests.values() for key, reason in manifest.holes.items()}
