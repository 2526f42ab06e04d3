"""The invalid vectors: a valid one with one mutation, everything else (digests, names, sizes) made good again.

`where` says who must find it: "open" (a reader, before it reads a sample), "list" (whoever lists the committed set: a
seal, verify, a live reader), "read" (a reader, at the sample), "verify" (only a check of everything).
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spec.vectors.folder import Folder
from spec.vectors.mutations import (
    MANIFEST,
    NO_DIGEST,
    P,
    array_document,
    changed_attachment,
    copied_part,
    deep_producer,
    duplicate_name,
    empty_id,
    file,
    files,
    flip,
    float_hidden_size,
    header,
    huge_header,
    huge_shape,
    ids,
    index,
    index_bytes,
    index_of_other_part,
    loose_metadata,
    manifest,
    manifest_bytes,
    metadata_list,
    misnamed_column,
    narrow_offsets,
    no_metadata,
    not_utf8,
    other_header,
    other_ids,
    overlap,
    payload,
    pointer,
    put,
    renamed_part,
    reversed_holes,
    root_bytes,
    shard_index,
    snapshot,
    snapshot_tensor,
    stale_pointer_target,
    states_entry,
    states_of_four_layers,
    swap_chunks,
    swap_shards,
    swap_supervised,
    tail_bytes,
    tensor,
    tensor_gap,
    two_equal_ids,
    without_scale,
    wrong_crc,
)
from spec.vectors.valid_cases import choose_rows


@dataclass(frozen=True)
class Case:
    """A mutation of a valid case, and the rule that it breaks."""

    name: str
    base: str
    rule: str
    where: str
    mutate: Callable[[Folder], None]


SHARD = f"parts/{P}/hidden_states/c/0/0/0"
CASES = (
    Case("part-name-upper-case", "two-parts", "LAY-1", "open", renamed_part),
    Case("path-outside", "two-parts", "LAY-2", "open", files(lambda f: f[0].update(path="../../outside"))),
    Case("chunks-swapped", "two-parts", "READ-3", "read", swap_chunks),
    Case("shards-swapped", "many-shards", "READ-3", "read", swap_shards),
    Case("padding-not-zero", "minimal", "LAY-7", "verify", payload("hidden_states", 0, flip(-1))),
    Case("crc32c-wrong", "two-parts", "LAY-7", "verify", wrong_crc),
    Case("shard-index-wrong", "two-parts", "LAY-8", "verify", shard_index),
    Case("duplicate-key", "minimal", "JSON-1", "list", manifest_bytes(lambda d: d[:-1] + b',"kind":"hsfmt.part"}')),
    Case("nan", "minimal", "JSON-1", "list", manifest_bytes(lambda d: d.replace(b'"holes":0', b'"holes":NaN'))),
    Case("byte-order-mark", "minimal", "JSON-1", "list", root_bytes(lambda d: b"\xef\xbb\xbf" + d)),
    Case("not-utf8", "minimal", "JSON-1", "list", manifest_bytes(lambda d: d.replace(b"vectors", b"vector\xff"))),
    Case("white-space", "minimal", "JSON-2", "list", root_bytes(lambda d: d.replace(b":", b": ", 1))),
    Case("newline-at-end", "minimal", "JSON-2", "list", root_bytes(lambda d: d + b"\n")),
    Case("escaped-text", "minimal", "JSON-2", "list",
         manifest_bytes(lambda d: d.replace(b"vectors", b"\\u0076ectors"))),
    Case("fraction", "two-parts", "JSON-3", "list", root_bytes(float_hidden_size)),
    Case("integer-of-65-bits", "minimal", "JSON-3", "open", manifest("producer", "n", value=1 << 64)),
    Case("nested-too-deep", "minimal", "JSON-4", "open", deep_producer),
    Case("metadata-not-an-object", "two-parts", "JSON-5", "read", index(metadata_list)),
    Case("digest-upper-case", "minimal", "DIG-1", "open", files(lambda f: f[0].update(digest="xxh3_128:" + "AB" * 16))),
    Case("digest-of-unknown-algorithm", "minimal", "DIG-1", "open",
         files(lambda f: f[0].update(digest="md5:" + "0" * 32))),
    Case("chunk-digest-wrong", "two-parts", "READ-3", "read", tensor("chunks.hidden_states", (0, 2), 1)),
    Case("content-digest-wrong", "two-parts", "DIG-3", "verify", tensor("content_digest", (0, 0), 0)),
    Case("extra-digest-wrong", "two-parts", "DIG-4", "verify", tensor("extra_digest", (0, 0), 0)),
    Case("id-hash-wrong", "two-parts", "DIG-5", "read", snapshot_tensor("id_hash", 0, 1)),
    Case("dataset-digest-wrong", "two-parts", "DIG-6", "verify",
         snapshot(lambda t: t.metadata.update(content_digest=NO_DIGEST))),
    Case("version-malformed", "minimal", "VER-1", "open", header(readable_from="1")),
    Case("header-of-format-2", "minimal", "VER-2", "open", header(format="2.0", readable_from="2.0")),
    Case("manifest-of-format-1-1", "minimal", "VER-2", "open", manifest("readable_from", value="1.1")),
    Case("pointer-of-format-2", "minimal", "VER-2", "open", pointer("readable_from", value="2.0")),
    Case("layers-descending", "two-parts", "HDR-1", "open", header(layers=[4, 2, 1])),
    Case("layers-repeated", "two-parts", "HDR-1", "open", header(layers=[1, 1, 2])),
    Case("layers-empty", "two-parts", "HDR-1", "open", header(layers=[])),
    Case("layer-negative", "two-parts", "HDR-1", "open", header(layers=[-1, 2, 3])),
    Case("hidden-size-zero", "minimal", "HDR-2", "open", header(hidden_size=0)),
    Case("hidden-size-huge", "minimal", "HDR-2", "open", header(hidden_size=1 << 40)),
    Case("final-norm-unclear", "minimal", "HDR-3", "open", header(final_norm="maybe")),
    Case("states-of-integers", "minimal", "HDR-4", "open", header(dtype="int8")),
    Case("model-is-text", "minimal", "HDR-5", "open", header(model="example/model")),
    Case("model-empty", "minimal", "HDR-5", "open", header(model={})),
    Case("scaling-missing", "float8", "HDR-6", "open", header(scaling=None)),
    Case("scaling-of-bfloat16", "minimal", "HDR-6", "open",
         header(scaling={"column": "x", "rule": "bfloat16_product"})),
    Case("scale-column-missing", "float8", "HDR-6", "open", without_scale),
    Case("format-malformed", "minimal", "HDR-7", "open", header(format="newest")),
    Case("header-digest-wrong", "minimal", "MAN-4", "open", manifest("header_digest", value=NO_DIGEST)),
    Case("part-of-other-layers", "two-parts", "HDR-9", "open", other_header),
    Case("dtype-unknown", "two-parts", "DT-1", "open", manifest("columns", "input_ids", "dtype", value="complex64")),
    Case("column-name", "extras", "COL-1", "open",
         misnamed_column),
    Case("column-kind", "extras", "COL-2", "open", manifest("columns", "flag", "kind", value="batch")),
    Case("axis-of-zero", "extras", "COL-2", "open", manifest("columns", "flag", "shape", value=[0])),
    Case("rows-of-sample-column", "extras", "COL-2", "open", manifest("columns", "flag", "shape", value=[4])),
    Case("states-shape", "two-parts", "COL-3", "open",
         states_of_four_layers),
    Case("ids-dtype", "two-parts", "COL-4", "open", manifest("columns", "input_ids", "dtype", value="uint32")),
    Case("mask-dtype", "two-parts", "COL-5", "open", manifest("columns", "loss_mask", "dtype", value="int8")),
    Case("mask-of-two", "two-parts", "COL-5", "read", payload("loss_mask", 0, put(0, b"\2"))),
    Case("chunk-over-layers", "two-parts", "COL-6", "open", states_entry("chunk_shape", [4, 3, 4])),
    Case("chunk-huge", "two-parts", "COL-6", "open", states_entry("chunk_shape", [1 << 40, 1, 4])),
    Case("chunk-of-no-rows", "two-parts", "COL-6", "open", states_entry("chunk_shape", [0, 1, 4])),
    Case("shard-not-whole", "two-parts", "COL-7", "open", states_entry("shard_shape", [10, 3, 4])),
    Case("shard-of-too-many-chunks", "two-parts", "COL-7", "open", states_entry("shard_shape", [4 * 4097, 3, 4])),
    Case("codec-unknown", "two-parts", "COD-1", "open", states_entry("codec", "lz4")),
    Case("frame-says-huge", "zstd", "COD-4", "read", payload("hidden_states", 0, put(4, b"\xff\xff\xff\x7f"))),
    Case("frame-truncated", "zstd", "COD-4", "read", payload("hidden_states", 0, put(12, struct.pack("<I", 17)))),
    Case("payload-longer-than-raw", "zstd", "COD-5", "open", tensor("chunks.hidden_states", (-1, 1), 4096)),
    Case("root-with-other-attribute", "minimal", "ZARR-1", "list",
         root_bytes(lambda d: d.replace(b'{"attributes":{', b'{"attributes":{"a":1,'))),
    Case("root-is-an-array", "minimal", "ZARR-1", "list", root_bytes(lambda d: d.replace(b'"group"', b'"array"'))),
    Case("group-with-attributes", "minimal", "ZARR-2", "verify",
         file("parts/zarr.json", lambda d: d.replace(b"{}", b'{"a":1}'))),
    Case("array-shape-edited", "two-parts", "ZARR-3", "open", array_document("shape", [8, 3, 4])),
    Case("array-codecs-edited", "two-parts", "ZARR-4", "open", array_document("codecs", [{"name": "bytes"}])),
    Case("array-fill-value-edited", "two-parts", "ZARR-5", "open", array_document("fill_value", 1)),
    Case("array-attribute-added", "two-parts", "ZARR-6", "verify",
         file(f"parts/{P}/hidden_states/zarr.json", lambda d: d + b"\n")),
    Case("tensor-gap", "two-parts", "TAB-1", "open", index_bytes(tensor_gap)),
    Case("tensor-overlap", "two-parts", "TAB-1", "open", index_bytes(overlap)),
    Case("bytes-behind-tensors", "two-parts", "TAB-1", "open", index_bytes(tail_bytes)),
    Case("table-header-huge", "two-parts", "TAB-1", "open", index_bytes(huge_header)),
    Case("tensor-shape-huge", "two-parts", "TAB-1", "open", index_bytes(huge_shape)),
    Case("tensor-name-twice", "two-parts", "TAB-1", "open", index_bytes(duplicate_name)),
    Case("tensor-dtype", "two-parts", "TAB-3", "open", index(narrow_offsets)),
    Case("tensor-missing", "two-parts", "TAB-3", "open", index(lambda t: t.tensors.__delitem__("source_index"))),
    Case("offsets-fall", "two-parts", "TAB-4", "open", tensor("token_offsets", 1, 10)),
    Case("offsets-end-early", "two-parts", "TAB-4", "open", tensor("token_offsets", -1, 8)),
    Case("table-without-metadata", "two-parts", "TAB-5", "open", index_bytes(no_metadata)),
    Case("table-metadata-not-canonical", "two-parts", "TAB-5", "open", index_bytes(loose_metadata)),
    Case("index-of-other-part", "two-parts", "IDX-1", "open", index_of_other_part),
    Case("empty-sample", "two-parts", "IDX-2", "open", tensor("token_offsets", 1, 0)),
    Case("supervised-tokens-swapped", "two-parts", "IDX-3", "verify", index(swap_supervised)),
    Case("mask-flag-of-two", "two-parts", "IDX-4", "open", tensor("loss_mask_given", 0, 2)),
    Case("id-twice", "two-parts", "IDX-5", "verify", ids(two_equal_ids)),
    Case("id-not-utf8", "two-parts", "IDX-5", "open", ids(not_utf8)),
    Case("id-empty", "two-parts", "IDX-5", "open", index(empty_id)),
    Case("chunk-offset-wrong", "two-parts", "IDX-7", "open", tensor("chunks.hidden_states", (1, 0), 0)),
    Case("payload-empty", "zstd", "IDX-8", "open", tensor("chunks.hidden_states", (0, 1), 0)),
    Case("states-other-than-digest", "two-parts", "DIG-3", "verify", payload("hidden_states", 0, flip(0))),
    Case("manifest-empty", "two-parts", "JSON-1", "open", manifest_bytes(lambda _: b"")),
    Case("manifest-truncated", "two-parts", "JSON-1", "open", manifest_bytes(lambda d: d[: len(d) // 2])),
    Case("manifest-bit-flipped", "two-parts", "MAN-2", "open",
         manifest_bytes(lambda d: d.replace(b"vectors", b"vectorr"))),
    Case("part-copied-by-hand", "two-parts", "MAN-3", "list", copied_part),
    Case("document-of-other-kind", "two-parts", "MAN-3", "open", manifest("kind", value="hsfmt.pointer")),
    Case("core-column-missing", "two-parts", "MAN-5", "open", manifest("columns", "loss_mask")),
    Case("file-not-listed", "two-parts", "MAN-6", "open", files(lambda f: f.pop() and None)),
    Case("files-in-other-order", "two-parts", "MAN-6", "open", files(lambda f: f.reverse())),
    Case("holes-in-other-order", "two-parts", "MAN-7", "open", reversed_holes),
    Case("replaces-another-manifest", "superseded", "MAN-8", "list",
         manifest("replaces", 0, "digest", value=NO_DIGEST, part="p-new")),
    Case("producer-is-a-list", "minimal", "MAN-9", "open", manifest("producer", value=[])),
    Case("holes-miscounted", "two-parts", "MAN-10", "open", manifest("counts", "holes", value=1)),
    Case("supervised-miscounted", "two-parts", "MAN-10", "open", manifest("counts", "supervised_tokens", value=1)),
    Case("count-negative", "minimal", "MAN-10", "open", manifest("counts", "holes", value=-1)),
    Case("tokens-without-samples", "holes-only", "MAN-10", "list",
         manifest("counts", "tokens", value=5, part="p-bad")),
    Case("attachment-changed", "attachment", "SNAP-10", "verify", changed_attachment),
    Case("attachment-name", "attachment", "SNAP-10", "verify",
         snapshot(lambda t: t.metadata["attachments"][0].update(name="../d2t.npy"))),
    Case("row-left-out", "two-parts", "SNAP-4", "verify", lambda f: choose_rows(f, [0, 1, 2])),
    Case("row-twice", "two-parts", "SNAP-4", "verify", lambda f: choose_rows(f, [0, 1, 2, 3, 0])),
    Case("row-twice-in-subset", "two-parts", "SNAP-4", "verify", lambda f: choose_rows(f, [0, 0], complete=False)),
    Case("snapshot-bit-flipped", "two-parts", "SNAP-1", "open", file("*/index.safetensors", flip(-1))),
    Case("snapshot-truncated", "two-parts", "SNAP-1", "open", file("*/index.safetensors", lambda d: d[:-8])),
    Case("counts-of-snapshot", "two-parts", "SNAP-6", "open",
         snapshot(lambda t: t.metadata["counts"].update(samples=5))),
    Case("row-beyond-part", "two-parts", "SNAP-7", "read", snapshot_tensor("row", 0, 7)),
    Case("part-beyond-table", "two-parts", "SNAP-7", "open", snapshot_tensor("part", 0, 2)),
    Case("ids-of-other-samples", "two-parts", "SNAP-8", "verify", other_ids),
    Case("ids-bit-flipped", "two-parts", "SNAP-8", "read", file("*/ids.safetensors", flip(-1))),
    Case("pointer-bit-flipped", "two-parts", "SNAP-9", "open",
         file("hsfmt/manifest.json", lambda d: d.replace(b"2026", b"2027"))),
    Case("pointer-to-nothing", "two-parts", "SNAP-9", "open", stale_pointer_target),
    Case("pointer-path", "two-parts", "SNAP-9", "open",
         pointer("index", "path", value="hsfmt/../../other.safetensors")),
    Case("pointer-empty", "two-parts", "JSON-1", "open", file("hsfmt/manifest.json", lambda _: b"")),
    Case("manifest-missing", "two-parts", "READ-4", "open", file(MANIFEST, None)),
    Case("index-missing", "two-parts", "READ-4", "open", file(f"hsfmt/index/{P}.safetensors", None)),
    Case("ids-missing", "two-parts", "READ-4", "read", file("*/ids.safetensors", None)),
    Case("shard-missing", "two-parts", "READ-4", "read", file(SHARD, None)),
    Case("shard-empty", "two-parts", "READ-4", "read", file(SHARD, lambda _: b"")),
    Case("shard-truncated", "two-parts", "READ-4", "read", file(SHARD, lambda d: d[:40])),
    Case("shard-bit-flipped", "two-parts", "READ-3", "read", file(SHARD, flip(0))),
    Case("index-bit-flipped", "two-parts", "READ-3", "open", file(f"hsfmt/index/{P}.safetensors", flip(-1))),
)  # fmt: skip


def make_invalid(valid: Path, root: Path) -> None:
    """Write all invalid cases below `root`, each as what differs from its base."""
    for case in CASES:
        target = root / case.name
        work = target / "work"
        shutil.copytree(valid / case.base / "dataset", work)
        before = Folder(work).files()
        case.mutate(Folder(work))
        after = Folder(work).files()
        shutil.rmtree(work)
        for path, data in after.items():
            if before.get(path) != data:
                changed = target / "overlay" / path
                changed.parent.mkdir(parents=True, exist_ok=True)
                changed.write_bytes(data)
        removed = sorted(set(before) - set(after))
        about = {"base": case.base, "remove": removed, "rule": case.rule, "where": case.where}
        (target / "case.json").write_text(json.dumps(about, indent=1) + "\n")
