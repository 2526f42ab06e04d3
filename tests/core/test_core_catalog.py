"""The committed set, its checks, superseding; and sealing on made parts."""

import shutil
from pathlib import Path

import pytest
from made_parts import HEADER, make_part, put_part

from hsfmt import digests, layout, tables
from hsfmt.catalog import (
    committed_parts,
    ensure_dataset,
    load_index,
    load_manifest,
    load_part,
    load_ref,
    read_header,
    read_pointer,
    read_snapshot,
    without_superseded,
)
from hsfmt.errors import (
    CorruptionError,
    ExpectationError,
    FormatError,
    HeaderMismatchError,
    NotFoundError,
)
from hsfmt.header import make_header
from hsfmt.sealing import build_live, seal
from hsfmt.storage import open_store


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "dataset")
    ensure_dataset(store, HEADER)
    return store


def path_of(store, path):
    return Path(store.url) / path


def test_creating_is_idempotent(store):
    before = store.read(layout.ROOT_METADATA, 1 << 16)
    assert ensure_dataset(store, HEADER) == HEADER == read_header(store)
    assert store.read(layout.ROOT_METADATA, 1 << 16) == before


def test_a_creator_that_died_half_way_is_no_obstacle(tmp_path):
    store = open_store(tmp_path / "dataset")
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "zarr.json.0123456789abcdef.tmp").write_bytes(b"{")
    (tmp_path / "dataset" / "parts").mkdir()
    assert ensure_dataset(store, HEADER) == HEADER


def test_no_dataset(tmp_path):
    with pytest.raises(NotFoundError, match=r"an hsfmt dataset, got no zarr.json there — check the path"):
        read_header(open_store(tmp_path))
    with pytest.raises(NotFoundError):
        seal(tmp_path / "nowhere")


def test_only_manifests_commit(store):
    put_part(store, "p1")
    folder = path_of(store, layout.MANIFESTS)
    for name in ("p2.json.0123456789abcdef.tmp", "P3.json", ".json", "p4.txt", "p5", "-p.json", "p 6.json"):
        (folder / name).write_bytes(b"{}")
    (path_of(store, "parts") / "uncommitted").mkdir()
    assert committed_parts(store) == ["p1"]


def test_a_part_is_loaded_with_all_checks(store):
    put_part(store, "p1")
    part = load_part(store, "p1", HEADER)
    assert part.index.n_samples == 2
    path = path_of(store, layout.index_path("p1"))
    data = path.read_bytes()
    for bad in (data[:-1] + b"\1", data[:-1], b""):
        path.write_bytes(bad)
        with pytest.raises(CorruptionError, match=r"hsfmt/index/p1.safetensors: expected"):
            load_index(store, part.manifest)
    path.write_bytes(data + b"x")
    with pytest.raises(CorruptionError, match="expected at most"):
        load_index(store, part.manifest)
    path.unlink()
    with pytest.raises(NotFoundError, match=r"hsfmt/index/p1.safetensors"):
        load_index(store, part.manifest)


def test_a_copied_part_is_refused(store):
    put_part(store, "p1")
    for folder, suffix in ((layout.MANIFESTS, ".json"), (layout.INDEXES, ".safetensors")):
        shutil.copy(path_of(store, f"{folder}/p1{suffix}"), path_of(store, f"{folder}/p2{suffix}"))
    with pytest.raises(CorruptionError, match="expected part p2, got 'p1'"):
        load_manifest(store, "p2", HEADER)
    with pytest.raises(CorruptionError, match=r"hsfmt/manifests/p2.json"):
        seal(store)


def test_a_part_of_another_meaning_is_refused_by_name(store):
    other = make_header(layers=[1, 2], hidden_size=4, final_norm="post", dtype="float32", model="m")
    put_part(store, "p1", header=other)
    for load in (lambda: load_part(store, "p1", HEADER), lambda: seal(store)):
        with pytest.raises(
            HeaderMismatchError, match=r"hsfmt/manifests/p1.json: final_norm: expected 'pre', got 'post'"
        ):
            load()
    unnamed = make_header(layers=[1, 2], hidden_size=4, final_norm="pre", dtype="float32")
    put_part(store, "p1", header=unnamed)
    with pytest.raises(HeaderMismatchError, match=r"hsfmt/manifests/p1.json"):
        seal(store)


def test_an_index_larger_than_the_cap_is_not_read(store, monkeypatch):
    manifest = put_part(store, "p1")
    monkeypatch.setattr(tables, "MAX_TABLE_NBYTES", 100)
    with pytest.raises(FormatError, match="at most 100 bytes"):
        load_index(store, manifest)


def test_superseded_parts_are_left_out(store):
    old = put_part(store, "p1", ids=("a", "b"))
    put_part(store, "p2", ids=("c", "d"))
    put_part(store, "p3", ids=("a", "b"), replaces={"p1": old.digest()})
    assert committed_parts(store) == ["p1", "p2", "p3"]
    snapshot = seal(store).snapshot
    assert [part.name for part in snapshot.parts] == ["p2", "p3"]
    assert snapshot.counts["shadowed"] == 0
    parts = [load_part(store, name, HEADER) for name in ("p3", "p2", "p1")]
    assert [part.manifest.part for part in without_superseded(parts)] == ["p3", "p2"]


def test_a_part_that_replaces_another_manifest_is_refused(store):
    put_part(store, "p1")
    put_part(store, "p2", replaces={"p1": digests.digest(b"another")})
    with pytest.raises(CorruptionError, match=r"hsfmt/manifests/p1.json: expected digest .*, as p2 replaces it"):
        seal(store)


def test_a_part_may_replace_one_that_is_gone(store):
    put_part(store, "p2", replaces={"gone": digests.digest(b"x")})
    assert seal(store).snapshot.n_samples == 2


