"""When parts end, what commit() returns, holes, resuming, and the view of what is committed."""

import json
import logging
import time
from pathlib import Path

import numpy as np
import part_oracles as oracles
import pytest

from hsfmt import seal
from hsfmt.catalog import committed_parts, read_pointer, read_snapshot
from hsfmt.snapshot import parse_snapshot_ids
from hsfmt.storage import open_store

ONE = np.ones((1, 2, 8), np.float32)


def write(writer, *ids, n_tokens=1):
    for sample_id in ids:
        writer.write(sample_id, np.arange(n_tokens), np.ones((n_tokens, 2, 8), np.float32))


def parts_of(url):
    return sorted(
        [part.index.sample_id(row) for row in range(part.index.n_samples)] if part.index else []
        for part in oracles.loaded_parts(url)
    )


def served(url):
    store = open_store(url)
    snapshot, _ = read_snapshot(store, read_pointer(store).fingerprint)
    path = f"hsfmt/snapshots/{snapshot.fingerprint.rpartition(':')[2]}/ids.safetensors"
    ids = parse_snapshot_ids(store.read(path, snapshot.ids_nbytes), snapshot, path)
    return [ids[i] for i in range(len(ids))]


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_commit_ends_the_part_and_returns_what_became_durable(url, open_writer):
    writer = open_writer()
    write(writer, "a", "b")
    assert parts_of(url) == []
    assert writer.commit() == ["a", "b"]
    assert parts_of(url) == [["a", "b"]]
    assert writer.commit() == []
    write(writer, "c")
    assert writer.commit() == ["c"]
    writer.close()
    assert parts_of(url) == [["a", "b"], ["c"]]


def test_parts_end_by_size_and_commit_returns_all_of_them(url, open_writer):
    writer = open_writer(part_nbytes=3 * ONE.nbytes)
    write(writer, *"abcdefgh")
    assert writer.commit() == list("abcdefgh")
    assert parts_of(url) == [["a", "b", "c"], ["d", "e", "f"], ["g", "h"]]


def test_parts_end_by_age_while_the_producer_is_idle(url, open_writer):
    writer = open_writer(part_seconds=0.3)
    write(writer, "a", "b")
    wait_for(lambda: parts_of(url) == [["a", "b"]])
    write(writer, "c")
    wait_for(lambda: parts_of(url) == [["a", "b"], ["c"]])
    assert writer.commit() == ["a", "b", "c"]
    assert len(committed_parts(open_store(url))) == 2, "no empty part"
    writer.hole("d", "failed")
    wait_for(lambda: len(committed_parts(open_store(url))) == 3)


def test_age_counts_from_the_first_sample_of_each_part(url, open_writer):
    writer = open_writer(part_seconds=30)
    write(writer, "a")
    first = writer._parts._timer
    writer.commit()
    assert first.finished.is_set(), "the ended part's timer is cancelled"
    write(writer, "b")
    assert writer._parts._timer is not first
    writer.close()
    assert writer._parts._timer.finished.is_set()


def test_age_can_be_turned_off(open_writer):
    writer = open_writer(part_seconds=None)
    write(writer, "a")
    assert writer._parts._timer is None


def test_parts_end_before_their_tables_outgrow_the_caps(url, open_writer, monkeypatch):
    monkeypatch.setattr("hsfmt.writers.part_sequence._MAX_TABLE_NBYTES", 2000)
    writer = open_writer()
    for number in range(6):
        writer.write(f"{number}", [1], ONE, metadata={"x": "y" * 900})
    for number in range(10):
        writer.hole(f"h{number}", "a reason of some length")
    writer.close()
    assert parts_of(url) == [[]] * 10 + [["0", "1"], ["2", "3"], ["4", "5"]]


def test_close_commits_and_seals(url, open_writer):
    with open_writer(seal=True) as writer:
        write(writer, "b", "a")
    assert served(url) == ["b", "a"]
    with open_writer() as writer:
        write(writer, "c")
    assert served(url) == ["b", "a"], "not sealed"
    writer = open_writer()
    write(writer, "d")
    writer.close(seal=True)
    assert served(url) == ["b", "a", "c", "d"]
    writer = open_writer(seal=True)
    write(writer, "e")
    writer.close(seal=False)
    assert served(url) == ["b", "a", "c", "d"]


def test_closing_without_a_sample_warns(url, open_writer, caplog):
    with caplog.at_level(logging.WARNING, "hsfmt"):
        open_writer(seal=True).close()
    assert "nothing was committed" in caplog.text
    assert oracles.left_files(url) == oracles.empty_dataset_files()


