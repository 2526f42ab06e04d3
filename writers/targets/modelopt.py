"""Target `modelopt`: what NVIDIA Model-Optimizer's collect_hidden_states scripts write, for its offline training.

`{conversation}.pt`, a dict of input_ids and loss_mask int64 [T], hidden_states [T, H], the last state,
aux_hidden_states [T, A*H], the layers before it side by side, and conversation_id. Files are named after the samples'
ids; conversation_id is the one that the sample's metadata have, else its id.

* The last state is post-norm unless the file says `hidden_states_prenorm`, as it does for a dataset with the state
  before the norm. ModelOpt reads that since 0.46, and applies the norm itself.
* A mask that nobody gave is left out: with answer_only_loss ModelOpt then stops, where it would train on every token.
* No file says which layers they are: `eagle_aux_hidden_state_layer_ids` counts outputs of layers, HF id - 1. ModelOpt
  reads the files in the order of the file system.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hsfmt.errors import Problem
from hsfmt.writers.targets.names import file_stems
from hsfmt.writers.targets.torch_files import TorchFilesTarget, as_tensor, side_by_side

if TYPE_CHECKING:
    from hsfmt.writers.targets.base import ExportSample

_ID = "conversation_id"


class ModelOptTarget(TorchFilesTarget):
    """Hidden states for ModelOpt's EAGLE and DFlash training."""

    name: ClassVar[str] = "modelopt"
    summary: ClassVar[str] = "NVIDIA Model-Optimizer: {conversation}.pt with hidden_states and aux_hidden_states"
    program: ClassVar[str] = "ModelOpt"
    needs_final_state: ClassVar[bool] = True

    def problems(self) -> list[Problem]:
        """Say what of the layers is wrong, and that the norm is unknown."""
        problems = super().problems()
        if self.job.header.final_norm == "unknown":
            expected = "a final state known to be before or after the final norm, since the files say which"
            remedy = "convert or capture the data anew with --final-norm pre or post, whichever is true"
            problems.append(Problem(self._where, expected, "final_norm unknown", remedy))
        return problems

    def dropped(self) -> list[str]:
        """Metadata, extra columns and attachments."""
        return super().dropped() + [f"attachment {name}" for name in self.job.attachments]

    @cached_property
    def _stems(self) -> list[str]:
        return file_stems(self.job.sample_ids)

    def path(self, number: int) -> str:
        """Return `{conversation}.pt`."""
        return f"{self._stems[number]}.pt"

    def record(self, sample: ExportSample) -> dict[str, Any]:
        """Return ids, states, mask and the conversation."""
        conversation = sample.metadata.get(_ID)
        record: dict[str, Any] = {
            "input_ids": as_tensor(sample.input_ids),
            "hidden_states": as_tensor(sample.hidden_states[:, -1]),
            "aux_hidden_states": side_by_side(sample.hidden_states[:, :-1]),
        }
        if sample.mask_given:
            record["loss_mask"] = as_tensor(sample.loss_mask.astype(np.int64))
        record[_ID] = conversation if type(conversation) in (str, int) else sample.sample_id
        if self.job.header.final_norm == "pre":
            record["hidden_states_prenorm"] = True
        return record
