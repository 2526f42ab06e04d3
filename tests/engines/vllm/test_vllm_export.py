"""An export to vLLM's layout in vLLM's own loader of such files: every state and token id of the original folder."""

from pathlib import Path

import pytest
from program import environment, python_of, run
from safetensors.torch import load_file

from hsfmt.cli.main import main as hsfmt

pytestmark = [pytest.mark.engine, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("load_exported.py")


def test_its_loader_gives_what_the_original_files_hold(data_dir, tmp_path):
    original = data_dir / "vllm/vllm032_bf16_prompt"
    dataset, folder, result = tmp_path / "dataset", tmp_path / "export", tmp_path / "result.safetensors"
    hsfmt(["convert", str(original), str(dataset), "--layer-ids", "2,4,5,8", "--quiet"], standalone_mode=False)
    assert hsfmt(["export", str(dataset), str(folder), "--to", "vllm", "--quiet"], standalone_mode=False) in (None, 0)
    run([python_of(".venv-vllm"), SCRIPT, folder, result], tmp_path / "log", environment())
    loaded = load_file(result)
    files = sorted(original.glob("*.safetensors"))
    assert len(files) == 8
    assert len(loaded) == 2 * len(files)
    for path in files:
        for key, value in load_file(path).items():
            found = loaded[f"{path.stem} {key}"]
            assert (found.dtype, found.shape) == (value.dtype, value.shape)
            assert found.equal(value)
