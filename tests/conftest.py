"""What every test file may ask for, and the settings of the run."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from servers import azurite

pytest_plugins = ["servers.server_fixtures"]

ROOT = Path(__file__).resolve().parent.parent

# The machine's speed is no property of the code; the same examples every run, so that a red CI can be repeated.
settings.register_profile("default", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

_HAS_TORCH = importlib.util.find_spec("torch") is not None
_IMPORTS_TORCH = re.compile(r"^(import|from) (safetensors\.)?torch\b", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the readers' tests open their datasets elsewhere: `make test-remote`."""
    parser.addoption("--store", choices=["local", "s3", "http", "memory"], help="where tests/readers open datasets")


@functools.cache
def imports_torch(path: Path) -> bool:
    """Whether a test file imports torch at its top, or what does so itself."""
    return path.suffix == ".py" and _IMPORTS_TORCH.search(path.read_text()) is not None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files that import torch at the top where there is none: they can't even be collected."""
    return True if not _HAS_TORCH and imports_torch(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of such files `torch`; a test that imports it inside marks itself.

    Without Azurite its tests are left out.
    """
    for item in items:
        if imports_torch(item.path):
            item.add_marker("torch")
    if not azurite.is_installed():
        left_out = [item for item in items if "azure_server" in getattr(item, "fixturenames", ())]
        items[:] = [item for item in items if "azure_server" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say that they were."""
    if not azurite.is_installed():
        terminalreporter.write_line(azurite.NOT_RUN)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Files that real programs wrote; see tests/data/README.md. Read only: copy what a test changes."""
    return ROOT / "tests" / "data"


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """Run Python code in a fresh process, from an empty folder; return its standard output.

    `path` goes into PYTHONPATH, which is empty otherwise.
    """
    cwd = tmp_path / "run_python"
    cwd.mkdir()

    def run(code: str, *argv: str, path: Path | None = None, python: str = sys.executable, flags: str = "") -> str:
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        if path is not None:
            env["PYTHONPATH"] = str(path)
        done = subprocess.run(
            [python, *flags.split(), "-c", code, *argv],
            cwd=cwd,
            env=env,
            text=True,
            capture_output=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
