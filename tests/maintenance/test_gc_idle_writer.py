"""A writer that has not touched its part for longer than `--older-than` may lose it, and then says so."""

import inspect
import os
import threading
from datetime import timedelta

import pytest
from gc_histories import open_writer, write_sample
from gc_merge_kills import write
from repair_cases import contents
from test_gc_races import At, all_is_old, steps

from hsfmt import DatasetWriter
from hsfmt.catalog import committed_parts
from hsfmt.errors import HsfmtError
from hsfmt.maintenance import collect as collecting
from hsfmt.maintenance.collect import collect
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def idle_writer(url):
    """Return a writer whose open part has a whole shard, an open one, and rows in memory."""
    writer = open_writer(url, part_names=lambda: "p-idle", shard_tokens=4, chunk_tokens=2)
    for sample_id in ("x", "y", "z"):
        write_sample(writer, sample_id, 1)
    wait_for_threads(writer)
    return writer


def wait_for_threads(writer):
    """Wait until all whole chunks are on the disk."""
    done = threading.Event()
    writer._parts._open._output.submit(lambda: None, done.set)
    done.wait()


def commit(writer):
    """Return whether the samples are durable; what is not must be said."""
    try:
        assert set(writer.commit()) == {"x", "y", "z"}
    except HsfmtError:
        writer.abort()
        return False
    writer.close()
    return True


def check(url, durable):
    assert [str(each) for each in verify(str(url), level="full").errors] == []
    assert contents(url, "live").keys() == {"a", *(("x", "y", "z") if durable else ())}
    assert ("p-idle" in committed_parts(open_store(url))) == durable


def collect_old(url):
    return collect(url, older_than=timedelta(days=7), keep_snapshots=1)


def test_a_part_that_was_idle_for_too_long_is_refused_at_the_commit(monkeypatch, tmp_path):
    url = tmp_path / "d"
    write(url, ["a"], "p-one")
    writer = idle_writer(url)
    all_is_old(monkeypatch, url)
    assert "p-idle" in {group.part for group in collect_old(url).removed}
    assert not commit(writer)
    check(url, durable=False)
    with open_writer(url, part_names=lambda: "p-again") as again:
        write_sample(again, "x", 1)
    assert contents(url, "live").keys() == {"a", "x"}


def test_a_part_that_was_touched_since_is_kept(monkeypatch, tmp_path):
    url = tmp_path / "d"
    write(url, ["a"], "p-one")
    writer = idle_writer(url)
    all_is_old(monkeypatch, url)
    for i in range(4):
        write_sample(writer, f"more-{i}", 1)
    wait_for_threads(writer)
    assert {group.part for group in collect_old(url).young} >= {"p-idle"}
    assert len(writer.commit()) == 7
    writer.close()
    assert [str(each) for each in verify(str(url), level="full").errors] == []


def test_by_default_no_part_stays_open_for_as_long_as_a_collection_waits():
    seconds = inspect.signature(DatasetWriter).parameters["part_seconds"].default
    assert timedelta(seconds=seconds) * 10 < collecting._LEAST


def rounds(monkeypatch, tmp_path, work, action, step):
    """Return how often the samples became durable and how often not, with the action at each call of the work."""
    done = {True: 0, False: 0}
    k = 1
    while True:
        url = tmp_path / f"round-{k}"
        write(url, ["a"], "p-one")
        writer = idle_writer(url)
        outcome = []
        with monkeypatch.context() as patch:
            all_is_old(patch, url)
            acts = {"commit": lambda w=writer, o=outcome: o.append(commit(w)), "collect": lambda u=url: collect_old(u)}
            at = At(patch, k, acts[action])
            acts[work]()
        if not at.ran:
            writer.abort()
            return k - 1, done
        (durable,) = outcome
        check(url, durable)
        done[durable] += 1
        k += step


@steps(3)
def test_a_collection_at_every_call_of_a_commit_takes_all_or_nothing(monkeypatch, tmp_path, step):
    n, done = rounds(monkeypatch, tmp_path, "commit", "collect", step)
    assert n >= 15
    # Its first act is to finish the open shard, which is seen.
    assert done[True] >= 5


@steps(2)
def test_a_commit_at_every_call_of_a_collection_takes_all_or_nothing(monkeypatch, tmp_path, step):
    n, done = rounds(monkeypatch, tmp_path, "collect", "commit", step)
    assert n >= 30
    assert done[True] >= 5
    assert done[False] >= 5