def test_an_exception_inside_commits_nothing_of_the_open_part(url, open_writer):
    with pytest.raises(ZeroDivisionError), open_writer(chunk_tokens=2, shard_tokens=4) as writer:  # noqa: PT012 - the context manager is what is tested
        write(writer, "a", n_tokens=100)
        writer.hole("b", "failed")
        raise ZeroDivisionError
    assert oracles.left_files(url) == oracles.empty_dataset_files()


def test_an_exception_keeps_what_was_committed(url, open_writer):
    with pytest.raises(ZeroDivisionError), open_writer(part_nbytes=2 * ONE.nbytes) as writer:  # noqa: PT012 - the context manager is what is tested
        write(writer, "a", "b", "c")
        raise ZeroDivisionError
    assert parts_of(url) == [["a", "b"]]
    with open_writer() as writer:
        assert "c" not in writer.committed_ids()
        write(writer, "c")
    assert parts_of(url) == [["a", "b"], ["c"]]


def test_reopening_appends_and_changes_nothing(url, open_writer):
    for ids in ("ab", "cd", "e"):
        before = {path: (Path(url) / path).read_bytes() for path in oracles.left_files(url)}
        with open_writer() as writer:
            write(writer, *ids)
        assert {path: (Path(url) / path).read_bytes() for path in before} == before
    assert sorted(oracles.read_samples(url)) == list("abcde")


def test_default_order_is_the_order_of_writing_over_runs(url, open_writer):
    for ids in (["z", "y"], ["b", "a"]):
        with open_writer(seal=True) as writer:
            write(writer, *ids)
    assert served(url) == ["z", "y", "b", "a"]
    read = oracles.read_samples(url)
    assert [read[key].source_index for key in "zyba"] == [0, 1, 2, 3]


def test_given_places_order_the_snapshot(url, open_writer):
    with open_writer(seal=True) as writer:
        for sample_id, place in (("c", 7), ("b", 2), ("a", 2), ("d", np.int32(0))):
            writer.write(sample_id, [1], ONE, source_index=place)
        write(writer, "e")
    assert served(url) == ["d", "a", "b", "c", "e"], "ties by id; what has no place of its own comes after"


def test_holes_are_listed_until_a_sample_comes(url, open_writer):
    with open_writer(seal=True) as writer:
        writer.hole("a", "timeout")
        writer.hole("b", "first reason")
        writer.hole("b", "second reason")
        writer.hole("c", "NaN")
        write(writer, "d", "c")
        assert writer.commit() == ["d", "c"]
        assert "a" not in writer.committed_ids()
    (part,) = oracles.loaded_parts(url)
    assert part.manifest.holes == {"a": "timeout", "b": "second reason"}
    store = open_store(url)
    assert read_snapshot(store, read_pointer(store).fingerprint)[0].counts["holes"] == 2
    with open_writer(seal=True) as writer:
        write(writer, "a")
    snapshot, _ = read_snapshot(store, read_pointer(store).fingerprint)
    assert (snapshot.counts["holes"], snapshot.counts["samples"]) == (1, 3)


def test_a_part_of_nothing_but_holes_is_its_manifest_alone(url, open_writer):
    with open_writer(seal=True) as writer:
        writer.hole("a", "b" * 10_000)
    (part,) = oracles.loaded_parts(url)
    assert (part.index, part.manifest.columns, part.manifest.files) == (None, {}, ())
    assert part.manifest.holes == {"a": "b" * 10_000}
    files = [path for path in oracles.left_files(url) if part.manifest.part in path]
    assert files == [f"hsfmt/manifests/{part.manifest.part}.json"]
    assert served(url) == []


def test_committed_ids_is_a_set_of_what_is_durable(url, open_writer):
    writer, other = open_writer(), open_writer()
    ids = writer.committed_ids()
    assert (len(ids), list(ids), "a" in ids) == (0, [], False)
    assert len(other.committed_ids()) == 0
    write(writer, "a", "ü", "x" * 4096)
    assert "a" not in writer.committed_ids(), "accepted is not durable"
    writer.commit()
    ids = writer.committed_ids()
    assert len(ids) == 3
    assert set(ids) == {"a", "ü", "x" * 4096}
    assert "a" in ids
    assert all(odd not in ids for odd in ("A", "", 5, None, b"a", "\ud800"))
    write(other, "b", "a")
    other.commit()
    assert "b" not in ids, "a view of the last look"
    assert "b" in writer.committed_ids()
    ids = writer.committed_ids()
    assert len(ids) == 4
    assert sorted(ids) == ["a", "b", "x" * 4096, "ü"], "each once"
    assert ids & {"a", "q"} == {"a"}
    assert {"q", "a"} - ids == {"q"}
    assert ids == {"a", "b", "ü", "x" * 4096}
    assert ids >= {"a", "b"}
    writer.close()
    assert "a" in writer.committed_ids()


