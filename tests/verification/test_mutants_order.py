"""A snapshot in which just two neighbours are in the wrong order."""

import pytest
from test_snapshot_content import SnapshotForger


@pytest.mark.parametrize("first", range(5))
def test_any_two_neighbours_in_the_wrong_order_are_a_warning(dataset, first):
    snapshot = SnapshotForger(dataset)
    ids = [b"s0-0", b"s0-1", b"s0-2", b"s1-0", b"s1-1", b"s1-2"]
    order = [0, 1, 2, 3, 4, 5]
    order[first : first + 2] = [first + 1, first]
    for name in ("n_tokens", "n_supervised", "part", "row", "id_hash"):
        snapshot.arrays[name] = snapshot.arrays[name][order]
    snapshot.set_ids([ids[i] for i in order])
    found = snapshot.errors()
    assert set(found) == {("warning", "snapshot_order", "row")}
    assert f"from sample {first} on" in found["warning", "snapshot_order", "row"].got
