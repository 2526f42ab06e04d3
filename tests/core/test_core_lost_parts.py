"""A seal never makes a dataset smaller because a manifest was lost."""

import logging
from pathlib import Path

import pytest
from made_parts import HEADER, put_part

from hsfmt import layout
from hsfmt.catalog import ensure_dataset, read_pointer
from hsfmt.errors import CorruptionError, NotFoundError, UsageError
from hsfmt.sealing import build_live, seal
from hsfmt.storage import open_store

LOST = r"manifests: expected a manifest of all 2 part\(s\) .* got 1 without one, with 2 of its 5 sample\(s\): p1 —"


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "dataset")
    ensure_dataset(store, HEADER)
    put_part(store, "p1", ids=("a", "b"))
    put_part(store, "p2", ids=("c", "d", "e"), lengths=(5, 6, 7))
    return store


def lose(store, *paths):
    for path in paths:
        (Path(store.url) / path).unlink()


def test_a_lost_manifest_stops_a_seal(store):
    seal(store)
    pointer = read_pointer(store)
    lose(store, layout.manifest_path("p1"))
    put_part(store, "p3", ids=("f",), lengths=(3,))
    with pytest.raises(CorruptionError, match=LOST) as caught:
        seal(store)
    for said in ("hsfmt/manifests/<part>.json", "`hsfmt seal --drop-missing`", "what is committed stays committed"):
        assert said in caught.value.problems[0].remedy
    assert read_pointer(store) == pointer
    put_part(store, "p1", ids=("a", "b"))
    assert seal(store).snapshot.n_samples == 6


def test_told_to_drop_it_seals_without_and_says_so(store, caplog):
    seal(store)
    lose(store, layout.manifest_path("p1"))
    with caplog.at_level(logging.WARNING, "hsfmt"):
        assert seal(store, drop_missing=True).snapshot.n_samples == 3
    assert "parts left out: 1 without one, with 2 of its 5 sample(s): p1" in caplog.text
    assert seal(store).changed is False


def test_all_manifests_lost(store):
    seal(store)
    lose(store, layout.manifest_path("p1"), layout.manifest_path("p2"))
    with pytest.raises(CorruptionError, match=r"2 without one, with 5 of its 5 sample\(s\): p1, p2"):
        seal(store)
    with pytest.raises(NotFoundError, match="committed parts"):
        seal(store, drop_missing=True)


def test_a_part_that_was_replaced_may_go(store):
    old = seal(store).snapshot.parts[0]
    put_part(store, "p3", ids=("a", "b"), replaces={"p1": old.manifest_digest})
    lose(store, layout.manifest_path("p1"))
    assert seal(store).snapshot.n_samples == 5


def test_without_a_pointer_every_snapshot_counts(store):
    """Of a copy that lacks both the pointer and a manifest, the snapshot still tells what there was."""
    first = seal(store).snapshot
    lose(store, layout.POINTER, layout.manifest_path("p1"))
    with pytest.raises(CorruptionError, match=LOST):
        seal(store)
    assert read_pointer(store) is None
    # One that can't be read is no obstacle: it names nothing.
    (Path(store.url) / layout.snapshot_path(first.fingerprint, "index")).write_bytes(b"x")
    assert seal(store).snapshot.n_samples == 3


@pytest.mark.parametrize("index_too", [False, True])
def test_what_was_retracted_in_a_lost_part_stays_so(store, index_too, caplog):
    seal(store, retract=["a"])
    lose(store, layout.manifest_path("p1"), *([layout.index_path("p1")] if index_too else []))
    put_part(store, "p4", ids=("a", "b"))
    with caplog.at_level(logging.WARNING, "hsfmt"):
        snapshot = seal(store, drop_missing=True).snapshot
    assert (snapshot.n_samples, snapshot.counts["retracted"]) == ((5, 0) if index_too else (4, 1))
    assert ("of the missing part p1, 1 retracted sample(s) are not known" in caplog.text) is index_too


@pytest.mark.parametrize("argument", ["retract", "expect"])
@pytest.mark.parametrize("text", ["abc", b"abc", ""])
def test_a_text_is_no_collection_of_ids(store, argument, text):
    with pytest.raises(UsageError, match=rf"{argument}: expected a .*collection of ids, got the text") as caught:
        seal(store, **{argument: text})
    assert caught.value.problems[0].remedy == f"write {argument}=[{text!r}]"
    assert read_pointer(store) is None


def test_any_other_collection_will_do(store):
    assert seal(store, retract=iter(["a"]), expect=dict.fromkeys("bcde")).snapshot.n_samples == 4


def test_the_same_id_with_different_content_is_logged(store, caplog):
    put_part(store, "p3", ids=("a", "b"), content=[bytes(16), bytes(16)])
    with caplog.at_level(logging.WARNING, "hsfmt"):
        seal(store, retract=["b"])
        assert "different content for 1 id(s), of which the first part's is served: a" in caplog.text
        caplog.clear()
        seal(store, retract=["a"])
    assert caplog.text == ""


def test_the_same_id_with_the_same_content_is_nothing_to_say(store, caplog):
    put_part(store, "p3", ids=("a", "b"))
    with caplog.at_level(logging.WARNING, "hsfmt"):
        assert seal(store).snapshot.counts["shadowed"] == 2
    assert caplog.text == ""


def test_a_pointer_that_says_something_else_is_replaced(store):
    from dataclasses import replace

    seal(store)
    pointer = read_pointer(store)
    store.replace(layout.POINTER, replace(pointer, samples=7).to_bytes())
    assert seal(store).changed is True
    assert read_pointer(store).samples == pointer.samples


@pytest.mark.parametrize("drop", [False, True])
def test_another_part_under_the_name_of_a_sealed_one_is_not_sealed(store, drop):
    """Whole and consistent, as a copy of another time is: it would silently take the place of what was sealed."""
    seal(store)
    pointer = read_pointer(store)
    lose(store, layout.manifest_path("p1"), layout.index_path("p1"))
    put_part(store, "p1", ids=("a", "x"))
    for take in (lambda: seal(store, drop_missing=drop), lambda: build_live(store, HEADER)):
        with pytest.raises(CorruptionError, match=r"manifests/p1\.json: expected digest xxh3.*as a snapshot names"):
            take()
    assert read_pointer(store) == pointer
