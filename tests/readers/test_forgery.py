"""Snapshots whose digests all fit and which are wrong all the same: the reader compares them with the parts."""

import numpy as np
import pytest

from hsfmt import canonical, digests, layout, tables
from hsfmt.errors import CorruptionError, HsfmtError
from hsfmt.readers.sample_reader import SampleReader


def forge(written, change):
    """Rewrite the current snapshot's index after `change(arrays, metadata)`, and the pointer to it."""
    pointer_path = written.path / layout.POINTER
    pointer = canonical.loads(pointer_path.read_bytes(), "pointer")
    index = tables.parse((written.path / pointer["index"]["path"]).read_bytes(), "index")
    arrays = {name: array.copy() for name, array in index.arrays.items()}
    metadata = dict(index.metadata)
    change(arrays, metadata)
    data = tables.serialize(arrays, metadata)
    fingerprint = digests.digest(data)
    path = layout.snapshot_path(fingerprint, "index")
    (written.path / path).parent.mkdir(parents=True)
    (written.path / path).write_bytes(data)
    body = {key: value for key, value in pointer.items() if key != "digest"}
    body |= {"fingerprint": fingerprint, "index": {**body["index"], "nbytes": len(data), "path": path}}
    pointer_path.write_bytes(canonical.dumps({**body, "digest": digests.digest(canonical.dumps(body))}))


def swap(name):
    def change(arrays, metadata):
        arrays[name][[0, 1]] = arrays[name][[1, 0]]

    return change


def assign(name, at, value):
    def change(arrays, metadata):
        arrays[name][at] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        swap("row"),
        swap("id_hash"),
        swap("n_tokens"),
        assign("row", 0, 1),
        assign("row", 0, -1),
        assign("row", 0, 10_000),
        assign("n_tokens", 0, 2**31 - 1),
        assign("n_tokens", 0, 0),
    ],
)
def test_rows_that_are_not_those_of_the_part(write, change):
    written = write([5, 6, 7], parts=1)
    forge(written, change)
    with pytest.raises(HsfmtError):
        SampleReader(written.url).read(0)


@pytest.mark.parametrize("name", ["part_manifest_digest", "part_index_digest", "part_names"])
def test_parts_that_are_not_those_of_the_snapshot(write, name):
    written = write([5, 6, 7, 8], parts=2)

    def change(arrays, metadata):
        arrays[name].view(np.uint8).reshape(-1)[0] ^= 1

    forge(written, change)
    with pytest.raises(HsfmtError):
        SampleReader(written.url).read_many(range(4))


def test_a_pointer_that_says_something_else_than_its_snapshot(write):
    written = write([5, 6, 7], parts=1)

    def change(arrays, metadata):
        metadata["content_digest"] = "xxh3_128:" + "0" * 32

    forge(written, change)
    with pytest.raises(CorruptionError, match="expected what its snapshot says"):
        SampleReader(written.url)


def test_an_unchanged_forgery_is_readable(write):
    """The test's own tool is sound."""
    written = write([5, 6, 7], parts=1)
    forge(written, lambda arrays, metadata: metadata.setdefault("of_a_later_version", 1))
    assert SampleReader(written.url).read(0).sample_id == "id-000"
