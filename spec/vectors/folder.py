"""Editing a dataset's files by hand: no check of the library is in the way, and all digests can be made good."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import xxhash

_TYPES = {"I32": "<i4", "I64": "<i8", "U64": "<u8", "U8": "u1"}


def canonical(document: Any) -> bytes:
    """Return canonical JSON (JSON-2)."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(data: bytes) -> str:
    """Return a digest string (DIG-1)."""
    return "xxh3_128:" + xxhash.xxh3_128_hexdigest(data)


def signed(document: dict[str, Any]) -> bytes:
    """Return a document with its own digest (MAN-2)."""
    body = {key: value for key, value in document.items() if key != "digest"}
    return canonical({**body, "digest": digest(canonical(body))})


class Table:
    """A table file, taken apart: `header` as parsed JSON, `tensors` as writable arrays, `metadata` as an object."""

    def __init__(self, data: bytes) -> None:
        (size,) = struct.unpack_from("<Q", data)
        self.header = json.loads(data[8 : 8 + size])
        self.metadata = json.loads(self.header.pop("__metadata__")["hsfmt"])
        body = data[8 + size :]
        self.tensors = {
            name: np.frombuffer(body[slice(*entry["data_offsets"])], _TYPES[entry["dtype"]])
            .reshape(entry["shape"])
            .copy()
            for name, entry in self.header.items()
        }

    def to_bytes(self) -> bytes:
        """Return the file (TAB-2)."""
        header: dict[str, Any] = {"__metadata__": {"hsfmt": canonical(self.metadata).decode()}}
        names = {np.dtype(value): key for key, value in _TYPES.items()}
        blobs, end = [], 0
        for name in sorted(self.tensors, key=lambda key: (-self.tensors[key].dtype.itemsize, key)):
            array = self.tensors[name]
            offsets = [end, end + array.nbytes]
            header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
            blobs.append(array.tobytes())
            end += array.nbytes
        return with_header(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode(), b"".join(blobs))


def with_header(header: bytes, body: bytes) -> bytes:
    """Return a table file of these JSON bytes."""
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + body


