"""How many files and bytes a dataset takes: by the layout arithmetic, checked on real ones; and the codecs' ratios."""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import part_oracles as oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsfmt import DatasetWriter, attachments, seal
from hsfmt.column_plan import GridOptions
from hsfmt.columns import MAX_SHARD_NBYTES, Column
from hsfmt.dataset_size import SizePlan, dataset_size
from hsfmt.header import make_header
from hsfmt.writers.part_writer import PartSettings

GIB = 1 << 30


def part_columns(header, codec, n_tokens, n_samples, extras=None, grid=None):
    """Return the columns of a part as a writer makes them."""
    plans = PartSettings(header, codec, extras or {}, grid or GridOptions(), {}).plans()
    rows = {"token": n_tokens, "sample": n_samples}
    return {plan.name: plan.column(rows[plan.kind]) for plan in plans}


def test_ten_thousand_samples_of_the_kimi_shape_are_few_files():
    header = make_header(layers=[3, 31, 59, 61], hidden_size=7168, final_norm="post")
    rng = np.random.default_rng(0)
    lengths = rng.multinomial(17_300_000 - 10_000, rng.dirichlet(np.full(10_000, 2.0))) + 1
    size = dataset_size(SizePlan(header, ratios={"hidden_states": 1.46}), lengths)
    assert size.states_nbytes / GIB == pytest.approx(924, abs=1)
    assert size.states_stored_nbytes / GIB == pytest.approx(633, abs=1)
    assert (size.parts, size.samples, size.tokens) == (29, 10_000, 17_300_000)
    assert 450 < size.files < 700


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize(("layers", "hidden"), [(1, 2048), (4, 7168), (8, 3072), (40, 5120), (3, 576)])
def test_no_shard_is_larger_than_four_gib(codec, layers, hidden):
    header = make_header(layers=range(layers), hidden_size=hidden, final_norm="pre")
    for n_tokens in (1, 255, 256, 257, 100_000, 10_000_000):
        for column in part_columns(header, codec, n_tokens, 1).values():
            assert column.shard_rows * column.row_nbytes <= MAX_SHARD_NBYTES
            worst = column.chunk_rows_per_shard * column.n_planes * (column.max_payload_nbytes + 4 + 16) + 4
            assert worst < 5 * 10**9, "the largest object that S3 copies at once"
            assert column.n_rows <= column.n_shards * column.shard_rows < column.n_rows + column.shard_rows


def written_size(url):
    """Return the bytes, files, parts, chunks and shards of a dataset on the disk."""
    files = oracles.left_files(url)
    columns = [column for part in oracles.loaded_parts(url) for column in part.manifest.columns.values()]
    nbytes = sum((Path(url) / path).stat().st_size for path in files)
    chunks, shards = sum(column.n_chunks for column in columns), sum(column.n_shards for column in columns)
    return nbytes, len(files), len(oracles.loaded_parts(url)), chunks, shards


def predicted(size):
    return size.stored_nbytes, size.files, size.parts, size.chunks, size.shards


EXTRAS = {
    "score": ("sample", "float32", ()),
    "place": ("token", "int32", (2,)),
    "weight": ("token", "float32", ()),
}


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.sampled_from(["float32", "bfloat16", "float16"])),
    grid=st.tuples(st.none() | st.integers(1, 12), st.none() | st.integers(1, 24)),
    part_tokens=st.integers(1, 80),
    extras=st.sets(st.sampled_from(sorted(EXTRAS))),
    ids=st.randoms(use_true_random=False),
)
def test_sizes_without_a_codec_are_those_of_written_datasets(
    tmp_path_factory, lengths, shape, grid, part_tokens, extras, ids
):
    """To the byte: shards, indexes, manifests, snapshot, pointer."""
    url = str(tmp_path_factory.mktemp("files") / "dataset")
    n_layers, hidden, dtype = shape
    header = make_header(layers=range(n_layers), hidden_size=hidden, final_norm="pre", dtype=dtype)
    part_nbytes = part_tokens * n_layers * hidden * 4
    names = [f"{number}-" + "\u00e9" * ids.randrange(6) for number in range(len(lengths))]
    notes = [{"note": "x" * ids.randrange(9)} for _ in lengths]
    declared = {name: EXTRAS[name] for name in extras}
    producer = {"codec": "none", "host": "here", "library": "hsfmt", "started": "2026-01-01T00:00:00+00:00"}
    with DatasetWriter(
        url, layers=header.layers, hidden_size=hidden, final_norm="pre", dtype=dtype, codec="none", producer=producer,
        chunk_tokens=grid[0], shard_tokens=grid[1], part_nbytes=part_nbytes,
        extras={name: {"kind": kind, "dtype": of, "shape": row} for name, (kind, of, row) in declared.items()},
    ) as writer:  # fmt: skip
        for name, note, length in zip(names, notes, lengths, strict=True):
            rows = {"sample": (), "token": (length,)}
            values = {key: np.ones((*rows[kind], *row), of) for key, (kind, of, row) in declared.items()}
            states = np.ones((length, n_layers, hidden), np.dtype(getattr(ml_dtypes, dtype, None) or dtype))
            writer.write(name, np.arange(length), states, None, note, **values)
    plan = SizePlan(header, "none", declared, GridOptions(*grid), part_nbytes, producer=producer)
    found = dataset_size(
        plan, lengths, id_nbytes=[len(name.encode()) for name in names], meta_nbytes=[len(str(n)) - 1 for n in notes]
    )
    assert predicted(found) == written_size(url)
    assert (found.samples, found.tokens) == (len(lengths), sum(lengths))
    raw = sum(
        column.n_rows * column.row_nbytes
        for part in oracles.loaded_parts(url)
        for column in part.manifest.columns.values()
    )
    assert found.raw_nbytes == raw