def test_committed_ids_lets_a_producer_skip(url, open_writer):
    wanted = [f"s{number}" for number in range(30)]
    for run in range(4):
        with open_writer(on_duplicate="error") as writer:
            done = writer.committed_ids()
            for sample_id in [each for each in wanted if each not in done][:10]:
                write(writer, sample_id)
        assert len(oracles.read_samples(url)) == min(30, 10 * (run + 1))


def test_no_deadlock_whatever_the_queue_and_the_columns(url, open_writer):
    extras = {f"e{number}": {"kind": "token", "dtype": "float32", "shape": [64]} for number in range(5)}
    with open_writer(queue_nbytes=1, extras=extras, threads=1) as writer:
        for number in range(4):
            rows = {name: np.full((700, 64), number, np.float32) for name in extras}
            writer.write(f"{number}", np.arange(700), np.full((700, 2, 8), number, np.float32), **rows)
    assert len(oracles.read_samples(url)) == 4


def test_many_small_parts_do_not_pile_up(url, open_writer):
    with open_writer(part_nbytes=1) as writer:
        most = 0
        for number in range(40):
            write(writer, f"{number}")
            most = max(most, len(writer._parts._waiting))
    assert most <= 3
    assert len(oracles.read_samples(url)) == 40


def test_the_producer_is_recorded_and_copied(url, open_writer):
    producer = {"engine": "e 1.0", "args": ["--x", 1], "nested": {"a": None}}
    with open_writer(producer=producer) as writer:
        producer["nested"]["a"] = 1.5
        write(writer, "a")
    (part,) = oracles.loaded_parts(url)
    assert part.manifest.producer["nested"] == {"a": None}
    assert part.manifest.producer["codec"] == "zstd"
    assert part.manifest.producer["library"].startswith("hsfmt ")
    assert {"host", "started", "engine", "args"} <= set(part.manifest.producer)


def test_the_arrays_metadata_is_standard(url, open_writer):
    with open_writer(dtype="bfloat16", chunk_tokens=4, shard_tokens=8) as writer:
        writer.write("a", np.arange(9), np.zeros((9, 2, 8), np.uint16))
    (part,) = oracles.loaded_parts(url)
    document = json.loads((Path(url) / f"parts/{part.manifest.part}/hidden_states/zarr.json").read_bytes())
    assert document["shape"] == [9, 2, 8]
    assert document["data_type"] == "bfloat16"
    assert document["dimension_names"] == ["token", "layer", "hidden"]
    assert document["chunk_grid"]["configuration"]["chunk_shape"] == [8, 2, 8]
    (sharding,) = document["codecs"]
    assert sharding["configuration"]["chunk_shape"] == [4, 1, 8]
    assert [codec["name"] for codec in sharding["configuration"]["codecs"]] == ["bytes", "blosc", "crc32c"]


def test_seal_returns_what_it_made(url, open_writer):
    with open_writer() as writer:
        write(writer, "a")
    first = seal(url)
    assert (first.changed, first.rounds, first.snapshot.n_samples) == (True, 1, 1)
    again = seal(url)
    assert (again.changed, again.snapshot.fingerprint) == (False, first.snapshot.fingerprint)


def test_leftovers_of_a_crashed_run_are_replaced_unread(url, open_writer):
    """A truncated shard, index and zarr.json of the same part name, as a kill leaves them where names are fixed."""
    open_writer().close()
    for path in (
        "parts/p/zarr.json",
        "parts/p/hidden_states/zarr.json",
        "parts/p/hidden_states/c/0/0/0",
        "parts/p/input_ids/c/0",
        "parts/p/loss_mask/c/0.0123456789abcdef.tmp",
        "hsfmt/index/p.safetensors",
    ):
        (Path(url) / path).parent.mkdir(parents=True, exist_ok=True)
        (Path(url) / path).write_bytes(b"half")
    with open_writer(part_names=lambda: "p", seal=True) as writer:
        assert list(writer.committed_ids()) == []
        write(writer, "a")
    assert list(oracles.read_samples(url)) == ["a"]
    assert served(url) == ["a"]
