"""What the figures were measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path

PACKAGES = (
    "hsfmt", "numpy", "torch", "numcodecs", "xxhash", "safetensors", "zarr", "zarrs", "tensorstore",
    "mosaicml-streaming", "litdata",
)  # fmt: skip


def cpu_model() -> str:
    """Return the processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def memory_gib() -> float:
    """Return the machine's memory in GiB."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def file_system(folder: Path) -> str:
    """Return the type of the file system that holds a folder."""
    best = ("", "unknown")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ")
        mount = left.split()[4]
        if folder.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, right.split()[0])
    return best[1]


def versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of what is compared; "not installed" for what is missing."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def describe(folder: Path, names: Sequence[str] = PACKAGES) -> list[str]:
    """Return the machine in lines of prose."""
    cores = len(os.sched_getaffinity(0))
    software = f"Linux {platform.release()}, {file_system(folder)}; Python {platform.python_version()}"
    return [
        f"{cpu_model()}, {cores} cores, {memory_gib():.0f} GiB of memory, {software}.",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in versions(names).items()) + ".",
    ]
