"""Read what a writer made without the package's reader: by hand from manifest and index, and with other libraries."""

from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np
import xxhash
from numcodecs import blosc

from hsfmt import layout
from hsfmt.catalog import committed_parts, load_part, read_header
from hsfmt.digests import SampleHasher, digest
from hsfmt.storage import open_store
from hsfmt.zarr_metadata import parse_root


@dataclass
class Read:
    """A sample as it lies in the shards: bit patterns, and the extras' rows (None: null)."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    states: np.ndarray
    metadata: dict
    source_index: int
    extras: dict


def loaded_parts(url):
    store = open_store(url)
    header = read_header(store)
    return [load_part(store, part, header) for part in committed_parts(store)]


def read_samples(url):
    """Return id to Read of every committed sample, all digests compared on the way; duplicates fail."""
    samples = {}
    for part in loaded_parts(url):
        check_files(url, part.manifest)
        if part.index is None:
            continue
        arrays = {name: decode_column(url, part, name) for name in part.manifest.columns}
        for row in range(part.index.n_samples):
            sample_id = part.index.sample_id(row)
            assert sample_id not in samples, sample_id
            samples[sample_id] = _sample(part, arrays, row)
    return samples


def check_files(url, manifest):
    for entry in manifest.files:
        data = (Path(url) / entry.path).read_bytes()
        assert (len(data), digest(data)) == (entry.nbytes, entry.digest), entry.path


def decode_column(url, part, name):
    """Decode a column chunk by chunk; compare chunk digests, crc32c and the shards' own indexes on the way."""
    column, table = part.manifest.columns[name], part.index.chunks[name]
    planes = column.n_planes
    rows = column.chunk_rows
    padded = np.zeros((column.n_chunk_rows * rows, planes, *column.chunk_shape[1:]), column.dtype.storage)
    if name == "hidden_states":
        padded = padded.reshape(-1, planes, column.shape[2])
    for shard in range(column.n_shards):
        key = Path(url) / layout.column_folder(part.manifest.part, name) / column.shard_key(shard)
        data = key.read_bytes()
        slots = column.chunk_rows_per_shard * planes
        tail = data[len(data) - 16 * slots - 4 :]
        assert google_crc32c.value(tail[:-4]).to_bytes(4, "little") == tail[-4:]
        own = np.frombuffer(tail[:-4], "<u8").reshape(slots, 2)
        first, end = column.shard_chunks(shard)
        assert (own[end - first :] == 2**64 - 1).all()
        for slot, (offset, nbytes, chunk_digest) in enumerate(table[first:end].tolist()):
            assert own[slot].tolist() == [offset, nbytes + 4]
            payload, crc = data[offset : offset + nbytes], data[offset + nbytes : offset + nbytes + 4]
            assert xxhash.xxh3_64_intdigest(payload) == chunk_digest
            assert google_crc32c.value(payload).to_bytes(4, "little") == crc
            raw = payload if column.codec == "none" else blosc.decompress(payload)
            at, plane = divmod(first + slot, planes)
            values = np.frombuffer(raw, column.dtype.storage)
            target = padded[at * rows : (at + 1) * rows, plane]
            target[...] = values.reshape(target.shape)
        assert table[end - 1, 0] + table[end - 1, 1] + 4 == len(data) - len(tail)
    assert not padded[column.n_rows :].any(), "padding inside the last chunk is zero"
    return padded[: column.n_rows].reshape(column.shape)


def _sample(part, arrays, row):
    index = part.index
    tokens = slice(index.token_offsets[row], index.token_offsets[row + 1])
    ids, mask, states = (arrays[name][tokens] for name in ("input_ids", "loss_mask", "hidden_states"))
    column = part.manifest.columns["hidden_states"]
    hasher = SampleHasher(column.dtype_name, *states.shape)
    hasher.tokens(ids.astype(np.int64), mask)
    hasher.states(states)
    assert hasher.digest() == index.content_digest[row].tobytes()
    assert index.n_supervised[row] == mask.sum()
    extras = {}
    for name, flags in index.valid.items():
        kind = part.manifest.columns[name].kind
        if kind == "ragged":
            value = arrays[name][index.offsets[name][row] : index.offsets[name][row + 1]]
        else:
            value = arrays[name][tokens] if kind == "token" else arrays[name][row]
        extras[name] = value if flags[row] else None
        assert flags[row] or not value.any()
    return Read(ids, mask, states, index.metadata(row), int(index.source_index[row]), extras)


def by_zarr(url, part, name, pipeline=None):
    """Return a column as zarr-python, or its zarrs pipeline, reads it: bit patterns."""
    import zarr

    from hsfmt.zarr_dtypes import register

    register()
    settings = {"codec_pipeline.path": pipeline} if pipeline else {}
    with zarr.config.set(settings):
        array = zarr.open_group(url, mode="r", path=layout.part_folder(part.manifest.part), use_consolidated=False)[
            name
        ]
        return patterns(array[...], part.manifest.columns[name])


def by_tensorstore(url, part, name):
    import tensorstore

    path = str(Path(url) / layout.column_folder(part.manifest.part, name))
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
    array = tensorstore.open(spec, open=True).result().read().result()
    return patterns(array, part.manifest.columns[name])


def patterns(array, column):
    return np.ascontiguousarray(array).view(column.dtype.storage)


def left_files(url):
    """Return every file below the dataset, relative; directories do not count."""
    root = Path(url)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def empty_dataset_files():
    return ["parts/zarr.json", "zarr.json"]


def root_header(url):
    return parse_root((Path(url) / "zarr.json").read_bytes(), "zarr.json")