@pytest.mark.parametrize(
    ("layers", "hidden", "dtype"), [(1, 2048, "float32"), (4, 1024, "bfloat16"), (3, 576, "float16")]
)
def test_sizes_of_default_chunks_are_those_of_written_datasets(url, layers, hidden, dtype):
    """Columns of more than one chunk, the last one padded."""
    header = make_header(layers=range(layers), hidden_size=hidden, final_norm="pre", dtype=dtype)
    lengths = [1500, 700, 2000]
    with DatasetWriter(
        url,
        layers=header.layers,
        hidden_size=hidden,
        final_norm="pre",
        dtype=dtype,
        codec="none",
        producer={"host": "a"},
    ) as writer:
        for number, length in enumerate(lengths):
            states = np.ones((length, layers, hidden), np.dtype(getattr(ml_dtypes, dtype, None) or dtype))
            writer.write(f"{number}", np.arange(length), states)
    (part,) = oracles.loaded_parts(url)
    found = dataset_size(SizePlan(header, "none", producer=part.manifest.producer), lengths, id_nbytes=1, meta_nbytes=2)
    assert predicted(found) == written_size(url)


def test_attachments_count(url):
    header = make_header(layers=[1], hidden_size=8, final_norm="pre", dtype="float32")
    producer = {"host": "here"}
    with DatasetWriter(
        url, layers=[1], hidden_size=8, final_norm="pre", dtype="float32", codec="none", producer=producer, seal=False
    ) as writer:
        writer.write("a", np.arange(3), np.ones((3, 1, 8), np.float32))
    arrays = {"d2t": np.arange(40), "t2d": np.ones(100, bool)}
    seal(url, attachments=arrays)
    (part,) = oracles.loaded_parts(url)
    entries = [attachments.encode(name, array)[0] for name, array in arrays.items()]
    plan = SizePlan(header, "none", producer=part.manifest.producer, attachments=entries)
    assert predicted(dataset_size(plan, [3], id_nbytes=1, meta_nbytes=2)) == written_size(url)


def test_the_defaults_of_small_and_large_parts(url):
    """A shard is never much larger than its column, so that its index is not mostly empty."""
    with DatasetWriter(url, layers=[1], hidden_size=7168, final_norm="pre") as writer:
        writer.write("a", np.arange(3), np.zeros((3, 1, 7168), np.uint16))
    (part,) = oracles.loaded_parts(url)
    states = part.manifest.columns["hidden_states"]
    assert isinstance(states, Column)
    assert (states.chunk_shape, states.shard_shape) == ((3, 1, 7168), (3, 1, 7168))


@pytest.fixture(scope="module")
def synthetic(repo_root):
    """States of four layers of 7168 with the statistics of real ones, uint16 [1024, 4, 7168]."""
    sys.path.insert(0, str(repo_root / "bench"))
    try:
        from synth import synth_hidden
    finally:
        sys.path.pop(0)
    return synth_hidden(1024, layers=4, hidden=7168, seed=0)


@pytest.mark.slow
def test_ratios_on_states_of_realistic_statistics(tmp_path, synthetic):
    sizes = {}
    for codec in ("none", "zstd"):
        url = str(tmp_path / codec)
        with DatasetWriter(url, layers=[3, 31, 59, 61], hidden_size=7168, final_norm="post", codec=codec) as writer:
            for number in range(4):
                writer.write(f"{number}", np.arange(256), synthetic[number * 256 : (number + 1) * 256])
        sizes[codec] = sum((Path(url) / path).stat().st_size for path in oracles.left_files(url))
        (part,) = oracles.loaded_parts(url)
        assert oracles.decode_column(url, part, "hidden_states").tobytes() == synthetic.tobytes()
    assert synthetic.nbytes <= sizes["none"] <= 1.01 * synthetic.nbytes
    assert synthetic.nbytes / sizes["zstd"] >= 1.42


def test_incompressible_states_cost_next_to_nothing(url):
    noise = np.random.default_rng(0).integers(0, 0x7F00, (2048, 2, 1024), np.uint16)
    with DatasetWriter(url, layers=[1, 2], hidden_size=1024, final_norm="pre", codec="zstd") as writer:
        writer.write("a", np.arange(2048), noise)
    assert sum((Path(url) / path).stat().st_size for path in oracles.left_files(url)) <= 1.01 * noise.nbytes
