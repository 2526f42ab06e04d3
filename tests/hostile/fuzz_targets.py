"""What is fuzzed: functions of bytes that may succeed or raise an error of this package, and nothing else.

Documents are signed again after they were changed, or hardly a mutation would get beyond the digest.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from dataset_forge import POINTER, ROOT, Forge, build, digest, signed

from hsfmt import canonical, tables
from hsfmt.attachments import parse_array
from hsfmt.codecs import blosc_blocks, decode_block, decode_into
from hsfmt.errors import HsfmtError
from hsfmt.index import parse_index
from hsfmt.manifest import parse_manifest
from hsfmt.pointer import parse_pointer
from hsfmt.readers.sample_reader import ReadOptions, SampleReader
from hsfmt.readers.verification import verify
from hsfmt.snapshot import parse_snapshot, parse_snapshot_ids
from hsfmt.zarr_metadata import parse_root

PART = "part-0"
MANIFEST, INDEX = f"hsfmt/manifests/{PART}.json", f"hsfmt/index/{PART}.safetensors"
CHUNK_NBYTES = 2048
Target = Callable[[bytes], object]


def _signed(data: bytes) -> bytes:
    """Sign again what is JSON, and canonical if it ever was."""
    try:
        return signed(json.loads(data))
    except (ValueError, RecursionError, UnicodeError):
        return data


class Targets:
    """The functions by name, and a seed for each; they share one small dataset."""

    def __init__(self, folder: Path) -> None:
        self.root = build(folder / "fuzzed", "zstd")
        forge = Forge(self.root)
        self.columns = parse_manifest(self.read(MANIFEST), PART, MANIFEST).columns
        snapshot_path = json.loads(self.read(POINTER))["index"]["path"]
        self.snapshot = parse_snapshot(self.read(snapshot_path), "snapshot")
        ids = self.read(snapshot_path.replace("index.", "ids."))
        frame = forge.payload(PART, "weight", 0)
        (attachment,) = self.root.glob("hsfmt/attachments/*/*")
        from dataset_forge import HIDDEN
        from numcodecs import blosc

        compressed = bytes(blosc.compress(bytes(CHUNK_NBYTES), b"zstd", 1, blosc.SHUFFLE, 512, 2))
        assert HIDDEN
        meta = b'{"a":1.5,"b":[null,true,"\\u00e9"],"c":{"d":-1e-3}}'
        self.files = sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file())
        self.table: dict[str, tuple[Target, list[bytes]]] = {
            "canonical": (lambda data: canonical.loads(data, "x"), [self.read(ROOT), self.read(MANIFEST)]),
            "metadata": (lambda data: canonical.loads(data, "x", metadata=True), [meta]),
            "root": (lambda data: parse_root(data, ROOT), [self.read(ROOT)]),
            "manifest": (lambda data: parse_manifest(_signed(data), PART, MANIFEST), [self.read(MANIFEST)]),
            "pointer": (lambda data: parse_pointer(_signed(data)), [self.read(POINTER)]),
            "table": (lambda data: tables.parse(data, "x"), [self.read(INDEX), ids]),
            "index": (lambda data: parse_index(data, PART, self.columns, INDEX), [self.read(INDEX)]),
            "snapshot": (lambda data: parse_snapshot(data, "x"), [self.read(snapshot_path)]),
            "ids": (self._ids, [ids]),
            "attachment": (lambda data: parse_array(data, "x"), [attachment.read_bytes()]),
            "frame": (self._frame, [compressed, frame]),
            "blocks": (self._blocks, [compressed, frame]),
            "dataset": (self._dataset, [bytes([number]) + self.read(path) for number, path in enumerate(self.files)]),
        }

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def run(self, name: str, data: bytes) -> bool:
        """Give data to a target; return whether it was taken."""
        try:
            self.table[name][0](data)
        except HsfmtError as error:
            assert error.problems  # noqa: PT017  the type is what this is about; that it says something comes with it
            return False
        return True

    def _ids(self, data: bytes) -> None:
        from dataclasses import replace

        ids = parse_snapshot_ids(data, replace(self.snapshot, ids_digest=digest(data)), "x")
        for i in range(len(ids)):
            ids[i]

    def _frame(self, data: bytes) -> None:
        decode_into("zstd", memoryview(data), np.empty(CHUNK_NBYTES, np.uint8), "x")

    def _blocks(self, data: bytes) -> None:
        payload = memoryview(bytearray(data))
        for block in blosc_blocks(payload, CHUNK_NBYTES, "x") or ():
            decode_block(payload, block, np.empty(block.nbytes, np.uint8), "x")

    def _dataset(self, data: bytes) -> None:
        """Put the data in the place of a file, with all that names it signed again, and read everything."""
        if not data:
            return
        path, body = self.files[data[0] % len(self.files)], data[1:]
        # Not below the fuzzed one: it is rebuilt at each call, in memory where there is such a place.
        place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=place) as folder:
            root = Path(folder) / "d"
            shutil.copytree(self.root, root)
            forge = Forge(root)
            if "/c/" in path or path.startswith("hsfmt/attachments"):
                (root / path).write_bytes(body)
            elif path.endswith("index.safetensors") and "snapshots" in path:
                forge.snapshot.edit_bytes = lambda _: body
            elif path.endswith("ids.safetensors"):
                forge.ids.edit_bytes = lambda _: body
            elif path == INDEX or path == INDEX.replace("0", "1"):
                forge.indexes[Path(path).stem].edit_bytes = lambda _: body
            else:
                forge.raw[path] = lambda _: _signed(body) if path != ROOT else body
            forge.save()
            report = verify(root, level="full")
            reader = SampleReader(root, options=ReadOptions(n_threads=1))
            for sample in reader.read_many(range(len(reader))):
                assert sample.metadata is not None
            list(reader.sample_ids)
            reader.attachments()
            assert report is not None
