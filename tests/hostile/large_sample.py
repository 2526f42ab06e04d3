"""A dataset of a few megabytes that holds one sample of any length, zeros throughout, as the format allows."""

from pathlib import Path

import google_crc32c
import numpy as np
import xxhash
from cases import PART
from dataset_forge import Forge, digest
from numcodecs import blosc

from hsfmt import DatasetWriter

HIDDEN = 8
CHUNK_NBYTES = 64 << 20  # the cap
_ITEM = {"hidden_states": 2, "input_ids": 4, "loss_mask": 1}
_WIDTH = {"hidden_states": HIDDEN, "input_ids": 1, "loss_mask": 1}


def build_large(path: Path, n_tokens: int) -> Path:
    """Make a dataset of one sample of one layer, whose chunks have the size that is the cap."""
    with DatasetWriter(
        path, layers=[1], hidden_size=HIDDEN, final_norm="pre", codec="zstd", part_names=lambda: PART, threads=1
    ) as writer:
        writer.write("s-0", np.zeros(1, np.int64), np.zeros((1, 1, HIDDEN), np.uint16), np.zeros(1, np.uint8))
    forge = Forge(path)
    manifest, index, snapshot = forge.manifests[PART], forge.indexes[PART].arrays, forge.snapshot.arrays
    files = {entry["path"]: entry for entry in manifest["files"]}
    for column, item in _ITEM.items():
        files |= _lengthen(forge, column, n_tokens, item * _WIDTH[column])
    manifest["files"] = [files[name] for name in sorted(files)]
    manifest["counts"]["tokens"] = forge.pointer["tokens"] = forge.snapshot.metadata["counts"]["tokens"] = n_tokens
    index["token_offsets"][1] = snapshot["n_tokens"][0] = n_tokens
    forge.save()
    return path


def _lengthen(forge: Forge, column: str, n_rows: int, row_nbytes: int) -> dict[str, dict[str, object]]:
    """Give a column as many rows of zeros; return the entries of its shards by path."""
    entry = forge.manifests[PART]["columns"][column]
    chunk_rows = CHUNK_NBYTES // row_nbytes
    n_chunks = -(-n_rows // chunk_rows)
    per_shard = min(n_chunks, (4 << 30) // CHUNK_NBYTES)
    entry["shape"][0], entry["chunk_shape"][0] = n_rows, chunk_rows
    entry["shard_shape"][0] = per_shard * chunk_rows
    shuffle = blosc.NOSHUFFLE if _ITEM[column] == 1 else blosc.SHUFFLE
    frame = bytes(blosc.compress(bytes(CHUNK_NBYTES), b"zstd", 1, shuffle, 512 << 10, _ITEM[column]))
    stored = frame + google_crc32c.value(frame).to_bytes(4, "little")
    numbers = np.arange(n_chunks, dtype=np.uint64)
    table = np.empty((n_chunks, 3), np.uint64)
    table[:, 0] = numbers % np.uint64(per_shard) * np.uint64(len(stored))
    table[:, 1], table[:, 2] = len(frame), xxhash.xxh3_64_intdigest(frame)
    forge.indexes[PART].arrays[f"chunks.{column}"] = table
    found = {}
    for shard in range(-(-n_chunks // per_shard)):
        n = min(per_shard, n_chunks - shard * per_shard)
        places = np.full((per_shard, 2), 2**64 - 1, "<u8")
        places[:n, 0], places[:n, 1] = np.arange(n) * len(stored), len(stored)
        index = places.tobytes()
        data = stored * n + index + google_crc32c.value(index).to_bytes(4, "little")
        name = forge.shard(PART, column, shard)
        (forge.path / name).parent.mkdir(parents=True, exist_ok=True)
        (forge.path / name).write_bytes(data)
        found[name] = {"path": name, "nbytes": len(data), "digest": digest(data)}
    return found
