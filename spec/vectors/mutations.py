"""The mutations that make invalid vectors. Unless one says otherwise, digests, names and sizes are made good."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from typing import Any

import google_crc32c
import numpy as np
import xxhash

from spec.vectors.folder import Folder, Table, canonical, digest, with_header
from spec.vectors.valid_cases import rewrite_header

P = "p-one"
NO_DIGEST = "xxh3_128:" + "0" * 32
MANIFEST = f"hsfmt/manifests/{P}.json"


def set_member(document: Any, keys: tuple[Any, ...], value: Any) -> None:
    for key in keys[:-1]:
        document = document[key]
    if value is REMOVED:
        del document[keys[-1]]
    else:
        document[keys[-1]] = value


REMOVED = object()


def header(**members: Any) -> Callable[[Folder], None]:
    """Change members of the header wherever it is repeated."""
    return lambda folder: rewrite_header(folder, **members)


def manifest(*keys: Any, value: Any = REMOVED, part: str = P) -> Callable[[Folder], None]:
    """Set or remove a member of a part's manifest."""

    def mutate(folder: Folder) -> None:
        document = folder.manifest(part)
        set_member(document, keys, value)
        folder.put_manifest(part, document)
        folder.make_snapshot_good()

    return mutate


def manifest_bytes(change: Callable[[bytes], bytes]) -> Callable[[Folder], None]:
    """Change the bytes of a manifest, and nothing else."""

    def mutate(folder: Folder) -> None:
        path = folder / MANIFEST
        path.write_bytes(change(path.read_bytes()))

    return mutate


def index(change: Callable[[Table], None]) -> Callable[[Folder], None]:
    """Change the part index."""

    def mutate(folder: Folder) -> None:
        table = folder.index(P)
        change(table)
        folder.put_index(P, table)
        folder.make_good(P)

    return mutate


def ids(change: Callable[[Table], None]) -> Callable[[Folder], None]:
    """Change ids in the part index, and all that repeats them."""

    def mutate(folder: Folder) -> None:
        index(change)(folder)
        folder.make_ids_good()

    return mutate


def index_bytes(change: Callable[[dict[str, Any], bytes], bytes]) -> Callable[[Folder], None]:
    """Change the part index below its tensors: (header as JSON, body) -> file."""

    def mutate(folder: Folder) -> None:
        data = (folder / f"hsfmt/index/{P}.safetensors").read_bytes()
        (size,) = struct.unpack_from("<Q", data)
        folder.put_index(P, change(json.loads(data[8 : 8 + size]), data[8 + size :]))
        folder.make_good(P)

    return mutate


def tensor(name: str, at: Any, value: Any) -> Callable[[Folder], None]:
    """Set elements of a tensor of the part index."""
    return index(lambda table: table.tensors[name].__setitem__(at, value))


def snapshot(change: Callable[[Table], None]) -> Callable[[Folder], None]:
    """Change the snapshot's index."""

    def mutate(folder: Folder) -> None:
        table = folder.snapshot_index()
        change(table)
        folder.put_snapshot_index(table)

    return mutate


def snapshot_tensor(name: str, at: Any, value: Any) -> Callable[[Folder], None]:
    """Set elements of a tensor of the snapshot's index."""
    return snapshot(lambda table: table.tensors[name].__setitem__(at, value))


def pointer(*keys: Any, value: Any = REMOVED) -> Callable[[Folder], None]:
    """Set or remove a member of the pointer."""

    def mutate(folder: Folder) -> None:
        document = folder.json("hsfmt/manifest.json")
        set_member(document, keys, value)
        folder.put_pointer(document)

    return mutate


def array_document(key: str, value: Any) -> Callable[[Folder], None]:
    """Change a member of the states' zarr.json, with the manifest made good."""

    def mutate(folder: Folder) -> None:
        path = f"parts/{P}/hidden_states/zarr.json"
        (folder / path).write_bytes(canonical({**folder.json(path), key: value}))
        folder.make_good(P)

    return mutate


