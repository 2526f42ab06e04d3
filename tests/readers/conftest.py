"""Datasets with known content, written by DatasetWriter."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from written import Written, as_written, make_content

from hsfmt import DatasetWriter


@pytest.fixture
def write(tmp_path) -> Callable[..., Written]:
    """Write a dataset of several parts with a small grid, so that every border occurs."""
    numbers = itertools.count()

    def make(
        lengths=(1, 7, 8, 9, 16, 33, 3, 64, 5, 31),
        *,
        layers=(1, 3, 5),
        hidden=8,
        dtype="bfloat16",
        codec="zstd",
        parts=2,
        chunk_tokens=8,
        shard_tokens=32,
        final_norm="pre",
        values=None,
        **options,
    ) -> Written:
        path = tmp_path / f"dataset{next(numbers)}"
        content = {}
        per_part = -(-len(lengths) // parts)
        for part in range(parts):
            with DatasetWriter(
                path, layers=list(layers), hidden_size=hidden, final_norm=final_norm, dtype=dtype, codec=codec,
                chunk_tokens=chunk_tokens, shard_tokens=shard_tokens, **options,
            ) as writer:  # fmt: skip
                for number in range(part * per_part, min((part + 1) * per_part, len(lengths))):
                    sample = make_content(
                        number, f"id-{number:03}", lengths[number], layers=len(layers), hidden=hidden, name=dtype
                    )
                    if dtype == "float8_e4m3fn":
                        scales = np.random.default_rng(number).uniform(0.01, 3, lengths[number]).astype(np.float32)
                        sample.extras["hidden_states_scale"] = scales
                    if values is not None:
                        sample.extras |= values(number, lengths[number])
                    content[sample.sample_id] = sample
                    writer.write(
                        sample.sample_id, sample.input_ids, as_written(sample.states, dtype), sample.loss_mask,
                        sample.metadata, source_index=number, **sample.extras,
                    )  # fmt: skip
        return Written(path, content, list(layers), dtype)

    return make
