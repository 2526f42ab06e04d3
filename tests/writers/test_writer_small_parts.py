"""A part of few rows takes few bytes: chunks shrink to what there is."""

import numpy as np
import pytest

from hsfmt import DatasetWriter
from hsfmt.catalog import committed_parts, load_manifest, read_header
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.storage import open_store


def columns(url):
    store = open_store(url)
    (part,) = committed_parts(store)
    return load_manifest(store, part, read_header(store)).columns


def write(url, lengths, **options):
    rng = np.random.default_rng(0)
    states = [rng.integers(0, 1 << 14, (n, 2, 64), np.uint16) for n in lengths]
    with DatasetWriter(url, layers=[1, 2], hidden_size=64, final_norm="pre", codec="none", **options) as writer:
        for i, sample in enumerate(states):
            writer.write(f"s{i}", np.arange(len(sample)), sample)
    return states


def test_small_part_is_not_padded(tmp_path):
    states = write(tmp_path / "d", [5, 300, 1])
    assert {name: column.chunk_rows for name, column in columns(tmp_path / "d").items()} == {
        "hidden_states": 306, "input_ids": 306, "loss_mask": 306,
    }  # fmt: skip
    stored = sum(path.stat().st_size for path in (tmp_path / "d" / "parts").glob("*/hidden_states/c/0/0/0"))
    raw = sum(sample.nbytes for sample in states)
    assert stored == raw + 2 * 4 + 2 * 16 + 4  # crc32c of two chunks, and the index with its own
    reader = SampleReader(tmp_path / "d")
    assert all(np.array_equal(reader.read(i).hidden_states, states[i]) for i in range(3))


@pytest.mark.parametrize("n_tokens", [8191, 8192, 8193])  # a chunk of 64 bf16 values a row is 8,192 tokens
def test_full_chunks_keep_their_size(tmp_path, n_tokens):
    states = write(tmp_path / "d", [n_tokens])
    column = columns(tmp_path / "d")["hidden_states"]
    assert column.chunk_rows == min(n_tokens, 8192)
    assert column.n_chunk_rows == -(-n_tokens // 8192)
    assert np.array_equal(SampleReader(tmp_path / "d").read(0).hidden_states, states[0])


def test_chunks_that_were_asked_for_stay(tmp_path):
    write(tmp_path / "d", [5], chunk_tokens=16)
    assert columns(tmp_path / "d")["hidden_states"].chunk_rows == 16
