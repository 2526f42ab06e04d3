"""Tiny checkpoints, and the states that transformers computes for them."""

import json

import program
import pytest
from sglang_server import HERE, PROMPTS, VENV


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folder of checkpoints llama/ and qwen3/ and of their reference states."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "prompts.json").write_text(json.dumps(PROMPTS))
    script = [program.python_of(VENV), HERE / "reference.py", folder, folder / "prompts.json"]
    program.run(script, folder / "reference.log", program.environment())
    return folder
