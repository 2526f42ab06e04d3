"""Every kind of finding has a slug that stays, and advice."""

import re

from hsfmt.readers.verification.report import REMEDIES, Findings, remedy


def test_every_code_is_a_slug_with_advice_and_is_used(repo_root):
    source = "".join(path.read_text() for path in sorted((repo_root / "readers/verification").glob("*.py")))
    for code, advice in REMEDIES.items():
        assert re.fullmatch(r"[a-z]+(_[a-z0-9]+)*", code)
        assert advice
        assert source.count(f'"{code}"') > 1, code


def test_the_codes_are_part_of_the_interface():
    """Scripts match them: a code may be added, none may change."""
    assert sorted(REMEDIES) == [
        "all_zero", "attachment", "chunk_crc", "chunk_decode", "chunk_digest", "content_digest", "corrupt", "counts",
        "dataset_digest", "digest", "extra_digest", "foreign", "header", "incomplete_snapshot", "loss_mask",
        "malformed", "metadata", "missing", "n_supervised", "negative_ids", "never_sealed", "newer_format",
        "newer_parts", "no_pointer", "nonfinite", "not_checked", "old_snapshot", "padding", "quarantined", "records",
        "replaces", "sample_id", "shadowed_different", "shard_index", "size", "snapshot_order", "snapshot_part",
        "snapshot_rows", "superseded", "temporary", "too_large", "uncommitted", "unexpected", "unreadable",
        "unstable_read", "values", "zarr_json",
    ]  # fmt: skip


def test_advice_depends_on_what_is_damaged():
    for code in ("corrupt", "counts"):
        assert "hsfmt repair URL --dry-run" in remedy(code, "hsfmt/index/part-0.safetensors")
    assert "hsfmt seal" in remedy("counts", "hsfmt/manifest.json")
    assert "hsfmt repair URL --dry-run" in remedy("corrupt", "hsfmt/manifest.json")
    assert "hsfmt repair URL --dry-run" in remedy("missing", "hsfmt/snapshots/00/ids.safetensors")
    assert "from the manifests" in remedy("missing", "zarr.json")
    assert "other Zarr readers" in remedy("missing", "parts/part-0/zarr.json")
    assert "the same in every dataset" in remedy("missing", "parts/zarr.json")


def test_no_advice_to_remove_manifests():
    for code in REMEDIES:
        for path in (
            "hsfmt/manifests/part-0.json",
            "hsfmt/index/part-0.safetensors",
            "hsfmt/manifest.json",
            "zarr.json",
        ):
            assert "remove hsfmt/" not in remedy(code, path)
            assert "remove what is left" not in remedy(code, path)


def test_findings_are_ordered_by_severity_then_place():
    findings = Findings()
    findings.add("info", "temporary", "a", expected="", got="")
    findings.add("warning", "nonfinite", "b", expected="", got="")
    findings.error("size", "d", expected="", got="")
    findings.error("size", "c", expected="", got="")
    assert [finding.where for finding in findings.ordered()] == ["c", "d", "b", "a"]
