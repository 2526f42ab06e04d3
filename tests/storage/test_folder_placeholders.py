"""Empty objects that stand for folders, as consoles and file browsers make them."""

import numpy as np
import pytest

from hsfmt import DatasetWriter
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store


@pytest.fixture
def place(s3_server, bucket, no_credentials):
    """A folder that somebody made by hand: (its URL, what makes another one)."""
    fs = s3_server.file_system()

    def make(name):
        fs.call_s3("put_object", Bucket=bucket, Key=name, Body=b"")

    make("states/")
    return f"s3://{bucket}/states", make


def test_a_dataset_can_be_made_in_one_and_is_fine(place, s3_server):
    url, make = place
    options = s3_server.options()
    settings = {"layers": [1], "hidden_size": 8, "final_norm": "pre", "dtype": "float32", "storage_options": options}
    with DatasetWriter(url, **settings) as writer:
        writer.write("a", np.arange(3), np.ones((3, 1, 8), np.float32))
    for name in ("states/parts/", "states/hsfmt/", "states/hsfmt/manifests/", "states/mine/"):
        make(name)
    store = open_store(url, options)
    assert all(not path.endswith("/") for path, _ in store.walk(""))
    assert {path for path, _ in store.walk("hsfmt")} >= {"hsfmt/manifest.json"}
    report = verify(store)
    assert [problem.code for problem in report.problems] == []
    assert SampleReader(url, storage_options=options).read(0).sample_id == "a"
