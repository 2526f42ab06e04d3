"""Target `vllm`: the folder that vLLM's ExampleHiddenStatesConnector writes (0.17 and later).

`{id}.safetensors`, the id escaped, each with the empty `.lock` beside it that vLLM 0.22 and later leave:
`load_hidden_states` of vLLM opens it before the data, and fails where it is missing. (hs_connectors of speculators
reads with or without, and removes the lock.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hsfmt.writers.targets.atomic import make_folder
from hsfmt.writers.targets.base import Target, Unit
from hsfmt.writers.targets.connector_file import SUFFIX, scales_column, scales_problems, write_connector_file
from hsfmt.writers.targets.names import file_stems

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hsfmt.errors import Problem
    from hsfmt.writers.targets.base import ExportSample

LOCK_SUFFIX = ".lock"


class VllmTarget(Target):
    """A folder of vLLM's connector: one file a sample, any layers."""

    name: ClassVar[str] = "vllm"
    summary: ClassVar[str] = "files of vLLM's hidden-states connector: {id}.safetensors with its .lock"
    final_norm: ClassVar[str | None] = "pre"
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16", "float32", "float8_e4m3fn")

    def problems(self) -> list[Problem]:
        """Say whether the scales of float8 states are missing."""
        return scales_problems(self.job)

    def dropped(self) -> list[str]:
        """Say what the files have no place for."""
        job = self.job
        others = [f"extra column {name}" for name in job.extras if name != scales_column(job.header)]
        others += [f"attachment {name}" for name in job.attachments]
        return ["loss masks"] * job.masks_given + ["metadata"] * job.has_metadata + others

    def units(self) -> Sequence[Unit]:
        """Return a unit a sample."""
        names = [stem + SUFFIX for stem in file_stems(self.job.sample_ids)]
        return [Unit(name, (number,), (name, name + LOCK_SUFFIX)) for number, name in enumerate(names)]

    def write(self, unit: Unit, samples: Iterator[ExportSample]) -> None:
        """Write the lock and the file, whose fsync of the folder covers both."""
        path, lock = (self.job.folder / name for name in unit.paths)
        for sample in samples:
            make_folder(lock.parent)
            lock.touch()
            write_connector_file(path, self.job.header, sample)
