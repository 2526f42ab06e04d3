"""torch and zarr are imported by those who need them, never to print help or read a manifest."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

HEAVY = ("torch", "zarr")

# Modules that exist for torch or zarr, and may import it at the top.
ALLOWED = {
    "torch": {
        "readers/buffers.py",
        "readers/device.py",
        "readers/packed_batch.py",
        "readers/packed_views.py",
        "readers/packing.py",
        "readers/prefetch.py",
        "readers/shared_memory.py",
        "readers/sources/torch_states.py",
        "readers/sources/verl_speco_sample.py",
        "readers/views.py",
    },
    "zarr": {"hsfmt/zarr_dtypes.py", "hsfmt/zarr_plugin.py", "readers/arrays.py", "readers/zarr_store.py"},
}
FOLDERS = ("hsfmt", "readers", "writers", "maintenance", "cli")


def modules(repo_root: Path) -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((repo_root / folder).rglob("*.py"))]


def runs_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when the module is imported: not those of functions, nor those for type checkers."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from runs_at_import(node.orelse)
            continue
        yield node
        for block in ("body", "orelse", "finalbody"):
            yield from runs_at_import(getattr(node, block, []))
        for handler in getattr(node, "handlers", []):
            yield from runs_at_import(handler.body)


def imported_at_top(path: Path) -> set[str]:
    names: set[str] = set()
    for node in runs_at_import(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("package", HEAVY)
def test_only_modules_made_for_it_import_it_at_the_top(repo_root, package):
    found = {path.relative_to(repo_root).as_posix() for path in modules(repo_root) if package in imported_at_top(path)}
    assert found <= ALLOWED[package]


def test_no_relative_imports(repo_root):
    """The import contracts read absolute names, and a reader finds `hsfmt.readers` in readers/ either way."""
    relative = [
        f"{path.relative_to(repo_root)}:{node.lineno}"
        for path in modules(repo_root)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def heavy_modules(run_python, code: str, *argv: str, repo_root: Path) -> list[str]:
    """Which of `HEAVY` a fresh process holds after `code`."""
    report = f"\nimport json, sys\nprint(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    last_line = run_python(code + report, *argv, path=repo_root).splitlines()[-1]
    return json.loads(last_line)


def test_import_hsfmt(repo_root, run_python):
    assert heavy_modules(run_python, "import hsfmt", repo_root=repo_root) == []


def test_public_names_exist(repo_root, run_python):
    """`dir` and attribute access know the lazily loaded names, and an unknown one is an AttributeError."""
    code = "import hsfmt\ntry:\n    hsfmt.no_such_name\nexcept AttributeError as error:\n    print(error)"
    assert "no_such_name" in run_python(code, path=repo_root)


CLI = """
import sys
from hsfmt.cli.main import main
main(sys.argv[1:], standalone_mode=False)
"""
COMMANDS = [
    "doctor", "estimate", "convert", "verify", "info", "ls", "seal", "export", "cat", "capture", "speculators-train",
    "specforge-train", "repair", "compact", "retract", "gc", "merge",
]  # fmt: skip
needs_cli = pytest.mark.skipif(
    not (Path(__file__).resolve().parent.parent / "cli" / "main.py").is_file(), reason="no command line yet"
)


@pytest.fixture
def sealed_dataset(tmp_path, repo_root, run_python) -> str:
    """A dataset of two samples, written in a process of its own."""
    code = """
    import sys, ml_dtypes, numpy as np
    from hsfmt import DatasetWriter
    with DatasetWriter(sys.argv[1], layers=[1, 2], hidden_size=8, final_norm="pre") as writer:
        for i in range(2):
            writer.write(f"s{i}", np.arange(3), np.ones((3, 2, 8), dtype=ml_dtypes.bfloat16))
    """
    url = str(tmp_path / "dataset")
    run_python("if 1:" + code, url, path=repo_root)
    return url


@needs_cli
@pytest.mark.parametrize(
    "argv", [["--help"], ["--version"], *[[command, "--help"] for command in COMMANDS]], ids=" ".join
)
def test_help_imports_neither(repo_root, run_python, argv):
    assert heavy_modules(run_python, CLI, *argv, repo_root=repo_root) == []


@needs_cli
@pytest.mark.parametrize("argv", [["info"], ["info", "--json"], ["ls"]], ids=" ".join)
def test_reading_the_index_imports_neither(repo_root, run_python, sealed_dataset, argv):
    assert heavy_modules(run_python, CLI, *argv, sealed_dataset, repo_root=repo_root) == []
