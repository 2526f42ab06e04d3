"""What a collection removes, in groups that go together: everything is kept that none of them names.

Spec: rules GC-2, GC-3, GC-5, GC-7.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hsfmt import digests, layout
from hsfmt.errors import CorruptionError, NotFoundError
from hsfmt.maintenance.collect_plan import Keep, Roots
from hsfmt.storage import Store
from hsfmt.zarr_metadata import group_document

_PART_FILE = re.compile(
    r"parts/[a-z0-9][a-z0-9-]{0,63}/(zarr\.json|[a-z][a-z0-9_]{0,63}/(zarr\.json|c(/[0-9]+)+))"
    r"|hsfmt/index/[a-z0-9][a-z0-9-]{0,63}\.safetensors"
)
_OTHER_FILE = re.compile(
    r"zarr\.json|parts/zarr\.json|hsfmt/manifest\.json|hsfmt/manifests/[a-z0-9][a-z0-9-]{0,63}\.json"
    r"|hsfmt/snapshots/[0-9a-f]{32}/(index|ids)\.safetensors|hsfmt/attachments/[0-9a-f]{32}/[a-z0-9][a-z0-9_.-]{0,59}\.npy"
    r"|hsfmt/gc|hsfmt/quarantine/.+"
)
_TEMPORARY = re.compile(r"(.+?)(\.[0-9a-f]{16}\.tmp)+")  # twice: of a collection that was killed
_ATTACHMENT = re.compile(r"hsfmt/attachments/[0-9a-f]{32}/.+")
_MAX_DOCUMENT_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Group:
    """Files that go together, in the order in which they go.

    Attributes
    ----------
    why
        The reason, for people.
    files
        (path, nbytes).
    age
        Seconds since the newest of them was written.
    part, snapshot
        What it is, if it is a part or a snapshot (its fingerprint).
    committed
        Whether the part is committed (and superseded).
    named_by_first
        Whether the first file is what makes the others be taken for something.
    nameable
        Whether it is of a kind that snapshots name.
    """

    why: str
    files: tuple[tuple[str, int], ...]
    age: float
    part: str | None = None
    snapshot: str | None = None
    committed: bool = False
    named_by_first: bool = False
    nameable: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(nbytes for _, nbytes in self.files)

    def to_json(self) -> dict[str, Any]:
        """Return the group as JSON."""
        files = [{"nbytes": nbytes, "path": path} for path, nbytes in self.files]
        return {"age_seconds": int(self.age), "files": files, "nbytes": self.nbytes, "why": self.why}


def is_part_file(path: str) -> bool:
    """Say whether a part has a file of this path, or of its temporary name."""
    match = _TEMPORARY.fullmatch(path)
    return _PART_FILE.fullmatch(match[1] if match else path) is not None


def plan_groups(
    store: Store, roots: Roots, listed: Iterable[tuple[str, int]], keep: Keep
) -> tuple[list[Group], list[str]]:
    """Return what may go, in the order of its removal, and the strays.

    Parameters
    ----------
    listed
        (path, nbytes) of all files, listed before `roots` were found.
    """
    sizes = dict(listed)
    parts: dict[str, list[str]] = {}
    single: list[tuple[str, str]] = []
    last: list[tuple[str, str]] = []
    aside: dict[str, list[str]] = {}
    unfinished: list[str] = []
    strays = []
    named = {part: {entry.path for entry in manifest.files} for part, manifest in roots.manifests.items()}
    for path in sizes:
        match = _TEMPORARY.fullmatch(path)
        base = match[1] if match else path
        part = layout.part_of_path(base) if _PART_FILE.fullmatch(base) else None
        if layout.bystander(path) is not None:
            continue
        if part is None and not _OTHER_FILE.fullmatch(base):
            strays.append(path)
        elif part is not None and part not in roots.manifests:
            parts.setdefault(part, []).append(path)
        elif match:
            single.append((path, "temporary file of a writer that was killed"))
        elif part is not None and path not in named[part]:
            strays.append(path)
        elif path.startswith(f"{layout.QUARANTINE}/"):
            aside.setdefault(path.split("/")[2].partition(".")[0], []).append(path)
        elif _ATTACHMENT.fullmatch(path) and path not in roots.attachments:
            last.append((path, "attachment that no kept snapshot lists"))
        elif path.startswith(f"{layout.SNAPSHOTS}/") and _fingerprint(path) not in roots.stored:
            unfinished.append(path)
    groups = [_snapshot(store, name, sizes, keep) for name in sorted(roots.dropped)]
    groups += [_group(store, keep, why, [path], sizes) for path, why in single]
    why = "snapshot that was never finished"
    groups += [_group(store, keep, why, [path], sizes, snapshot=_fingerprint(path)) for path in unfinished]
    groups += [_superseded(store, keep, roots, part, sizes) for part in roots.removable]
    for part, paths in sorted(parts.items()):
        if part not in aside and part not in roots.named and _is_foreign(store, part, sizes):
            strays += paths
        elif part not in roots.named:
            why = "part that repair set aside" if part in aside else "part that was never committed"
            # With the manifest that was set aside: it tells since when.
            groups.append(
                _group(store, keep, why, [*_ordered(paths), *aside.pop(part, ())], sizes, part=part, nameable=True)
            )
    last += [
        (path, "set aside by repair") for part, paths in aside.items() if part not in roots.named for path in paths
    ]
    groups += [_group(store, keep, why, [path], sizes, nameable=True) for path, why in last]
    return groups, sorted(strays)


def _is_foreign(store: Store, part: str, sizes: Mapping[str, int]) -> bool:
    """Say whether the folder is a Zarr node that another program made: writers make no other document than theirs."""
    path = f"{layout.part_folder(part)}/{layout.ROOT_METADATA}"
    if path not in sizes:
        return False
    try:
        data = store.read(path, _MAX_DOCUMENT_NBYTES)
        return data != group_document() and "zarr_format" in json.loads(data)
    except (NotFoundError, ValueError, TypeError, RecursionError) as error:
        return isinstance(error, CorruptionError)  # larger than any of ours


def _fingerprint(path: str) -> str:
    return f"{digests.ALGORITHM}:{path.split('/')[2]}"


def _ordered(paths: Iterable[str]) -> list[str]:
    """The index, then data, then what describes it."""
    return sorted(paths, key=lambda path: (not path.startswith(layout.INDEXES), path.endswith("zarr.json"), path))


def _superseded(store: Store, keep: Keep, roots: Roots, part: str, sizes: Mapping[str, int]) -> Group:
    paths = [layout.manifest_path(part), *_ordered([entry.path for entry in roots.manifests[part].files])]
    replacers = sorted(roots.replacers[part])
    why = f"part that {', '.join(replacers)} replaces, named by no kept snapshot"
    group = _group(store, keep, why, paths, sizes, part=part, committed=True, named_by_first=True, nameable=True)
    # Who opened or began to seal before it was replaced may still use it.
    since = [store.modified(layout.manifest_path(name)) for name in replacers]
    return replace(group, age=min([group.age, *(keep.now - (at or keep.now) for at in since)]))


def _snapshot(store: Store, fingerprint: str, sizes: Mapping[str, int], keep: Keep) -> Group:
    paths = [layout.snapshot_path(fingerprint, file) for file in ("index", "ids")]
    why = "snapshot that is not to be kept"
    return _group(store, keep, why, paths, sizes, snapshot=fingerprint, named_by_first=True)


def _group(store: Store, keep: Keep, why: str, paths: Iterable[str], sizes: Mapping[str, int], **kind: Any) -> Group:
    files = tuple((path, sizes[path]) for path in paths if path in sizes)
    # What is gone meanwhile was renamed or removed by whoever is at work there.
    times = [at for path, _ in files if (at := store.modified(path)) is not None]
    age = keep.now - max(times) if len(times) == len(files) and times else 0.0
    return Group(why, files, age, **kind)
