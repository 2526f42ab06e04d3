"""Nonsense under right digests: a report each time, never a traceback, never memory by a document's word."""

import copy
import json
import os
import random
import shutil
import struct
from dataclasses import replace

import google_crc32c
import numpy as np
import pytest
import xxhash

from hsfmt import canonical, digests
from hsfmt.errors import HsfmtError
from hsfmt.readers.verification import verify
from hsfmt.readers.verification.report import REMEDIES, SEVERITIES

MANIFEST, INDEX = "hsfmt/manifests/part-0.json", "hsfmt/index/part-0.safetensors"
ABSENT = object()
NONSENSE = [
    ABSENT, None, True, -1, 0, 1, 3, 2**31, 2**40, 2**62, "", "x", "../../etc/passwd", "a\0b", "2.0",
    "xxh3_128:" + "0" * 32, [], [[]], [2**40] * 3, {}, {"a": 1},
]  # fmt: skip
NUMBERS = [0, 1, -1, 2, 5, 2**40, 2**62, 2**63 - 1, -(2**63)]


@pytest.fixture(scope="module")
def small(tmp_path_factory, build_dataset):
    return build_dataset(tmp_path_factory.mktemp("hostile") / "dataset", n_parts=1, n_samples=2, first_seed=4)


@pytest.fixture
def root(small, tmp_path):
    return shutil.copytree(small, tmp_path / "dataset")


def places(document, path=()):
    yield path
    if isinstance(document, dict):
        for key in document:
            yield from places(document[key], (*path, key))
    elif isinstance(document, list):
        for i in range(len(document)):
            yield from places(document[i], (*path, i))


def put(document, path, value):
    if not path:
        return {} if value is ABSENT else value
    result = copy.deepcopy(document)
    parent = result
    for key in path[:-1]:
        parent = parent[key]
    if value is ABSENT:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return result


def signed(document) -> bytes:
    if not isinstance(document, dict):
        return canonical.dumps(document)
    body = {key: value for key, value in document.items() if key != "digest"}
    return canonical.dumps({**body, "digest": digests.digest(canonical.dumps(body))})


def split(data: bytes):
    (nbytes,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + nbytes]), data[8 + nbytes :]


