"""What of format 1.0 is frozen, and its digests: `python tests/compatibility/frozen.py` prints them."""

import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LIST = Path(__file__).resolve().parent / "frozen-1.0.txt"
DATASETS = ROOT / "tests" / "data" / "format-1.0"
FOLDERS = [ROOT / "spec/vectors/1.0/valid", ROOT / "spec/vectors/1.0/invalid", DATASETS]


def digest_of(folder: Path) -> str:
    """Return the digest of a folder: of all its paths and bytes."""
    state = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            state.update(f"{path.relative_to(folder).as_posix()}\0{len(data)}\0".encode() + data)
    return state.hexdigest()


def digests() -> dict[str, str]:
    """Return path in the repository to digest, of every case."""
    cases = [case for folder in FOLDERS for case in sorted(folder.iterdir()) if case.is_dir()]
    return {case.relative_to(ROOT).as_posix(): digest_of(case) for case in cases}


def listed() -> dict[str, str]:
    """Return the same as it was when 1.0 was frozen."""
    return {path: digest for digest, _, path in (line.partition("  ") for line in LIST.read_text().splitlines())}


if __name__ == "__main__":
    sys.stdout.writelines(f"{digest}  {path}\n" for path, digest in digests().items())
