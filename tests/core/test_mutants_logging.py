"""What a seal warns of goes to the logger that programs listen to."""

from pathlib import Path

import pytest
from made_parts import HEADER, put_part

from hsfmt import layout
from hsfmt.catalog import ensure_dataset
from hsfmt.sealing import seal
from hsfmt.storage import open_store


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "dataset")
    ensure_dataset(store, HEADER)
    put_part(store, "p1", ids=("a", "b"))
    put_part(store, "p2", ids=("c", "d", "e"), lengths=(5, 6, 7))
    return store


def test_every_warning_of_a_seal_goes_to_one_logger(store, caplog):
    seal(store, retract=["a"])
    put_part(store, "p3", ids=("c",), lengths=(5,), content=[bytes(16)])
    for path in (layout.manifest_path("p1"), layout.index_path("p1")):
        (Path(store.url) / path).unlink()
    seal(store, drop_missing=True)
    said = {record.name: record.getMessage() for record in caplog.records}
    assert set(said) == {"hsfmt"}
    for text in ("parts left out", "1 retracted sample(s) are not known", "different content for 1 id(s)"):
        assert text in caplog.text
    assert {record.levelname for record in caplog.records} == {"WARNING"}
