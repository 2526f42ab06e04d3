"""The spec's prose, its rules and its vectors."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from spec.vectors.apply import build

SPEC = Path(__file__).resolve().parent.parent.parent / "spec"
VECTORS = SPEC / "vectors" / "1.0"
VALID = sorted(path.name for path in (VECTORS / "valid").iterdir())
INVALID = sorted(path.name for path in (VECTORS / "invalid").iterdir())
PROSE = (SPEC / "hsfmt-1.0.md").read_text(encoding="utf-8")
RULE = re.compile(r"^- \*\*([A-Z]+)-(\d+)\*\* (.*?)(?=^\s*$|^- \*\*|^#)", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="session")
def rules() -> dict[str, str]:
    """Text of each rule by id."""
    found = [(f"{area}-{number}", " ".join(text.split())) for area, number, text in RULE.findall(PROSE)]
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.fixture
def vector(tmp_path) -> Callable[[str], Path]:
    """Put a case ("valid/minimal") together and return its dataset."""
    return lambda case: build(VECTORS / case, tmp_path / case.replace("/", "-"))


def about(case: str) -> dict:
    """What an invalid case says about itself."""
    return json.loads((VECTORS / "invalid" / case / "case.json").read_text())


def expected(case: str) -> dict:
    """What a reader gets from a valid case."""
    return json.loads((VECTORS / "valid" / case / "expected.json").read_text(encoding="utf-8"))
