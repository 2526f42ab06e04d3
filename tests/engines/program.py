"""Real programs under test: each in a process group of its own, which is gone when the test is."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def python_of(venv: str) -> Path:
    """The interpreter of an engine's environment. A missing one fails the test: what did not run is not covered."""
    path = ROOT / venv / "bin" / "python"
    if not path.exists():
        pytest.fail(f"no {venv}: `make engines` installs it; `-m 'not engine'` leaves these tests out")
    return path


def environment(*paths: Path, **extra: str) -> dict[str, str]:
    """Nothing of this process's Python but this checkout; no hub is asked for anything."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HSFMT"))}
    python_path = os.pathsep.join(map(str, [ROOT, *paths]))
    return {**plain, "PYTHONPATH": python_path, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", **extra}


@contextmanager
def started(command: list[str | Path], log: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program whose output goes to `log`; kill it, and all it started, at the end."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, cwd=log.parent, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(command: list[str | Path], log: Path, env: dict[str, str], *, exit_code: int = 0, seconds: float = 240) -> str:
    """Run a program to its end; return what it printed."""
    with started(command, log, env) as process:
        process.wait(seconds)
    text = log.read_text(errors="replace")
    assert process.returncode == exit_code, f"exit {process.returncode}\n{text[-6000:]}"
    return text
