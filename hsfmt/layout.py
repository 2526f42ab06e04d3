"""Names and places: where each object of a dataset lies.

Spec: rules LAY-1 to LAY-3, VFY-13.
"""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime

from hsfmt.errors import FormatError

ROOT_METADATA = "zarr.json"
OWN_FOLDERS = frozenset({"hsfmt", "parts"})
PARTS_METADATA = "parts/zarr.json"
POINTER = "hsfmt/manifest.json"
MANIFESTS = "hsfmt/manifests"
INDEXES = "hsfmt/index"
SNAPSHOTS = "hsfmt/snapshots"
ATTACHMENTS = "hsfmt/attachments"
QUARANTINE = "hsfmt/quarantine"
# Files and folders that file browsers, NFS, version control and dataset hubs leave behind, anywhere in a dataset.
BYSTANDERS = (
    ".DS_Store", ".cache", ".git", ".gitattributes", ".gitignore", ".gitkeep", ".gitmodules", "README.md", "Thumbs.db",
    "desktop.ini",
)  # fmt: skip
BYSTANDER_PREFIXES = ("._", ".nfs")
PART_PATTERN = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


def new_part_name(now: datetime | None = None) -> str:
    """Return an opaque part name: start time and 64 random bits, in lower case, which no file system folds."""
    start = (now or datetime.now(UTC)).strftime("%Y%m%dt%H%M%Sz")
    return f"{start}-{secrets.token_hex(8)}"


def check_part_name(name: object, where: str) -> str:
    """Return the name if it is one that a part can have.

    Raises
    ------
    FormatError
        It has other characters, or is empty or too long.
    """
    if not isinstance(name, str) or not PART_PATTERN.fullmatch(name):
        raise FormatError.at(where, expected=f"a part name of {PART_PATTERN.pattern}", got=repr(name)[:100])
    return name


def part_folder(part: str) -> str:
    """Return the folder of a part's arrays."""
    return f"parts/{part}"


def column_folder(part: str, column: str) -> str:
    """Return the folder of one array."""
    return f"parts/{part}/{column}"


def index_path(part: str) -> str:
    """Return the path of a part's index."""
    return f"{INDEXES}/{part}.safetensors"


def manifest_path(part: str) -> str:
    """Return the path of a part's manifest."""
    return f"{MANIFESTS}/{part}.json"


def snapshot_path(fingerprint: str, file: str) -> str:
    """Return the path of a snapshot's file ("index" or "ids") for a fingerprint like xxh3_128:<hex>."""
    return f"{SNAPSHOTS}/{fingerprint.rpartition(':')[2]}/{file}.safetensors"


def part_of_manifest(name: str) -> str | None:
    """Return the part that a file of the manifests folder commits, None for a temporary or foreign name."""
    stem, dot, suffix = name.rpartition(".")
    return stem if dot and suffix == "json" and PART_PATTERN.fullmatch(stem) else None


def part_of_path(path: str) -> str | None:
    """Return the part that an object belongs to by its path: one of its folder, or its index."""
    segments = path.split("/")
    name = None
    if segments[0] == "parts" and len(segments) > 2:
        name = segments[1]
    elif path.startswith(f"{INDEXES}/") and path.endswith(".safetensors") and len(segments) == 3:
        name = segments[2].removesuffix(".safetensors")
    return name if name is not None and PART_PATTERN.fullmatch(name) else None


def bystander(path: str) -> str | None:
    """Return the path up to the file or folder that other software left there, None if it is none (rule VFY-13)."""
    segments = path.split("/")
    for i, name in enumerate(segments):
        if name in BYSTANDERS or name.startswith(BYSTANDER_PREFIXES):
            return "/".join(segments[: i + 1])
    return None
