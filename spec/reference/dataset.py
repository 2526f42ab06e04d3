"""Datasets, snapshots and the pointer: sections 2 and 13."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from .documents import check_header, check_signed, check_version, digest, parse_json
from .parts import GROUP, Part, Sample, dataset_digest, load_part
from .refusal import Refused, need
from .tables import Table, parse_table

KIB = 1 << 10


@dataclass
class Dataset:
    """What a reader sees."""

    header: dict[str, Any]
    samples: list[Sample]
    holes: dict[str, str]
    content_digest: str


def load(root: Path) -> Dataset:
    """Return a dataset: its current snapshot, or the live set if it was never sealed.

    Raises
    ------
    Refused
        Names the rule that is broken.
    """
    data = (root / "zarr.json").read_bytes()
    need(len(data) <= 64 * KIB, "READ-1", "zarr.json: size")
    document = parse_json(data, "zarr.json")
    good = isinstance(document, dict) and isinstance(document.get("attributes"), dict)
    need(good and set(document["attributes"]) == {"hsfmt"}, "ZARR-1", "zarr.json: attributes")
    header = document["attributes"]["hsfmt"]
    check_header(header, "zarr.json")
    need(document == {"attributes": {"hsfmt": header}, "node_type": "group", "zarr_format": 3}, "ZARR-1", "zarr.json")
    need((root / "parts/zarr.json").read_bytes() == GROUP, "ZARR-2", "parts/zarr.json")
    matches = (re.fullmatch(r"([a-z0-9][a-z0-9-]{0,63})\.json", p.name) for p in (root / "hsfmt/manifests").iterdir())
    parts = {name: load_part(root, name, header) for name in sorted(match[1] for match in matches if match)}
    superseded = set()
    for part in parts.values():
        for entry in part.manifest["replaces"]:
            superseded.add(entry["part"])
            if entry["part"] in parts:
                same = parts[entry["part"]].manifest["digest"] == entry["digest"]
                need(same, "MAN-8", f"{entry['part']}: replaced under another digest")
    if (root / "hsfmt/manifest.json").exists():
        return load_snapshot(root, parts, header)
    current = {name: part for name, part in parts.items() if name not in superseded}
    return live(current, header)


def live(parts: dict[str, Part], header: dict[str, Any]) -> Dataset:
    samples: dict[str, Sample] = {}
    for part in parts.values():
        for sample in part.samples:
            samples.setdefault(sample.id, sample)
    ordered = sorted(samples.values(), key=lambda s: (s.source_index, s.id))
    return Dataset(header, ordered, holes_of(parts.values(), set(samples)), dataset_digest(ordered))


def holes_of(parts: Any, present: set[str]) -> dict[str, str]:
    entries = {entry["id"]: entry["reason"] for part in parts for entry in part.manifest["holes"]}
    return {key: reason for key, reason in sorted(entries.items()) if key not in present}


def load_pointer(root: Path) -> tuple[dict[str, Any], str, Table]:
    """Return the pointer, the snapshot's folder and the snapshot's index."""
    data = (root / "hsfmt/manifest.json").read_bytes()
    need(len(data) <= 64 * KIB, "READ-1", "pointer: size")
    pointer = parse_json(data, "pointer")
    try:
        check_signed(pointer, "hsfmt.pointer", "pointer")
    except Refused as error:
        raise Refused("SNAP-9", str(error)) if error.rule.startswith("MAN") else error from None
    need(re.fullmatch(r"xxh3_128:[0-9a-f]{32}", str(pointer.get("fingerprint"))), "DIG-1", "pointer: fingerprint")
    folder = f"hsfmt/snapshots/{pointer['fingerprint'][9:]}"
    need(pointer["index"].get("path") == f"{folder}/index.safetensors", "SNAP-9", "pointer: path")
    need((root / folder / "index.safetensors").is_file(), "SNAP-9", f"{folder}: missing")
    data = (root / folder / "index.safetensors").read_bytes()
    need(digest(data) == pointer["fingerprint"], "SNAP-1", f"{folder}: fingerprint")
    need(len(data) == pointer["index"]["nbytes"], "SNAP-9", f"{folder}: size")
    t = parse_table(data, "hsfmt.snapshot", folder)
    check_version(t.metadata, folder)
    check_header(t.metadata.get("header"), folder)
    return pointer, folder, t


def load_snapshot(root: Path, parts: dict[str, Part], header: dict[str, Any]) -> Dataset:
    pointer, folder, t = load_pointer(root)
    need(t.metadata["header"] == pointer["header"] == header, "SNAP-6", f"{folder}: header")
    names = t.take("part_names", "U8", None).tobytes()
    offsets = t.offsets("part_name_offsets", None, len(names), strict=True)
    listed = [names[a:b].decode() for a, b in pairwise(offsets)]
    need(all(re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", name) for name in listed), "LAY-1", f"{folder}: {listed}")
    need(sorted(set(listed)) == listed, "SNAP-2", f"{folder}: parts ascending")
    for i, name in enumerate(listed):
        need(name in parts, "READ-4", f"{folder}: part {name} is missing")
        part = parts[name]
        said = (
            int(t.take("part_manifest_nbytes", "I64", len(listed))[i]),
            t.take("part_manifest_digest", "U8", len(listed), 16)[i].tobytes().hex(),
        )
        need(said == (part.manifest_nbytes, part.manifest["digest"][9:]), "READ-3", f"{folder}: manifest of {name}")
        raw = t.take("part_index_digest", "U8", len(listed), 16)[i].tobytes().hex()
        need(raw == (part.index_digest or ":" + "0" * 32).partition(":")[2], "READ-3", f"{folder}: index of {name}")
        t.take("part_index_nbytes", "I64", len(listed))
    loaded = [parts[name] for name in listed]

    places: list[tuple[int, int]] = []

    def rows(prefix: str) -> list[Sample]:
        part, row = t.take(f"{prefix}part", "I32", None), t.take(f"{prefix}row", "I32", None)
        need(len(part) == len(row), "TAB-3", f"{folder}: {prefix}row")
        for p, r in zip(part, row, strict=True):
            need(0 <= p < len(loaded) and 0 <= r < len(loaded[p].samples), "SNAP-7", f"{folder}: row {p}, {r}")
        places.extend(zip(part.tolist(), row.tolist(), strict=True))
        return [loaded[p].samples[r] for p, r in zip(part, row, strict=True)]

    served, shadowed, retracted = rows(""), rows("shadowed_"), rows("retracted_")
    t.take("shadowed_same", "U8", len(shadowed))
    check_absent(t, {sample.id for part in loaded for sample in part.samples}, folder)
    every = [(i, row) for i, part in enumerate(loaded) for row in range(len(part.samples))]
    complete = t.metadata.get("complete")
    need(isinstance(complete, bool), "SNAP-4", f"{folder}: complete")
    once = sorted(places) == every if complete else len(set(places)) == len(places)
    need(once, "SNAP-4", f"{folder}: each row once")
    n = len(served)
    facts = [(len(s.input_ids), sum(s.loss_mask), xxhash.xxh3_64_intdigest(s.id.encode())) for s in served]
    for name, kind, column in (("n_tokens", "I32", 0), ("n_supervised", "I32", 1)):
        need(t.take(name, kind, n).tolist() == [f[column] for f in facts], "SNAP-7", f"{folder}: {name}")
    need(t.take("id_hash", "U64", n).tolist() == [f[2] for f in facts], "DIG-5", f"{folder}: id_hash")
    holes = holes_of(loaded, {s.id for part in loaded for s in part.samples})
    counts = {
        "holes": len(holes), "parts": len(loaded), "retracted": len(retracted), "samples": n,
        "shadowed": len(shadowed), "supervised_tokens": sum(f[1] for f in facts), "tokens": sum(f[0] for f in facts),
    }  # fmt: skip
    need(counts.items() <= t.metadata.get("counts", {}).items(), "SNAP-6", f"{folder}: counts")
    content = dataset_digest(served)
    need(t.metadata.get("content_digest") == content, "DIG-6", f"{folder}: content digest")
    check_ids(root, folder, t, served)
    check_attachments(root, t)
    same = all(pointer[key] == value for key, value in (("content_digest", content), ("samples", n)))
    need(same and pointer["tokens"] == counts["tokens"], "SNAP-9", "pointer: does not repeat the snapshot")
    return Dataset(header, served, holes, content)


def check_absent(t: Table, present: set[str], folder: str) -> None:
    if "absent_ids" in t.tensors:
        text = t.take("absent_ids", "U8", None).tobytes()
        offsets = t.offsets("absent_id_offsets", None, len(text), strict=True)
        ids = [text[a:b].decode() for a, b in pairwise(offsets)]
        need(ids == sorted(set(ids) - present), "SNAP-11", f"{folder}: absent ids")


def check_ids(root: Path, folder: str, t: Table, served: list[Sample]) -> None:
    path = root / folder / "ids.safetensors"
    need(path.is_file(), "READ-4", f"{folder}: ids are missing")
    data = path.read_bytes()
    need(
        {"digest": digest(data), "nbytes": len(data)}.items() <= t.metadata.get("ids", {}).items(),
        "SNAP-8",
        f"{folder}: ids",
    )
    table = parse_table(data, "hsfmt.snapshot-ids", f"{folder}: ids")
    ids = table.take("ids", "U8", None).tobytes()
    offsets = table.offsets("id_offsets", len(served), len(ids), strict=True)
    found = [ids[a:b].decode() for a, b in pairwise(offsets)]
    need(found == [sample.id for sample in served], "SNAP-8", f"{folder}: ids of the rows")


def check_attachments(root: Path, t: Table) -> None:
    entries = t.metadata.get("attachments")
    need(isinstance(entries, list), "SNAP-10", "attachments")
    for entry in entries or []:
        need(re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,63}", entry["name"]), "SNAP-10", f"attachment {entry['name']}")
        path = root / "hsfmt/attachments" / entry["digest"][9:] / entry["name"]
        need(path.is_file(), "READ-4", f"{path.name}: missing")
        data = path.read_bytes()
        need((digest(data), len(data)) == (entry["digest"], entry["nbytes"]), "SNAP-10", f"{path.name}: digest")


def to_json(dataset: Dataset) -> dict[str, Any]:
    """Return what tests compare: states as hex of their bytes, or their digest where that is long."""

    def states(sample: Sample) -> str:
        data = sample.hidden_states.tobytes()
        return data.hex() if len(data) <= 1024 else digest(data)

    return {
        "content_digest": dataset.content_digest,
        "header": dataset.header,
        "holes": dataset.holes,
        "samples": [
            {
                "extras": s.extras,
                "hidden_states": states(s),
                "id": s.id,
                "input_ids": s.input_ids if len(s.input_ids) <= 64 else digest(np.array(s.input_ids, "<i8").tobytes()),
                "loss_mask": s.loss_mask if len(s.loss_mask) <= 64 else digest(bytes(s.loss_mask)),
                "loss_mask_given": s.loss_mask_given,
                "metadata": s.metadata,
            }
            for s in dataset.samples
        ],
    }
