"""Where the spec and its vectors lie."""

import json
import re
from pathlib import Path

SPEC = Path(__file__).resolve().parent.parent.parent / "spec"
VECTORS = SPEC / "vectors" / "1.0"
VALID = sorted(path.name for path in (VECTORS / "valid").iterdir())
INVALID = sorted(path.name for path in (VECTORS / "invalid").iterdir())
PROSE = (SPEC / "hsfmt-1.0.md").read_text(encoding="utf-8")
RULE = re.compile(r"^- \*\*([A-Z]+)-(\d+)\*\* (.*?)(?=^\s*$|^- \*\*|^#)", re.MULTILINE | re.DOTALL)


def about(case: str) -> dict:
    """What an invalid case says about itself."""
    return json.loads((VECTORS / "invalid" / case / "case.json").read_text())


def expected(case: str) -> dict:
    """What a reader gets from a valid case."""
    return json.loads((VECTORS / "valid" / case / "expected.json").read_text(encoding="utf-8"))
