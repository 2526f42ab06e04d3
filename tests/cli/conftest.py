"""A command line to call in this process, and datasets that it made."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result

from hsfmt import DatasetWriter
from hsfmt.cli.main import main

ROOT = Path(__file__).resolve().parent.parent.parent
LAYERS = "2,4,5,8"


class Hsfmt:
    """Calls `hsfmt` in this process."""

    def __call__(self, *args: object, code: int = 0) -> Result:
        result = CliRunner().invoke(main, [str(arg) for arg in args], prog_name="hsfmt")
        assert result.exit_code == code, f"exit {result.exit_code}\n{result.stdout}\n{result.stderr}"
        if code and not result.stdout:
            assert result.stderr.strip(), "an error says something"
        assert "Traceback" not in result.output
        return result

    def json(self, *args: object, code: int = 0) -> Any:
        return json.loads(self(*args, "--json", code=code).stdout)


@pytest.fixture(scope="session")
def hsfmt() -> Hsfmt:
    return Hsfmt()


@pytest.fixture
def process() -> Callable[..., "subprocess.Popen[str]"]:
    """Start `hsfmt` in a process of its own."""

    def start(*args: object, env: dict[str, str] | None = None, **options: Any) -> "subprocess.Popen[str]":
        env = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        command = [sys.executable, "-m", "hsfmt.cli", *map(str, args)]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=env, **{**pipe, **options})

    return start


@pytest.fixture(scope="session")
def vllm(data_dir: Path) -> Path:
    return data_dir / "vllm" / "vllm032_bf16_prompt"


@pytest.fixture(scope="session")
def vllm_negative(data_dir: Path) -> Path:
    return data_dir / "vllm" / "vllm032_inprocess_missing_last_batch"


@pytest.fixture(scope="session")
def _converted(hsfmt, vllm, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("converted") / "dataset"
    hsfmt("convert", vllm, path, "--layer-ids", LAYERS, "--model", "tiny/llama")
    return path


@pytest.fixture
def dataset(_converted, tmp_path) -> Path:
    """The good vLLM folder as a sealed dataset; a copy that the test may damage."""
    return Path(shutil.copytree(_converted, tmp_path / "dataset"))


def states(n_tokens: int, n_layers: int = 2, hidden: int = 8) -> np.ndarray:
    values = np.arange(n_tokens * n_layers * hidden, dtype=np.float32) % 251 - 100
    return values.reshape(n_tokens, n_layers, hidden).astype(ml_dtypes.bfloat16)


@pytest.fixture
def write() -> Callable[..., None]:
    """Write samples {id: loss mask or None} of as many tokens as their number, from 1 on."""

    def write_samples(url: object, samples: dict[str, Any], *, seal: bool = True, holes=(), **settings: Any) -> None:
        options = {"layers": [0, 3], "hidden_size": 8, "final_norm": "unknown", "seal": seal, **settings}
        with DatasetWriter(str(url), **options) as writer:
            for n, (sample_id, mask) in enumerate(samples.items(), 1):
                writer.write(sample_id, np.arange(n), states(n), mask, {"n": n})
            for sample_id, reason in holes:
                writer.hole(sample_id, reason)

    return write_samples
