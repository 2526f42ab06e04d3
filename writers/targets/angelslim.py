"""Target `angelslim-eagle3`: offline data of AngelSlim 0.5 for EAGLE-3, every tensor with a batch axis of 1.

`rank_0/rows_{a}-{b}/data_{i}.ckpt`: input_ids and loss_mask int64 [1, T], hidden_states [1, T, 3H], the layers before
the last side by side, and target_hiddens [1, T, H], the last one, post-norm. Models that see have inputs_embeds
[1, T, H] and position_ids [3, 1, T] besides, from token columns of these names; None where a sample has none.
`vocab_mapping.pt` is written where the dataset has d2t and t2d.

No file says which layers they are: AngelSlim counts outputs of layers, HF id - 1. It reads the files in the order of
their paths as text, data_10 before data_2. The mask is not changed at its last position, by either side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hsfmt.errors import SampleError
from hsfmt.writers.targets.numbered_files import NumberedFilesTarget, rows_help, rows_path
from hsfmt.writers.targets.torch_files import AUX_HELP, as_tensor, side_by_side

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from hsfmt.writers.targets.base import ExportSample

_ROWS = 5000
_EMBEDS, _POSITIONS = "inputs_embeds", "position_ids"


class AngelSlimEagle3Target(NumberedFilesTarget):
    """Offline data of AngelSlim for EAGLE-3."""

    name: ClassVar[str] = "angelslim-eagle3"
    summary: ClassVar[str] = "AngelSlim eagle3: rank_0/rows_{a}-{b}/data_{i}.ckpt with hidden_states, target_hiddens"
    program: ClassVar[str] = "AngelSlim"
    final_norm: ClassVar[str | None] = "post"
    needs_final_state: ClassVar[bool] = True
    n_aux: ClassVar[int | None] = 3
    vocabulary: ClassVar[tuple[str, ...]] = ("vocab_mapping.pt",)
    kept_extras: ClassVar[tuple[str, ...]] = (_EMBEDS, _POSITIONS)
    option_help: ClassVar[Mapping[str, str]] = {**rows_help(_ROWS), **AUX_HELP}

    def path(self, number: int) -> str:
        """Return `rank_0/rows_{a}-{b}/data_{i}.ckpt`."""
        return f"rank_0/{rows_path(number, self.job.options, _ROWS)}.ckpt"

    def record(self, sample: ExportSample) -> dict[str, Any]:
        """Return ids, mask, states and what goes with images.

        Raises
        ------
        SampleError
            A column of theirs has another shape.
        """
        return {
            "input_ids": as_tensor(sample.input_ids)[None],
            "loss_mask": as_tensor(sample.loss_mask.astype(np.int64))[None],
            "hidden_states": side_by_side(sample.hidden_states[:, :-1])[None],
            "target_hiddens": as_tensor(sample.hidden_states[:, -1])[None],
            **{name: _seen(sample, name) for name in self.kept_extras if name in self.job.extras},
        }


def _seen(sample: ExportSample, name: str) -> torch.Tensor | None:
    values = sample.extras.get(name)
    if values is None:
        return None
    width = 3 if name == _POSITIONS else sample.hidden_states.shape[2]
    wanted = (len(sample.input_ids), width)
    if values.shape != wanted:
        where = f"{sample.sample_id}[{name}]"
        raise SampleError.at(where, expected=f"shape {list(wanted)}", got=str(list(values.shape)))
    return as_tensor(values.T)[:, None] if name == _POSITIONS else as_tensor(values)[None]
