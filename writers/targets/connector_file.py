"""The file that vLLM's hidden-states connectors write for a request, byte for byte.

ExampleHiddenStatesConnector: `hidden_states` [token, layer, hidden] and `token_ids` int64 [token]; hs_connectors'
FP8HiddenStatesConnector also `hidden_states_scales` float32 [token, 1, 1]. The state after the last layer is before the
final norm. Nothing in the file says which layers it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hsfmt.errors import Problem, SampleError
from hsfmt.writers.targets.atomic import writing
from hsfmt.writers.tensor_files import FileTensor, write_safetensors

if TYPE_CHECKING:
    from pathlib import Path

    from hsfmt.header import Header
    from hsfmt.writers.targets.base import ExportJob, ExportSample

SUFFIX = ".safetensors"
_FLOAT8 = "float8_e4m3fn"


def scales_column(header: Header) -> str | None:
    """Name of the column that holds the scales of float8 states; None for others."""
    return header.scaling["column"] if header.scaling is not None else None


def scales_problems(job: ExportJob) -> list[Problem]:
    """Say whether float8 states lack the scales that the connector's file has to have."""
    column = scales_column(job.header)
    found = job.extras.get(column, "no such column") if column is not None else "float32"
    if found == "float32":
        return []
    return [Problem(f"column {column}", "a float32 scale for each token of the float8 states", found)]


def write_connector_file(path: Path, header: Header, sample: ExportSample) -> None:
    """Write the states and token ids of a sample.

    Raises
    ------
    SampleError
        The sample lacks the scales of its float8 states.
    OSError
        The storage fails.
    """
    tensors = {
        "hidden_states": FileTensor(header.dtype, sample.hidden_states),
        "token_ids": FileTensor("int64", np.ascontiguousarray(sample.input_ids, np.int64)),
    }
    column = scales_column(header)
    if column is not None:
        scales, n_tokens = sample.extras.get(column), len(sample.input_ids)
        if scales is None or scales.shape[:1] != (n_tokens,) or scales.size != n_tokens:
            got = "none" if scales is None else f"shape {list(scales.shape)}"
            raise SampleError.at(
                f"{sample.sample_id}[{column}]", expected=f"a scale for each of {n_tokens} tokens", got=got
            )
        tensors["hidden_states_scales"] = FileTensor("float32", scales.reshape(-1, 1, 1))
    with writing(path) as file:
        write_safetensors(file, tensors, {})