def payload(column: str, k: int, change: Callable[[bytes], bytes]) -> Callable[[Folder], None]:
    """Change a chunk's payload, with crc32c, chunk digest and all above it made good."""

    def mutate(folder: Folder) -> None:
        folder.put_payload(P, column, k, change(folder.payload(P, column, k)))
        folder.make_good(P)

    return mutate


def file(path: str, change: Callable[[bytes], bytes] | None) -> Callable[[Folder], None]:
    """Change the bytes of a file, or remove it; nothing is made good. "*" stands for the snapshot's folder."""

    def mutate(folder: Folder) -> None:
        target = folder / path.replace("*", folder.snapshot)
        if change is None:
            target.unlink()
        else:
            target.write_bytes(change(target.read_bytes()))

    return mutate


def flip(offset: int) -> Callable[[bytes], bytes]:
    """Flip the lowest bit of one byte."""

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[offset] ^= 1
        return bytes(changed)

    return change


def put(offset: int, new: bytes) -> Callable[[bytes], bytes]:
    """Overwrite bytes."""
    return lambda data: data[: offset % len(data)] + new + data[offset % len(data) + len(new) :]


def root_bytes(change: Callable[[bytes], bytes]) -> Callable[[Folder], None]:
    return file("zarr.json", change)


def renamed_part(folder: Folder) -> None:
    table = folder.snapshot_index()
    names = table.tensors["part_names"]
    names[:1] = ord("P")
    folder.put_snapshot_index(table)


def other_header(folder: Folder) -> None:
    document = folder.manifest(P)
    document["header"]["layers"] = [1, 2, 3]
    document["header_digest"] = digest(canonical(document["header"]))
    folder.put_manifest(P, document)
    folder.make_snapshot_good()


def without_scale(folder: Folder) -> None:
    document = folder.manifest(P)
    del document["columns"]["hidden_states_scale"]
    document["files"] = [e for e in document["files"] if "hidden_states_scale" not in e["path"]]
    folder.put_manifest(P, document)
    folder.make_snapshot_good()


def swap_shards(folder: Folder) -> None:
    first, second = (folder / f"parts/{P}/hidden_states/c/{i}/0/0" for i in (0, 1))
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)


def swap_chunks(folder: Folder) -> None:
    first, second = (folder.payload(P, "hidden_states", k) for k in (0, 1))
    path = folder.shard(P, "hidden_states")
    for k, data in ((0, second), (1, first)):
        offset = int(folder.index(P).tensors["chunks.hidden_states"][k, 0])
        folder.patch(path, offset, data + struct.pack("<I", google_crc32c.value(data)))


def shard_index(folder: Folder) -> None:
    path = folder.shard(P, "hidden_states")
    data = (folder / path).read_bytes()
    table = folder.index(P).tensors["chunks.hidden_states"]
    start = int(table[-1, 0] + table[-1, 1]) + 4
    entries = bytearray(data[start:-4])
    entries[:16], entries[16:32] = entries[16:32], entries[:16]
    folder.patch(path, start, bytes(entries) + struct.pack("<I", google_crc32c.value(bytes(entries))))
    folder.make_good(P)


def wrong_crc(folder: Folder) -> None:
    offset, nbytes, _ = (int(n) for n in folder.index(P).tensors["chunks.hidden_states"][0])
    path = folder.shard(P, "hidden_states")
    folder.patch(path, offset + nbytes, flip(0)((folder / path).read_bytes()[offset + nbytes :][:4]))
    folder.make_good(P)


def copied_part(folder: Folder) -> None:
    folder.copy_part(P, "p-copy")


def index_of_other_part(folder: Folder) -> None:
    shutil.copyfile(folder / "hsfmt/index/p-two.safetensors", folder / f"hsfmt/index/{P}.safetensors")
    folder.make_good(P)


def stale_pointer_target(folder: Folder) -> None:
    shutil.rmtree(folder / folder.snapshot)


def other_ids(folder: Folder) -> None:
    path = folder / f"{folder.snapshot}/ids.safetensors"
    table = Table(path.read_bytes())
    table.tensors["ids"][-1] = ord("Z")
    path.write_bytes(table.to_bytes())
    folder.make_snapshot_good()


def two_equal_ids(table: Table) -> None:
    table.tensors["ids"][:] = np.frombuffer(b"s-0s-0", np.uint8)


