# ruff: noqa: E501  a case a line
"""The table of cases: lies, each the only one in a dataset whose digests are all right, and who must refuse each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from dataset_forge import POINTER, Forge

PART = "part-0"
MANIFEST, INDEX = f"hsfmt/manifests/{PART}.json", f"hsfmt/index/{PART}.safetensors"
MIB = 1 << 20
PATHS = {
    "..": "../../secret", "absolute": "/etc/passwd", ".. within": "parts/part-0/../../../secret", "drive": "C:\\x",
    "backslash": "parts\\part-0\\x", "url": "file:///etc/passwd", "chain": "simplecache::memory://x", "NUL": "a\0b",
    "empty segment": "parts//x", "dot": "./x", "empty": "", "full-width dots": "\uff0e\uff0e/secret", "space": " ",
    "zero width": "parts/part-0/hidden_states/c/0/0/0\u200b", "upper case": "PARTS/part-0/hidden_states/c/0/0/0",
    "home": "~/secret", "variable": "$HOME/secret", "other part": "parts/part-1/hidden_states/c/0/0/0",
    "pointer": POINTER, "surrogate": "\ud800", "UNC": "\\\\host\\share", "https": "https://host/x", "s3": "s3://bucket/x", "drive alone": "C:x", "stream": "parts/x:y", "device": "/dev/zero",
    "trailing dot": "parts/part-0/zarr.json.", "trailing space": "parts/part-0/zarr.json ", "trailing slash": "parts/part-0/", "dots": "parts/.../x",
    "reserved": "parts/part-0/CON", "composed": "parts/p\u00e4rt/x", "decomposed": "parts/pa\u0308rt/x", "turned around": "parts/\u202egpj.x",
    "long name": "parts/" + "a" * 256, "escaped": "parts/%2e%2e/secret", "line end": "parts/part-0/zarr.json\n", "long": "a" * 5000, "number": 5, "list": ["a"], "null": None,
}  # fmt: skip
NUMBERS = {
    "-1": -1,
    "2^63-1": 2**63 - 1,
    "2^63": 2**63,
    "2^64": 2**64,
    "1.5": 1.5,
    "1e300": 1e300,
    "true": True,
    "text": "9",
    "null": None,
    "list": [],
    "huge": 10**4000,
}

_VERIFY = {"verify quick", "verify complete", "verify full", "hsfmt verify", "hsfmt verify --json"}
_TAKES_CHUNKS = {
    "read", "metadata", "ids", "zarr", "live", "cat", "export safetensors", "export zarr", "export npz live",
    "items", "batch", "speculators", "extras",
}  # fmt: skip
SEALING = {"seal", "seal with attachments", "hsfmt seal", "writer", "convert", "info live"}
_TAKES_PARTS = _TAKES_CHUNKS | SEALING | {"info", "info --json", "ls", "ls --json", "ls --holes", "window"}

# Who must refuse a lie of each kind; the others may pass it by, or see it too.
REFUSED_BY: dict[str, set[str]] = {
    "manifest": _VERIFY | _TAKES_PARTS,
    "index": (_VERIFY | _TAKES_PARTS) - {"ls --holes"},
    "pointer": _VERIFY | _TAKES_PARTS | {"attachments", "open"},
    "snapshot": _VERIFY | _TAKES_PARTS | {"attachments", "open"},
    "root": (_VERIFY | SEALING | {"live", "info", "info --json", "ls", "ls --json", "ls --holes", "cat"})
    | {"export safetensors", "export zarr", "export npz live"},
    "header": _VERIFY | _TAKES_PARTS | {"attachments", "open"},
    "ids": _VERIFY | {"ids", "ls", "ls --json"},
    "chunk": _TAKES_CHUNKS | {"verify full", "hsfmt verify", "hsfmt verify --json"},
    "attachment": {"attachments"},
    "attachment entry": _VERIFY
    | SEALING
    | {"attachments", "live", "info", "info --json", "export safetensors", "export zarr", "export npz live"},
    "verify": _VERIFY,
    # Rows of a snapshot that the part has not, or not so.
    "rows": _VERIFY
    | {"read", "metadata", "ids", "cat", "items", "batch", "window", "extras", "speculators", "export safetensors"}
    | {"info", "ls", "ls --json"},
    "verify full": {"verify full", "hsfmt verify", "hsfmt verify --json"},
    "nobody": set(),
}


@dataclass(frozen=True)
class Case:
    """A lie: `change` plants it; `allowance` is what its sheer size may cost, in bytes, where that is not little."""

    change: Callable[[Forge], Any]
    kind: str
    but: frozenset[str] = frozenset()
    allowance: int = 0

    @property
    def refused_by(self) -> set[str]:
        found = REFUSED_BY[self.kind] - self.but
        return found | {"read windows"} if "read" in found else found


CASES: dict[str, Case] = {}


def case(
    name: str, kind: str, change: Callable[[Forge], Any], *, but: tuple[str, ...] = (), allowance: int = 0
) -> None:
    assert name not in CASES, name
    CASES[name] = Case(change, kind, frozenset(but), allowance)


def put(take: Callable[[Forge], Any], *path: Any, value: Any) -> Callable[[Forge], None]:
    """Return a change that stores a value under a path of a document; `...` deletes it."""

    def change(forge: Forge) -> None:
        place = take(forge)
        for key in path[:-1]:
            place = place[key]
        if value is ...:
            del place[path[-1]]
        else:
            place[path[-1]] = value

    return change


def in_manifest(*path: Any, value: Any) -> Callable[[Forge], None]:
    return put(lambda forge: forge.manifests[PART], *path, value=value)


def in_header(key: str, value: Any) -> Callable[[Forge], None]:
    return lambda forge: forge.header(lambda header: header.__setitem__(key, value))


def array(table: str, name: str, value: Any) -> Callable[[Forge], None]:
    """Return a change of an array: of the index of part-0, the snapshot, or its ids. A value, or a function of it."""

    def change(forge: Forge) -> None:
        tables = {"index": forge.indexes[PART], "snapshot": forge.snapshot, "ids": forge.ids}
        arrays = tables[table].arrays
        found = value(arrays[name]) if callable(value) else value
        arrays[name] = np.asarray(found).astype(arrays[name].dtype)

    return change


def edited(at: Any, value: Any) -> Callable[[np.ndarray], np.ndarray]:
    def change(old: np.ndarray) -> np.ndarray:
        new = old.copy()
        new[at] = value
        return new

    return change
