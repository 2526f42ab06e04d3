"""A resuming producer, in a dataset whose first part was replaced."""

from made_parts import HEADER, put_part

from hsfmt.catalog import ensure_dataset
from hsfmt.idset import CommittedIds
from hsfmt.sealing import seal
from hsfmt.storage import open_store


def test_parts_behind_a_replaced_one_count(tmp_path):
    store = open_store(tmp_path / "dataset")
    ensure_dataset(store, HEADER)
    put_part(store, "p1", ids=("a", "lost"))
    old = seal(store).snapshot.parts[0]
    put_part(store, "p2", ids=("a", "b"), replaces={"p1": old.manifest_digest})
    put_part(store, "p3", ids=("c",), lengths=(3,))
    ids = CommittedIds(store, HEADER)
    ids.refresh()
    assert set(ids) == {"a", "b", "c"}
    assert len(ids) == 3
    assert "lost" not in ids
