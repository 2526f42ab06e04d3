"""The examples in docstrings run."""

import doctest
import importlib
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"hsfmt": "hsfmt", "readers": "hsfmt.readers", "writers": "hsfmt.writers", "cli": "hsfmt.cli"}


def modules_with_examples() -> list[str]:
    """Names of the modules that have a `>>>` in them."""
    return [
        ".".join([package, *path.relative_to(ROOT / folder).with_suffix("").parts]).removesuffix(".__init__")
        for folder, package in FOLDERS.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
        if ">>> " in path.read_text()
    ]


@pytest.mark.parametrize("name", modules_with_examples() or [pytest.param("", marks=pytest.mark.skip("no examples"))])
def test_examples(name, tmp_path, monkeypatch):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        pytest.skip("needs torch")
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.attempted, "the >>> in it is no example that doctest finds"
    assert result.failed == 0
    assert os.getcwd() == str(tmp_path)  # noqa: PTH109 - an example that left its folder would disturb the next
