"""Make the vectors: `python spec/vectors/make.py FOLDER` writes `valid/`, `invalid/` and SHA256SUMS there.

Vectors of a released format version never change; a test holds them to SHA256SUMS. So this is run for new versions,
or for new cases beside the old ones.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from spec.reference.dataset import load, to_json  # noqa: E402 - the checkout must be on the path first
from spec.vectors.invalid_cases import make_invalid  # noqa: E402
from spec.vectors.valid_cases import make_valid  # noqa: E402


def make(root: Path) -> None:
    """Write all vectors below `root`."""
    make_valid(root / "valid")
    for case in sorted((root / "valid").iterdir()):
        text = json.dumps(to_json(load(case / "dataset")), indent=1, ensure_ascii=False, sort_keys=True)
        (case / "expected.json").write_text(text + "\n")
    make_invalid(root / "valid", root / "invalid")
    (root / "SHA256SUMS").write_text(sums(root))


def sums(root: Path) -> str:
    """Return the lines of SHA256SUMS."""
    paths = sorted(p for p in root.rglob("*") if p.is_file() and p.name != "SHA256SUMS")
    return "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(root).as_posix()}\n" for p in paths)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
