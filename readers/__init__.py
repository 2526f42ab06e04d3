"""Reading: datasets, batches and their order, trainer views, verification and foreign source formats.

The public names are loaded on first use, so that reading a manifest imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hsfmt.readers.dataset import HiddenStateDataset as HiddenStateDataset
    from hsfmt.readers.device import DevicePrefetcher as DevicePrefetcher
    from hsfmt.readers.order import BatchOrder as BatchOrder
    from hsfmt.readers.packing import PackingCollator as PackingCollator
    from hsfmt.readers.prefetch import Prefetcher as Prefetcher
    from hsfmt.readers.shuffle import Locality as Locality

_PUBLIC = {
    "BatchOrder": "hsfmt.readers.order",
    "DevicePrefetcher": "hsfmt.readers.device",
    "HiddenStateDataset": "hsfmt.readers.dataset",
    "Locality": "hsfmt.readers.shuffle",
    "PackingCollator": "hsfmt.readers.packing",
    "Prefetcher": "hsfmt.readers.prefetch",
}
__all__ = ["BatchOrder", "DevicePrefetcher", "HiddenStateDataset", "Locality", "PackingCollator", "Prefetcher"]


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'hsfmt.readers' has no attribute {name!r}")
