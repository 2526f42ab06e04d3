"""Errors about what is stored name the dataset, once, on one line, and keep what machines read."""

import pickle
import re
from dataclasses import replace
from datetime import timedelta
from functools import partial

import numpy as np
import pytest

from hsfmt import DatasetWriter, collect_garbage, layout, open_zarr, seal, transfer
from hsfmt.errors import CorruptionError, FormatError, HsfmtError, NotFoundError, Problem, UsageError
from hsfmt.naming import about_dataset
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.storage import open_store

SETTINGS = {"layers": [1, 3], "hidden_size": 4, "dtype": "float32", "final_norm": "pre"}
MANIFEST, INDEX = layout.manifest_path("p"), layout.index_path("p")


def write(url, **settings):
    with DatasetWriter(url, **SETTINGS, part_names=lambda: "p", **settings) as writer:
        writer.write("a", np.arange(5), np.ones((5, 2, 4), np.float32))
    return open_store(url)


@pytest.fixture(params=["local", "memory"])
def base(request, tmp_path):
    """Where datasets are made: a folder, or a URL that is nobody else's."""
    return str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"


def change(store, path):
    body = store.read(path, 1 << 20)
    store.write(path, body[:60] + bytes([body[60] ^ 1]) + body[61:])


def shard(store):
    return next(path for path, _ in store.walk("parts") if "/hidden_states/c/" in path)


def snapshot_index(store):
    return next(path for path, _ in store.walk(layout.SNAPSHOTS) if path.endswith("/index.safetensors"))


DAMAGED = {
    "pointer": (lambda store: layout.POINTER, SampleReader),
    "snapshot": (snapshot_index, SampleReader),
    "root": (lambda store: layout.ROOT_METADATA, lambda url: SampleReader(url, snapshot="live")),
    "root, of a writer": (lambda store: layout.ROOT_METADATA, lambda url: DatasetWriter(url, **SETTINGS)),
    "manifest": (lambda store: MANIFEST, lambda url: SampleReader(url).read(0)),
    "manifest, when it is sealed": (lambda store: MANIFEST, seal),
    "manifest, of what collects": (
        lambda store: MANIFEST,
        partial(collect_garbage, older_than=timedelta(days=7)),
    ),
    "index": (lambda store: INDEX, lambda url: SampleReader(url).read(0)),
    "index, of a live snapshot": (lambda store: INDEX, lambda url: SampleReader(url, snapshot="live")),
    "chunk": (shard, lambda url: SampleReader(url).read(0)),
    "chunk, of zarr": (shard, lambda url: open_zarr(url).hidden_states[:]),
}


def assert_names(error, store, path):
    text = str(error)
    assert text.count(store.url) == 1
    assert path in text
    assert "\n" not in text
    assert error.problems[0].where.startswith(path)
    assert error.dataset == store.url
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.problems, again.dataset) == (type(error), text, error.problems, store.url)


@pytest.mark.parametrize(("find", "use"), DAMAGED.values(), ids=DAMAGED)
def test_what_is_damaged(base, find, use):
    store = write(f"{base}/ds")
    path = find(store)
    change(store, path)
    with pytest.raises((CorruptionError, FormatError)) as caught:
        use(store.url)
    assert_names(caught.value, store, path)


@pytest.mark.parametrize("path", [MANIFEST, INDEX, "shard", "snapshot"])
def test_what_is_gone(base, path):
    store = write(f"{base}/ds")
    path = {"shard": shard, "snapshot": snapshot_index}.get(path, lambda _: path)(store)
    store.remove(path)
    with pytest.raises((CorruptionError, NotFoundError)) as caught:
        SampleReader(store.url).read(0)
    assert caught.value.dataset == store.url
    assert str(caught.value).startswith(f"{store.url}: {path}: ")


def test_a_root_document_that_the_manifests_can_not_give_back(base):
    store = write(f"{base}/ds")
    store.remove(layout.ROOT_METADATA)
    change(store, MANIFEST)
    with pytest.raises((CorruptionError, FormatError)) as caught:
        DatasetWriter(store.url, **SETTINGS)
    assert_names(caught.value, store, MANIFEST)


def test_no_such_sample_and_no_such_snapshot(base):
    store = write(f"{base}/ds")
    other = f"xxh3_128:{'0' * 32}"
    for use in (lambda: SampleReader(store.url).index_of("b"), lambda: SampleReader(store.url, snapshot=other)):
        with pytest.raises(HsfmtError) as caught:
            use()
        assert str(caught.value).startswith(f"{store.url}: ")


@pytest.mark.parametrize("side", [0, 1])
def test_of_two_datasets_the_one_that_is_meant(base, side):
    stores = write(f"{base}/ds"), write(f"{base}/ds-2")
    with DatasetWriter(stores[0].url, **SETTINGS, part_names=lambda: "q") as writer:
        writer.write("b", np.arange(5), np.ones((5, 2, 4), np.float32))
    path = layout.manifest_path("q") if side == 0 else MANIFEST
    change(stores[side], path)
    with pytest.raises((CorruptionError, FormatError)) as caught:
        transfer(stores[0], stores[1])
    assert_names(caught.value, stores[side], path)
    assert str(caught.value).startswith(f"{stores[side].url}: {path}: ")


def test_arguments_are_not_of_a_dataset(base):
    store = write(f"{base}/ds")
    with pytest.raises(UsageError) as caught:
        SampleReader(store.url).read(0, layers=[7])
    assert store.url not in str(caught.value)


def test_the_place_is_named_once_and_the_first_that_names_it_counts():
    problem = Problem("a/b", "x", "y", "do z")
    cases = {
        "a/b": "/data/ds: a/b: expected x, got y — do z",
        "/data/ds: a/b": "/data/ds: a/b: expected x, got y — do z",
        "/data/ds": "/data/ds: expected x, got y — do z",
        "/data/ds-2": "/data/ds: /data/ds-2: expected x, got y — do z",
    }
    for where, text in cases.items():
        error = CorruptionError([replace(problem, where=where)])
        expected = pytest.raises(CorruptionError, match=f"^{re.escape(text)}$")
        with expected, about_dataset("/data/other"), about_dataset("/data/ds"):
            raise error
        assert error.problems[0].where == where
    both = CorruptionError([problem, replace(problem, where="c")])
    both.dataset = "s3://b/ds"
    assert [line.partition(": expected")[0] for line in str(both).splitlines()] == ["s3://b/ds: a/b", "s3://b/ds: c"]


def test_an_error_that_is_a_text_stays_one():
    error = CorruptionError("Caught CorruptionError in DataLoader worker")
    with pytest.raises(CorruptionError), about_dataset("/data/ds"):
        raise error
    assert str(pickle.loads(pickle.dumps(error))) == "Caught CorruptionError in DataLoader worker"
