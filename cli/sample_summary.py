"""What one sample looks like: shapes, the first ids, and figures of each layer's states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hsfmt.cli import units
from hsfmt.cli.failures import one_line
from hsfmt.readers.sample_arrays import SampleArrays

_BLOCK_TOKENS = 1024
_SHOWN_IDS = 12
_UNSCALED = "float8_e4m3fn"


def summarize(sample: SampleArrays, layers: Sequence[int], dtype: str) -> dict[str, Any]:
    """Return a sample's summary as a JSON object.

    Parameters
    ----------
    sample
        As read; the states are bit patterns.
    layers
        HF ids of its layer axis.
    dtype
        Element type of the states. For float8_e4m3fn the figures are of the values as stored, without scales, which
        `unscaled` says.
    """
    tokens = len(sample.input_ids)
    extras = {name: None if value is None else list(value.shape) for name, value in sample.extras.items()}
    return {
        "dtype": dtype,
        "extras": extras,
        "first_ids": sample.input_ids[:_SHOWN_IDS].tolist(),
        "id": sample.sample_id,
        "layers": [_layer(sample.hidden_states[:, i], k, dtype) for i, k in enumerate(layers)],
        "metadata": sample.metadata,
        "shape": list(sample.hidden_states.shape),
        "supervised_tokens": int(np.count_nonzero(sample.loss_mask)),
        "tokens": tokens,
        "unscaled": dtype == _UNSCALED,
    }


def _layer(states: npt.NDArray[Any], hf_index: int, dtype: str) -> dict[str, Any]:
    total = {"abs": 0.0, "square": 0.0}
    largest, bad, zero = 0.0, 0, 0
    for start in range(0, len(states), _BLOCK_TOKENS):
        values = _floats(states[start : start + _BLOCK_TOKENS], dtype)
        finite = np.isfinite(values)
        bad += int(values.size - np.count_nonzero(finite))
        zero += int(np.count_nonzero(values == 0))
        magnitudes = np.abs(values, where=finite, out=np.zeros_like(values)).astype(np.float64)
        total["abs"] += float(magnitudes.sum())
        total["square"] += float(np.square(magnitudes).sum())
        largest = max(largest, float(magnitudes.max()))
    n = states.size - bad
    return {
        "hf_hidden_states_index": hf_index,
        "max_abs": largest,
        "mean_abs": total["abs"] / n if n else None,
        "nonfinite": bad,
        "rms": (total["square"] / n) ** 0.5 if n else None,
        "zeros": zero,
    }


def _floats(patterns: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    if dtype in ("bfloat16", "float8_e4m3fn"):
        patterns = np.ascontiguousarray(patterns).view(getattr(ml_dtypes, dtype))
    return patterns.astype(np.float32)


def text(summary: dict[str, Any], place: str) -> str:
    """Return the summary for people; `place` says where the sample lies."""
    more = " …" if summary["tokens"] > len(summary["first_ids"]) else ""
    rows = [
        ("place", place),
        ("tokens", f"{summary['tokens']:,}, {summary['supervised_tokens']:,} of them supervised"),
        ("input ids", " ".join(map(str, summary["first_ids"])) + more),
        ("states", f"{' x '.join(map(str, summary['shape']))} [token, layer, hidden] {summary['dtype']}"),
    ]
    rows += [(name, "null" if shape is None else f"shape {shape}") for name, shape in summary["extras"].items()]
    rows += [(one_line(key), _short(value)) for key, value in summary["metadata"].items()]
    table = [f"{'HF index':>8}  {'mean |x|':>10}  {'rms':>10}  {'max |x|':>10}  {'NaN, Inf':>9}  {'zeros':>9}"]
    for layer in summary["layers"]:
        figures = "  ".join(_figure(layer[key]) for key in ("mean_abs", "rms", "max_abs"))
        table.append(f"{layer['hf_hidden_states_index']:>8}  {figures}  {layer['nonfinite']:>9,}  {layer['zeros']:>9,}")
    if summary["unscaled"]:
        table.append("of the float8 values as stored, not multiplied by their scales")
    rows.append(("layers", "\n".join(table)))
    return f"{one_line(summary['id'])}\n{units.aligned(rows, '  ')}"


def _figure(value: float | None) -> str:
    return f"{'-' if value is None else format(value, '.4g'):>10}"


def _short(value: Any) -> str:
    shown = one_line(str(value))
    return shown if len(shown) <= 100 else shown[:99] + "…"
