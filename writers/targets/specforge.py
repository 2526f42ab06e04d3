"""Targets `specforge-eagle3`, `specforge-dflash`, `specforge-dspark`: offline features of SpecForge 0.2.

`rows_{a}-{b}/data_{i}.ckpt`, or `.ckpt.gz` with `--option compression=gzip`, each a dict of a sample: input_ids and
loss_mask int64 [T], and states [1, T, width]:

* eagle3: aux_hidden_state, the layers before the last side by side, and hidden_state, the last one, post-norm.
* dflash, which domino reads too: hidden_states, all layers side by side; no final state.
* dspark: hidden_states, the layers before the last, and target_last_hidden_states, the last one, post-norm.

No file says which layers they are; a draft config counts them as outputs of layers, HF id - 1. SpecForge reads the
files in the order of their paths as text, data_10 before data_2, and shuffles by its seed from there. It zeroes the
last position of the mask itself for eagle3; here the mask is the dataset's. `vocab_mapping/vocab_mapping.pt` is written
for eagle3 where the dataset has d2t and t2d.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hsfmt.errors import Problem, SampleError
from hsfmt.writers.targets.numbered_files import NumberedFilesTarget, rows_help, rows_path
from hsfmt.writers.targets.torch_files import AUX_HELP, TorchFilesTarget, as_tensor, shown, side_by_side

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hsfmt.writers.targets.base import ExportSample

_ROWS = 2000
_KEEP_REMEDY = "leave them out: --ids FILE with the others; --option sparse_masks=keep writes them all the same"
_HELP = {**rows_help(_ROWS), "compression": "gzip: .ckpt.gz files, which SpecForge reads whole"}
_KEEP_HELP = {"sparse_masks": "keep: write samples without two neighbouring supervised tokens too"}


class SpecForgeTarget(NumberedFilesTarget):
    """What SpecForge's algorithms have in common.

    Attributes
    ----------
    aux_key, last_key
        Keys of the layers side by side and of the final state, None where there is none.
    """

    program: ClassVar[str] = "SpecForge"
    aux_key: ClassVar[str] = "hidden_states"
    last_key: ClassVar[str | None] = None
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **TorchFilesTarget.choices,
        "compression": ("none", "gzip"),
        "sparse_masks": ("refuse", "keep"),
    }

    def path(self, number: int) -> str:
        """Return `rows_{a}-{b}/data_{i}.ckpt`."""
        suffix = ".ckpt.gz" if self.job.options.get("compression") == "gzip" else ".ckpt"
        return rows_path(number, self.job.options, _ROWS) + suffix

    def record(self, sample: ExportSample) -> dict[str, Any]:
        """Return ids, mask and states."""
        states = sample.hidden_states
        record = {
            "input_ids": as_tensor(sample.input_ids),
            "loss_mask": as_tensor(sample.loss_mask.astype(np.int64)),
            self.aux_key: side_by_side(states[:, :-1] if self.last_key else states)[None],
        }
        if self.last_key:
            record[self.last_key] = as_tensor(states[:, -1])[None]
        return record


class SpecForgeEagle3Target(SpecForgeTarget):
    """Features for EAGLE-3."""

    name: ClassVar[str] = "specforge-eagle3"
    summary: ClassVar[str] = "SpecForge eagle3: rows_{a}-{b}/data_{i}.ckpt with aux_hidden_state and hidden_state"
    final_norm: ClassVar[str | None] = "post"
    needs_final_state: ClassVar[bool] = True
    n_aux: ClassVar[int | None] = 3
    aux_key: ClassVar[str] = "aux_hidden_state"
    last_key: ClassVar[str | None] = "hidden_state"
    vocabulary: ClassVar[tuple[str, ...]] = ("vocab_mapping/vocab_mapping.pt",)
    option_help: ClassVar[Mapping[str, str]] = {**_HELP, **AUX_HELP}


class _DFlashFamily(SpecForgeTarget):
    """Algorithms that stop at a sample without two neighbouring supervised tokens."""

    option_help: ClassVar[Mapping[str, str]] = {**_HELP, **_KEEP_HELP}

    def problems(self) -> list[Problem]:
        """Say what of layers, options and masks is wrong."""
        return super().problems() + self._mask_problems()

    def record(self, sample: ExportSample) -> dict[str, Any]:
        """Return ids, mask and states.

        Raises
        ------
        SampleError
            No two neighbouring tokens are supervised.
        """
        mask = sample.loss_mask
        if not self._keeps and not bool(np.any(mask[1:] & mask[:-1])):
            got = f"{np.count_nonzero(mask)} supervised tokens, none beside another"
            raise SampleError.at(sample.sample_id, expected=_PAIR, got=got, remedy=_KEEP_REMEDY)
        return super().record(sample)

    @property
    def _keeps(self) -> bool:
        return self.job.options.get("sparse_masks") == "keep"

    def _mask_problems(self) -> list[Problem]:
        supervised = self.job.n_supervised
        if self._keeps or supervised is None:
            return []
        ids = tuple(self.job.sample_ids[int(n)] for n in np.flatnonzero(supervised < 2))
        return [Problem(self._where, _PAIR, "fewer than two", _KEEP_REMEDY, ids)] if ids else []


_PAIR = "two neighbouring supervised tokens in every sample, without which SpecForge's readers stop"


class SpecForgeDFlashTarget(_DFlashFamily):
    """Features for DFlash and Domino."""

    name: ClassVar[str] = "specforge-dflash"
    summary: ClassVar[str] = "SpecForge dflash and domino: rows_{a}-{b}/data_{i}.ckpt with hidden_states"

    def problems(self) -> list[Problem]:
        """Say what is wrong, a final state among the layers included."""
        header = self.job.header
        problems = super().problems()
        if header.final_norm != "unknown":
            expected = "captured layers alone, since these files have no place for the final state"
            got = f"layer {header.layers[-1]}, the final state ({header.final_norm}-norm)"
            others = header.layers[:-1]
            remedy = f"leave it out: --layers {shown(others)}" if others else "choose another --to"
            problems.append(Problem(self._where, expected, got, remedy))
        return problems


class SpecForgeDSparkTarget(_DFlashFamily):
    """Features for DSpark."""

    name: ClassVar[str] = "specforge-dspark"
    summary: ClassVar[str] = "SpecForge dspark: rows_{a}-{b}/data_{i}.ckpt with hidden_states and the last state"
    final_norm: ClassVar[str | None] = "post"
    needs_final_state: ClassVar[bool] = True
    last_key: ClassVar[str | None] = "target_last_hidden_states"
