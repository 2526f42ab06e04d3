"""Attachments: the files of a snapshot that belong to the dataset as a whole.

Spec: rules SNAP-10, VFY-5, VFY-6.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from hsfmt import digests, layout
from hsfmt.errors import CorruptionError
from hsfmt.manifest import FileEntry
from hsfmt.readers.verification.objects import file_digest, read_twice
from hsfmt.readers.verification.report import Findings
from hsfmt.storage import Store

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_PATH = re.compile(rf"{layout.ATTACHMENTS}/([0-9a-f]{{32}})/{_NAME.pattern}")


def parse_attachments(listed: Any, findings: Findings, where: str) -> tuple[FileEntry, ...]:
    """Return the attachments of a snapshot's metadata; entries that break rule SNAP-10 are findings."""
    entries = []
    for item in listed if isinstance(listed, list) else [None]:
        if (
            isinstance(item, dict)
            and digests.is_digest(item.get("digest"))
            and _NAME.fullmatch(str(item.get("name")))
            and type(item.get("nbytes")) is int
            and item["nbytes"] >= 0
        ):
            folder = item["digest"].removeprefix(f"{digests.ALGORITHM}:")
            path = f"{layout.ATTACHMENTS}/{folder}/{item['name']}"
            entries.append(FileEntry(path, item["nbytes"], item["digest"]))
        else:
            expected = "a list of digest, name and nbytes"
            findings.error("malformed", f"{where}: attachments", expected=expected, got=repr(item)[:200])
    names = [entry.path.rpartition("/")[2] for entry in entries]
    if names != sorted(set(names)):
        findings.error("malformed", f"{where}: attachments", expected="names that ascend", got=repr(names)[:200])
    return tuple(entries)


def check_attachments(store: Store, findings: Findings, entries: Iterable[FileEntry], *, deep: bool) -> None:
    """Compare size and, if `deep`, digest of each attachment that a snapshot names."""
    for entry in entries:

        def fetch(entry: FileEntry = entry) -> None:
            nbytes = store.size(entry.path)
            if nbytes is None:
                raise _fault(entry, "nothing")
            if nbytes != entry.nbytes:
                raise _fault(entry, f"{nbytes} bytes")
            if deep:
                actual = file_digest(store, entry.path, nbytes, lambda _: None)
                if actual != entry.digest:
                    raise _fault(entry, actual)

        read_twice(findings, entry.path, fetch, corrupt="attachment", store=store)


def _fault(entry: FileEntry, got: str) -> CorruptionError:
    return CorruptionError.at(entry.path, expected=f"a file of {entry.nbytes} bytes, {entry.digest}", got=got)


def check_unnamed(store: Store, findings: Findings, path: str, nbytes: int) -> bool:
    """Report an attachment that no snapshot names; say whether the path is that of one at all."""
    match = _PATH.fullmatch(path)
    if match is None:
        return False

    def fetch() -> None:
        actual = file_digest(store, path, nbytes, lambda _: None)
        if actual != f"{digests.ALGORITHM}:{match[1]}":
            raise CorruptionError.at(path, expected=f"digest {match[1]}, as its folder is named", got=actual)

    read_twice(findings, path, fetch, corrupt="attachment", store=store)
    if not findings.has_error(path):
        findings.add("info", "uncommitted", path, expected="a snapshot that names it", got=f"{nbytes} bytes")
    return True
