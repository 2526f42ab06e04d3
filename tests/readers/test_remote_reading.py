"""The same through fsspec: batches of ranges, one plan at a time."""

import pickle

import fsspec
import numpy as np
import pytest
from written import assert_same

from hsfmt import open_zarr
from hsfmt.errors import CorruptionError
from hsfmt.readers.sample_reader import SampleReader


@pytest.fixture
def copied(write):
    """A dataset, and the URL of a copy of it in memory."""
    written = write()
    url = f"memory://{written.path.name}"
    fs = fsspec.filesystem("memory")
    fs.put(f"{written.path}/", f"/{written.path.name}/", recursive=True)
    yield written, url, fs
    fs.rm(f"/{written.path.name}", recursive=True)


def test_read(copied):
    written, url, _ = copied
    reader = SampleReader(url)
    for number, got in enumerate(reader.read_many(range(10))):
        assert_same(got, written.content[written.ids[number]])
    assert_same(pickle.loads(pickle.dumps(reader)).read(5, 3, 20), written.content["id-005"], 3, 20)
    assert reader.index_of("id-007") == 7


def test_damage(copied):
    written, url, fs = copied
    shard = written.shards()[0].relative_to(written.path).as_posix()
    key = f"/{written.path.name}/{shard}"
    good = fs.cat_file(key)
    reader = SampleReader(url)
    for bad in (good[:20] + bytes([good[20] ^ 1]) + good[21:], good[:20], b"", None):
        fs.rm(key)
        if bad is not None:
            fs.pipe_file(key, bad)
        with pytest.raises(CorruptionError) as caught:
            reader.read_many(range(10))
        assert shard in str(caught.value)
        assert caught.value.problems[0].samples
        with pytest.raises(CorruptionError):
            open_zarr(url).hidden_states[:]
    fs.pipe_file(key, good)
    assert_same(reader.read(0), written.content["id-000"])


def test_arrays(copied):
    written, url, _ = copied
    dataset = open_zarr(url)
    for number, wanted in enumerate(written.content.values()):
        assert dataset.hidden_states[dataset.sample_tokens(number)].tobytes() == wanted.states.tobytes()
        np.testing.assert_array_equal(dataset.input_ids[dataset.sample_tokens(number)], wanted.input_ids)
