"""Formats whose torch.save files are numbered, in folders of a fixed number each: SpecForge, AngelSlim, speculators.

What the numbers are for is in `hsfmt_samples.jsonl`, which the trainers don't read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hsfmt.errors import Problem
from hsfmt.writers.targets.shard_plan import SAMPLE_LIST, write_sample_list
from hsfmt.writers.targets.torch_files import TorchFilesTarget, as_tensor, save
from hsfmt.writers.targets.vocab_mapping import mapping_problems, tables, unmapped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_ROWS = "rows"
_MOST = 10**9


class NumberedFilesTarget(TorchFilesTarget):
    """A format with a numbered file for each sample.

    Attributes
    ----------
    vocabulary
        Files for a drafter's vocabulary, which attachments d2t and t2d are made into; none if there is no place for it.
    """

    vocabulary: ClassVar[tuple[str, ...]] = ()

    def problems(self) -> list[Problem]:
        """Say what of layers, options and attachments is wrong."""
        problems = super().problems() + rows_problems(self._where, self.job.options)
        return problems + (mapping_problems(self.job) if self.vocabulary else [])

    def dropped(self) -> list[str]:
        """Metadata, extra columns and attachments without a place."""
        others = unmapped(self.job) if self.vocabulary else [f"attachment {name}" for name in self.job.attachments]
        return super().dropped() + others

    def final_paths(self) -> tuple[str, ...]:
        """The list of samples, and the files of the vocabulary."""
        return (SAMPLE_LIST, *(self.vocabulary if tables(self.job) else ()))

    def finish(self) -> tuple[str, ...]:
        """Write them."""
        write_sample_list(self.job)
        found = tables(self.job)
        if self.vocabulary and found:
            self.write_vocabulary(found)
        return self.final_paths()

    def write_vocabulary(self, found: Mapping[str, NDArray[Any]]) -> None:
        """Write d2t and t2d as one torch.save file.

        Raises
        ------
        OSError
            The storage fails.
        """
        save(self.job.folder / self.vocabulary[0], {name: as_tensor(table) for name, table in found.items()})


def rows_help(default: int) -> dict[str, str]:
    """Return the help of the option that says how many samples go into a folder."""
    return {_ROWS: f"samples a folder, {default} by default"}


def rows_problems(where: str, options: Mapping[str, str]) -> list[Problem]:
    """Say that the option is no number of samples."""
    value = options.get(_ROWS, "1")
    if value.isascii() and value.isdigit() and len(value) < 11 and 0 < int(value) <= _MOST:
        return []
    return [Problem(f"{where} --option {_ROWS}", f"a number from 1 to {_MOST}", repr(value))]


def rows_path(number: int, options: Mapping[str, str], default: int) -> str:
    """Return the file of a sample without its last suffix.

    >>> rows_path(4017, {}, 2000), rows_path(7, {"rows": "5"}, 2000)
    ('rows_4000-6000/data_4017', 'rows_5-10/data_7')
    """
    rows = int(options.get(_ROWS, default))
    start = number - number % rows
    return f"rows_{start}-{start + rows}/data_{number}"
