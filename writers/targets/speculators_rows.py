"""Targets `speculators` and `speculators-fp8`: an offline dataset as speculators 0.5 to 0.9 trains on it.

An Arrow dataset (`arrow_dataset`), `hidden_states/hs_{row}.safetensors` (`connector_file`), joined by row, and the
vocabulary files of `speculators_vocab`. Rows are the samples in the order of the export; the ids go into
`hsfmt_samples.jsonl`, which speculators doesn't read. Nothing in the folder says which layers the files hold: all but
the last one are the trainer's `--target-layer-ids`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import xxhash

from hsfmt.dtypes import dtype as element
from hsfmt.errors import Problem
from hsfmt.writers.targets import arrow_dataset as arrow
from hsfmt.writers.targets.atomic import writing
from hsfmt.writers.targets.base import Target, Unit
from hsfmt.writers.targets.connector_file import SUFFIX, scales_column, scales_problems, write_connector_file
from hsfmt.writers.targets.shard_plan import SAMPLE_LIST, plan_shards, write_sample_list
from hsfmt.writers.targets.speculators_vocab import attached, vocab_paths, vocab_problems, write_vocab
from hsfmt.writers.targets.token_ids import int32_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hsfmt.writers.targets.base import ExportSample

STATES_FOLDER = "hidden_states"
# Of an Arrow file's samples. They are written, and after an interruption written again, together: token ids and masks
# wait in memory for the file, so that a token counts for 4 KiB and a row for 64 KiB at the least.
_SHARD_NBYTES, _TOKEN_NBYTES, _ROW_NBYTES = 1 << 30, 4 << 10, 64 << 10
_MASK = "loss_mask"


class SpeculatorsTarget(Target):
    """An offline dataset of speculators 0.5 to 0.9; its `file` backend reads the states."""

    name: ClassVar[str] = "speculators"
    summary: ClassVar[str] = "speculators 0.5 to 0.9: Arrow dataset with hidden_states/hs_{row}.safetensors"
    final_norm: ClassVar[str | None] = "pre"
    needs_final_state: ClassVar[bool] = True
    option_help: ClassVar[Mapping[str, str]] = {
        _MASK: "int64 for speculators 0.8 and later (the default), bool for those before"
    }

    def problems(self) -> list[Problem]:
        """Say what of the options, lengths, scales and attachments can't be written, and what package is missing."""
        job = self.job
        problems = [*arrow.pyarrow_problems(), *scales_problems(job), *vocab_problems(job)]
        if self._mask_dtype not in arrow.MASK_DTYPES:
            problems.append(Problem(f"--option {_MASK}", " or ".join(arrow.MASK_DTYPES), repr(self._mask_dtype)))
        problems.extend(
            Problem(job.sample_ids[number], f"at most {arrow.MAX_TOKENS} tokens", str(job.n_tokens[number]))
            for number in np.flatnonzero(job.n_tokens > arrow.MAX_TOKENS).tolist()
        )
        return problems

    def dropped(self) -> list[str]:
        """Say what the files have no place for."""
        job = self.job
        extras = [f"extra column {name}" for name in job.extras if name != scales_column(job.header)]
        kept = {id(array) for array in attached(job).values()}
        others = [f"attachment {name}" for name, array in job.attachments.items() if id(array) not in kept]
        return ["metadata"] * job.has_metadata + extras + others

    def units(self) -> Sequence[Unit]:
        """Return a unit for each Arrow file, with the states of its rows."""
        header = self.job.header
        token_nbytes = header.n_layers * header.hidden_size * element(header.dtype).itemsize
        costs = self.job.n_tokens * max(token_nbytes, _TOKEN_NBYTES) + _ROW_NBYTES
        shards = plan_shards(costs, _SHARD_NBYTES)
        files = [arrow.data_file(number, len(shards)) for number in range(len(shards))]
        return [Unit(file, shard, (file, *map(_states_file, shard))) for file, shard in zip(files, shards, strict=True)]

    def write(self, unit: Unit, samples: Iterator[ExportSample]) -> None:
        """Write the states of each row, then the Arrow file.

        Raises
        ------
        SampleError
            A sample has token ids beyond int32, or lacks its scales.
        OSError
            The storage fails.
        """
        job = self.job
        rows: list[arrow.Row] = []
        for sample in samples:
            rows.append((int32_ids(sample), sample.loss_mask.astype(np.uint8)))
            write_connector_file(job.folder / _states_file(sample.number), job.header, sample)
        with writing(job.folder / unit.paths[0]) as file:
            arrow.write_rows(file, rows, self._mask_dtype)

    def final_paths(self) -> tuple[str, ...]:
        """Return the documents of the dataset, the vocabulary files and the list of samples."""
        return (SAMPLE_LIST, *vocab_paths(self.job), arrow.INFO, arrow.STATE)

    def finish(self) -> tuple[str, ...]:
        """Write them; without state.json the folder is no dataset."""
        job = self.job
        names = (write_sample_list(job), *write_vocab(job))
        documents = {
            arrow.INFO: arrow.info_document(self._mask_dtype),
            arrow.STATE: arrow.state_document(len(self.units()), self._fingerprint()),
        }
        for name, document in documents.items():
            with writing(job.folder / name) as file:
                file.write(document)
        return (*names, *documents)

    @property
    def _mask_dtype(self) -> str:
        return self.job.options.get(_MASK, "int64")

    def _fingerprint(self) -> str:
        digest = xxhash.xxh3_64(f"{self.job.fingerprint} {self._mask_dtype}".encode())
        for sample_id in self.job.sample_ids:
            digest.update(f"{len(sample_id)} {sample_id}".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


class SpeculatorsFp8Target(SpeculatorsTarget):
    """The same with float8 states and a scale a token, for the `fp8` backend of speculators 0.9."""

    name: ClassVar[str] = "speculators-fp8"
    summary: ClassVar[str] = "speculators 0.9 for its fp8 backend: float8_e4m3fn states with hidden_states_scales"
    dtypes: ClassVar[tuple[str, ...]] = ("float8_e4m3fn",)


def _states_file(row: int) -> str:
    return f"{STATES_FOLDER}/hs_{row}{SUFFIX}"
