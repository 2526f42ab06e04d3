"""As many holes as anyone records: parts end long before their manifests hold more values than readers take."""

import re

import pytest

from hsfmt import DatasetWriter, canonical
from hsfmt.catalog import committed_parts, load_manifest, read_header
from hsfmt.errors import FormatError
from hsfmt.storage.local import LocalStore

SETTINGS = {"layers": [1], "hidden_size": 8, "final_norm": "pre"}


PRODUCER = {"host": "h"}


def add_holes(writer):
    for number in range(1000):
        writer.hole(f"id-{number}", "gone")


def test_parts_of_holes_end_before_readers_refuse_them(tmp_path):
    """The shortest holes there are, of which most fit into a part by its size."""
    ids = [f"{number:x}" for number in range(140_000)]
    with DatasetWriter(tmp_path / "d", **SETTINGS, seal=False) as writer:
        for sample_id in ids:
            writer.hole(sample_id, "x")
    store = LocalStore(tmp_path / "d")
    manifests = [load_manifest(store, part, read_header(store)) for part in committed_parts(store)]
    assert len(manifests) == 9
    assert {sample_id for manifest in manifests for sample_id in manifest.holes} == set(ids)
    for manifest in manifests:
        data = manifest.to_bytes()
        assert data.count(b",") + data.count(b"{") + data.count(b"[") < canonical.MAX_VALUES // 2


@pytest.mark.parametrize("spare", [0, -1])
def test_a_manifest_of_more_values_than_readers_take_is_not_committed(tmp_path, monkeypatch, spare):
    """At the cap it is committed and read, one value less and it is not: an error tells, and nothing counts as done."""
    with DatasetWriter(tmp_path / "measured", **SETTINGS, seal=False, producer=PRODUCER) as writer:
        add_holes(writer)
    (path,) = (tmp_path / "measured/hsfmt/manifests").iterdir()
    outside = re.sub(r'"[^"]*"', "", path.read_text())
    cap = sum(map(outside.count, ",[{")) + spare
    monkeypatch.setattr(canonical, "MAX_VALUES", cap)
    writer = DatasetWriter(tmp_path / "d", **SETTINGS, seal=False, producer=PRODUCER)
    add_holes(writer)
    if spare:
        with pytest.raises(FormatError, match=f"at most {cap} values"):
            writer.close()
    else:
        writer.close()
    store = LocalStore(tmp_path / "d")
    parts = committed_parts(store)
    assert len(parts) == (0 if spare else 1)
    assert sum(len(load_manifest(store, part, read_header(store)).holes) for part in parts) == (0 if spare else 1000)
