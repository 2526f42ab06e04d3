"""Target `npz`: a .npz file a sample; NumPy has no bfloat16 and float8, of which it holds the bit patterns."""

from __future__ import annotations

from typing import ClassVar

from hsfmt.writers.targets.sample_tensors import SampleFilesTarget


class NpzTarget(SampleFilesTarget):
    """The arrays of target `safetensors`; bit patterns say their real type in `NAME.dtype`; JSON in `hsfmt`."""

    name: ClassVar[str] = "npz"
    summary: ClassVar[str] = "a .npz file a sample; bfloat16 as uint16 bit patterns"
    suffix: ClassVar[str] = ".npz"
