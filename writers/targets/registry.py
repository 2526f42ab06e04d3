"""The targets by name; a target's module is imported when it is asked for, so that `--help` imports none."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from hsfmt.errors import UsageError

if TYPE_CHECKING:
    from hsfmt.writers.targets.base import Target

_CLASSES = {
    "safetensors": ("safetensors_files", "SafetensorsTarget"),
    "npz": ("npz_files", "NpzTarget"),
    "zarr": ("zarr_group", "ZarrTarget"),
    "vllm": ("vllm_files", "VllmTarget"),
    "speculators": ("speculators_rows", "SpeculatorsTarget"),
    "speculators-fp8": ("speculators_rows", "SpeculatorsFp8Target"),
    "speculators-pt": ("speculators_pt", "SpeculatorsPtTarget"),
    "specforge-eagle3": ("specforge", "SpecForgeEagle3Target"),
    "specforge-dflash": ("specforge", "SpecForgeDFlashTarget"),
    "specforge-dspark": ("specforge", "SpecForgeDSparkTarget"),
    "modelopt": ("modelopt", "ModelOptTarget"),
    "angelslim-eagle3": ("angelslim", "AngelSlimEagle3Target"),
    "eagle-ge": ("eagle_ge", "EagleGeTarget"),
    "deepspec": ("deepspec", "DeepSpecTarget"),
}
TARGET_NAMES = tuple(_CLASSES)


def target_class(name: str) -> type[Target]:
    """Return the target of that name.

    Raises
    ------
    UsageError
        There is none.
    """
    if name not in _CLASSES:
        raise UsageError.at("--to", expected=f"one of {', '.join(TARGET_NAMES)}", got=repr(name))
    module, kind = _CLASSES[name]
    target: type[Target] = getattr(import_module(f"hsfmt.writers.targets.{module}"), kind)
    return target
