"""What was retracted stays so through collections, merges and repairs, though only an old snapshot tells of it."""

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from hsfmt import DatasetWriter, layout, seal
from hsfmt.catalog import read_pointer
from hsfmt.maintenance.collect import collect
from hsfmt.maintenance.merge import merge
from hsfmt.maintenance.repair import repair
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store

AT_ONCE = {"older_than": timedelta(0), "force": True}


def write(url, *ids):
    with DatasetWriter(
        url, layers=[1], hidden_size=2, final_norm="pre", dtype="float32", seal=False, threads=1, chunk_tokens=1
    ) as writer:
        for sample_id in ids:
            writer.write(sample_id, [1], np.full((1, 1, 2), ord(sample_id), np.float32))
    return url


def served(url):
    return sorted(SampleReader(url).sample_ids)


def put_back_an_old_pointer(url):
    """Retract a, and let the pointer name the snapshot before, as a seal may that is killed at the wrong moment."""
    seal(url)
    old = (Path(url) / layout.POINTER).read_bytes()
    seal(url, retract=["a"])
    (Path(url) / layout.POINTER).write_bytes(old)


def test_a_collection_keeps_the_snapshot_that_alone_retracts(tmp_path, caplog):
    url = write(str(tmp_path / "dataset"), *"abc")
    put_back_an_old_pointer(url)
    report = collect(url, keep_snapshots=1, **AT_ONCE)
    assert report.removed == ()
    assert "is kept until `hsfmt seal`: of what it retracts the current one lacks 1 sample(s)" in caplog.text
    seal(url)
    assert served(url) == ["b", "c"]
    assert collect(url, keep_snapshots=1, **AT_ONCE).removed
    write(url, "d")
    seal(url)
    assert served(url) == ["b", "c", "d"]


@pytest.mark.parametrize("how", ["copy", "move"])
def test_a_merge_takes_over_what_an_old_snapshot_retracts(tmp_path, how):
    url, other = write(str(tmp_path / "dataset"), *"xy"), write(str(tmp_path / "other"), *"abc")
    put_back_an_old_pointer(other)
    report = merge(url, [other], how=how)
    assert report.retracted == ("a",)
    assert served(url) == ["b", "c", "x", "y"]


def lose_retracted(url):
    """Retract a, damage its states, and repair: of a nothing is left."""
    seal(url)
    seal(url, retract=["a"])
    (shard,) = Path(url).glob("parts/*/hidden_states/c/0/0/0")
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(data)
    assert repair(url).lost
    assert collect(url, keep_snapshots=1, **AT_ONCE).removed
    assert len(list((Path(url) / "hsfmt/snapshots").glob("*/index.safetensors"))) == 1


@pytest.mark.parametrize("merged", [False, True])
def test_a_retracted_sample_that_was_lost_is_not_made_again(tmp_path, merged):
    """A producer that resumes retries holes: the sample is written, and retracted at once."""
    url = write(str(tmp_path / "dataset"), *"abc")
    lose_retracted(url)
    if merged:
        merge(str(tmp_path / "another"), [url], how="move")
        url = str(tmp_path / "another")
    write(url, "a", "d")
    sealed = seal(url)
    assert sealed.snapshot.counts["retracted"] == 1
    assert served(url) == ["b", "c", "d"]
    assert verify(url, level="full").ok
    assert read_pointer(open_store(url)).fingerprint == sealed.snapshot.fingerprint
