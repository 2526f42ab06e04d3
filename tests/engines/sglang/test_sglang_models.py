"""What [3, 31, 59] means is the model's to say: the header has what the real classes resolve it to."""

import json

import program
import pytest
from sglang_server import HERE, VENV

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def resolved(tmp_path_factory):
    log = tmp_path_factory.mktemp("resolve") / "log"
    env = program.environment(SGLANG_USE_CPU_ENGINE="1", TORCHDYNAMO_DISABLE="1")
    output = program.run([program.python_of(VENV), HERE / "resolve_layers.py"], log, env)
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize(
    ("model", "case", "layers"),
    [
        # Outputs of layers 2, 30, 58 on these, of 3, 31, 59 on those: SGLang 0.5.23 adds one, or does not.
        ("kimi", "eagle3 3,31,59", [3, 31, 59]),
        ("deepseek", "eagle3 3,31,59", [3, 31, 59]),
        ("llama", "eagle3 3,31,59", [4, 32, 60]),
        ("qwen3", "eagle3 3,31,59", [4, 32, 60]),
        ("kimi", "dflash 3,31,59", [4, 32, 60]),
        ("deepseek", "dflash 3,31,59", [4, 32, 60]),
        ("llama", "dflash 3,31,59", [4, 32, 60]),
        ("kimi", "eagle3 59,3,31", [3, 31, 59]),
        ("kimi", "eagle3 1,30,58", [2, 31, 59]),
        ("deepseek", "eagle3 1,30,58", [2, 31, 59]),
        ("kimi", "eagle3 default", [2, 30, 58]),
    ],
)
def test_the_resolved_layers_are_recorded(resolved, model, case, layers):
    result = resolved[f"{model} {case}"]
    assert sorted(result["model"]) == result["ours"] == layers


LOAD_PLUGINS = """
import sglang.version
print(sglang.version.__version__)
from sglang.srt.plugins import load_plugins
load_plugins()
"""


def test_an_older_release_ends_instead_of_serving_without_a_capture(tmp_path):
    """0.5.17 has plugins, and no capture without a draft: the real one, as far as it loads its plugins."""
    python = program.python_of(VENV)
    older = python.parent.parent / "sglang-0.5.17"
    env = program.environment(older, SGLANG_USE_CPU_ENGINE="1", HSFMT_SGLANG_OUT=str(tmp_path / "states"))
    output = program.run([python, "-c", LOAD_PLUGINS], tmp_path / "log", env, exit_code=1)
    assert "0.5.17\n" in output
    assert "expected 0.5.23 or newer, got 0.5.17" in output
    assert not (tmp_path / "states").exists()
