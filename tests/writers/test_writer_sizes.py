"""How many files and bytes a dataset takes: by the layout arithmetic, checked on real ones; and the codecs' ratios."""

import sys
from pathlib import Path

import numpy as np
import part_oracles as oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsfmt import DatasetWriter
from hsfmt.columns import MAX_SHARD_NBYTES, Column
from hsfmt.header import make_header
from hsfmt.manifest import expected_paths
from hsfmt.writers.column_writer import GridOptions
from hsfmt.writers.part_writer import PartSettings

GIB = 1 << 30


def part_columns(header, codec, n_tokens, n_samples, extras=None, grid=None):
    """Return the columns of a part as a writer makes them."""
    plans = PartSettings(header, codec, extras or {}, grid or GridOptions(), {}).plans()
    rows = {"token": n_tokens, "sample": n_samples}
    return {plan.name: plan.column(rows[plan.kind]) for plan in plans}


def n_files_of_part(columns):
    return len(expected_paths("p", columns)) + 1  # and the manifest


def dataset_files(lengths, header, codec="zstd", part_nbytes=32 * GIB, **options):
    """Return how many files a sealed dataset of samples of these lengths has, parts ending by size."""
    row = header.n_layers * header.hidden_size * {"bfloat16": 2, "float32": 4}[header.dtype]
    total, n_tokens, n_samples, n_parts = 0, 0, 0, 0
    for length in [*lengths, None]:
        if n_samples and (length is None or n_tokens * row >= part_nbytes):
            total += n_files_of_part(part_columns(header, codec, n_tokens, n_samples, **options))
            n_tokens = n_samples = 0
            n_parts += 1
        if length is not None:
            n_tokens += length
            n_samples += 1
    # zarr.json, parts/zarr.json, the pointer, and the snapshot's two.
    return total + 5, n_parts


def test_ten_thousand_samples_of_the_kimi_shape_are_few_files():
    header = make_header(layers=[3, 31, 59, 61], hidden_size=7168, final_norm="post")
    rng = np.random.default_rng(0)
    lengths = rng.multinomial(17_300_000 - 10_000, rng.dirichlet(np.full(10_000, 2.0))) + 1
    assert lengths.sum() * 4 * 7168 * 2 / GIB == pytest.approx(924, abs=1)
    n_files, n_parts = dataset_files(lengths.tolist(), header)
    assert n_parts == 29
    assert n_files < 1000
    assert 450 < n_files < 700


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


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    n_layers=st.integers(1, 3),
    chunk=st.integers(1, 12),
    shard=st.integers(1, 24),
    part_tokens=st.integers(1, 80),
)
def test_the_arithmetic_is_that_of_written_datasets(tmp_path_factory, lengths, n_layers, chunk, shard, part_tokens):
    url = str(tmp_path_factory.mktemp("files") / "dataset")
    part_nbytes = part_tokens * n_layers * 4 * 4
    options = {"layers": range(n_layers), "hidden_size": 4, "final_norm": "pre", "dtype": "float32"}
    with DatasetWriter(url, chunk_tokens=chunk, shard_tokens=shard, part_nbytes=part_nbytes, **options) as writer:
        for number, length in enumerate(lengths):
            writer.write(f"{number}", np.arange(length), np.ones((length, n_layers, 4), np.float32))
    grid = GridOptions(chunk, shard)
    expected, n_parts = dataset_files(lengths, make_header(**options), part_nbytes=part_nbytes, grid=grid)
    assert len(oracles.left_files(url)) == expected
    parts = oracles.loaded_parts(url)
    assert len(parts) == n_parts
    for part in parts:
        counts = part.manifest.counts
        columns = part_columns(make_header(**options), "zstd", counts.tokens, counts.samples, grid=grid)
        assert dict(part.manifest.columns) == columns
        assert [entry.path for entry in part.manifest.files] == expected_paths(part.manifest.part, columns)


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
