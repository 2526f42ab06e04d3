"""What the README and the docs show runs: the Python blocks of a file, in order, as one program."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if path.is_file()]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LOADS_TORCH = re.compile(r"\btorch\b|HiddenStateDataset")


def program(text: str) -> str:
    """The Python blocks of `text`, each on the lines it has there, so that a traceback names lines of the document."""
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        start = text.count("\n", 0, block.start(1))
        code = block[1].splitlines()
        lines[start : start + len(code)] = code
    return "\n".join(lines) + "\n"


def as_param(path: Path):
    marks = [pytest.mark.torch] if LOADS_TORCH.search(program(path.read_text())) else []
    return pytest.param(path, id=path.relative_to(ROOT).as_posix(), marks=marks)


def test_readme_shows_python():
    assert BLOCK.search((ROOT / "README.md").read_text()), "README.md has no ```python block"


@pytest.mark.parametrize("path", [as_param(path) for path in FILES if BLOCK.search(path.read_text())])
def test_python_blocks_run(path, tmp_path):
    code = program(path.read_text())
    script = tmp_path / f"{path.stem}.py"
    script.write_text(code)
    (tmp_path / "tests").symlink_to(ROOT / "tests")  # the documents name the shipped files as a checkout has them
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::DeprecationWarning:__main__"}
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, env=env, text=True, capture_output=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"{path.name}\n{done.stdout}\n{done.stderr}"


def test_program_keeps_line_numbers():
    text = "# a\n\n```python\nx = 1\n```\n\n```sh\nls\n```\n\n```python\nif x:\n    y = 2\n```\n"
    assert program(text).splitlines()[:13] == ["", "", "", "x = 1", *[""] * 7, "if x:", "    y = 2"]
