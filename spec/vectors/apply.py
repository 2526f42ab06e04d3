"""Build a vector's dataset: `python spec/vectors/apply.py 1.0/invalid/shard-missing FOLDER`.

A valid case is a whole dataset; an invalid one is its base with the files of `overlay/` laid over it and those of
`remove` gone.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path


def build(case: Path, target: Path) -> Path:
    """Copy the case's dataset to `target`, which must not exist, and return it."""
    if (case / "dataset").is_dir():
        shutil.copytree(case / "dataset", target)
        return target
    about = json.loads((case / "case.json").read_text())
    build(case.parent.parent / "valid" / about["base"], target)
    if (case / "overlay").is_dir():
        shutil.copytree(case / "overlay", target, dirs_exist_ok=True)
    for path in about["remove"]:
        (target / path).unlink()
    return target


if __name__ == "__main__":
    build(Path(__file__).parent / sys.argv[1], Path(sys.argv[2]))
