"""What is installed is what is in the tree, and every way to import it works."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

PACKAGE_DIRS = {"hsfmt": "hsfmt"} | {name: f"hsfmt/{name}" for name in ("cli", "maintenance", "readers", "writers")}
IMPORT_ALL = """
import importlib, json, os, sys
sys.path[:0] = json.loads(sys.argv[1])
for name in sys.argv[2:]:
    try:
        file = importlib.import_module(name).__file__
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "vllm"):  # a few modules exist for one of these alone
            raise
        continue
    tree = os.path.dirname(sys.modules["hsfmt"].__path__[0])
    print(tree if file.startswith(tree + os.sep) else file)
"""


def tree_modules(repo_root: Path) -> dict[str, Path]:
    """Path inside a wheel -> source file, for every Python file of the package."""
    return {
        f"{target}/{path.relative_to(repo_root / source).as_posix()}": path
        for source, target in PACKAGE_DIRS.items()
        for path in (repo_root / source).rglob("*.py")
    }


def module_names(repo_root: Path) -> list[str]:
    return sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in tree_modules(repo_root)
    )


@pytest.fixture(scope="module")
def wheel(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy so that the checkout gets no build/ folder."""
    source = tmp_path_factory.mktemp("source") / "hsfmt"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in PACKAGE_DIRS:
        shutil.copytree(repo_root / folder, source / folder, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repo_root / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out]
    done = subprocess.run([*pip, source], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("hsfmt-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files, as pip would lay them."""
    target = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def test_wheel_holds_every_module_and_nothing_else(repo_root, wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == set(tree_modules(repo_root)) | {"hsfmt/py.typed"}


def test_wheel_metadata(wheel, installed):
    (info,) = installed.glob("hsfmt-*.dist-info")
    entry_points = (info / "entry_points.txt").read_text()
    assert "[console_scripts]\nhsfmt = hsfmt.cli.main:main\n" in entry_points
    assert "[zarr.data_type]\nbfloat16 = hsfmt.zarr_dtypes:BFloat16\n" in entry_points
    assert "float8_e4m3fn = hsfmt.zarr_dtypes:Float8E4M3FN" in entry_points
    assert "[zarr.buffer]\nhsfmt = hsfmt.zarr_plugin:Buffer" in entry_points
    assert "[sglang.srt.plugins]\nhsfmt = hsfmt.writers.sglang:register\n" in entry_points
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text()
    assert wheel.name.endswith("-py3-none-any.whl")


def test_listed_packages_are_those_of_the_tree(repo_root):
    listed = tomllib.loads((repo_root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {str(Path(name).parent).replace("/", ".") for name in tree_modules(repo_root)}
    assert listed == sorted(found)


def test_every_folder_of_modules_is_a_package(repo_root):
    folders = {path.parent for path in tree_modules(repo_root).values()}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def import_all(run_python, repo_root: Path, *first: Path) -> set[Path]:
    """Import every module with `first` at the head of the path; return the trees they came from.

    -S keeps out the editable install's finder, which would help where nothing should.
    """
    site_packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    path = json.dumps([*map(str, first), *sorted(site_packages)])
    return {Path(line) for line in run_python(IMPORT_ALL, path, *module_names(repo_root), flags="-S").splitlines()}


def test_installed_wheel_imports(repo_root, installed, run_python):
    assert import_all(run_python, repo_root, installed) == {installed}


def test_bare_checkout_imports(repo_root, run_python):
    assert import_all(run_python, repo_root, repo_root) == {repo_root}


def test_checkout_and_installed_wheel_do_not_mix(repo_root, installed, run_python):
    """As when Python is started in the repository of an installed wheel, and the other way round."""
    assert import_all(run_python, repo_root, repo_root, installed) == {repo_root}
    assert import_all(run_python, repo_root, installed, repo_root) == {installed}


ZARR_OPEN = """
import json, pathlib, sys, zarr
root = pathlib.Path("group")
for name in ("bfloat16", "float8_e4m3fn"):
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [2],
        "data_type": name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0.0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {},
    }
    (root / name).mkdir(parents=True)
    (root / name / "zarr.json").write_text(json.dumps(metadata))
(root / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
for name in ("bfloat16", "float8_e4m3fn"):
    array = zarr.open(root / name, mode="r") if sys.argv[1] == "array" else zarr.open(root, mode="r")[name]
    print(array[:].dtype)
"""
ZARR_VERSION = tuple(map(int, importlib.metadata.version("zarr").split(".")[:2]))


@pytest.mark.parametrize(
    "what",
    [
        "group",
        pytest.param(
            "array",
            marks=pytest.mark.skipif(ZARR_VERSION < (3, 4), reason="zarr-python before 3.4: see zarr_plugin.py"),
        ),
    ],
)
def test_zarr_python_finds_the_data_types_by_itself(run_python, what):
    """Through the entry points of the installed package: nothing here imports hsfmt."""
    try:
        importlib.metadata.distribution("hsfmt")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("hsfmt is not installed here, only on the path")
    assert run_python(ZARR_OPEN, what).split() == ["bfloat16", "float8_e4m3fn"]


def test_the_plugin_makes_arrays_open_directly(repo_root, run_python):
    code = "import hsfmt.zarr_plugin\n" + ZARR_OPEN
    assert run_python(code, "array", path=repo_root).split() == ["bfloat16", "float8_e4m3fn"]


def test_the_plugin_leaves_zarrs_buffers_alone(repo_root, run_python):
    code = """
from zarr.registry import get_buffer_class
before = get_buffer_class()
import hsfmt.zarr_plugin
assert get_buffer_class() is before is hsfmt.zarr_plugin.Buffer, before
"""
    run_python(code, path=repo_root)
