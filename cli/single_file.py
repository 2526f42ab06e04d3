"""What a single file of another program is, and which folder it belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hsfmt.errors import HsfmtError, Problem, SourceError
from hsfmt.readers.sources.detection import folder_claims
from hsfmt.readers.sources.folder import HEAD_NBYTES, PACKED, describe_foreign
from hsfmt.readers.sources.sample_names import is_torch_name

if TYPE_CHECKING:
    from hsfmt.readers.sources.base import Claim

# Folders that programs cut one run into: what is converted is the folder above them.
_CUT = re.compile(r"rows_[0-9]+-[0-9]+|rank_?[0-9]+|shard_[0-9]+|hidden_states|[0-9]{1,4}")
_ANCESTORS = 4
_KINDS = {
    ".json": "a JSON document, which goes with data files",
    ".jsonl": "lines of JSON, which go with data files",
    ".arrow": "an Arrow file of a data set",
    ".lock": "the lock of a data file, written by vLLM's connector",
    ".memmap": "raw activations, whose shape is in the .meta file beside it",
    ".meta": "the shape of raw activations",
    ".idx": "an index of samples",
    ".bin": "raw data, which an index beside it describes",
}


@dataclass(slots=True)
class SingleFile:
    """A file, and where it belongs.

    Attributes
    ----------
    path
        The file.
    what
        In words.
    holds
        Keys and shapes, where it was read.
    problems
        What is wrong with it.
    folder, claims
        The folder to give, and what the sources claim of it.
    """

    path: Path
    what: str
    holds: str = ""
    problems: list[Problem] = field(default_factory=list)
    folder: Path = field(default_factory=Path)
    claims: dict[str, Claim] = field(default_factory=dict)


def look_into(path: Path) -> SingleFile:
    """Look into a file; never executes what is in it.

    Raises
    ------
    StorageError
        It can't be read.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_NBYTES)
    what, read = _kind(path.name)
    found = SingleFile(path, what)
    foreign = describe_foreign(head, path.stat().st_size)
    if foreign is not None and not (path.name.endswith(PACKED) and head[:2] == b"\x1f\x8b"):
        found.problems.append(Problem(path.name, what, foreign))
    elif read is not None:
        try:
            found.holds = read(path)
        except SourceError as error:
            found.problems.extend(error.problems)
    found.folder, found.claims = _belongs_to(path.absolute())
    return found


def _kind(name: str) -> tuple[str, Callable[[Path], str] | None]:
    if is_torch_name(name):
        packed = ", packed by gzip" if name.endswith(PACKED) else ""
        return f"a file of torch.save{packed}", _torch
    if name.endswith(".safetensors"):
        return "a safetensors file", _safetensors
    if name.endswith(".npz"):
        return "an archive of NumPy arrays", _npz
    return _KINDS.get(Path(name).suffix, "a file of a kind that no source reads"), None


def _torch(path: Path) -> str:
    from hsfmt.readers.sources.key_sets import describe
    from hsfmt.readers.sources.torch_record import load_record

    return describe(load_record(path, path.name))


def _safetensors(path: Path) -> str:
    from hsfmt.readers.sources.safetensors_file import read_entries

    entries = sorted(read_entries(path, path.name).items())
    return ", ".join(f"{name} {entry.dtype.name} {list(entry.shape)}" for name, entry in entries)


def _npz(path: Path) -> str:
    from hsfmt.readers.sources.npz_file import read_arrays_header

    entries = sorted(read_arrays_header(path, path.name).items())
    return ", ".join(f"{name} {entry.dtype.name} {list(entry.shape)}" for name, entry in entries)


def _belongs_to(path: Path) -> tuple[Path, dict[str, Claim]]:
    """Return the folder to give: the file's own, or the one above the folders that one run was cut into."""
    folder = path.parent
    for _ in range(_ANCESTORS):
        name = folder.resolve().name
        if not _CUT.fullmatch(name):
            break
        folder = folder.parent
    for candidate in dict.fromkeys((folder, path.parent)):
        try:
            claims = folder_claims(candidate)
        except HsfmtError:
            continue
        if claims:
            return candidate, claims
    return path.parent, {}
