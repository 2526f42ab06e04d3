"""The valid vectors: small whole datasets. Each function writes one below `root` and returns what it is about."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import xxhash

from hsfmt.columns import parse_column
from hsfmt.sealing import seal
from hsfmt.writers.dataset_writer import DatasetWriter
from hsfmt.writers.extras import Extra
from hsfmt.zarr_metadata import array_document, shard_index
from spec.vectors.folder import Folder, canonical, digest, signed

HIDDEN = 4
LAYERS = [1, 2, 4]
_PRODUCER = {"host": "vectors", "library": "hsfmt 0.1.0", "started": "2026-11-29T20:00:00+00:00"}


def writer(root: Path, *parts: str, **options: Any) -> DatasetWriter:
    """Return a writer whose parts have these names."""
    names = iter(parts)
    settings: dict[str, Any] = {"layers": LAYERS, "hidden_size": HIDDEN, "final_norm": "pre", "chunk_tokens": 4}
    settings |= {"codec": "none", "producer": _PRODUCER, "part_seconds": None, "threads": 1, **options}
    return DatasetWriter(root, part_names=lambda: next(names), **settings)


def states(n_tokens: int, seed: int, dtype: type = np.uint16, n_layers: int = len(LAYERS)) -> np.ndarray:
    """Return finite states [token, layer, hidden]; bit patterns for bfloat16 (uint16) and float8 (uint8)."""
    count = n_tokens * n_layers * HIDDEN
    numbers = np.arange(count, dtype=np.int64) * 37 + seed * 1009
    if dtype is np.uint16:
        values = 0x3F00 + numbers % 509 + ((numbers // 5) % 2 << 15)
    elif dtype is np.uint8:
        values = numbers % 0x7F
    else:
        values = (numbers % 509 - 254) / 16
    return values.astype(dtype).reshape(n_tokens, n_layers, HIDDEN)


def ids(n_tokens: int, seed: int) -> np.ndarray:
    """Return token ids [token]."""
    return (np.arange(n_tokens) * 101 + seed * 7) % 32000


def mask(n_tokens: int, first: int) -> np.ndarray:
    """Return a loss mask that is 1 from token `first` on."""
    return (np.arange(n_tokens) >= first).astype(np.uint8)


def put(target: DatasetWriter, sample_id: str, n_tokens: int, seed: int, **options: Any) -> None:
    """Write a sample of which all follows from the arguments."""
    dtype = options.pop("states_dtype", np.uint16)
    target.write(
        sample_id, ids(n_tokens, seed), states(n_tokens, seed, dtype), mask(n_tokens, n_tokens // 2), **options
    )


def minimal(root: Path) -> str:
    with writer(root, "p-one", layers=[2], hidden_size=2) as w:
        w.write("a", [7, 8, 9], np.arange(0x3F80, 0x3F86, dtype=np.uint16).reshape(3, 1, 2))
    return "One sample of three tokens, one layer, no mask given"


def two_parts(root: Path) -> str:
    model = {"name": "example/model", "revision": "0123abc"}
    tokenizer = {"name": "example/model", "chat_template_digest": "xxh3_128:" + "5" * 32}
    with writer(root, "p-one", "p-two", model=model, tokenizer=tokenizer) as w:
        put(w, "s-0", 3, 0, source_index=0, metadata={"split": "train", "temperature": 0.5})
        put(w, "s-2", 6, 2, source_index=2)
        w.hole("s-1", "request timed out")
        w.hole("s-9", "source file is truncated")
        w.commit()
        put(w, "s-1", 5, 1, source_index=1, metadata={"Größe": "µ\n\u0001"})
        w.write("s-3", ids(2, 3), states(2, 3), source_index=3)
    return "Two parts whose samples interleave in the order; two holes, one of them filled by a later sample"


def zstd(root: Path) -> str:
    with writer(root, "p-one", codec="zstd") as w:
        put(w, "a", 9, 1)
        put(w, "b", 4, 2)
    return "Codec zstd"


def float16(root: Path) -> str:
    with writer(root, "p-one", dtype="float16", final_norm="post") as w:
        put(w, "a", 5, 1, states_dtype=np.float16)
    return "float16 states"


def float32(root: Path) -> str:
    with writer(root, "p-one", dtype="float32", final_norm="unknown", codec="zstd") as w:
        put(w, "a", 5, 1, states_dtype=np.float32)
    return "float32 states"


def float8(root: Path) -> str:
    with writer(root, "p-one", dtype="float8_e4m3fn") as w:
        scale = np.array([0.5, 1, 2, 0.0625, 3], np.float32)
        put(w, "a", 5, 1, states_dtype=np.uint8, hidden_states_scale=scale)
    return "float8_e4m3fn states with their scales"


def extras(root: Path) -> str:
    declared = {
        "logprob": Extra("token", "float32"),
        "pair": Extra("sample", "int64", (2,)),
        "spans": Extra("ragged", "int32", (3,)),
        "unused": Extra("ragged", "float64"),
        "flag": Extra("sample", "bool"),
    }
    with writer(root, "p-one", extras=declared) as w:
        put(w, "all", 3, 1, logprob=np.float32([-1, -2, -3]), pair=np.int64([5, 6]), flag=np.bool_([True]),
            spans=np.arange(6, dtype=np.int32).reshape(2, 3))  # fmt: skip
        put(w, "nulls", 2, 2)
        put(w, "empty", 4, 3, spans=np.empty((0, 3), np.int32), pair=np.int64([-1, 2**62]), flag=np.bool_([False]))
    return "Token, sample and ragged extras; nulls, an empty value, and a ragged column without any row"


def many_shards(root: Path) -> str:
    with writer(root, "p-one", chunk_tokens=2, shard_tokens=4) as w:
        for i, n_tokens in enumerate((1, 5, 3, 2)):
            put(w, f"s{i}", n_tokens, i)
    return "Chunks of 2 and shards of 4 tokens: samples cross both, the last shard is partly absent"


def all_bfloat16_patterns(root: Path) -> str:
    with writer(root, "p-one", hidden_size=64, layers=[0, 3], codec="zstd", nonfinite="keep", chunk_tokens=256) as w:
        w.write("all", np.arange(512), np.arange(1 << 16, dtype=np.uint16).reshape(512, 2, 64))
    return "All 65,536 bit patterns in order, NaN and infinities included"


def shadowed_and_retracted(root: Path) -> str:
    first, second = writer(root, "p-one", seal=False), writer(root, "p-two", seal=False)
    put(first, "same", 3, 1)
    put(second, "same", 3, 1)
    put(first, "other", 2, 2)
    put(second, "other", 2, 3)
    put(first, "gone", 4, 4)
    put(second, "last", 1, 5)
    second.close()
    first.close()
    seal(root, retract=["gone"])
    return "Two ids written by two writers at once, with equal and with other content, and a retracted sample"


def superseded(root: Path) -> str:
    with writer(root, "p-old", seal=False) as w:
        put(w, "a", 3, 1)
        put(w, "b", 2, 2)
    old = Folder(root)
    manifest = old.manifest("p-old")
    _hide(old, "p-old")
    with writer(root, "p-new", seal=False) as w:
        put(w, "a", 3, 1)
        put(w, "b", 2, 7)
    _unhide(old, "p-old")
    replacing = old.manifest("p-new")
    replacing["replaces"] = [{"digest": manifest["digest"], "part": "p-old"}]
    old.put_manifest("p-new", replacing)
    seal(root)
    return "A part that replaces another, which is still there"


def holes_only(root: Path) -> str:
    with writer(root, "p-bad", "p-good") as w:
        w.hole("x", "out of memory")
        w.commit()
        put(w, "a", 3, 1)
    return "A part that holds nothing but a hole: its manifest alone"


def unsealed(root: Path) -> str:
    with writer(root, "p-one", seal=False) as w:
        put(w, "a", 3, 1)
    return "Committed, never sealed: no snapshot, readable as the live set only"


def uncommitted(root: Path) -> str:
    with writer(root, "p-one") as w:
        put(w, "a", 3, 1)
    with writer(root, "p-two", seal=False) as w:
        put(w, "b", 3, 2)
    folder = Folder(root)
    manifest = folder / "hsfmt/manifests/p-two.json"
    manifest.rename(f"{manifest}.0123456789abcdef.tmp")
    return "Files of a part without manifest, and a temporary file among the manifests: all ignored"


def unknown_members(root: Path) -> str:
    with writer(root, "p-one") as w:
        put(w, "a", 3, 1)
    folder = Folder(root)
    header = {**folder.json("zarr.json")["attributes"]["hsfmt"], "format": "1.7", "colour": {"of": ["the", "data"]}}
    (folder / "zarr.json").write_bytes(
        canonical({"attributes": {"hsfmt": header}, "node_type": "group", "zarr_format": 3})
    )
    index = folder.index("p-one")
    index.tensors["novelty"] = np.arange(3, dtype=np.int64)
    index.metadata["novelty"] = 1
    folder.put_index("p-one", index)
    manifest = folder.manifest("p-one")
    manifest |= {"header": header, "header_digest": digest(canonical(header)), "format": "1.7", "novelty": [1]}
    for nested in (manifest["counts"], manifest["files"][0], manifest["columns"]["input_ids"]):
        nested["novelty"] = "nested"
    folder.put_manifest("p-one", manifest)
    table = folder.snapshot_index()
    table.metadata["counts"]["novelty"] = 1
    table.metadata |= {"header": header, "format": "1.7", "novelty": "x"}
    folder.put_snapshot_index(table)
    folder.make_good("p-one")
    folder.put_pointer({**folder.json("hsfmt/manifest.json"), "header": header, "format": "1.7", "novelty": None})
    return "Written by format 1.7, readable from 1.0: members and a tensor that 1.0 does not know"


def newer_writers_only(root: Path) -> str:
    with writer(root, "p-one") as w:
        put(w, "a", 3, 1)
    folder = Folder(root)
    rewrite_header(folder, format="1.1", writable_from="1.1")
    return "Readable by 1.0, to be appended to by 1.1 and later only"


def int64_ids(root: Path) -> str:
    with writer(root, "p-one", codec="none") as w:
        put(w, "a", 3, 1)
    folder = Folder(root)
    widen_ids(folder)
    return "Token ids stored as int64, as another writer might"


def attachment(root: Path) -> str:
    with writer(root, "p-one") as w:
        put(w, "a", 3, 1)
    folder = Folder(root)
    stream = io.BytesIO()
    np.save(stream, np.arange(4, dtype=np.int64))
    data = stream.getvalue()
    path = folder / f"hsfmt/attachments/{digest(data).partition(':')[2]}/d2t.npy"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    table = folder.snapshot_index()
    table.metadata["attachments"] = [{"digest": digest(data), "name": "d2t.npy", "nbytes": len(data)}]
    folder.put_snapshot_index(table)
    return "A snapshot that lists an attachment"


def other_order(root: Path) -> str:
    two_parts(root)
    folder = Folder(root)
    choose_rows(folder, [3, 0, 2, 1])
    return "A snapshot in another order than a seal makes"


def subset(root: Path) -> str:
    two_parts(root)
    folder = Folder(root)
    choose_rows(folder, [2, 0], complete=False)
    return "A snapshot that serves two of four samples and says that it is not complete"


def choose_rows(folder: Folder, numbers: list[int], *, complete: bool = True) -> None:
    """Let the snapshot serve these of its samples, in this order; counts, ids and digests are made good."""
    table = folder.snapshot_index()
    for name in ("n_tokens", "n_supervised", "part", "row", "id_hash"):
        table.tensors[name] = table.tensors[name][numbers]
    counts = {
        "samples": len(numbers),
        "supervised_tokens": int(table.tensors["n_supervised"].sum()),
        "tokens": int(table.tensors["n_tokens"].sum()),
    }
    table.metadata["counts"] |= counts
    table.metadata["complete"] = complete
    folder.put_snapshot_index(table)
    folder.make_ids_good()
    pointer = folder.json("hsfmt/manifest.json")
    folder.put_pointer({**pointer, "samples": counts["samples"], "tokens": counts["tokens"]})


def rewrite_header(folder: Folder, *, root_only: bool = False, **members: Any) -> None:
    """Change the header everywhere it is repeated."""
    header = {**folder.json("zarr.json")["attributes"]["hsfmt"], **members}
    (folder / "zarr.json").write_bytes(
        canonical({"attributes": {"hsfmt": header}, "node_type": "group", "zarr_format": 3})
    )
    if root_only:
        return
    for path in sorted((folder / "hsfmt/manifests").glob("*.json")):
        manifest = {**folder.manifest(path.stem), "header": header, "header_digest": digest(canonical(header))}
        folder.put_manifest(path.stem, manifest)
    table = folder.snapshot_index()
    table.metadata["header"] = header
    folder.put_snapshot_index(table)
    folder.make_snapshot_good()
    folder.put_pointer({**folder.json("hsfmt/manifest.json"), "header": header})


def widen_ids(folder: Folder) -> None:
    """Store the token ids of p-one, one chunk, as int64."""
    manifest, index = folder.manifest("p-one"), folder.index("p-one")
    entry = manifest["columns"]["input_ids"]
    wide = np.frombuffer(folder.payload("p-one", "input_ids", 0), "<i4").astype("<i8").tobytes()
    entry["dtype"] = "int64"
    column = parse_column("input_ids", entry, "column")
    index.tensors["chunks.input_ids"][:] = (0, len(wide), xxhash.xxh3_64_intdigest(wide))
    shard = (
        wide + struct.pack("<I", google_crc32c.value(wide)) + shard_index(column, 0, index.tensors["chunks.input_ids"])
    )
    (folder / folder.shard("p-one", "input_ids")).write_bytes(shard)
    (folder / "parts/p-one/input_ids/zarr.json").write_bytes(array_document(column))
    folder.put_index("p-one", index)
    folder.put_manifest("p-one", manifest)
    folder.make_good("p-one")


def _hide(folder: Folder, part: str) -> None:
    (folder / f"hsfmt/manifests/{part}.json").rename(folder / "hidden")


def _unhide(folder: Folder, part: str) -> None:
    (folder / "hidden").rename(folder / f"hsfmt/manifests/{part}.json")


CASES: tuple[Callable[[Path], str], ...] = (
    minimal, two_parts, zstd, float16, float32, float8, extras, many_shards, all_bfloat16_patterns,
    shadowed_and_retracted, superseded, holes_only, unsealed, uncommitted, unknown_members, newer_writers_only,
    int64_ids, attachment, other_order, subset,
)  # fmt: skip


def make_valid(root: Path) -> None:
    """Write all valid cases below `root`."""
    for case in CASES:
        target = root / case.__name__.replace("_", "-")
        what = case(target / "dataset")
        pointer = target / "dataset/hsfmt/manifest.json"
        if pointer.is_file():
            folder = Folder(target / "dataset")
            pointer.write_bytes(signed({**folder.json("hsfmt/manifest.json"), "sealed": "2026-11-29T21:00:00+00:00"}))
        (target / "ABOUT").write_text(what + ".\n")