def join(header, body: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def put_index(root, data: bytes) -> None:
    """Store a part index and the manifest that names it."""
    (root / INDEX).write_bytes(data)
    document = json.loads((root / MANIFEST).read_bytes())
    for entry in document["files"]:
        if entry["path"] == INDEX:
            entry |= {"nbytes": len(data), "digest": digests.digest(data)}
    (root / MANIFEST).write_bytes(signed(document))


def put_snapshot(root, data: bytes) -> None:
    """Store a snapshot's index under its fingerprint, and the pointer that names it."""
    (folder,) = (root / "hsfmt/snapshots").iterdir()
    fingerprint = digests.digest(data)
    (folder / "index.safetensors").write_bytes(data)
    target = folder.with_name(fingerprint.partition(":")[2])
    folder.rename(target)
    document = json.loads((root / "hsfmt/manifest.json").read_bytes())
    document["fingerprint"] = fingerprint
    document["index"] = {"nbytes": len(data), "path": f"hsfmt/snapshots/{target.name}/index.safetensors"}
    (root / "hsfmt/manifest.json").write_bytes(signed(document))


def snapshot_bytes(root) -> bytes:
    (path,) = root.glob("hsfmt/snapshots/*/index.safetensors")
    return path.read_bytes()


def put_root(root, document):
    (root / "zarr.json").write_bytes(canonical.dumps(document))


def put_pointer(root, document):
    (root / "hsfmt/manifest.json").write_bytes(signed(document))


def put_manifest(root, document):
    (root / MANIFEST).write_bytes(signed(document))


def metadata_of(data: bytes):
    return json.loads(split(data)[0]["__metadata__"]["hsfmt"])


def with_metadata(data: bytes, document) -> bytes:
    header, body = split(data)
    return join({**header, "__metadata__": {"hsfmt": canonical.dumps(document).decode()}}, body)


# Name to (document out of the dataset, store a changed one).
DOCUMENTS = {
    "root": (lambda root: json.loads((root / "zarr.json").read_bytes()), put_root),
    "pointer": (lambda root: json.loads((root / "hsfmt/manifest.json").read_bytes()), put_pointer),
    "manifest": (lambda root: json.loads((root / MANIFEST).read_bytes()), put_manifest),
    "index header": (
        lambda root: split((root / INDEX).read_bytes())[0],
        lambda root, document: put_index(root, join(document, split((root / INDEX).read_bytes())[1])),
    ),
    "index metadata": (
        lambda root: metadata_of((root / INDEX).read_bytes()),
        lambda root, document: put_index(root, with_metadata((root / INDEX).read_bytes(), document)),
    ),
    "snapshot header": (
        lambda root: split(snapshot_bytes(root))[0],
        lambda root, document: put_snapshot(root, join(document, split(snapshot_bytes(root))[1])),
    ),
    "snapshot metadata": (
        lambda root: metadata_of(snapshot_bytes(root)),
        lambda root, document: put_snapshot(root, with_metadata(snapshot_bytes(root), document)),
    ),
}


def check_report(root):
    report = verify(root, level="full")
    assert json.loads(json.dumps(report.to_json()))["ok"] == report.ok
    for finding in report.problems:
        assert finding.severity in SEVERITIES
        assert finding.code in REMEDIES
        assert finding.where
        assert finding.remedy
    return report


@pytest.mark.parametrize("name", DOCUMENTS)
def test_any_member_may_be_nonsense(root, name):
    assert check_nonsense(root, name, 20, 2) > 4


@pytest.mark.deep
@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_member_may_be_any_nonsense(root, name):
    assert check_nonsense(root, name, 1000, 8) > 30


def check_nonsense(root, name, n_places, n_values):
    """Put so many values in so many places of a document, one at a time; return how many could be stored."""
    take, store = DOCUMENTS[name]
    original = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    document = take(root)
    choose = random.Random(name)
    sound = stored = 0
    everywhere = list(places(document))
    for place in choose.sample(everywhere, min(len(everywhere), n_places)):
        for value in choose.sample(NONSENSE, n_values):
            try:
                store(root, put(document, place, value))
            except HsfmtError:
                continue  # not to be written as canonical JSON at all
            stored += 1
            sound += check_report(root).ok
            shutil.rmtree(root / "hsfmt/snapshots")
            for path, data in original.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
    # Members that the format leaves free (producer, model …) and values that happen to be the same ones.
    assert sound <= len(everywhere) * n_values // 4
    assert verify(root, level="full").ok
    return stored


@pytest.mark.parametrize("seed", [*range(24), *(pytest.param(n, marks=pytest.mark.deep) for n in range(24, 300))])
def test_any_number_of_an_index_may_be_nonsense(root, seed):
    choose = random.Random(seed)
    of_snapshot = seed % 2
    header, body = split(snapshot_bytes(root) if of_snapshot else (root / INDEX).read_bytes())
    table = bytearray(body)
    while bytes(table) == body:
        for _ in range(choose.choice([1, 1, 3])):
            struct.pack_into("<q", table, choose.randrange(len(table) // 8) * 8, choose.choice(NUMBERS))
    (put_snapshot if of_snapshot else put_index)(root, join(header, bytes(table)))
    assert not check_report(root).ok


def test_a_shape_can_not_ask_for_memory(root):
    document = json.loads((root / MANIFEST).read_bytes())
    document["columns"]["topk"] |= {"shape": [2**40, 2], "chunk_shape": [1, 2], "shard_shape": [1, 2]}
    put_manifest(root, document)
    (finding, *_) = check_report(root).errors
    assert finding.path == MANIFEST


def test_rows_too_large_to_decode_are_refused(forger, monkeypatch):
    from hsfmt.readers.verification import shards

    monkeypatch.setattr(shards, "MAX_BLOCK_NBYTES", 64)
    report = verify(forger.root, level="full")
    assert {(f.code, f.path.split("/")[2]) for f in report.errors} == {("too_large", "hidden_states")}


@pytest.mark.parametrize("claimed", [0, 1, 2**31, 2**32 - 1])
def test_a_frame_can_not_ask_for_memory(forger, claimed):
    """The sizes in a Blosc frame's own header are compared before it is decoded."""
    path = forger.shard("input_ids")
    table = np.array(forger.index.chunks["input_ids"])
    for field in (4, 8, 12):
        data = bytearray((forger.root / path).read_bytes())
        payload = bytearray(data[: int(table[0, 1])])
        struct.pack_into("<I", payload, field, claimed)
        data[: len(payload) + 4] = payload + google_crc32c.value(bytes(payload)).to_bytes(4, "little")
        forger.set_file(path, bytes(data))
        table[0, 2] = xxhash.xxh3_64_intdigest(bytes(payload))
        forger.set_index(chunks={**forger.index.chunks, "input_ids": table})
        forger.sign()
        codes = {(f.code, f.path) for f in check_report(forger.root).errors}
        # A block size that the frame does not need decodes all the same.
        assert codes == {("chunk_decode", path)} or field == 8


def test_offsets_that_wrap_around_are_refused(tmp_path, build_dataset, forge):
    forger = forge(build_dataset(tmp_path / "d", n_parts=1, n_samples=4))
    rows = int(forger.index.offsets["topk"][-1])
    wrapping = np.array([0, 2**63 - 1, -(2**63), -5, rows], np.int64)
    forger.set_index(offsets={"topk": wrapping})
    forger.sign(reseal=False)
    assert ("corrupt", f"{INDEX}: offsets.topk") in {(f.code, f.where) for f in check_report(forger.root).errors}


@pytest.mark.parametrize("name", ["zarr.json", "hsfmt/manifest.json", MANIFEST, "parts/part-0/weight/zarr.json", INDEX])
def test_a_file_of_a_terabyte_is_not_read(root, name):
    with (root / name).open("r+b") as file:
        file.truncate(1 << 40)
    report = check_report(root)
    assert name in {finding.path for finding in report.errors}


def test_a_fifo_does_not_hang(root):
    path = root / "parts/part-0/hidden_states/c/0/0/0"
    path.unlink()
    os.mkfifo(path)
    assert {finding.path for finding in check_report(root).errors} == {path.relative_to(root).as_posix()}


def test_deeply_nested_json_is_a_finding(root):
    (root / MANIFEST).write_bytes(b"[" * 100_000 + b"]" * 100_000)
    assert MANIFEST in {finding.path for finding in check_report(root).errors}


@pytest.mark.parametrize("name", ["zarr.json", "hsfmt/manifest.json", MANIFEST])
def test_documents_of_a_later_format_say_so(root, name):
    document = json.loads((root / name).read_bytes())
    target = document["attributes"]["hsfmt"] if name == "zarr.json" else document
    target |= {"format": "7.1", "readable_from": "7.0"}
    (root / name).write_bytes(canonical.dumps(document) if name == "zarr.json" else signed(document))
    found = {finding.code: finding for finding in check_report(root).errors if finding.path == name}
    assert "7.0" in found["newer_format"].got
    assert "install a newer hsfmt" in found["newer_format"].remedy


def test_a_replaced_part_of_another_digest(dataset, forge):
    forger = forge(dataset, "part-1")
    forger.manifest = replace(forger.manifest, replaces={"part-0": digests.digest(b"another manifest")})
    forger.sign(reseal=False)
    found = {finding.code: finding for finding in check_report(dataset).errors}
    assert found["replaces"].path == "hsfmt/manifests/part-0.json"


def test_a_replaced_part_is_neither_newer_nor_missing(dataset, forge):
    old = forge(dataset, "part-0").manifest.digest()
    forger = forge(dataset, "part-1")
    forger.manifest = replace(forger.manifest, replaces={"part-0": old})
    forger.sign()
    report = check_report(dataset)
    assert [(f.severity, f.code) for f in report.problems] == [("info", "superseded")]
    assert report.counts.parts == 2
