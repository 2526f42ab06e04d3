"""Target `safetensors`: a .safetensors file a sample, with real bfloat16 and float8, and what is known as metadata."""

from __future__ import annotations

from typing import ClassVar

from hsfmt.writers.targets.sample_tensors import SampleFilesTarget


class SafetensorsTarget(SampleFilesTarget):
    """`hidden_states` [token, layer, hidden], `input_ids` int64, `loss_mask` bool, extras; JSON in metadata `hsfmt`."""

    name: ClassVar[str] = "safetensors"
    summary: ClassVar[str] = "a .safetensors file a sample, with all that the dataset has of it"
    suffix: ClassVar[str] = ".safetensors"
