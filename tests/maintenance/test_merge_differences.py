"""What a merge refuses as another meaning, by name; and what may differ from part to part, and comes along as it is."""

import os

import ml_dtypes
import numpy as np
import pytest
from repair_cases import contents

from hsfmt import DatasetWriter, seal
from hsfmt.catalog import committed_parts, load_manifest, read_header
from hsfmt.errors import CorruptionError, HeaderMismatchError, HsfmtError, UsageError
from hsfmt.maintenance.merge import merge
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store
from hsfmt.writers.extras import Extra

MEANING = {
    "layers": [1, 2], "hidden_size": 8, "final_norm": "pre", "dtype": "bfloat16", "model": "tiny",
    "tokenizer": {"name": "tiny", "digest": "xxh3_128:" + "0" * 32},
}  # fmt: skip
OTHER = {
    "layers": ("layers", {"layers": [1, 3]}),
    "more-layers": ("layers", {"layers": [1, 2, 3]}),
    "hidden-size": ("hidden_size", {"hidden_size": 16}),
    "norm": ("final_norm", {"final_norm": "post"}),
    "unknown-norm": ("final_norm", {"final_norm": "unknown"}),
    "dtype": ("dtype", {"dtype": "float16"}),
    "model": ("model", {"model": "other"}),
    "revision": ("model", {"model": {"name": "tiny", "revision": "2"}}),
    "weights": ("model", {"model": {"name": "tiny", "weights_digest": "xxh3_128:" + "1" * 32}}),
    "tokenizer": ("tokenizer", {"tokenizer": {"name": "tiny", "digest": "xxh3_128:" + "1" * 32}}),
    "chat-template": ("tokenizer", {"tokenizer": MEANING["tokenizer"] | {"chat_template_digest": "a:b"}}),
    "no-tokenizer": ("tokenizer", {"tokenizer": None}),
    "no-model": ("model", {"model": None}),
}


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def write(url, ids, part, *, value=1, holes=(), extra=None, **settings):
    meaning = MEANING | {"part_names": lambda: part, "codec": "none"} | settings
    values = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[meaning["dtype"]]
    with DatasetWriter(url, **meaning) as writer:
        for sample_id in ids:
            states = np.full((3, len(meaning["layers"]), meaning["hidden_size"]), value, values)
            writer.write(sample_id, np.arange(3), states, **(extra or {}))
        for sample_id in holes:
            writer.hole(sample_id, "the engine gave nothing")


def check(url, ids):
    assert [str(each) for each in verify(str(url), level="full").errors] == []
    assert contents(url).keys() == set(ids)


@pytest.mark.parametrize(("member", "settings"), OTHER.values(), ids=OTHER)
def test_another_meaning_is_refused_by_name(tmp_path, member, settings):
    write(tmp_path / "a", ["x"], "p-a")
    write(tmp_path / "b", ["y"], "p-b", **settings)
    for first, second in (("a", "b"), ("b", "a")):
        with pytest.raises(HeaderMismatchError) as error:
            merge(tmp_path / "d", [tmp_path / first, tmp_path / second], how="move")
        # Where a model is not said, the headers differ and nothing else does.
        assert member in str(error.value) or "the very same header" in str(error.value)
        assert str(tmp_path / second) in str(error.value)
        assert not (tmp_path / "d").exists()
    with pytest.raises(HeaderMismatchError):
        merge(tmp_path / "a", [tmp_path / "b"], how="move")
    check(tmp_path / "a", ["x"])
    check(tmp_path / "b", ["y"])


def test_all_members_that_differ_are_named_at_once(tmp_path):
    write(tmp_path / "a", ["x"], "p-a")
    write(tmp_path / "b", ["y"], "p-b", layers=[3], final_norm="post", model="other")
    with pytest.raises(HeaderMismatchError) as error:
        merge(tmp_path / "d", [tmp_path / "a", tmp_path / "b"])
    assert len(error.value.problems) == 3


def test_codec_chunks_extras_and_producer_come_along_as_they_are(tmp_path):
    """They are of a part, not of the meaning."""
    producers = {name: {"engine": name, "host": f"host-{name}"} for name in "abc"}
    write(tmp_path / "a", ["x"], "p-a", codec="none", producer=producers["a"])
    write(tmp_path / "b", ["y"], "p-b", codec="zstd", chunk_tokens=2, shard_tokens=2, producer=producers["b"])
    extra = {"extras": {"score": Extra("sample", "float64")}, "extra": {"score": 0.5}}
    write(tmp_path / "c", ["z"], "p-c", producer=producers["c"], **extra)
    before = {
        name: (tmp_path / name[-1] / f"hsfmt/manifests/{name}.json").read_bytes() for name in ("p-a", "p-b", "p-c")
    }
    merge(tmp_path / "d", [tmp_path / name for name in "cab"])
    store = open_store(tmp_path / "d")
    for name, data in before.items():
        assert (tmp_path / f"d/hsfmt/manifests/{name}.json").read_bytes() == data
        producer = load_manifest(store, name, read_header(store)).producer
        assert {key: producer[key] for key in ("engine", "host")} == producers[name[-1]]
    check(tmp_path / "d", ["x", "y", "z"])


