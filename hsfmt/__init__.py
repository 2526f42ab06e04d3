"""hsfmt: the storage layer for multi-layer LLM hidden states.

The public names are loaded on first use, so that `import hsfmt` imports neither torch nor zarr.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hsfmt.maintenance.collect import collect as collect_garbage
    from hsfmt.maintenance.compact import compact as compact
    from hsfmt.maintenance.merge import merge as merge
    from hsfmt.maintenance.repair import repair as repair
    from hsfmt.maintenance.transfer import transfer as transfer
    from hsfmt.readers.arrays import open_zarr as open_zarr
    from hsfmt.readers.dataset import HiddenStateDataset as HiddenStateDataset
    from hsfmt.sealing import seal as seal
    from hsfmt.writers.dataset_writer import DatasetWriter as DatasetWriter

__version__ = "0.1.0"

_RENAMED = {"collect_garbage": "collect"}
_PUBLIC = {
    "DatasetWriter": "hsfmt.writers.dataset_writer",
    "HiddenStateDataset": "hsfmt.readers.dataset",
    "compact": "hsfmt.maintenance.compact",
    "collect_garbage": "hsfmt.maintenance.collect",
    "merge": "hsfmt.maintenance.merge",
    "open_zarr": "hsfmt.readers.arrays",
    "repair": "hsfmt.maintenance.repair",
    "seal": "hsfmt.sealing",
    "transfer": "hsfmt.maintenance.transfer",
}
__all__ = [
    "DatasetWriter",
    "HiddenStateDataset",
    "__version__",
    "collect_garbage",
    "compact",
    "merge",
    "open_zarr",
    "repair",
    "seal",
    "transfer",
]

# In a source tree writers/, readers/ and cli/ lie beside this folder; installed, setuptools puts them inside it.
_CHECKOUT = Path(__file__).resolve().parent.parent
if not (Path(__file__).parent / "readers").is_dir() and (_CHECKOUT / "readers" / "__init__.py").is_file():
    __path__.append(str(_CHECKOUT))


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), _RENAMED.get(name, name))
    raise AttributeError(f"module 'hsfmt' has no attribute {name!r}")
