"""Target `deepspec`: DeepSpec's target cache, version 2.

`shard-{i:05d}.bin`: each sample's input_ids int32, attention_mask uint8 (ones), loss_mask uint8, target_hidden_states
bfloat16 [token, layer * hidden] and target_last_hidden_states bfloat16 [token, hidden] (after the final norm), one
after the other. `samples.idx`: a record of 56 bytes a sample. `manifest.json` last: without it there is no cache.

Layers count decoder layers from 0, -1 the embeddings: one less than HF ids. Sample ids are the numbers 0 to n-1, which
the reader insists on; the real ones go into `hsfmt_samples.jsonl`, which it doesn't read.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hsfmt.errors import Problem, SampleError
from hsfmt.writers.targets.atomic import writing
from hsfmt.writers.targets.base import Target, Unit
from hsfmt.writers.targets.shard_plan import (
    SAMPLE_LIST,
    plan_shards,
    size_option,
    size_problems,
    write_sample_list,
)
from hsfmt.writers.targets.token_ids import int32_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import IO

    from numpy.typing import NDArray

    from hsfmt.writers.targets.base import ExportSample

VERSION = 2
INDEX, MANIFEST = "samples.idx", "manifest.json"
RECORD = np.dtype(
    [
        ("sample_id", "<u8"),
        ("shard_id", "<u4"),
        ("seq_len", "<u4"),
        ("input_ids_offset", "<u8"),
        ("attention_mask_offset", "<u8"),
        ("loss_mask_offset", "<u8"),
        ("target_hidden_states_offset", "<u8"),
        ("target_last_hidden_states_offset", "<u8"),
    ]
)
MAX_TOKENS = 2**32 - 1
# DeepSpec's own writer takes 64 GiB; a shard is what an interrupted export writes again.
_SHARD_NBYTES = 4 << 30
_BLOCK_NBYTES = 16 << 20
_SIZE, _MODEL = "shard_size", "target_model"


class DeepSpecTarget(Target):
    """A target cache of DeepSpec."""

    name: ClassVar[str] = "deepspec"
    summary: ClassVar[str] = "DeepSpec's target cache, version 2: shards of bfloat16 states with an index"
    final_norm: ClassVar[str | None] = "post"
    needs_final_state: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16",)
    option_help: ClassVar[Mapping[str, str]] = {
        _SIZE: "bytes of a shard, like 64GiB; 4GiB if it is not said",
        _MODEL: "target_model_name_or_path of the training config, which the trainer compares, letter by letter; "
        "the dataset's model if it is not said",
    }

    def problems(self) -> list[Problem]:
        """Say what layers, lengths and options rule out."""
        job, where = self.job, f"--to {self.name}"
        problems = size_problems(job.options, _SIZE)
        if job.header.n_layers < 2:
            expected = "a layer beside the final one: target_layer_ids can't be empty"
            problems.append(Problem(where, expected, f"layers {list(job.header.layers)}"))
        if self._model is None:
            remedy = f"say --option {_MODEL}=NAME, as the training config names it"
            problems.append(Problem(where, "the model's name, which DeepSpec's trainer compares", "none", remedy))
        problems.extend(
            Problem(job.sample_ids[number], f"1 to {MAX_TOKENS} tokens", str(job.n_tokens[number]))
            for number in np.flatnonzero((job.n_tokens < 1) | (job.n_tokens > MAX_TOKENS)).tolist()
        )
        return problems

    def dropped(self) -> list[str]:
        """Say what the cache has no place for."""
        job = self.job
        others = [f"extra column {name}" for name in job.extras] + [f"attachment {name}" for name in job.attachments]
        return ["metadata"] * job.has_metadata + others

    def units(self) -> Sequence[Unit]:
        """Return a unit a shard."""
        names = [_shard_name(number) for number in range(len(self._shards()))]
        return [Unit(name, shard, (name,)) for name, shard in zip(names, self._shards(), strict=True)]

    def write(self, unit: Unit, samples: Iterator[ExportSample]) -> None:
        """Write a shard.

        Raises
        ------
        SampleError
            A sample has token ids beyond int32, or another length than the job says.
        OSError
            The storage fails.
        """
        with writing(self.job.folder / unit.paths[0]) as file:
            for sample in samples:
                n_tokens = int(self.job.n_tokens[sample.number])
                if len(sample.input_ids) != n_tokens:
                    got = f"{len(sample.input_ids)}"
                    raise SampleError.at(sample.sample_id, expected=f"{n_tokens} tokens, as the index says", got=got)
                file.write(int32_ids(sample).data)
                file.write(np.ones(n_tokens, np.uint8).data)
                file.write(np.ascontiguousarray(sample.loss_mask, np.uint8).data)
                _write_blocks(file, sample.hidden_states[:, :-1])
                _write_blocks(file, sample.hidden_states[:, -1])

    def final_paths(self) -> tuple[str, ...]:
        """Return the list of samples, the index and the manifest."""
        return SAMPLE_LIST, INDEX, MANIFEST

    def finish(self) -> tuple[str, ...]:
        """Write them."""
        job = self.job
        write_sample_list(job)
        with writing(job.folder / INDEX) as file:
            file.write(self._records().tobytes())
        with writing(job.folder / MANIFEST) as file:
            file.write(json.dumps(self._manifest(), indent=2, sort_keys=True).encode())
        return self.final_paths()

    @property
    def _model(self) -> str | None:
        return self.job.options.get(_MODEL) or (self.job.header.model or {}).get("name")

    def _sizes(self) -> NDArray[np.int64]:
        """Bytes of each sample: ids, two masks, states."""
        header = self.job.header
        return self.job.n_tokens * (4 + 1 + 1 + header.n_layers * header.hidden_size * 2)

    def _shards(self) -> list[range]:
        return plan_shards(self._sizes(), size_option(self.job.options, _SIZE, _SHARD_NBYTES))

    def _records(self) -> NDArray[Any]:
        n_tokens, header = self.job.n_tokens, self.job.header
        starts = np.concatenate([[0], np.cumsum(self._sizes())])
        records = np.zeros(len(n_tokens), RECORD)
        records["sample_id"] = np.arange(len(n_tokens))
        records["seq_len"] = n_tokens
        for number, shard in enumerate(self._shards()):
            rows = slice(shard.start, shard.stop)
            records["shard_id"][rows] = number
            records["input_ids_offset"][rows] = starts[rows] - starts[shard.start]
        offset = records["input_ids_offset"]
        row_nbytes = {"attention_mask": 4, "loss_mask": 1, "target_hidden_states": 1}
        row_nbytes["target_last_hidden_states"] = (header.n_layers - 1) * header.hidden_size * 2
        for name, before in row_nbytes.items():
            offset = offset + n_tokens.astype(np.uint64) * np.uint64(before)
            records[f"{name}_offset"] = offset
        return records

    def _manifest(self) -> dict[str, Any]:
        header, shards = self.job.header, self._shards()
        return {
            "hidden_dtype": "bfloat16",
            "hidden_size": header.hidden_size,
            "hsfmt": {"layers": list(header.layers), "snapshot": self.job.fingerprint},
            "index_record_size": RECORD.itemsize,
            "mask_dtype": "uint8",
            "num_samples": len(self.job.n_tokens),
            "num_shards": len(shards),
            "shards": [{"file_name": _shard_name(number), "shard_id": number} for number in range(len(shards))],
            "target_layer_ids": [layer - 1 for layer in header.layers[:-1]],
            "target_model_name_or_path": self._model,
            "token_dtype": "int32",
            "version": VERSION,
        }


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.bin"


def _write_blocks(file: IO[bytes], states: NDArray[Any]) -> None:
    """Write states of any strides in C order, without a copy of them all."""
    step = max(1, _BLOCK_NBYTES // (states[:1].size * states.itemsize or 1))
    for start in range(0, len(states), step):
        file.write(np.ascontiguousarray(states[start : start + step]).reshape(-1).view(np.uint8).data)
