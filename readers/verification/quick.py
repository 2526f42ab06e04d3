"""Tier quick, a part: its manifest, and the size of every file that the manifest lists.

Spec: rules VFY-4, VFY-5.
"""

from __future__ import annotations

from collections.abc import Mapping

from hsfmt import layout
from hsfmt.errors import HsfmtError
from hsfmt.manifest import MAX_MANIFEST_NBYTES, PartManifest, parse_manifest
from hsfmt.readers.verification.objects import read_twice
from hsfmt.readers.verification.part_context import PartContext
from hsfmt.readers.verification.report import Findings
from hsfmt.storage import Store


def load_manifest(store: Store, findings: Findings, part: str) -> tuple[PartManifest | None, int]:
    """Return a part's manifest and the nbytes of its file; None where it can't be used."""
    path = layout.manifest_path(part)

    def fetch() -> tuple[PartManifest, int]:
        data = store.read(path, MAX_MANIFEST_NBYTES)
        return parse_manifest(data, part, path), len(data)

    return read_twice(findings, path, fetch, store=store) or (None, 0)


def check_sizes(context: PartContext, sizes: Mapping[str, int]) -> None:
    """Compare the size of every listed file; one that is absent or of another size is looked at again."""
    for entry in context.manifest.files:
        nbytes: int | None = sizes.get(entry.path)
        if nbytes != entry.nbytes:
            try:
                nbytes = context.store.size(entry.path)
            except HsfmtError as error:
                context.findings.raised(error, entry.path)
                context.unusable.add(entry.path)
                continue
        if nbytes is None:
            context.findings.error("missing", entry.path, expected=f"a file of {entry.nbytes} bytes", got="nothing")
            context.unusable.add(entry.path)
        elif nbytes != entry.nbytes:
            context.findings.error("size", entry.path, expected=f"{entry.nbytes} bytes", got=f"{nbytes} bytes")
