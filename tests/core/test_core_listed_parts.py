"""A part as a snapshot lists it: rows that it has not, counts that differ, ids to retract that are nowhere."""

import dataclasses
from pathlib import Path

import pytest
from made_parts import HEADER, put_part

from hsfmt import sealing
from hsfmt.catalog import ensure_dataset, load_listed, load_ref
from hsfmt.digests import digest
from hsfmt.errors import CorruptionError, SampleNotFoundError
from hsfmt.sealing import seal
from hsfmt.storage.local import LocalStore


@pytest.fixture
def sealed(tmp_path):
    """A dataset of two parts of two samples each, and its snapshot."""
    store = LocalStore(tmp_path / "dataset")
    ensure_dataset(store, HEADER)
    put_part(store, "p1")
    put_part(store, "p2", ids=("c", "d"), lengths=(3, 4))
    return store, seal(store).snapshot


def changed(snapshot, name, at, value):
    array = getattr(snapshot, name).copy()
    array[at] = value
    return dataclasses.replace(snapshot, **{name: array})


def test_listed_parts_are_loaded(sealed):
    store, snapshot = sealed
    for number, name in enumerate(("p1", "p2")):
        loaded = load_listed(store, snapshot, number)
        assert loaded.manifest.part == name
        assert loaded.index.n_samples == 2


def test_a_row_that_the_part_has_not_is_refused(sealed):
    """The first one behind the end too."""
    store, snapshot = sealed
    of_second = [i for i in range(4) if snapshot.part[i] == 1]
    for row in (2, 3, 100):
        with pytest.raises(CorruptionError, match=f"the 2 samples of part p2.*row {row}"):
            load_listed(store, changed(snapshot, "row", of_second[1], row), 1)
        assert load_listed(store, changed(snapshot, "row", of_second[1], row), 0).manifest.part == "p1"


def test_a_length_that_is_not_the_row_s_is_refused(sealed):
    store, snapshot = sealed
    n_tokens = int(snapshot.n_tokens[0])
    with pytest.raises(CorruptionError, match="rows of other lengths"):
        load_listed(store, changed(snapshot, "n_tokens", 0, n_tokens + 1), int(snapshot.part[0]))


@pytest.mark.parametrize("kind", ["shadowed", "retracted"])
def test_rows_that_are_not_served_must_exist_too(sealed, kind):
    store, snapshot = sealed
    one = snapshot.part[:1].copy()
    for row, good in ((1, True), (2, False)):
        arrays = {f"{kind}_part": one * 0 + 1, f"{kind}_row": one * 0 + row}
        if kind == "shadowed":
            arrays["shadowed_same"] = one.astype("u1") * 0
        listed = dataclasses.replace(snapshot, **arrays)
        if good:
            assert load_listed(store, listed, 1).manifest.part == "p2"
        else:
            with pytest.raises(CorruptionError, match=r"the 2 samples of part p2.*row 2"):
                load_listed(store, listed, 1)


def test_a_part_with_samples_is_not_one_without(sealed):
    store, snapshot = sealed
    ref = snapshot.parts[0]
    with pytest.raises(CorruptionError, match=r"part without samples, as the snapshot says.*2 samples"):
        load_ref(store, dataclasses.replace(ref, index_digest=None, index_nbytes=0), HEADER)
    with pytest.raises(CorruptionError, match="as the snapshot says"):
        load_ref(store, dataclasses.replace(ref, index_digest=digest(b"other")), HEADER)
    with pytest.raises(CorruptionError, match="as the snapshot says"):
        load_ref(store, dataclasses.replace(ref, index_nbytes=ref.index_nbytes + 1), HEADER)


def test_retracting_an_id_that_is_nowhere_is_refused_and_changes_nothing(sealed):
    store, snapshot = sealed
    pointer = store.read("hsfmt/manifest.json", 1 << 16)
    with pytest.raises(SampleNotFoundError, match="2 unknown") as refused:
        seal(store, retract=["a", "typo", "another"])
    assert refused.value.problems[0].samples == ("another", "typo")
    assert store.read("hsfmt/manifest.json", 1 << 16) == pointer
    assert seal(store, retract=["a"]).snapshot.n_samples == snapshot.n_samples - 1


@pytest.mark.parametrize("row", [1, 2])
def test_a_seal_takes_no_retraction_of_a_row_that_is_not_there(sealed, monkeypatch, row):
    """Row 1 is the last of the part, row 2 the first behind it."""
    store, snapshot = sealed
    listed = dataclasses.replace(
        snapshot, retracted_part=snapshot.part[:1] * 0 + 1, retracted_row=snapshot.row[:1] * 0 + row
    )
    monkeypatch.setattr(sealing, "snapshots_to_keep", lambda _: [listed])
    if row == 1:
        sealed_again = seal(store).snapshot
        assert (sealed_again.n_samples, sealed_again.counts["retracted"]) == (3, 1)
    else:
        with pytest.raises(CorruptionError, match=r"2 rows of part p2.*a retracted row 2"):
            seal(store)


def test_a_seal_goes_on_beside_one_that_has_not_written_its_index(sealed, monkeypatch):
    """Its folder appears during this seal, and is empty: it will list after it has written."""
    store, _ = sealed
    rival = Path(store.url) / "hsfmt/snapshots" / ("0" * 32)
    point_at = sealing._point_at

    def then_rival(*args):
        rival.mkdir(exist_ok=True)
        return point_at(*args)

    monkeypatch.setattr(sealing, "_point_at", then_rival)
    put_part(store, "p3", ids=("e",), lengths=(2,))
    result = seal(store)
    assert rival.is_dir()
    assert (result.snapshot.n_samples, result.rounds) == (5, 1)
