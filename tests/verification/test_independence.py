"""The judge is independent of the judged: verification shares no decode path with writer or reader."""

import ast
from pathlib import Path

import pytest

SHARED = {
    "hsfmt.codecs",
    "hsfmt.digests.SampleHasher",
    "hsfmt.digests.extras_digest",
    "hsfmt.digests.dataset_digest",
    "hsfmt.digests.chunk_digest",
    "hsfmt.zarr_metadata.shard_index",
    "hsfmt.snapshot_builder",
}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("level", ["imports", "names"])
def test_verification_decodes_and_digests_by_itself(repo_root, level):
    modules = sorted((repo_root / "readers/verification").glob("*.py"))
    assert len(modules) > 8
    for path in modules:
        if level == "imports":
            found = imports(path)
            assert not found & SHARED, path
            assert not {name for name in found if name.startswith(("hsfmt.writers", "torch", "zarr."))}, path
            own = {name for name in found if name.startswith("hsfmt.readers.")}
            assert all(name.startswith("hsfmt.readers.verification") for name in own), path
        else:
            text = path.read_text()
            assert "SampleHasher" not in text
            assert "decode_into" not in text
