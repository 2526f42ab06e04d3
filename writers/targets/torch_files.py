"""Formats that are one torch.save file a sample: tensors of their own storages, the same bytes for the same samples.

The files are zips as torch.save makes them for an open file: no name and no time of day is in them. `weights_only=True`
loads them.
"""

from __future__ import annotations

import gzip
from abc import abstractmethod
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from hsfmt.errors import Problem
from hsfmt.writers.targets.atomic import writing
from hsfmt.writers.targets.base import Target, Unit
from hsfmt.writers.tensor_files import save_torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import torch
    from numpy.typing import NDArray

    from hsfmt.writers.targets.base import ExportSample

# torch takes no array of a type that NumPy has no word for: it gets integers of that width.
_CARRIERS = {"bfloat16": np.int16, "float8_e4m3fn": np.int8}
_GZIP_LEVEL = 6
_AUX = "aux"
AUX_HELP = {_AUX: "any: take another number of layers than three before the final one, for a trainer that was changed"}


class TorchFilesTarget(Target):
    """A format with a torch.save file for each sample.

    Attributes
    ----------
    program
        Whose format it is, for messages.
    n_aux
        How many layers before the final state the program's draft model takes; None for any number.
    kept_extras
        Extra columns that the format has a place for.
    choices
        Values of the options that have a few.
    """

    program: ClassVar[str]
    n_aux: ClassVar[int | None] = None
    kept_extras: ClassVar[tuple[str, ...]] = ()
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {_AUX: ("any",)}

    @abstractmethod
    def path(self, number: int) -> str:
        """Return the file of a sample, relative to the folder."""

    @abstractmethod
    def record(self, sample: ExportSample) -> dict[str, Any]:
        """Return what the file of a sample holds.

        Raises
        ------
        SampleError
            The program does not take such a sample.
        """

    def problems(self) -> list[Problem]:
        """Say which layers the format can't represent, which options are wrong, and whether torch is missing."""
        problems = self._layer_problems()
        for name, value in self.job.options.items():
            if name in self.choices and value not in self.choices[name]:
                expected = f"one of {', '.join(self.choices[name])}"
                problems.append(Problem(f"{self._where} --option {name}", expected, repr(value)))
        if find_spec("torch") is None:
            problems.append(
                Problem(self._where, "torch, which writes the files", "none", "pip install 'hsfmt[convert]'")
            )
        return problems

    def dropped(self) -> list[str]:
        """Metadata and extra columns."""
        extras = [f"extra column {name}" for name in self.job.extras if name not in self.kept_extras]
        return (["metadata"] if self.job.has_metadata else []) + extras

    def units(self) -> Sequence[Unit]:
        """A sample each."""
        paths = map(self.path, range(len(self.job.sample_ids)))
        return [Unit(path, (number,), (path,)) for number, path in enumerate(paths)]

    def write(self, unit: Unit, samples: Iterator[ExportSample]) -> None:
        """Write the file of a sample."""
        for path, sample in zip(unit.paths, samples, strict=True):
            save(self.job.folder / path, self.record(sample))

    @property
    def _where(self) -> str:
        return f"--to {self.name}"

    def _layer_problems(self) -> list[Problem]:
        layers = self.job.header.layers
        outputs = [layer for layer in layers if layer > 0]
        problems = []
        if len(outputs) < len(layers):
            expected = f"outputs of layers, as {self.program} numbers them from 0"
            got = f"layer 0, the embeddings, among layers {shown(layers)}"
            remedy = f"leave it out: --layers {shown(outputs)}" if outputs else "choose another --to"
            problems.append(Problem(self._where, expected, got, remedy))
        if not self.needs_final_state or not outputs:
            return problems
        aux = outputs[:-1]
        if not aux:
            expected = "at least one layer beside the final state"
            problems.append(Problem(self._where, expected, f"layer {shown(outputs)} alone", "choose another --to"))
        elif self.n_aux is not None and self.job.options.get(_AUX) != "any" and len(aux) != self.n_aux:
            expected = f"{self.n_aux} layers and the final state, which is what {self.program}'s draft model takes"
            remedy = f"choose them by --layers, or add --option {_AUX}=any for a trainer that takes others"
            problems.append(Problem(self._where, expected, f"{len(aux)}: layers {shown(outputs)}", remedy))
        return problems


def shown(layers: Sequence[int]) -> str:
    """Return layer ids as the command line takes them."""
    return ",".join(map(str, layers))


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return an array, of NumPy's or ml_dtypes' type, as a contiguous tensor whose storage holds nothing else.

    The memory is shared where the array is contiguous and writable.
    """
    import torch

    name = array.dtype.name
    array = np.require(array, requirements=("C", "W"))
    carrier = _CARRIERS.get(name)
    if carrier is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(carrier)).view(getattr(torch, name))


def side_by_side(states: NDArray[Any]) -> torch.Tensor:
    """Return states [token, layer, hidden] with the layers of a token side by side: [token, layer * hidden]."""
    return as_tensor(states.reshape(len(states), -1))


def save(path: Path, value: Any) -> None:
    """Write a torch.save file, whole or not at all; gzipped if its name ends in .gz.

    Raises
    ------
    OSError
        The storage fails.
    """
    with writing(path) as file:
        if path.suffix != ".gz":
            save_torch(value, file)
            return
        with gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0) as zipped:
            save_torch(value, cast("IO[bytes]", zipped))
