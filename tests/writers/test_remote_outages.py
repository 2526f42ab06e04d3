"""S3 that goes away for longer than retries last, or lets nobody in any more, while a dataset is written."""

import time
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import ml_dtypes
import numpy as np
import pytest
from servers.fault_proxy import Fault

from hsfmt import DatasetWriter, HiddenStateDataset, seal
from hsfmt.catalog import committed_parts
from hsfmt.errors import StorageError
from hsfmt.maintenance.collect import collect
from hsfmt.readers.verification import verify
from hsfmt.storage import open_store
from hsfmt.writers.capturing.ask import Ask
from hsfmt.writers.capturing.assembler import Assembly
from hsfmt.writers.capturing.background import BackgroundWriter
from hsfmt.writers.capturing.counters import Counters
from hsfmt.writers.capturing.room import Room

HIDDEN = 2048
IDS = [f"id-{i}" for i in range(4)]
PATIENCE = 300
GONE = [("status", 503), ("status", 403), ("reset", 0)]


@dataclass
class From(Fault):
    """Strikes every request, of any method, from the `skip`-th on."""

    count: int | None = None

    def strikes(self, method, path):
        del method, path
        self.seen += 1
        struck = self.seen > self.skip
        self.struck += struck
        return struck


@contextmanager
def short_patience():
    """While S3 is away; else a busy machine would make an outage."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HSFMT_RETRY_SECONDS", "0.2")
        yield


def states_of(i):
    return np.full((1500, 2, HIDDEN), i, ml_dtypes.bfloat16)


def write_all(url, options, told):
    """Write IDS, objects of several requests among them; add to `told` what is said to be durable."""
    settings = {"layers": [1, 2], "hidden_size": HIDDEN, "final_norm": "pre", "codec": "none", "on_duplicate": "skip"}
    with DatasetWriter(url, storage_options=options, part_nbytes=20 << 20, threads=1, **settings) as writer:
        for i, name in enumerate(IDS):
            writer.write(name, np.arange(1500), states_of(i))
            if i % 2:
                told += writer.commit()


def check_outage(s3_server, proxy, url, fault):
    """Write while S3 goes away at a request; return what the writer said."""
    options, told = s3_server.options(), []
    store = open_store(url, options)
    proxy.reset()
    proxy.faults.append(fault)
    with short_patience(), pytest.raises(StorageError) as caught:
        write_all(url, s3_server.options(endpoint=proxy.url), told)
    assert fault.struck >= 1
    proxy.reset()
    found = []
    if committed_parts(store):
        seal(store)
        found = list(HiddenStateDataset(url, storage_options=options).sample_ids)
        assert verify(store, level="full").ok
    assert set(told) <= set(found), "what was called durable is"
    if store.size("zarr.json") is not None:
        collect(store, older_than=timedelta(0), force=True)
    assert store.unfinished_uploads() == []
    write_all(url, options, [])
    assert sorted(HiddenStateDataset(url, storage_options=options).sample_ids) == IDS
    assert verify(store, level="full").ok
    return str(caught.value)


def outages(s3_server, proxy, make_bucket, n, kinds):
    """Let S3 go away at `n` requests of a writer; return how many there were."""
    write_all(f"s3://{make_bucket()}/d", s3_server.options(endpoint=proxy.url), [])
    n_requests = len(proxy.requests)
    for number in range(n):
        kind, status = kinds[number % len(kinds)]
        url = f"s3://{make_bucket()}/d"
        # The last requests are those of the seal, whose number differs a little from run to run.
        fault = From(kind, skip=number * (n_requests - 6) // max(1, n - 1), status=status)
        said = check_outage(s3_server, proxy, url, fault)
        assert url in said
        assert ("expected to be let in" in said) == (status == 403), said
    return n_requests


@pytest.mark.slow
def test_a_writer_whose_s3_goes_away_says_so_and_commits_nothing_half(s3_server, make_bucket, s3_faults):
    assert outages(s3_server, s3_faults, make_bucket, 3, GONE) > 30


@pytest.mark.deep
@pytest.mark.parametrize("kind", GONE, ids=lambda kind: f"{kind[0]} {kind[1]}")
def test_wherever_s3_goes_away(s3_server, make_bucket, s3_faults, kind):
    assert outages(s3_server, s3_faults, make_bucket, 40, [kind]) > 30


class Gone:
    """Stands for an engine's request."""


def sample(i):
    made = Assembly(weakref.ref(Gone()), f"c-{i}", Ask(f"c-{i}"), np.arange(1500), state="accepted")
    made.pieces.append([states_of(i)])
    made.nbytes = states_of(i).nbytes
    return made


def wait_for(condition):
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("status", [503, 403])
def test_capturing_goes_on_when_s3_is_back(s3_server, bucket, s3_faults, status):
    """What an engine writes: samples of a part that fails are counted as lost, and those that wait are kept."""
    url, options = f"s3://{bucket}/d", s3_server.options(endpoint=s3_faults.url)

    def open_writer():
        return DatasetWriter(
            url, layers=[1, 2], hidden_size=HIDDEN, final_norm="pre", codec="none", seal=False, storage_options=options
        )

    room, counters = Room(1 << 30), Counters()
    writer = BackgroundWriter(open_writer, room, counters, retry_seconds=0.05)
    try:
        for i in range(2):
            writer.submit(sample(i))
        assert writer.flush(PATIENCE).n_durable == 2
        writer.submit(sample(2))
        wait_for(lambda: counters.tokens == 3 * 1500)
        fault = From("status", status=status)
        s3_faults.faults.append(fault)
        with short_patience():
            report = writer.flush(PATIENCE)
            assert not report.ok
            assert url in report.problem
            assert counters.lost == 1
            for i in range(2, 5):  # the one that was lost may come again
                assert not writer.is_taken(f"c-{i}")
                writer.submit(sample(i))
            wait_for(lambda: writer._stuck)
        s3_faults.reset()
        report = writer.flush(PATIENCE)
        wait_for(lambda: counters.durable == 5)
        assert counters.lost == 1
    finally:
        s3_faults.reset()
        writer.close(PATIENCE)
    store = open_store(url, s3_server.options())
    seal(store)
    dataset = HiddenStateDataset(url, storage_options=s3_server.options())
    assert sorted(dataset.sample_ids) == [f"c-{i}" for i in range(5)]
    assert verify(store, level="full").ok