def test_the_order_is_that_of_the_samples_not_of_the_sources(tmp_path):
    for name, rows in {"a": (0, 3), "b": (1, 4), "c": (2, 5)}.items():
        with DatasetWriter(
            tmp_path / name, **MEANING, codec="none", part_names=lambda name=name: f"p-{name}"
        ) as writer:
            for row in rows:
                states = np.full((3, 2, 8), row, ml_dtypes.bfloat16)
                writer.write(f"s-{9 - row}", np.arange(3), states, source_index=row)
    orders = []
    for number, names in enumerate(("abc", "cba", "bac")):
        report = merge(tmp_path / f"d{number}", [tmp_path / name for name in names])
        reader = SampleReader(tmp_path / f"d{number}")
        orders.append([reader.read(i).sample_id for i in range(len(reader))])
        reader.close()
        assert report.counts["samples"] == 6
    assert orders == [[f"s-{9 - row}" for row in range(6)]] * 3


def test_a_hole_gives_way_to_a_sample_and_no_sample_to_a_hole(tmp_path):
    write(tmp_path / "a", ["x"], "p-a", holes=["y", "z"])
    write(tmp_path / "b", ["y"], "p-b", holes=["x", "z"])
    report = merge(tmp_path / "d", [tmp_path / "a", tmp_path / "b"])
    assert (report.counts["samples"], report.counts["holes"]) == (2, 1)
    check(tmp_path / "d", ["x", "y"])


def test_what_one_retracts_stays_out_though_another_serves_it(tmp_path):
    write(tmp_path / "a", ["x", "y"], "p-a")
    write(tmp_path / "b", ["x", "z"], "p-b", value=2)
    seal(tmp_path / "a", retract=["x"])
    found = set()
    for number, names in enumerate(("ab", "ba")):
        report = merge(tmp_path / f"d{number}", [tmp_path / name for name in names])
        assert report.retracted == ("x",)
        check(tmp_path / f"d{number}", ["y", "z"])
        found.add(report.fingerprint)
    assert len(found) == 1
    write(tmp_path / "c", ["x"], "p-c")
    merge(tmp_path / "d0", [tmp_path / "c"])
    check(tmp_path / "d0", ["y", "z"])


def test_same_id_same_content_is_served_once_and_other_content_is_refused(tmp_path):
    write(tmp_path / "a", ["x", "y"], "p-a")
    write(tmp_path / "b", ["x"], "p-b", codec="zstd", chunk_tokens=2)
    report = merge(tmp_path / "d", [tmp_path / "a", tmp_path / "b"])
    assert (report.same, report.conflicts) == (1, ())
    check(tmp_path / "d", ["x", "y"])
    write(tmp_path / "c", ["x"], "p-0", value=3)
    want = contents(tmp_path / "d")
    with pytest.raises(UsageError) as error:
        merge(tmp_path / "d", [tmp_path / "c"])
    assert error.value.problems[0].samples == ("x",)
    assert contents(tmp_path / "d") == want
    assert committed_parts(open_store(tmp_path / "d")) == ["p-a", "p-b"]


def test_sources_that_were_never_sealed_or_are_newer_than_their_seal(tmp_path):
    write(tmp_path / "a", ["x"], "p-a", seal=False)
    write(tmp_path / "b", ["y"], "p-b")
    write(tmp_path / "b", ["z"], "p-c", seal=False)
    report = merge(tmp_path / "d", [tmp_path / "a", tmp_path / "b"])
    assert report.newer == {str(tmp_path / "b"): ("p-c",)}
    check(tmp_path / "d", ["x", "y", "z"])


def test_sources_with_nothing_in_them(tmp_path):
    write(tmp_path / "a", [], "p-a")
    write(tmp_path / "b", ["x"], "p-b")
    merge(tmp_path / "d", [tmp_path / "a", tmp_path / "b"])
    check(tmp_path / "d", ["x"])
    (tmp_path / "nothing").mkdir()
    for missing in (tmp_path / "nothing", tmp_path / "none"):
        with pytest.raises(HsfmtError):
            merge(tmp_path / "d", [missing])
    check(tmp_path / "d", ["x"])


def test_a_part_that_only_its_snapshot_knows_any_more_is_not_passed_over(tmp_path):
    write(tmp_path / "a", ["x"], "p-a")
    write(tmp_path / "a", ["y"], "p-b")
    (tmp_path / "a/hsfmt/manifests/p-b.json").unlink()
    with pytest.raises(CorruptionError, match="p-b"):
        merge(tmp_path / "d", [tmp_path / "a"])
    assert not (tmp_path / "d").exists()
