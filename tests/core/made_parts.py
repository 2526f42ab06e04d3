"""Small parts made in memory, valid in every rule, for tests that break one thing."""

import numpy as np

from hsfmt import digests, layout
from hsfmt.columns import Column
from hsfmt.header import make_header
from hsfmt.index import PartIndex
from hsfmt.manifest import Counts, FileEntry, PartManifest, expected_paths, implied_documents
from hsfmt.tables import pack_strings

HEADER = make_header(layers=[1, 2], hidden_size=4, final_norm="pre", dtype="float32", model="m")


def chunk_table(column, seed=0):
    """Return a table of a raw column: payloads dense and in order in each shard."""
    rng = np.random.default_rng(seed)
    rows = []
    for shard in range(column.n_shards):
        first, end = column.shard_chunks(shard)
        rows += [
            [slot * (column.chunk_nbytes + 4), column.chunk_nbytes, rng.integers(2**63)] for slot in range(end - first)
        ]
    return np.array(rows, np.uint64).reshape(-1, 3)


def make_columns(n_tokens, n_samples, *, chunk=4, shard=8, extras=()):
    columns = {
        "hidden_states": Column("hidden_states", "token", "float32", (n_tokens, 2, 4), chunk, shard, "none"),
        "input_ids": Column("input_ids", "token", "int32", (n_tokens,), chunk, shard, "none"),
        "loss_mask": Column("loss_mask", "token", "uint8", (n_tokens,), chunk, shard, "none"),
    }
    if "ragged" in extras:
        columns["boxes"] = Column("boxes", "ragged", "int8", (3 * n_samples, 2), chunk, shard, "none")
    if "sample" in extras:
        columns["score"] = Column("score", "sample", "float32", (n_samples,), chunk, shard, "none")
    return columns


def make_index(columns, ids, lengths, *, content=None, source_index=None, meta=b'{"a":1}'):
    n = len(ids)
    data, offsets = pack_strings([sample_id.encode() for sample_id in ids])
    metas, meta_offsets = pack_strings([meta] * n)
    content = content or [digests.id_key(sample_id.encode()) for sample_id in ids]
    return PartIndex(
        token_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        n_supervised=np.array(lengths, np.int64) // 2,
        loss_mask_given=np.ones(n, np.uint8),
        source_index=np.array(range(n) if source_index is None else source_index, np.int64),
        ids=data,
        id_offsets=offsets,
        meta=metas,
        meta_offsets=meta_offsets,
        content_digest=np.frombuffer(b"".join(content), np.uint8).reshape(n, 16),
        extra_digest=np.zeros((n, 16), np.uint8),
        chunks={name: chunk_table(column) for name, column in columns.items()},
        valid={name: np.ones(n, np.uint8) for name in columns if name in ("boxes", "score")},
        offsets={name: np.arange(n + 1, dtype=np.int64) * 3 for name in columns if name == "boxes"},
    )


def make_part(
    part="p", ids=("a", "b"), lengths=(5, 6), *, holes=None, extras=(), header=HEADER, replaces=None, **index
):
    """Return (manifest, index bytes); the shards are only named."""
    columns = make_columns(sum(lengths), len(ids), extras=extras)
    table = make_index(columns, list(ids), list(lengths), **index)
    data = table.to_bytes(part)
    known = {**implied_documents(part, columns), layout.index_path(part): data}
    files = [
        FileEntry(path, len(known.get(path, b"x" * 99)), digests.digest(known.get(path, path.encode())))
        for path in expected_paths(part, columns)
    ]
    counts = Counts(len(ids), sum(lengths), int(table.n_supervised.sum()), len(holes or {}))
    manifest = PartManifest(
        part=part,
        header=header,
        columns=columns,
        files=tuple(files),
        counts=counts,
        holes=holes or {},
        replaces=replaces or {},
        producer={"engine": "e"},
    )
    return manifest, data


def put_part(store, *args, **kwargs):
    """Write manifest and index of a made part; return its manifest."""
    manifest, data = make_part(*args, **kwargs)
    store.write(layout.index_path(manifest.part), data)
    for path in expected_paths(manifest.part, manifest.columns):
        if path != layout.index_path(manifest.part):
            store.write(path, implied_documents(manifest.part, manifest.columns).get(path, b"x" * 99))
    store.write(layout.manifest_path(manifest.part), manifest.to_bytes())
    return manifest
