"""The root document: lost and written back, and where no dataset may be created."""

from pathlib import Path

import pytest
from made_parts import HEADER, put_part

from hsfmt import layout
from hsfmt.catalog import ensure_dataset, find_dataset, read_header
from hsfmt.errors import CorruptionError, HeaderMismatchError, NotFoundError, UsageError
from hsfmt.header import make_header
from hsfmt.sealing import seal
from hsfmt.storage import open_store

OTHER = make_header(layers=[1, 2], hidden_size=4, final_norm="post", dtype="float32", model="m")
UNNAMED = make_header(layers=[1, 2], hidden_size=4, final_norm="pre", dtype="float32")


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "dataset")
    ensure_dataset(store, HEADER)
    return store


def files(store):
    root = Path(store.url)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("sealed", [False, True])
def test_a_lost_root_comes_back_as_the_manifests_have_it(store, sealed):
    put_part(store, "p1")
    if sealed:
        seal(store)
    before = files(store)
    (Path(store.url) / "zarr.json").unlink()
    # A caller without a model takes what is there: its own header would have other bytes.
    assert find_dataset(store, UNNAMED) == ensure_dataset(store, UNNAMED) == HEADER
    assert files(store) == before


def test_a_lost_root_comes_back_as_the_pointer_has_it(store):
    put_part(store, "p1")
    seal(store)
    for path in ("zarr.json", layout.manifest_path("p1")):
        (Path(store.url) / path).unlink()
    with pytest.raises(HeaderMismatchError):
        ensure_dataset(store, OTHER)
    assert ensure_dataset(store, UNNAMED) == HEADER


def test_a_refused_caller_leaves_nothing_behind(store, tmp_path):
    put_part(store, "p1")
    (Path(store.url) / "zarr.json").unlink()
    before = files(store)
    with pytest.raises(HeaderMismatchError, match="final_norm: expected 'pre', got 'post'"):
        ensure_dataset(store, OTHER)
    assert files(store) == before


def test_manifests_that_do_not_agree_are_no_root(store):
    put_part(store, "p1")
    put_part(store, "p2", ids=("c", "d"), header=OTHER)
    (Path(store.url) / "zarr.json").unlink()
    before = files(store)
    with pytest.raises(CorruptionError, match=r"zarr.json: .* 2 different headers, in hsfmt/manifests/p1.json, hsfmt"):
        ensure_dataset(store, HEADER)
    assert files(store) == before


def test_a_lost_root_is_said_with_the_way_back(store):
    put_part(store, "p1")
    (Path(store.url) / "zarr.json").unlink()
    for attempt in (read_header, seal):
        with pytest.raises(
            NotFoundError,
            match=r"zarr.json: expected the root document .* beside 1 committed parts — restore .* DatasetWriter",
        ):
            attempt(store)


def test_a_mismatch_with_an_empty_dataset_says_that_it_is_empty(store):
    with pytest.raises(HeaderMismatchError, match=r"holds no samples yet: .* remove the folder") as caught:
        ensure_dataset(store, OTHER)
    assert store.url in caught.value.problems[0].remedy
    put_part(store, "p1")
    with pytest.raises(HeaderMismatchError, match="use another dataset for these samples"):
        ensure_dataset(store, OTHER)


@pytest.mark.parametrize("inside", ["inner", "parts/inner", "parts/p1/a/b/c", "hsfmt/x"])
def test_no_dataset_inside_another(store, inside):
    before = files(store)
    inner = open_store(Path(store.url) / inside)
    with pytest.raises(UsageError, match="one inside the dataset") as caught:
        ensure_dataset(inner, HEADER)
    assert store.url in str(caught.value)
    with pytest.raises(UsageError):
        find_dataset(inner, HEADER)
    assert files(store) == before
    assert not (Path(store.url) / "inner").exists()


def test_other_zarr_groups_may_hold_datasets(tmp_path):
    (tmp_path / "zarr.json").write_text('{"attributes":{},"node_type":"group","zarr_format":3}')
    assert ensure_dataset(open_store(tmp_path / "a/b"), HEADER) == HEADER


def test_an_outer_dataset_of_a_later_format_counts(store, tmp_path):
    path = Path(store.url) / "zarr.json"
    path.write_bytes(path.read_bytes().replace(b'"readable_from":"1.0"', b'"readable_from":"9.0"'))
    with pytest.raises(UsageError, match="one inside the dataset"):
        ensure_dataset(open_store(Path(store.url) / "inner"), HEADER)


@pytest.mark.parametrize("name", [".DS_Store", "README.md", ".gitattributes", "._x"])
def test_what_other_software_leaves_is_no_obstacle(tmp_path, name):
    (tmp_path / name).write_text("x")
    assert ensure_dataset(open_store(tmp_path), HEADER) == HEADER


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UsageError, match=r"'notes\.txt' among them"):
        ensure_dataset(open_store(tmp_path), HEADER)
