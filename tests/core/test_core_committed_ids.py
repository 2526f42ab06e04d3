"""The ids that a producer may skip, while others commit, repair, compact and collect."""

from pathlib import Path

import pytest
from made_parts import HEADER, put_part

from hsfmt import layout
from hsfmt.catalog import ensure_dataset
from hsfmt.errors import CorruptionError
from hsfmt.idset import CommittedIds
from hsfmt.storage import open_store


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "dataset")
    ensure_dataset(store, HEADER)
    return store


def known(ids, among="abcdef"):
    ids.refresh()
    listed = sorted(ids)
    assert listed == [sample_id for sample_id in among if sample_id in ids]
    assert len(ids) == len(listed)
    return "".join(listed)


def test_what_a_repair_lost_is_there_no_longer(store):
    """Whoever runs for days must not go on to skip it."""
    old = put_part(store, "p1", ids=("a", "b"))
    ids = CommittedIds(store, HEADER)
    assert known(ids) == "ab"
    put_part(store, "p1-r", ids=("b",), lengths=(6,), holes={"a": "lost"}, replaces={"p1": old.digest()})
    put_part(store, "p2", ids=("c",), lengths=(5,))
    assert known(ids) == "bc"


def test_a_part_that_was_replaced_and_collected(store):
    old = put_part(store, "p1", ids=("a", "b"))
    ids = CommittedIds(store, HEADER)
    assert known(ids) == "ab"
    put_part(store, "p1-c", ids=("a", "b"), replaces={"p1": old.digest()})
    for path in (layout.manifest_path("p1"), layout.index_path("p1")):
        (Path(store.url) / path).unlink()
    assert known(ids) == "ab"


def test_a_part_that_was_set_aside_hides_nothing_any_more(store):
    old = put_part(store, "p1", ids=("a", "b"))
    put_part(store, "p1-c", ids=("a",), lengths=(5,), replaces={"p1": old.digest()})
    ids = CommittedIds(store, HEADER)
    assert known(ids) == "a"
    (Path(store.url) / layout.manifest_path("p1-c")).unlink()
    assert known(ids) == "ab"


def test_what_could_not_be_read_is_not_taken_for_known(store):
    """A second attempt has it: else its samples would be made again."""
    put_part(store, "p1", ids=("a", "b"))
    put_part(store, "p2", ids=("c",), lengths=(5,))
    index = Path(store.url) / layout.index_path("p2")
    whole = index.read_bytes()
    index.write_bytes(whole[:-1])
    ids = CommittedIds(store, HEADER)
    with pytest.raises(CorruptionError):
        ids.refresh()
    index.write_bytes(whole)
    assert known(ids) == "abc"