def test_a_chain_of_replacements_leaves_the_last(store):
    first = put_part(store, "p1")
    second = put_part(store, "p2", replaces={"p1": first.digest()})
    put_part(store, "p3", replaces={"p2": second.digest()})
    assert [part.name for part in seal(store).snapshot.parts] == ["p3"]


def test_a_snapshot_names_its_parts_by_digest(store):
    put_part(store, "p1")
    (ref,) = seal(store).snapshot.parts
    assert load_ref(store, ref, HEADER).index.n_samples == 2
    assert (ref.manifest_nbytes, ref.index_nbytes) == (
        store.size(layout.manifest_path("p1")), store.size(layout.index_path("p1"))
    )  # fmt: skip
    put_part(store, "p1", ids=("a", "c"))
    with pytest.raises(CorruptionError, match=r"hsfmt/manifests/p1.json: expected digest"):
        load_ref(store, ref, HEADER)


def test_sealing_nothing_is_an_error(store):
    with pytest.raises(NotFoundError, match="expected committed parts, got none — commit samples first"):
        seal(store)
    assert read_pointer(store) is None


def test_expectations(store):
    put_part(store, "p1", ids=("a", "b"), holes={"c": "x"})
    for expect, message in (
        (3, r"expected 3 samples, got 2 \(1 holes\) — run the producer again"),
        (1, r"expected 1 samples, got 2 \(1 holes\) — expect them too, or retract them \(Python: hsfmt.seal\("),
        (["a", "b", "c"], "expected each of the 3 ids asked for, got 1 missing .1 sample.s.: c. — run the producer"),
        (["a"], "expected no id but the 1 asked for, got 1 unexpected .1 sample.s.: b. — expect them too, or retract"),
        ([], "2 unexpected"),
    ):
        with pytest.raises(ExpectationError, match=message) as caught:
            seal(store, expect=expect)
        assert caught.value.exit_code == 1
        assert read_pointer(store) is None
        assert store.list(layout.SNAPSHOTS) == []
    with pytest.raises(ExpectationError) as caught:
        seal(store, expect={"a", "z"})
    assert len(caught.value.problems) == 2
    assert seal(store, expect={"a", "b"}).snapshot.n_samples == 2
    assert seal(store, expect=2).changed is False


def test_a_failed_expectation_leaves_the_old_snapshot(store):
    put_part(store, "p1")
    pointer = seal(store) and read_pointer(store)
    put_part(store, "p2", ids=("c",), lengths=(3,))
    with pytest.raises(ExpectationError):
        seal(store, expect=2)
    assert read_pointer(store) == pointer


def test_the_live_snapshot_is_that_of_a_seal(store):
    put_part(store, "p1")
    index, ids = build_live(store, HEADER)
    sealed = seal(store).snapshot
    assert digests.digest(index) == sealed.fingerprint
    assert digests.digest(ids) == sealed.ids_digest
    seal(store, retract=["a"])
    assert digests.digest(build_live(store, HEADER)[0]) == read_pointer(store).fingerprint != sealed.fingerprint


def test_sealing_puts_back_a_snapshot_whose_ids_were_damaged(store):
    put_part(store, "p1")
    fingerprint = seal(store).snapshot.fingerprint
    path = path_of(store, layout.snapshot_path(fingerprint, "ids"))
    data = path.read_bytes()
    for bad in (b"", data[:-1], data[:-1] + b"\xff"):
        path.write_bytes(bad)
        assert seal(store).changed is True
        assert path.read_bytes() == data
    path.unlink()
    assert seal(store).changed is True
    assert path.read_bytes() == data


def test_a_damaged_current_snapshot_is_said_not_forgotten(store):
    """It may have retracted samples: going on as if there were none would serve them again."""
    put_part(store, "p1")
    fingerprint = seal(store, retract=["a"]).snapshot.fingerprint
    path = path_of(store, layout.snapshot_path(fingerprint, "index"))
    data = path.read_bytes()
    for bad in (data[:-1], b""):
        path.write_bytes(bad)
        with pytest.raises(CorruptionError, match=r"run `hsfmt repair`; retract again .* .hsfmt retract URL ID. if it"):
            seal(store)
    path.unlink()
    with pytest.raises(NotFoundError, match=r"index.safetensors"):
        seal(store)
    path_of(store, layout.POINTER).unlink()
    assert seal(store, retract=["a"]).snapshot.fingerprint == fingerprint


def test_stray_files_beside_the_snapshots_do_no_harm(store):
    put_part(store, "p1")
    path_of(store, layout.SNAPSHOTS).mkdir(parents=True)
    (path_of(store, layout.SNAPSHOTS) / "README").write_text("x")
    (path_of(store, layout.SNAPSHOTS) / ("0" * 32)).mkdir()
    assert seal(store).rounds == 1
    snapshot, data = read_snapshot(store, read_pointer(store).fingerprint)
    assert digests.digest(data) == snapshot.fingerprint


def test_a_part_whose_index_disagrees_with_its_counts_is_refused(store):
    manifest, data = make_part("p1")
    store.write(layout.index_path("p1"), data)
    other, _ = make_part("p1", lengths=(4, 7))
    assert other.counts.supervised_tokens == manifest.counts.supervised_tokens == 5
    assert load_index(store, manifest).n_samples == 2
    with pytest.raises(CorruptionError):
        load_index(store, other)


def test_part_names():
    names = {layout.new_part_name() for _ in range(200)}
    assert len(names) == 200
    assert all(layout.check_part_name(name, "x") == name for name in names)
    for bad in ("", "A", "a/b", "..", "a.b", "a" * 65, "-a", "a\n", "é", None, 5, b"a"):
        with pytest.raises(FormatError):
            layout.check_part_name(bad, "x")
