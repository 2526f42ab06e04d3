"""DatasetWriter straight to a real S3 server: several writers join one dataset."""

import ml_dtypes
import numpy as np

from hsfmt import DatasetWriter, HiddenStateDataset, seal
from hsfmt.catalog import committed_parts
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store

SETTINGS = {"layers": [1, 2], "hidden_size": 64, "final_norm": "pre", "codec": "none"}


def sample(n, value):
    return np.arange(n), np.full((n, 2, 64), value, ml_dtypes.bfloat16)


def test_writers_join_a_dataset_in_a_bucket(s3_server, bucket):
    url, options = f"s3://{bucket}/d", s3_server.options()
    for name in ("a", "b", "c"):
        with DatasetWriter(url, storage_options=options, seal=False, **SETTINGS) as writer:
            writer.write(name, *sample(5, 2))
    store = open_store(url, options)
    assert len(committed_parts(store)) == 3
    seal(store)
    dataset = HiddenStateDataset(url, storage_options=options)
    assert list(dataset.sample_ids) == ["a", "b", "c"]
    assert verify(store, level="full").ok
    assert store.unfinished_uploads() == []
