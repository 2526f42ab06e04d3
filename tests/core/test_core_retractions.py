"""What was retracted never comes back, whatever became of the snapshot, the part or the pointer that told of it."""

import logging
from pathlib import Path

import pytest
from made_parts import HEADER, put_part

from hsfmt import layout, retractions
from hsfmt.catalog import ensure_dataset, read_pointer, read_snapshot
from hsfmt.errors import StorageError
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.retractions import retracted_before
from hsfmt.sealing import build_live, seal
from hsfmt.snapshot import parse_snapshot
from hsfmt.storage import open_store
from hsfmt.storage.local import LocalStore

NOT_KNOWN = "1 retracted sample(s) are not known: its index is gone too"


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


def replace_part(store, ids, lengths):
    """Put another part in the place of p1, as a repair does of which the other samples are lost."""
    manifest = read_snapshot(store, read_pointer(store).fingerprint)[0].parts[0]
    put_part(store, "p1-r", ids=ids, lengths=lengths, replaces={"p1": manifest.manifest_digest})


def served(store):
    snapshot, _ = read_snapshot(store, read_pointer(store).fingerprint)
    return sorted(SampleReader(store, snapshot=snapshot.fingerprint).sample_ids)


def absent(snapshot):
    return [snapshot.absent_ids[i] for i in range(len(snapshot.absent_ids))]


def test_an_id_without_a_sample_stays_retracted(store):
    """Its sample was lost: whoever makes it again makes it in vain."""
    seal(store)
    first = seal(store, retract=["a"]).snapshot
    assert absent(first) == []
    replace_part(store, ("b",), (6,))
    second = seal(store).snapshot
    assert absent(second) == ["a"]
    assert second.counts["retracted"] == 0
    # Of the former snapshots nothing is left, as after a collection.
    for snapshot in (Path(store.url) / "hsfmt/snapshots").iterdir():
        if not second.fingerprint.endswith(snapshot.name):
            [file.unlink() for file in snapshot.iterdir()]
    assert not seal(store).changed
    put_part(store, "p9", ids=("a", "f"))
    third = seal(store).snapshot
    assert absent(third) == []
    assert third.counts["retracted"] == 1
    assert served(store) == ["b", "c", "d", "e", "f"]


def test_a_part_that_is_done_without_and_comes_back(store):
    seal(store, retract=["a", "c"])
    manifest = Path(store.url) / layout.manifest_path("p1")
    whole = manifest.read_bytes()
    manifest.unlink()
    assert absent(seal(store, drop_missing=True).snapshot) == ["a"]
    manifest.write_bytes(whole)
    assert absent(seal(store).snapshot) == []
    assert served(store) == ["b", "d", "e"]


def test_of_a_lost_index_older_snapshots_tell(store, caplog):
    """What one of them served, of that part and row, is what another took out."""
    seal(store)
    seal(store, retract=["a"])
    replace_part(store, ("b",), (6,))
    lose(store, layout.index_path("p1"))
    with caplog.at_level(logging.WARNING, "hsfmt"):
        assert absent(seal(store).snapshot) == ["a"]
    assert caplog.text == ""


def test_of_a_lost_index_no_snapshot_tells(store, caplog):
    seal(store, retract=["a"])
    replace_part(store, ("b",), (6,))
    lose(store, layout.index_path("p1"))
    with caplog.at_level(logging.WARNING, "hsfmt"):
        assert absent(seal(store).snapshot) == []
    assert NOT_KNOWN in caplog.text


def test_copies_of_what_is_not_known_stay_hidden(store, caplog):
    put_part(store, "p3", ids=("a", "f"))
    seal(store, retract=["a"])
    replace_part(store, ("b",), (6,))
    lose(store, layout.index_path("p1"))
    with caplog.at_level(logging.WARNING, "hsfmt"):
        seal(store)
    assert NOT_KNOWN in caplog.text
    assert served(store) == ["b", "c", "d", "e", "f"]


@pytest.mark.parametrize("whole_nbytes", [0, 1 << 20])
def test_a_live_snapshot_knows_what_any_snapshot_retracts(store, monkeypatch, whole_nbytes):
    monkeypatch.setattr(retractions, "_WHOLE_NBYTES", whole_nbytes)
    seal(store)
    old = (Path(store.url) / layout.POINTER).read_bytes()
    seal(store, retract=["a"])
    replace_part(store, ("b",), (6,))
    seal(store, retract=["c"])
    (Path(store.url) / layout.POINTER).write_bytes(old)
    live = parse_snapshot(build_live(store, HEADER)[0], "live")
    assert absent(live) == ["a"]
    assert live.counts["retracted"] == 1
    assert live.fingerprint == seal(store).snapshot.fingerprint


def test_no_flipped_byte_of_a_snapshot_hides_what_it_retracts(store, caplog):
    """It is told, or it is said that it is not known."""
    seal(store)
    fingerprint = seal(store, retract=["a"]).snapshot.fingerprint
    path = Path(store.url) / layout.snapshot_path(fingerprint, "index")
    whole, n_flipped = path.read_bytes(), 0
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1, 0x80, 0xFF)[at % 3]]) + whole[at + 1 :])
        caplog.clear()
        assert retracted_before(store, [fingerprint], ()) == set()
        assert f"what snapshot {fingerprint} retracts is not known" in caplog.text
        n_flipped += 1
    path.write_bytes(whole)
    assert retracted_before(store, [fingerprint], ()) == {"a"}
    assert n_flipped == len(whole) > 1000


def test_a_count_that_denies_the_rows_is_not_believed(store, monkeypatch, caplog):
    """Of a large snapshot only ranges are read: they must agree."""
    monkeypatch.setattr(retractions, "_WHOLE_NBYTES", 0)
    fingerprint = seal(store, retract=["a"]).snapshot.fingerprint
    path = Path(store.url) / layout.snapshot_path(fingerprint, "index")
    whole = path.read_bytes()
    assert whole.count(rb"\"retracted\":1") == 1
    path.write_bytes(whole.replace(rb"\"retracted\":1", rb"\"retracted\":0"))
    assert retracted_before(store, [fingerprint], ()) == set()
    assert f"what snapshot {fingerprint} retracts is not known" in caplog.text


class Failing(LocalStore):
    """Fails once to read a snapshot's index."""

    failed = False

    def read(self, path, max_nbytes):
        if path.endswith("index.safetensors") and path.startswith(layout.SNAPSHOTS) and not self.failed:
            self.failed = True
            raise StorageError.at(path, expected="bytes", got="EIO")
        return super().read(path, max_nbytes)


def test_a_storage_that_fails_is_no_damage(store):
    """Without a pointer any snapshot counts: one that can't be read now is not to be left out."""
    seal(store, retract=["a"], attachments={"d2t": [1, 2]})
    lose(store, layout.POINTER)
    failing = Failing(store.url)
    with pytest.raises(StorageError):
        seal(failing)
    assert failing.failed
    assert read_pointer(store) is None
    again = seal(failing).snapshot
    assert again.counts["retracted"] == 1
    assert [entry["name"] for entry in again.attachments] == ["d2t.npy"]