def not_utf8(table: Table) -> None:
    table.tensors["ids"][-1] = 0xFF


def empty_id(table: Table) -> None:
    table.tensors["id_offsets"][1] = 0


def metadata_list(table: Table) -> None:
    text = b'["split","train","temp","0.500"]'
    first = int(table.tensors["meta_offsets"][1])
    assert len(text) <= first
    table.tensors["meta"][:first] = np.frombuffer(text.ljust(first), np.uint8)
    meta = table.tensors["meta"][:first].tobytes()
    form = b"hsfmt:extras:1\0" + struct.pack("<Q", len(meta)) + meta
    table.tensors["extra_digest"][0] = np.frombuffer(xxhash.xxh3_128_digest(form), np.uint8)


def swap_supervised(table: Table) -> None:
    table.tensors["n_supervised"][:] = table.tensors["n_supervised"][::-1].copy()


def tensor_gap(head: dict[str, Any], body: bytes) -> bytes:
    for name, entry in head.items():
        if name != "__metadata__":
            entry["data_offsets"] = [n + 8 for n in entry["data_offsets"]]
    return with_header(json.dumps(head).encode(), bytes(8) + body)


def overlap(head: dict[str, Any], body: bytes) -> bytes:
    head["n_supervised"]["data_offsets"] = head["source_index"]["data_offsets"]
    return with_header(json.dumps(head).encode(), body)


def tail_bytes(head: dict[str, Any], body: bytes) -> bytes:
    return with_header(json.dumps(head).encode(), body + bytes(8))


def huge_header(head: dict[str, Any], body: bytes) -> bytes:
    return struct.pack("<Q", 1 << 60) + with_header(json.dumps(head).encode(), body)[8:]


def huge_shape(head: dict[str, Any], body: bytes) -> bytes:
    head["ids"]["shape"] = [1 << 50]
    return with_header(json.dumps(head).encode(), body)


def duplicate_name(head: dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(head)
    return with_header((text[:-1] + ',"ids":' + json.dumps(head["ids"]) + "}").encode(), body)


def no_metadata(head: dict[str, Any], body: bytes) -> bytes:
    del head["__metadata__"]
    return with_header(json.dumps(head).encode(), body)


def loose_metadata(head: dict[str, Any], body: bytes) -> bytes:
    head["__metadata__"]["hsfmt"] = head["__metadata__"]["hsfmt"].replace(",", ", ", 1)
    return with_header(json.dumps(head).encode(), body)


def narrow_offsets(table: Table) -> None:
    table.tensors["token_offsets"] = table.tensors["token_offsets"].astype("<i4")


def float_hidden_size(data: bytes) -> bytes:
    return data.replace(b'"hidden_size":4', b'"hidden_size":4.0')


def deep_producer(folder: Folder) -> None:
    value: Any = 1
    for _ in range(33):
        value = [value]
    manifest("producer", "deep", value=value)(folder)


def files(change: Callable[[list[dict[str, Any]]], None]) -> Callable[[Folder], None]:
    def mutate(folder: Folder) -> None:
        document = folder.manifest(P)
        change(document["files"])
        folder.put_manifest(P, document)
        folder.make_snapshot_good()

    return mutate


def changed_attachment(folder: Folder) -> None:
    """Change a byte of the attachment."""
    path = next(path for path in folder.files() if path.startswith("hsfmt/attachments/"))
    folder.patch(path, -1, b"\1")


def misnamed_column(folder: Folder) -> None:
    """Describe a column under a name that leads out of its folder."""
    manifest("columns", "../up", value=folder.manifest(P)["columns"]["flag"])(folder)


def reversed_holes(folder: Folder) -> None:
    """List the holes in another order."""
    manifest("holes", value=folder.manifest(P)["holes"][::-1])(folder)


def states_of_four_layers(folder: Folder) -> None:
    """Give the states another layer than the header says."""
    states_entry("shape", [9, 4, 4])(folder)
    states_entry("shard_shape", [12, 4, 4])(folder)


def states_entry(key: str, value: Any) -> Callable[[Folder], None]:
    return manifest("columns", "hidden_states", key, value=value)
