"""The spec's rules and vectors as fixtures."""

from collections.abc import Callable
from pathlib import Path

import pytest
from vector_cases import PROSE, RULE, VECTORS

from spec.vectors.apply import build


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
