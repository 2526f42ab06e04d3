"""Reading a remote dataset ahead of its order: how many requests are in flight together, and what is held.

The server answers only once as many requests are waiting as should be in flight: else nothing would go on.
"""

import itertools
import os
import shutil
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader
from written import RemoteLikeStore, flip_bit, write_dataset

from hsfmt import HiddenStateDataset
from hsfmt.errors import CorruptionError
from hsfmt.readers.order import BatchOrder
from hsfmt.readers.packing import PackingCollator
from hsfmt.readers.prefetch import Prefetcher
from hsfmt.readers.sample_reader import SampleReader
from hsfmt.storage import arrivals

N_SAMPLES, N_TOKENS, HIDDEN = 64, 8, 64
STATES = "/hidden_states/c/"
DOCUMENTS = "/hsfmt/(manifests|index)/"
ONE_CLIENT = pytest.mark.parametrize("remote", ["obstore"], indirect=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Samples of one chunk each, so that a batch of one is one request once its part is known."""
    path = tmp_path_factory.mktemp("written") / "dataset"
    lengths = (N_TOKENS,) * N_SAMPLES
    grid = {"layers": (1,), "hidden": HIDDEN, "chunk_tokens": N_TOKENS, "shard_tokens": N_SAMPLES * N_TOKENS}
    return write_dataset(path, lengths, codec="none", parts=2, **grid)


@pytest.fixture(scope="module")
def in_s3(written, s3_server, make_bucket):
    bucket = make_bucket()
    s3_server.upload(written.path, f"s3://{bucket}/dataset")
    return f"s3://{bucket}/dataset"


@pytest.fixture(params=["obstore", "fsspec"])
def remote(request, in_s3, s3_server, s3_faults, monkeypatch):
    """Open the dataset, through the proxy, with what is small of it read already."""
    monkeypatch.setenv("HSFMT_REMOTE", request.param)

    def opened(**options):
        dataset = HiddenStateDataset(in_s3, storage_options=s3_server.options(endpoint=s3_faults.url), **options)
        dataset.__getitems__(range(N_SAMPLES))  # from now on the ids and masks are at hand
        s3_faults.reset()
        return dataset

    return opened


def n_bytes(dataset, n_batches):
    return n_batches * N_TOKENS * dataset._token_nbytes


def until(condition):
    deadline = time.monotonic() + 300
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


@contextmanager
def no_more_in_flight_than(n, proxy):
    """What the block begins makes just so many requests, while none of them is answered."""
    proxy.expect_groups(1 << 30)
    yield
    until(lambda: proxy.in_flight == n)
    time.sleep(0.05)
    assert proxy.in_flight == n
    proxy.reset()


def same(written, number, states):
    wanted = written.content[written.ids[number]].states
    return states.view(torch.int16).numpy().view("u2").tobytes() == wanted.tobytes()


def ahead_by(remote, n_batches):
    """A dataset that reads so many batches of one sample ahead."""
    dataset = remote()
    return remote(ahead_nbytes=n_bytes(dataset, n_batches))


def test_a_loader_without_workers(remote, written, s3_faults):
    """63 batches in 7 round trips: each time the one that is asked for, and 8 that follow."""
    dataset = ahead_by(remote, 8)
    order = BatchOrder(dataset, n_samples=1, seed=1, samples=range(63))
    numbers = [number for (number,) in list(order.batches)]
    s3_faults.expect_groups(*[9] * 7, match=STATES)
    for number, (item,) in zip(numbers, DataLoader(dataset, batch_sampler=order, collate_fn=list), strict=True):
        assert same(written, number, item["hidden_states"])
        assert dataset._ahead.held_nbytes <= dataset._ahead.max_nbytes
    assert s3_faults.groups_left == 0
    assert s3_faults.count() == 63


def test_packed_batches_of_a_loader(remote, written, s3_faults):
    """The same, where the collator is the loader's dataset."""
    collator = packed(remote())
    collator = packed(remote(ahead_nbytes=8 * collator._nbytes([0])))
    order = BatchOrder(collator.dataset, n_samples=1, seed=1, samples=range(63))
    numbers = [number for (number,) in list(order.batches)]
    s3_faults.expect_groups(*[9] * 7, match=STATES)
    loader = DataLoader(collator, sampler=order, batch_size=None)
    assert len(loader) == 63
    for number, batch in zip(numbers, loader, strict=True):
        assert same(written, number, batch["hidden_states"][0])
    assert s3_faults.groups_left == 0


@ONE_CLIENT
def test_none_is_read_ahead_where_nothing_may_be(remote, s3_faults):
    dataset = remote(ahead_nbytes=0)
    order = BatchOrder(dataset, n_samples=1)
    read = []
    with no_more_in_flight_than(1, s3_faults):
        loader = DataLoader(dataset, batch_sampler=order, collate_fn=list)
        reading = threading.Thread(target=lambda: read.extend(loader))
        reading.start()
    reading.join()
    assert len(read) == N_SAMPLES


@ONE_CLIENT
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_share_what_may_be_ahead(remote, written, s3_faults, method):
    """60 batches in 6 round trips of both workers together: each reads 4 that will come to it beside its own."""
    dataset = ahead_by(remote, 8)
    order = BatchOrder(dataset, n_samples=1, seed=1, samples=range(60))
    numbers = [number for (number,) in list(order.batches)]
    loader = DataLoader(
        dataset, batch_sampler=order, collate_fn=list, num_workers=2, multiprocessing_context=method, timeout=300
    )
    s3_faults.expect_groups(*[10] * 6, match=STATES)
    for number, (item,) in zip(numbers, loader, strict=True):
        assert same(written, number, item["hidden_states"])
    assert s3_faults.groups_left == 0


@ONE_CLIENT
def test_the_parts_that_come_next_are_loaded_ahead(tmp_path, remote, s3_server, make_bucket, s3_faults):
    """Manifest and index of 8 parts in one round trip, each once."""
    path = tmp_path / "dataset"
    write_dataset(path, (N_TOKENS,) * 16, layers=(1,), hidden=HIDDEN, chunk_tokens=N_TOKENS, parts=8)
    url = f"s3://{make_bucket()}/dataset"
    s3_server.upload(path, url)
    dataset = HiddenStateDataset(url, storage_options=s3_server.options(endpoint=s3_faults.url))
    order = BatchOrder(dataset, n_samples=1, shuffle=False)
    s3_faults.reset()
    s3_faults.expect_groups(16, match=DOCUMENTS)
    assert len(list(DataLoader(dataset, batch_sampler=order, collate_fn=list))) == 16
    assert s3_faults.groups_left == 0
    assert s3_faults.count(DOCUMENTS) == 16


@ONE_CLIENT
def test_leaving_early_and_going_on(remote, written, s3_faults):
    """The state says what was handed out, whatever was read ahead; what nobody wants any more is given up."""
    dataset = ahead_by(remote, 8)
    order = BatchOrder(dataset, n_samples=1, seed=1)
    numbers = [number for (number,) in list(order.batches)]
    loader = DataLoader(dataset, batch_sampler=order, collate_fn=list)
    for i, (item,) in enumerate(loader):
        assert same(written, numbers[i], item["hidden_states"])
        if i == 9:
            break
    state = order.state_dict(n_batches=10)
    resumed = BatchOrder(dataset, n_samples=1, seed=1)
    resumed.load_state_dict(state)
    rest = list(DataLoader(dataset, batch_sampler=resumed, collate_fn=list))
    assert len(rest) == N_SAMPLES - 10
    for number, (item,) in zip(numbers[10:], rest, strict=True):
        assert same(written, number, item["hidden_states"])
    dataset.close()
    until(lambda: dataset._ahead.held_nbytes == 0)


@pytest.fixture
def damaged(tmp_path, written, s3_server, make_bucket):
    """Options to open a copy of which sample 5 is damaged."""
    path = tmp_path / "damaged"
    shutil.copytree(written.path, path)
    reader = SampleReader(path)
    part, row = reader.locate(5)
    offset = int(part.index.chunks["hidden_states"][row][0])
    flip_bit(path / f"parts/{part.name}/hidden_states/c/0/0/0", offset + 3)
    url = f"s3://{make_bucket()}/dataset"
    s3_server.upload(path, url)
    return {"url": url, "storage_options": s3_server.options()}


def test_a_damaged_sample_is_named_at_its_turn(damaged):
    """After those before it, though it was read before they were asked for."""
    dataset = HiddenStateDataset(**damaged)
    order = BatchOrder(dataset, n_samples=1, shuffle=False)
    loader = iter(DataLoader(dataset, batch_sampler=order, collate_fn=list))
    assert [item["sample_id"] for _ in range(5) for item in next(loader)] == [f"id-{n:03}" for n in range(5)]
    with pytest.raises(CorruptionError) as caught:
        next(loader)
    assert caught.value.problems[0].samples == ("id-005",)


def test_closing_gives_up_what_a_storage_does_not_answer(remote, s3_faults, monkeypatch):
    monkeypatch.setenv("HSFMT_TIMEOUT_SECONDS", "1000")
    dataset = remote()
    prefetcher = Prefetcher(packed(dataset), BatchOrder(dataset, n_samples=1))
    s3_faults.expect_groups(1000, match=STATES)
    batches = iter(prefetcher)
    until(lambda: s3_faults.in_flight == 32)
    closing = threading.Thread(target=batches.close, daemon=True)
    closing.start()
    closing.join(300)
    assert not closing.is_alive()
    until(lambda: arrivals.held_nbytes() == 0)
    s3_faults.reset()
    assert dataset[1]["sample_id"] == "id-001"


def packed(dataset):
    return PackingCollator(dataset, N_TOKENS, view="raw")


def test_a_prefetcher_has_as_many_readers_as_small_batches_need(remote, written, s3_faults):
    """64 batches in 2 round trips; what is on its way is counted, and no more batches are held than it says."""
    dataset = remote()
    collator = packed(dataset)
    order = BatchOrder(dataset, n_samples=1, seed=1)
    numbers = [number for (number,) in list(order.batches)]
    prefetcher = Prefetcher(collator, order)
    places = set()
    s3_faults.expect_groups(32, 32, match=STATES)
    for number, batch in zip(numbers, prefetcher, strict=True):
        assert same(written, number, batch["hidden_states"][0])
        places.add(batch["hidden_states"].data_ptr())
    assert s3_faults.groups_left == 0
    assert len(places) <= 64 + 2


def test_what_a_prefetcher_holds_is_bounded(remote, written, s3_faults):
    """Batches by max_nbytes; what is on its way is what they need, and no more."""
    dataset = remote()
    collator = packed(dataset)
    nbytes = collator.allocate()["hidden_states"].untyped_storage().nbytes()
    prefetcher = Prefetcher(collator, BatchOrder(dataset, n_samples=1, seed=1), max_nbytes=10 * nbytes)
    with no_more_in_flight_than(8, s3_faults):
        batches = iter(prefetcher)
        until(lambda: s3_faults.in_flight == 8)
        assert arrivals.held_nbytes() == 8 * N_TOKENS * HIDDEN * 2
    places, held = set(), []
    for batch in batches:
        places.add(batch["hidden_states"].data_ptr())
        held.append(arrivals.held_nbytes())
    assert len(places) <= 10
    assert max(held) <= 8 * N_TOKENS * HIDDEN * 2
    until(lambda: arrivals.held_nbytes() == 0)


@ONE_CLIENT
@pytest.mark.parametrize("n_readers", [1, 4])
def test_what_was_said_holds(remote, s3_faults, n_readers):
    dataset = remote()
    prefetcher = Prefetcher(packed(dataset), BatchOrder(dataset, n_samples=1), depth=4, n_readers=n_readers)
    with no_more_in_flight_than(n_readers, s3_faults):
        batches = iter(prefetcher)
    assert len(list(batches)) == N_SAMPLES


class Large:
    """A collator over a remote dataset, of batches of so many bytes; None: nobody knows."""

    def __init__(self, tmp_path, nbytes):
        self.dataset = SimpleNamespace(reader=SimpleNamespace(store=RemoteLikeStore(tmp_path)))
        if nbytes is not None:
            self.allocate = lambda: {"states": torch.empty(nbytes, dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("nbytes", "options", "expected"),
    [
        (1 << 10, {}, (64, 32)),
        (4 << 20, {}, (32, 16)),
        (32 << 20, {}, (4, 2)),
        (100 << 20, {}, (3, 2)),
        (500 << 20, {}, (2, 2)),
        (None, {}, (2, 2)),
        (4 << 20, {"max_nbytes": 40 << 20}, (8, 16)),
        (100 << 20, {"max_nbytes": 3 << 30}, (4, 2)),
        (4 << 20, {"depth": 3}, (3, 16)),
        (4 << 20, {"n_readers": 3}, (6, 3)),
        (None, {"n_readers": 5}, (5, 5)),
    ],
)
def test_depth_and_readers_of_a_remote_dataset(tmp_path, nbytes, options, expected):
    """64 MiB on their way, in at most 32 batches; all batches in 512 MiB, or four of them."""
    prefetcher = Prefetcher(Large(tmp_path, nbytes), [[0]], **options)
    assert (prefetcher._depth, prefetcher._n_readers) == expected


@pytest.mark.local
def test_a_local_dataset_is_read_as_before(written):
    dataset = HiddenStateDataset(written.url)
    prefetcher = Prefetcher(packed(dataset), BatchOrder(dataset, n_samples=1))
    assert (prefetcher._depth, prefetcher._n_readers) == (2, 1)
    assert dataset.n_tokens_ahead == 0
    assert all(type(batch) is list for batch in BatchOrder(dataset, n_samples=1))


def test_a_fork_in_the_midst(remote, written, s3_faults):
    """The child reads what it is asked for by itself; the parent's batches are still the parent's."""
    dataset = ahead_by(remote, 8)
    order = BatchOrder(dataset, n_samples=1, shuffle=False)
    batches = list(iter(order))
    dataset.__getitems__(batches[0])
    child = os.fork()
    if not child:
        good = False
        try:
            good = same(written, 1, dataset.__getitems__(batches[1])[0]["hidden_states"])
        finally:
            os._exit(0 if good else 1)
    ended = threading.Timer(300, lambda: os.kill(child, 9))
    ended.start()
    assert os.waitpid(child, 0)[1] == 0
    ended.cancel()
    for number, batch in itertools.islice(enumerate(batches), 1, None):
        assert same(written, number, dataset.__getitems__(batch)[0]["hidden_states"])
