"""Target `speculators-pt`: the `data_{i}.pt` of speculators 0.3 and 0.4.

A dict of input_ids and loss_mask int64 [T], and hidden_states, a list of [T, H], the final state last and before the
norm, which speculators 0.4 applies itself (0.3 did not apply it at all). With them `sample_lengths.json`, tokens by
number, `data_config.json`, whose layer_ids are outputs of layers (HF id - 1), and `d2t.npy` and `t2d.npy` where the
dataset has them. speculators 0.4 loads every file under the folder whose name ends in "pt", in the order of the file
system, so that `token_freq.pt` can't lie there. It drops the first position of ids and mask itself.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hsfmt.writers.targets.atomic import writing
from hsfmt.writers.targets.numbered_files import NumberedFilesTarget
from hsfmt.writers.targets.torch_files import AUX_HELP, as_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from hsfmt.writers.targets.base import ExportSample

_LENGTHS, _CONFIG = "sample_lengths.json", "data_config.json"


class SpeculatorsPtTarget(NumberedFilesTarget):
    """Data files of speculators 0.3 and 0.4."""

    name: ClassVar[str] = "speculators-pt"
    summary: ClassVar[str] = "speculators 0.4: data_{i}.pt with a list of states, sample_lengths.json, data_config.json"
    program: ClassVar[str] = "speculators"
    final_norm: ClassVar[str | None] = "pre"
    needs_final_state: ClassVar[bool] = True
    n_aux: ClassVar[int | None] = 3
    vocabulary: ClassVar[tuple[str, ...]] = ("d2t.npy", "t2d.npy")
    option_help: ClassVar[Mapping[str, str]] = AUX_HELP

    def path(self, number: int) -> str:
        """Return `data_{i}.pt`."""
        return f"data_{number}.pt"

    def record(self, sample: ExportSample) -> dict[str, Any]:
        """Return ids, the list of states, and mask."""
        states = sample.hidden_states
        return {
            "input_ids": as_tensor(sample.input_ids),
            "hidden_states": [as_tensor(states[:, i]) for i in range(states.shape[1])],
            "loss_mask": as_tensor(sample.loss_mask.astype(np.int64)),
        }

    def final_paths(self) -> tuple[str, ...]:
        """The list of samples, vocabulary, lengths and config."""
        return (*super().final_paths(), _LENGTHS, _CONFIG)

    def finish(self) -> tuple[str, ...]:
        """Write them."""
        super().finish()
        _write_json(self.job.folder / _LENGTHS, {str(i): int(n) for i, n in enumerate(self.job.n_tokens)})
        _write_json(self.job.folder / _CONFIG, self._config())
        return self.final_paths()

    def write_vocabulary(self, found: Mapping[str, NDArray[Any]]) -> None:
        """Write d2t and t2d as files of their own.

        Raises
        ------
        OSError
            The storage fails.
        """
        for name, table in found.items():
            with writing(self.job.folder / f"{name}.npy") as file:
                np.lib.format.write_array(file, table, allow_pickle=False)

    def _config(self) -> dict[str, Any]:
        header, n_tensors = self.job.header, self.job.header.n_layers
        return {
            "version": "2.0",
            "written_by": "hsfmt",
            "model": {
                "target_model_path": (header.model or {}).get("name"),
                "hidden_size": header.hidden_size,
            },
            "data": {"num_samples": len(self.job.sample_ids), "hsfmt_snapshot": self.job.fingerprint},
            "hidden_states": {
                "layer_ids": [layer - 1 for layer in header.layers],
                "description": "Outputs of these layers, counted from 0; the last one before the final norm",
            },
            "format": {
                "file_pattern": "data_{idx}.pt",
                "schema": {
                    "input_ids": {"dtype": "torch.long", "shape": "[seq_len]"},
                    "hidden_states": {
                        "dtype": f"list[torch.{header.dtype}]",
                        "shape": f"list of [seq_len, {header.hidden_size}]",
                        "num_tensors": n_tensors,
                    },
                    "loss_mask": {"dtype": "torch.long", "shape": "[seq_len]"},
                },
            },
        }


def _write_json(path: Path, value: Any) -> None:
    with writing(path) as file:
        file.write(json.dumps(value, indent=2).encode())
