"""Parts: section 12."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from .columns import Column, load_column, parse_column
from .documents import canonical, check_header, check_signed, digest, parse_json
from .refusal import Refused, need
from .tables import parse_table

Array = npt.NDArray[Any]
MIB = 1 << 20
CORE = ("hidden_states", "input_ids", "loss_mask")
GROUP = b'{"attributes":{},"node_type":"group","zarr_format":3}'


@dataclass
class Sample:
    """A sample, decoded."""

    id: str
    input_ids: list[int]
    loss_mask: list[int]
    loss_mask_given: bool
    hidden_states: Array
    metadata: dict[str, Any]
    extras: dict[str, Any]
    source_index: int
    content_digest: bytes


@dataclass
class Part:
    """A part with its samples."""

    manifest: dict[str, Any]
    manifest_nbytes: int
    samples: list[Sample] = field(default_factory=list)
    index_digest: str | None = None


def load_part(root: Path, name: str, header: dict[str, Any]) -> Part:
    path = f"hsfmt/manifests/{name}.json"
    need((root / path).stat().st_size <= 16 * MIB, "READ-1", f"{path}: size")
    data = (root / path).read_bytes()
    m = parse_json(data, path)
    check_signed(m, "hsfmt.part", path)
    need(m.get("part") == name, "MAN-3", f"{path}: is part {m.get('part')}")
    check_header(m.get("header"), path)
    need(m["header"] == header, "HDR-9", f"{path}: another header")
    need(m.get("header_digest") == digest(canonical(m["header"])), "MAN-4", f"{path}: header_digest")
    need(isinstance(m.get("producer"), dict), "MAN-9", f"{path}: producer")
    need(isinstance(m.get("columns"), dict), "MAN-5", f"{path}: columns")
    columns = {key: parse_column(key, value, f"{path}: {key}") for key, value in m["columns"].items()}
    check_manifest(m, columns, path)
    part = Part(m, len(data))
    for entry in m["files"]:
        need((root / entry["path"]).is_file(), "READ-4", f"{entry['path']}: missing")
    if columns:
        check_zarr_documents(root, name, columns)
        part.index_digest = load_samples(root, name, part, columns)
    for entry in m["files"]:
        data = (root / entry["path"]).read_bytes()
        need((len(data), digest(data)) == (entry["nbytes"], entry["digest"]), "READ-3", f"{entry['path']}: digest")
    return part


def check_manifest(m: dict[str, Any], columns: dict[str, Column], path: str) -> None:
    counts = m.get("counts")
    members = {"samples", "tokens", "supervised_tokens", "holes"}
    need(isinstance(counts, dict) and members <= set(counts), "MAN-10", f"{path}: counts")
    assert counts is not None
    need(all(type(counts[key]) is int and counts[key] >= 0 for key in members), "MAN-10", f"{path}: counts")
    holes = [entry.get("id") for entry in m["holes"]]
    need(all({"id", "reason"} <= set(entry) for entry in m["holes"]), "MAN-7", f"{path}: holes")
    need(sorted(set(holes)) == holes, "MAN-7", f"{path}: holes ascending")
    need(len(holes) == counts["holes"], "MAN-10", f"{path}: holes counted")
    replaced = [entry.get("part") for entry in m["replaces"]]
    need(sorted(set(replaced)) == replaced, "MAN-8", f"{path}: replaces ascending")
    if columns or counts["samples"]:
        need(all(name in columns for name in CORE), "MAN-5", f"{path}: core columns")
        states, ids, mask = (columns[name] for name in CORE)
        tokens, header = counts["tokens"], m["header"]
        shape = [tokens, len(header["layers"]), header["hidden_size"]]
        kinds = states.kind == ids.kind == mask.kind == "token"
        need(kinds and states.shape == shape and states.dtype == header["dtype"], "COL-3", f"{path}: hidden_states")
        need(ids.dtype in ("int32", "int64") and ids.shape == [tokens], "COL-4", f"{path}: input_ids")
        need(mask.dtype == "uint8" and mask.shape == [tokens], "COL-5", f"{path}: loss_mask")
        for column in columns.values():
            rows = {"token": tokens, "sample": counts["samples"]}.get(column.kind, column.shape[0])
            need(column.shape[0] == rows, "COL-2", f"{path}: rows of {column.name}")
        if header["scaling"]:
            scale = columns.get(header["scaling"]["column"])
            good = scale is not None and (scale.kind, scale.dtype, len(scale.shape)) == ("token", "float32", 1)
            need(good, "HDR-6", f"{path}: scale column")
    else:
        need(counts["tokens"] == counts["supervised_tokens"] == 0, "MAN-10", f"{path}: tokens without samples")
    expected = []
    if columns:
        name = m["part"]
        expected = [f"parts/{name}/zarr.json", f"hsfmt/index/{name}.safetensors"]
        for column in columns.values():
            expected.append(f"parts/{name}/{column.name}/zarr.json")
            expected += [column.shard_path(name, i) for i in range(column.n_shards)]
    listed = [entry["path"] for entry in m["files"]]
    need(set(listed) <= set(expected), "LAY-2", f"{path}: {sorted(set(listed) - set(expected))}")
    need(listed == sorted(expected), "MAN-6", f"{path}: files")
    for entry in m["files"]:
        need(re.fullmatch(r"xxh3_128:[0-9a-f]{32}", entry["digest"]), "DIG-1", f"{path}: {entry['digest']}")


def check_zarr_documents(root: Path, part: str, columns: dict[str, Column]) -> None:
    need((root / f"parts/{part}/zarr.json").read_bytes() == GROUP, "ZARR-2", f"group of {part}")
    for column in columns.values():
        path = f"parts/{part}/{column.name}/zarr.json"
        document, expected = (json.loads(data) for data in ((root / path).read_bytes(), column.zarr_json()))
        rules = {"fill_value": "ZARR-5", "dimension_names": "ZARR-5", "codecs": "ZARR-4"}
        for key in {*document, *expected}:
            need(document.get(key) == expected.get(key), rules.get(key, "ZARR-3"), f"{path}: {key}")
        need((root / path).read_bytes() == column.zarr_json(), "ZARR-6", f"{path}: bytes")


def load_samples(root: Path, name: str, part: Part, columns: dict[str, Column]) -> str:
    path = f"hsfmt/index/{name}.safetensors"
    data = (root / path).read_bytes()
    entry = next(e for e in part.manifest["files"] if e["path"] == path)
    need(digest(data) == entry["digest"], "READ-3", f"{path}: digest")
    t = parse_table(data, "hsfmt.part-index", path)
    need(t.metadata.get("part") == name, "IDX-1", f"{path}: index of {t.metadata.get('part')}")
    counts = part.manifest["counts"]
    offsets = t.offsets("token_offsets", None, counts["tokens"], rule="IDX-2", strict=True)
    n = len(offsets) - 1
    need(n == counts["samples"], "MAN-10", f"{path}: {n} samples")
    extras = sorted(set(columns) - set(CORE))
    valid = {key: t.take(f"valid.{key}", "U8", n) for key in extras}
    ragged = {k: t.offsets(f"offsets.{k}", n, columns[k].shape[0]) for k in extras if columns[k].kind == "ragged"}
    given = t.take("loss_mask_given", "U8", n)
    need(all(np.all(flags <= 1) for flags in (given, *valid.values())), "IDX-4", f"{path}: flags")
    supervised = t.take("n_supervised", "I64", n)
    id_bytes, meta = t.take("ids", "U8", None).tobytes(), t.take("meta", "U8", None).tobytes()
    id_offsets = t.offsets("id_offsets", n, len(id_bytes), rule="IDX-5", strict=True)
    meta_offsets = t.offsets("meta_offsets", n, len(meta))
    need(max(np.diff(id_offsets)) <= 4096, "IDX-5", f"{path}: long id")
    need(max(np.diff(meta_offsets)) <= MIB, "IDX-6", f"{path}: long metadata")
    rows = {k: load_column(root, name, c, t.take(f"chunks.{k}", "U64", c.n_chunks, 3)) for k, c in columns.items()}
    for i in range(n):
        tokens = slice(offsets[i], offsets[i + 1])
        try:
            sample_id = id_bytes[id_offsets[i] : id_offsets[i + 1]].decode()
        except UnicodeDecodeError:
            raise Refused("IDX-5", f"{path}: id of row {i}") from None
        need(sample_id not in {s.id for s in part.samples}, "IDX-5", f"{path}: {sample_id} twice")
        mask = rows["loss_mask"][tokens]
        need(np.all(mask <= 1), "COL-5", f"{sample_id}: mask")
        need(int(mask.sum()) == supervised[i], "IDX-3", f"{sample_id}: n_supervised")
        values: dict[str, Array | None] = {}
        for key in extras:
            at = {"token": tokens, "sample": slice(i, i + 1)}.get(columns[key].kind)
            at = slice(*ragged[key][i : i + 2]) if at is None else at
            need(valid[key][i] or not rows[key][at].any(), "COL-8", f"{sample_id}: null {key} with a value")
            values[key] = rows[key][at] if valid[key][i] else None
        meta_i = meta[meta_offsets[i] : meta_offsets[i + 1]]
        ids = rows["input_ids"][tokens].view(f"<i{columns['input_ids'].item}")
        states = np.ascontiguousarray(rows["hidden_states"][tokens])
        content = content_digest(columns["hidden_states"].dtype, ids, mask, states)
        need(content == t.take("content_digest", "U8", n, 16)[i].tobytes(), "DIG-3", f"{sample_id}: content digest")
        extra = extras_digest(meta_i, {key: (columns[key].dtype, value) for key, value in values.items()})
        need(extra == t.take("extra_digest", "U8", n, 16)[i].tobytes(), "DIG-4", f"{sample_id}: extras digest")
        source = int(t.take("source_index", "I64", n)[i])
        shown = {key: None if value is None else value.tobytes().hex() for key, value in values.items()}
        document = parse_json(meta_i, f"metadata of {sample_id}", metadata=True)
        part.samples.append(
            Sample(sample_id, ids.tolist(), mask.tolist(), bool(given[i]), states, document, shown, source, content)
        )
    need(sum(supervised) == counts["supervised_tokens"], "MAN-10", f"{path}: supervised tokens")
    return digest(data)


def content_digest(dtype: str, ids: Array, mask: Array, states: Array) -> bytes:
    form = b"hsfmt:sample:1\0" + dtype.encode() + b"\0" + struct.pack("<3Q", *states.shape)
    return xxhash.xxh3_128_digest(form + ids.astype("<i8").tobytes() + mask.tobytes() + states.tobytes())


def extras_digest(meta: bytes, values: dict[str, tuple[str, Array | None]]) -> bytes:
    form = b"hsfmt:extras:1\0" + struct.pack("<Q", len(meta)) + meta
    for name, (dtype, value) in sorted(values.items()):
        form += f"{name}\0{dtype}\0".encode()
        if value is None:
            form += b"\0"
        else:
            form += b"\1" + struct.pack(f"<{value.ndim + 1}Q", value.ndim, *value.shape) + value.tobytes()
    return xxhash.xxh3_128_digest(form)


def dataset_digest(samples: list[Sample]) -> str:
    keys = []
    for sample in samples:
        sample_id = sample.id.encode()
        pair = b"hsfmt:pair:1\0" + struct.pack("<Q", len(sample_id)) + sample_id + sample.content_digest
        keys.append(xxhash.xxh3_128_digest(pair))
    return digest(b"hsfmt:dataset:1\0" + struct.pack("<Q", len(keys)) + b"".join(sorted(keys)))
