"""A sample as named tensors and what else is known of it, for the formats that are a file a sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hsfmt.columns import IDS, MASK, STATES
from hsfmt.dtypes import STATE_DTYPES, dtype
from hsfmt.errors import Problem
from hsfmt.writers.targets.atomic import writing
from hsfmt.writers.targets.base import ExportJob, ExportSample, Target, Unit
from hsfmt.writers.targets.names import file_stems
from hsfmt.writers.tensor_files import FORMATS, FileTensor


def patterns(array: npt.NDArray[Any]) -> FileTensor:
    """Return an array, of NumPy's or ml_dtypes' type, as a tensor to write."""
    name = array.dtype.name
    storage = dtype(name).storage
    return FileTensor(name, np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).view(storage))


class SampleFilesTarget(Target):
    """A file a sample, as `hsfmt cat` writes it: all that the dataset has of the sample.

    Attributes
    ----------
    suffix
        Of the files, which says their format.
    """

    suffix: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]] = STATE_DTYPES

    def __init__(self, job: ExportJob) -> None:
        super().__init__(job)
        self._stems = file_stems(job.sample_ids)

    def problems(self) -> list[Problem]:
        """Say that a column takes the name under which the file says what else is known."""
        if self.suffix == ".safetensors" or "hsfmt" not in self.job.extras:
            return []
        got = "one, and the file says under that name what else is known"
        return [Problem(f"--to {self.name}", "no extra column hsfmt", got, "choose --to safetensors")]

    def dropped(self) -> list[str]:
        """Attachments, which are no sample's."""
        return [f"attachment {name}" for name in self.job.attachments]

    def units(self) -> Sequence[Unit]:
        """A sample each."""
        return [Unit(stem, (n,), (stem + self.suffix,)) for n, stem in enumerate(self._stems)]

    def write(self, unit: Unit, samples: Iterator[ExportSample]) -> None:
        """Write the file of a sample."""
        for sample in samples:
            tensors = {
                STATES: patterns(sample.hidden_states),
                IDS: patterns(sample.input_ids),
                MASK: FileTensor("bool", sample.loss_mask),
            }
            tensors |= {name: patterns(value) for name, value in sample.extras.items() if value is not None}
            with writing(self.job.folder / unit.paths[0]) as file:
                FORMATS[self.suffix](file, tensors, self._attributes(sample))

    def _attributes(self, sample: ExportSample) -> dict[str, Any]:
        header = self.job.header
        return {
            "extras": {name: dict(column) for name, column in self.job.extra_columns.items()},
            "final_norm": header.final_norm,
            "layers": list(header.layers),
            "loss_mask_given": sample.mask_given,
            "metadata": dict(sample.metadata),
            "model": dict(header.model) if header.model else None,
            "nulls": [name for name, value in sample.extras.items() if value is None],
            "sample_id": sample.sample_id,
            "scaling": dict(header.scaling) if header.scaling else None,
            "snapshot": self.job.fingerprint,
            "tokenizer": dict(header.tokenizer) if header.tokenizer else None,
        }
