"""Memory for the tensors that are handed out; in a DataLoader's worker such that torch sends it without a copy.

A worker's tensors reach the trainer as file descriptors of shared memory. What is no shared memory yet, torch copies
into an object in /dev/shm, one a tensor: 64 MB hold all of them together in many a container, and each keeps a
descriptor open on both sides. So a worker reads into an anonymous memory file (memfd), one for a whole batch, mapped by
torch as if it had come from another process: that one is sent as it is, and needs no /dev/shm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import get_worker_info

from hsfmt.readers.recycled_memory import MEMORY
from hsfmt.readers.shared_memory import SHARED_MEMORY

Item = dict[str, Any]
Spec = tuple[tuple[int, ...], torch.dtype]

_ALIGNMENT_NBYTES = 64


def in_worker() -> bool:
    """Say whether this is a worker process of a DataLoader."""
    return get_worker_info() is not None


def empty_tensors(specs: Sequence[Spec], *, pin_memory: bool = False) -> list[torch.Tensor]:
    """Return uninitialised, contiguous tensors out of one allocation, each aligned to 64 bytes.

    The memory is free again when the last of them is gone, in a worker's case in all processes.

    Parameters
    ----------
    specs
        (shape, dtype) of each; sizes of 0 are fine.
    pin_memory
        Page-locked memory where there is CUDA. A worker's memory is shared instead: the DataLoader pins what arrives.

    Raises
    ------
    StorageError
        A worker may not open another file.
    MemoryError, RuntimeError
        There is not enough memory.
    """
    return carve(_allocate(nbytes_of(specs), pin_memory=pin_memory), specs)


def nbytes_of(specs: Sequence[Spec]) -> int:
    """Return the bytes that tensors take together, each aligned."""
    return sum(_aligned_nbytes(spec) for spec in specs)


def carve(memory: torch.Tensor, specs: Sequence[Spec]) -> list[torch.Tensor]:
    """Return tensors of some shapes and dtypes one behind the other in uint8 [nbytes_of(specs)]."""
    tensors, start = [], 0
    for shape, dtype in specs:
        tensors.append(memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
        start += _aligned_nbytes((shape, dtype))
    return tensors


def share(items: list[Item]) -> list[Item]:
    """Move what is in ordinary memory to one shared allocation, in a worker; elsewhere the items stay as they are.

    Tensors that share memory go on to. Raises as `empty_tensors`.

    Parameters
    ----------
    items
        Their tensors are replaced.
    """
    if not in_worker():
        return items
    places = [(item, key, value) for item in items for key, value in item.items() if isinstance(value, torch.Tensor)]
    found = sorted((value.untyped_storage() for _, _, value in places), key=torch.UntypedStorage.nbytes)
    moving = {storage.data_ptr(): storage for storage in found if storage.nbytes() and not storage.is_shared()}
    shared = empty_tensors([((storage.nbytes(),), torch.uint8) for storage in moving.values()])
    if not all(tensor.untyped_storage().is_shared() for tensor in shared):
        return items
    moved = dict(zip(moving, shared, strict=True))
    for start, target in moved.items():
        target.copy_(torch.empty(0, dtype=torch.uint8).set_(moving[start]))
    for item, key, value in places:
        start = value.untyped_storage().data_ptr()
        if start in moved:
            offset = moved[start].storage_offset() // value.itemsize + value.storage_offset()
            place = moved[start].untyped_storage(), offset, value.size(), value.stride()
            item[key] = torch.empty(0, dtype=value.dtype).set_(*place)
    return items


def _allocate(nbytes: int, *, pin_memory: bool) -> torch.Tensor:
    """Return uint8 [nbytes]."""
    if in_worker():
        shared = SHARED_MEMORY.storage(nbytes)
        if shared is not None:
            return torch.empty(0, dtype=torch.uint8).set_(shared)
        pin_memory = False
    if pin_memory and torch.cuda.is_available():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(MEMORY.empty(nbytes))


def _aligned_nbytes(spec: Spec) -> int:
    shape, dtype = spec
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
