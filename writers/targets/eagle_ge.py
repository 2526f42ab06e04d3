"""Target `eagle-ge`: training data of EAGLE-1 and 2 as SafeAILab/EAGLE's ge_data scripts write it.

`0/data_{n}.ckpt`, a dict of input_ids int64 [T], hidden_state [T, H], the last state, post-norm, and loss_mask int64
[T]. The scripts write float16, and bfloat16 for Qwen2; the trainer widens any dtype to float32. It loads every file
under the folder, whatever its name, in the order of the file system: no other file may be put there. It zeroes the last
position of the mask itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hsfmt.errors import Problem
from hsfmt.writers.targets.torch_files import TorchFilesTarget, as_tensor, shown

if TYPE_CHECKING:
    from hsfmt.writers.targets.base import ExportSample


class EagleGeTarget(TorchFilesTarget):
    """Training data of EAGLE-1 and 2."""

    name: ClassVar[str] = "eagle-ge"
    summary: ClassVar[str] = "SafeAILab/EAGLE ge_data: 0/data_{n}.ckpt with hidden_state, the last state"
    program: ClassVar[str] = "EAGLE"
    final_norm: ClassVar[str | None] = "post"
    needs_final_state: ClassVar[bool] = True

    def _layer_problems(self) -> list[Problem]:
        layers = self.job.header.layers
        if len(layers) == 1:
            return []
        expected = "the final state alone, which is all that these files have a place for"
        remedy = f"leave the others out: --layers {layers[-1]}"
        return [Problem(self._where, expected, f"layers {shown(layers)}", remedy)]

    def dropped(self) -> list[str]:
        """The ids of the samples, metadata, extra columns and attachments."""
        return ["sample ids", *super().dropped()] + [f"attachment {name}" for name in self.job.attachments]

    def path(self, number: int) -> str:
        """Return `0/data_{n}.ckpt`."""
        return f"0/data_{number}.ckpt"

    def record(self, sample: ExportSample) -> dict[str, Any]:
        """Return ids, state and mask."""
        return {
            "input_ids": as_tensor(sample.input_ids),
            "hidden_state": as_tensor(sample.hidden_states[:, -1]),
            "loss_mask": as_tensor(sample.loss_mask.astype(np.int64)),
        }