class Folder:
    """A dataset's folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __truediv__(self, path: str) -> Path:
        return self.root / path

    def files(self) -> dict[str, bytes]:
        """Return every file by path."""
        return {
            p.relative_to(self.root).as_posix(): p.read_bytes() for p in sorted(self.root.rglob("*")) if p.is_file()
        }

    def json(self, path: str) -> Any:
        """Return a parsed document."""
        return json.loads((self / path).read_bytes())

    def manifest(self, part: str) -> Any:
        """Return a part's manifest."""
        return self.json(f"hsfmt/manifests/{part}.json")

    def put_manifest(self, part: str, document: dict[str, Any]) -> None:
        """Write a part's manifest with its digest made good."""
        (self / f"hsfmt/manifests/{part}.json").write_bytes(signed(document))

    def index(self, part: str) -> Table:
        """Return a part's index."""
        return Table((self / f"hsfmt/index/{part}.safetensors").read_bytes())

    def put_index(self, part: str, table: Table | bytes) -> None:
        """Write a part's index."""
        data = table if isinstance(table, bytes) else table.to_bytes()
        (self / f"hsfmt/index/{part}.safetensors").write_bytes(data)

    @property
    def snapshot(self) -> str:
        """Folder of the current snapshot."""
        return str(Path(self.json("hsfmt/manifest.json")["index"]["path"]).parent)

    def snapshot_index(self) -> Table:
        """Return the current snapshot's index."""
        return Table((self / f"{self.snapshot}/index.safetensors").read_bytes())

    def put_snapshot_index(self, table: Table | bytes) -> None:
        """Write the current snapshot's index; its name and the pointer are made good."""
        data = table if isinstance(table, bytes) else table.to_bytes()
        pointer = self.json("hsfmt/manifest.json")
        old, new = self / self.snapshot, self / f"hsfmt/snapshots/{digest(data).partition(':')[2]}"
        (old / "index.safetensors").write_bytes(data)
        old.rename(new)
        pointer["fingerprint"] = digest(data)
        if isinstance(table, Table):
            pointer["content_digest"] = table.metadata["content_digest"]
        pointer["index"] = {"nbytes": len(data), "path": f"hsfmt/snapshots/{new.name}/index.safetensors"}
        (self / "hsfmt/manifest.json").write_bytes(signed(pointer))

    def put_pointer(self, document: dict[str, Any]) -> None:
        """Write the pointer with its digest made good."""
        (self / "hsfmt/manifest.json").write_bytes(signed(document))

    def make_good(self, *parts: str) -> None:
        """Recompute what depends on the files of these parts: file entries, manifests, snapshot, pointer."""
        for part in parts:
            manifest = self.manifest(part)
            for entry in manifest["files"]:
                if (self / entry["path"]).is_file():
                    data = (self / entry["path"]).read_bytes()
                    entry["nbytes"], entry["digest"] = len(data), digest(data)
            self.put_manifest(part, manifest)
        self.make_snapshot_good()

    def make_snapshot_good(self) -> None:
        """Recompute what the snapshot says about manifests, indexes and ids."""
        table = self.snapshot_index()
        offsets, names = table.tensors["part_name_offsets"], table.tensors["part_names"]
        for i in range(len(offsets) - 1):
            part = names[offsets[i] : offsets[i + 1]].tobytes().decode()
            data = (self / f"hsfmt/manifests/{part}.json").read_bytes()
            table.tensors["part_manifest_nbytes"][i] = len(data)
            raw = bytes.fromhex(json.loads(data)["digest"].partition(":")[2])
            table.tensors["part_manifest_digest"][i] = np.frombuffer(raw, np.uint8)
            index = self / f"hsfmt/index/{part}.safetensors"
            if index.is_file():
                table.tensors["part_index_nbytes"][i] = index.stat().st_size
                raw = xxhash.xxh3_128_digest(index.read_bytes())
                table.tensors["part_index_digest"][i] = np.frombuffer(raw, np.uint8)
        ids = (self / f"{self.snapshot}/ids.safetensors").read_bytes()
        table.metadata["ids"] = {"digest": digest(ids), "nbytes": len(ids)}
        self.put_snapshot_index(table)

    def make_ids_good(self) -> None:
        """Recompute what the snapshot says about ids: hashes, the ids file, the content digest."""
        table = self.snapshot_index()
        offsets, names = table.tensors["part_name_offsets"], table.tensors["part_names"]
        parts = [names[offsets[i] : offsets[i + 1]].tobytes().decode() for i in range(len(offsets) - 1)]
        ids, keys = [], []
        for part, row in zip(table.tensors["part"], table.tensors["row"], strict=True):
            index = self.index(parts[part]).tensors
            ids.append(index["ids"][index["id_offsets"][row] : index["id_offsets"][row + 1]].tobytes())
            pair = struct.pack("<Q", len(ids[-1])) + ids[-1] + index["content_digest"][row].tobytes()
            keys.append(xxhash.xxh3_128_digest(b"hsfmt:pair:1\0" + pair))
        form = b"hsfmt:dataset:1\0" + struct.pack("<Q", len(keys)) + b"".join(sorted(keys))
        table.metadata["content_digest"] = digest(form)
        table.tensors["id_hash"][:] = [xxhash.xxh3_64_intdigest(sample_id) for sample_id in ids]
        path = self / f"{self.snapshot}/ids.safetensors"
        ids_table = Table(path.read_bytes())
        ids_table.tensors["ids"] = np.frombuffer(b"".join(ids), np.uint8)
        ids_table.tensors["id_offsets"] = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        path.write_bytes(ids_table.to_bytes())
        self.put_snapshot_index(table)
        self.make_snapshot_good()

    def put_payload(self, part: str, column: str, k: int, payload: bytes) -> None:
        """Replace a chunk's payload in the first shard by one of its length; crc32c and chunk digest are made good."""
        table = self.index(part)
        chunks = table.tensors[f"chunks.{column}"]
        offset, nbytes, _ = (int(n) for n in chunks[k])
        assert len(payload) == nbytes
        self.patch(self.shard(part, column), offset, payload + struct.pack("<I", google_crc32c.value(payload)))
        chunks[k, 2] = xxhash.xxh3_64_intdigest(payload)
        self.put_index(part, table)

    def payload(self, part: str, column: str, k: int) -> bytes:
        """Return a chunk's payload, of the first shard."""
        offset, nbytes, _ = (int(n) for n in self.index(part).tensors[f"chunks.{column}"][k])
        return (self / self.shard(part, column)).read_bytes()[offset : offset + nbytes]

    def shard(self, part: str, column: str) -> str:
        """Return the path of a column's first shard."""
        rank = len(self.manifest(part)["columns"][column]["shape"])
        return f"parts/{part}/{column}/c/" + "/".join("0" * rank)

    def patch(self, path: str, offset: int, data: bytes) -> None:
        """Overwrite bytes of a file."""
        content = bytearray((self / path).read_bytes())
        offset %= len(content)
        content[offset : offset + len(data)] = data
        (self / path).write_bytes(content)

    def copy_part(self, part: str, new: str) -> None:
        """Copy all files of a part under another name, as someone might by hand."""
        shutil.copytree(self / f"parts/{part}", self / f"parts/{new}")
        for path in (f"hsfmt/index/{part}.safetensors", f"hsfmt/manifests/{part}.json"):
            shutil.copyfile(self / path, self / path.replace(part, new))
