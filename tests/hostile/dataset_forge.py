"""A forger who signs: whatever is changed in a dataset, every digest, size and name that depends on it is made right.

Digests are no signatures, so a hostile dataset has valid ones throughout, and only the planted lie is wrong. The forge
shares no parser with the library: it must be able to write what the library would refuse.
"""

import copy
import itertools
import json
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import xxhash

from hsfmt import DatasetWriter
from hsfmt.columns import parse_column
from hsfmt.errors import HsfmtError
from hsfmt.manifest import implied_documents
from hsfmt.writers.extras import Extra

LAYERS, HIDDEN = (1, 3), 8
POINTER, ROOT = "hsfmt/manifest.json", "zarr.json"
DTYPES = {"I32": "<i4", "I64": "<i8", "U64": "<u8", "U8": "u1"}
NAMES = {np.dtype(value): key for key, value in DTYPES.items()}

_MAX_PARSED_NBYTES = 8 << 20

Edit = Callable[[Any], Any]


def digest(data: bytes) -> str:
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"


def dumps(document: Any) -> bytes:
    """Canonical JSON where there is such a form, else as near as json comes: floats, NaN, surrogates and all."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def signed(document: Any) -> bytes:
    if not isinstance(document, dict):
        return dumps(document)
    body = {key: value for key, value in document.items() if key != "digest"}
    return dumps({**body, "digest": digest(dumps(body))})


class TableFile:
    """A safetensors file in pieces: `arrays`, `metadata`, and edits of the header and of the bytes on their way out."""

    def __init__(self, data: bytes) -> None:
        (size,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + size])
        self.metadata = json.loads(header.pop("__metadata__")["hsfmt"])
        body = data[8 + size :]
        self.arrays: dict[str, np.ndarray] = {}
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            self.arrays[name] = np.frombuffer(body[start:stop], DTYPES[entry["dtype"]]).reshape(entry["shape"]).copy()
        self.edit_header: Edit | None = None
        self.edit_bytes: Edit | None = None

    def to_bytes(self) -> bytes:
        header: Any = {"__metadata__": {"hsfmt": dumps(self.metadata).decode("utf-8", "surrogatepass")}}
        blobs, at = [], 0
        for name in sorted(self.arrays, key=lambda name: (-self.arrays[name].dtype.itemsize, name)):
            array = self.arrays[name]
            blobs.append(array.tobytes())
            offsets = [at, at + len(blobs[-1])]
            header[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
            at = offsets[1]
        if self.edit_header is not None:
            header = self.edit_header(header) or header
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        data = struct.pack("<Q", len(text)) + text + b"".join(blobs)
        return data if self.edit_bytes is None else self.edit_bytes(data)


class Forge:
    """A dataset taken apart; `save` puts it together with everything signed again.

    Attributes
    ----------
    header
        The header that root, manifests, snapshot and pointer repeat; None leaves each its own.
    root, pointer
        The documents; their bytes on the way out go through `raw[path]`, if there is such a function.
    manifests, indexes
        By part.
    snapshot, ids
        The tables of the snapshot.
    keep
        What is not to be made right: "index entry", "header_digest", "ids", "parts table", "pointer".
    later
        Called with the root and a folder outside of it once all is signed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.document = json.loads((path / ROOT).read_bytes())
        self.pointer = json.loads((path / POINTER).read_bytes())
        folder = path / "hsfmt/snapshots" / self.pointer["fingerprint"].partition(":")[2]
        self.snapshot = TableFile((folder / "index.safetensors").read_bytes())
        self.ids = TableFile((folder / "ids.safetensors").read_bytes())
        self.parts = sorted(file.stem for file in (path / "hsfmt/manifests").iterdir())
        self.manifests: dict[str, Any] = {
            part: json.loads((path / f"hsfmt/manifests/{part}.json").read_bytes()) for part in self.parts
        }
        self.indexes = {part: TableFile((path / f"hsfmt/index/{part}.safetensors").read_bytes()) for part in self.parts}
        self.raw: dict[str, Callable[[bytes], bytes]] = {}
        self.keep: set[str] = set()
        self.later: list[Callable[[Path, Path], Any]] = []
        self._folder = folder
        self._originals = copy.deepcopy(self.manifests)

    def header(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change the header, alike wherever it is repeated."""
        places = [
            self.document["attributes"]["hsfmt"],
            self.pointer["header"],
            self.snapshot.metadata["header"],
            *(manifest["header"] for manifest in self.manifests.values()),
        ]
        for place in places:
            change(place)

    def chunk(self, part: str, column: str, number: int, payload: bytes) -> None:
        """Replace a chunk's payload: shard, its index, chunk table and all digests follow."""
        table = self.indexes[part].arrays[f"chunks.{column}"]
        entry = self.manifests[part]["columns"][column]
        planes = entry["shape"][1] if column == "hidden_states" else 1
        per_shard = entry["shard_shape"][0] // entry["chunk_shape"][0] * planes
        shard = number // per_shard
        path = self.path / self.shard(part, column, shard)
        data = path.read_bytes()
        first, end = shard * per_shard, min((shard + 1) * per_shard, len(table))
        payloads = [data[at : at + nbytes] for at, nbytes in table[first:end, :2].tolist()]
        payloads[number - first] = payload
        at, stored, places = 0, b"", np.full((per_shard, 2), 2**64 - 1, "<u8")
        for slot, body in enumerate(payloads):
            table[first + slot] = at, len(body), xxhash.xxh3_64_intdigest(body)
            places[slot] = at, len(body) + 4
            stored += body + google_crc32c.value(body).to_bytes(4, "little")
            at += len(body) + 4
        index = places.tobytes()
        path.write_bytes(stored + index + google_crc32c.value(index).to_bytes(4, "little"))

    def payload(self, part: str, column: str, number: int) -> bytes:
        entry = self.manifests[part]["columns"][column]
        planes = entry["shape"][1] if column == "hidden_states" else 1
        per_shard = entry["shard_shape"][0] // entry["chunk_shape"][0] * planes
        at, nbytes, _ = self.indexes[part].arrays[f"chunks.{column}"][number].tolist()
        return (self.path / self.shard(part, column, number // per_shard)).read_bytes()[at : at + nbytes]

    def shard(self, part: str, column: str, number: int = 0) -> str:
        axes = len(self.manifests[part]["columns"][column]["shape"]) - 1
        return f"parts/{part}/{column}/c/{number}" + "/0" * axes

    def save(self) -> None:
        """Write every document anew, from the leaves to the pointer."""
        for part in self.parts:
            self._save_part(part)
        if "ids" not in self.keep:
            ids = self._put(None, self.ids.to_bytes())
            self.snapshot.metadata["ids"] = {"digest": digest(ids), "nbytes": len(ids)}
        else:
            ids = self.ids.to_bytes()
        data = self.snapshot.to_bytes()
        shutil.rmtree(self._folder.parent)
        self._folder = self._folder.with_name(digest(data).partition(":")[2])
        self._folder.mkdir(parents=True)
        (self._folder / "index.safetensors").write_bytes(data)
        (self._folder / "ids.safetensors").write_bytes(ids)
        if isinstance(self.pointer, dict) and "pointer" not in self.keep:
            path = f"hsfmt/snapshots/{self._folder.name}/index.safetensors"
            self.pointer["fingerprint"] = digest(data)
            self.pointer["index"] = {"nbytes": len(data), "path": path}
            if isinstance(self.snapshot.metadata, dict) and "content_digest" in self.snapshot.metadata:
                self.pointer["content_digest"] = self.snapshot.metadata["content_digest"]
        self._put(POINTER, signed(self.pointer))
        self._put(ROOT, dumps(self.document))

    def _save_part(self, part: str) -> None:
        manifest, arrays = self.manifests[part], self.snapshot.arrays
        index = self._put(f"hsfmt/index/{part}.safetensors", self.indexes[part].to_bytes())
        if isinstance(manifest, dict):
            self._sign_files(part, manifest, index)
            if isinstance(manifest.get("header"), dict) and "header_digest" not in self.keep:
                manifest["header_digest"] = digest(dumps(manifest["header"]))
        data = self._put(f"hsfmt/manifests/{part}.json", signed(manifest))
        if "parts table" in self.keep:
            return
        number = self.parts.index(part)
        own = bytes(16)
        # Of 64 MB of empty lists the forger himself would make gigabytes.
        if len(data) <= _MAX_PARSED_NBYTES:
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                own = bytes.fromhex(json.loads(data)["digest"].partition(":")[2])
        if number < min(len(arrays["part_manifest_nbytes"]), len(arrays["part_index_nbytes"])):
            arrays["part_manifest_nbytes"][number] = len(data)
            arrays["part_manifest_digest"][number] = np.frombuffer(own, np.uint8)
            arrays["part_index_nbytes"][number] = len(index)
            arrays["part_index_digest"][number] = np.frombuffer(xxhash.xxh3_128_digest(index), np.uint8)

    def _sign_files(self, part: str, manifest: dict[str, Any], index: bytes) -> None:
        if "index entry" in self.keep or not isinstance(manifest.get("files"), list):
            return
        implied: dict[str, bytes] = {}
        if manifest.get("columns") != self._originals[part]["columns"]:
            try:
                columns = {name: parse_column(name, entry, "") for name, entry in manifest["columns"].items()}
                implied = implied_documents(part, columns)
            except (HsfmtError, AttributeError, KeyError):
                implied = {}
        for path, data in implied.items():
            (self.path / path).parent.mkdir(parents=True, exist_ok=True)
            (self.path / path).write_bytes(data)
        for entry in manifest["files"]:
            path = entry.get("path") if isinstance(entry, dict) else None
            if path == f"hsfmt/index/{part}.safetensors":
                entry |= {"nbytes": len(index), "digest": digest(index)}
            elif isinstance(path, str) and (path in implied or "/c/" in path) and ".." not in path and path[0] != "/":
                file = self.path / path
                if file.is_file():
                    entry |= {"nbytes": file.stat().st_size, "digest": digest(file.read_bytes())}

    def _put(self, path: str | None, data: bytes) -> bytes:
        if path is None:
            return data
        data = self.raw.get(path, lambda data: data)(data)
        (self.path / path).write_bytes(data)
        return data


def build(path: Path, codec: str = "zstd", prefix: str = "") -> Path:
    """Two parts of three samples with extras of every kind, metadata, a hole each and an attachment, sealed.

    Names of parts and ids begin with the prefix.
    """
    names = itertools.count()
    extras = {
        "score": Extra("sample", "float64"),
        "topk": Extra("ragged", "int32", (2,)),
        "weight": Extra("token", "float32"),
    }
    with DatasetWriter(
        path,
        layers=LAYERS,
        hidden_size=HIDDEN,
        final_norm="pre",
        model="tiny",
        codec=codec,
        extras=extras,
        chunk_tokens=4,
        shard_tokens=8,
        seal=False,
        threads=1,
        part_names=lambda: f"{prefix}part-{next(names)}",
        producer={"engine": "made up"},
    ) as writer:
        for seed in range(6):
            n_tokens = 3 + seed
            rng = np.random.default_rng(seed)
            writer.write(
                f"{prefix}s-{seed}",
                np.arange(n_tokens) + seed,
                rng.integers(1, 0x7000, (n_tokens, len(LAYERS), HIDDEN)).astype(np.uint16),
                np.arange(n_tokens) % 2,
                {"seed": seed, "half": 0.5},
                weight=np.linspace(0, 1, n_tokens, dtype=np.float32),
                score=None if seed % 3 == 2 else seed / 3,
                topk=None if seed % 2 else np.full((seed + 1, 2), seed, np.int32),
            )
            if seed % 3 == 2:
                writer.hole(f"{prefix}hole-{seed}", "the engine gave nothing")
                writer.commit()
    from hsfmt import seal

    seal(path, attachments={"d2t": np.arange(16)})
    return path
