"""Datasets to export, and folders of files to compare."""

import hashlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hsfmt import DatasetWriter
from hsfmt.writers.targets.registry import TARGET_NAMES

LAYERS, HIDDEN = (1, 2, 5), 16
NATIVE = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn)}
SCALING = {"column": "hidden_states_scale", "rule": "bfloat16_product"}

WITHOUT_TORCH = ("safetensors", "npz", "zarr", "vllm", "speculators", "speculators-fp8", "deepspec")


def for_target(name: str, *values: Any) -> Any:
    """Parameters of a test that exports to a target, marked where that needs torch."""
    return pytest.param(name, *values, marks=[] if name in WITHOUT_TORCH else pytest.mark.torch)


def every_target() -> list[Any]:
    return [for_target(name) for name in TARGET_NAMES]


def native(name: str) -> np.dtype:
    return NATIVE.get(name, np.dtype(name))


def values(number: int, n_tokens: int, dtype: str) -> np.ndarray:
    """States [token, layer, hidden], different in every sample."""
    made = np.random.default_rng(number).standard_normal((n_tokens, len(LAYERS), HIDDEN), np.float32) * 3
    return made.astype(native(dtype))


def make_dataset(url: object, n: int = 20, *, dtype: str = "bfloat16", ids: Any = None, **settings: Any) -> list[str]:
    """Write n samples of 1 to 23 tokens in several parts, with masks, metadata and two extra columns."""
    names = list(ids) if ids is not None else [f"sample-{i:03}" for i in range(n)]
    extras = {"weight": {"kind": "token", "dtype": "float32"}, "note": {"kind": "ragged", "dtype": "uint8"}}
    options = {"layers": LAYERS, "hidden_size": HIDDEN, "final_norm": "pre", "dtype": dtype, "extras": extras}
    if dtype == "float8_e4m3fn":
        options |= {"scaling": SCALING, "extras": None}
    with DatasetWriter(str(url), **{**options, **settings}) as writer:
        for i, name in enumerate(names):
            n_tokens = 1 + 7 * i % 23
            ids_of = np.arange(n_tokens) * 3 + i
            more: dict[str, Any] = {"weight": np.arange(n_tokens, dtype=np.float32)}
            if i % 3:
                more["note"] = np.arange(i, dtype=np.uint8)
            if dtype == "float8_e4m3fn":
                more = {"hidden_states_scale": np.linspace(0.5, 2, n_tokens, dtype=np.float32)}
            elif settings.get("extras", ...) is None:
                more = {}
            mask = np.arange(n_tokens) % 2
            writer.write(name, ids_of, values(i, n_tokens, dtype), mask, {"n": i}, source_index=i, **more)
            if i % 8 == 7:
                writer.commit()
    return names


def tree(folder: Path) -> dict[str, str]:
    """Digest by relative path of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def journal_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".hsfmt-export.jsonl")
