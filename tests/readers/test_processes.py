"""Every way a DataLoader can be run: start methods, workers, parent used first or not."""

import multiprocessing
import os
import pickle
import sys
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from written import assert_same

from hsfmt import HiddenStateDataset
from hsfmt.errors import CorruptionError
from hsfmt.readers import threads
from hsfmt.readers.sample_reader import ReadOptions, SampleReader

# Python 3.12 and later warn of any fork in a process with threads; that it works all the same is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")


def as_is(items):
    """Keep a batch as the list that it is."""
    return items


def check(items, written):
    assert [item["sample_id"] for item in items] == written.ids
    for item in items:
        wanted = written.content[item["sample_id"]]
        assert item["hidden_states"].view(torch.int16).numpy().tobytes() == wanted.states.tobytes()
        np.testing.assert_array_equal(item["input_ids"].numpy(), wanted.input_ids)


@pytest.mark.parametrize(
    ("method", "used_first", "snapshot"),
    [
        ("fork", True, None),
        ("spawn", False, None),
        ("forkserver", True, None),
        pytest.param("fork", True, "live", marks=pytest.mark.lists),
        pytest.param("spawn", True, "live", marks=pytest.mark.lists),
    ],
)
def test_loader_with_workers(write, method, used_first, snapshot):
    """Samples of all combinations, which test_loader_processes.py goes through."""
    written = write()
    dataset = HiddenStateDataset(written.url, snapshot=snapshot, n_threads=2)
    if used_first:
        check(list(dataset), written)
        assert dataset.index_of("id-003") == 3
    loader = DataLoader(
        dataset, batch_size=3, num_workers=2, collate_fn=as_is, multiprocessing_context=method, timeout=300
    )
    check([item for batch in loader for item in batch], written)
    check(list(dataset), written)


def test_loader_without_workers(write):
    written = write()
    loader = DataLoader(HiddenStateDataset(written.url), batch_size=4, collate_fn=as_is)
    check([item for batch in loader for item in batch], written)


def test_persistent_workers_over_epochs(write):
    written = write()
    loader = DataLoader(
        HiddenStateDataset(written.url), batch_size=None, num_workers=2, persistent_workers=True, timeout=300
    )
    for _ in range(3):
        check(list(loader), written)


def test_an_error_in_a_worker_names_the_sample(write):
    written = write([20] * 3, parts=1)
    shard = written.shards()[0]
    shard.write_bytes(bytes(shard.stat().st_size))
    loader = DataLoader(HiddenStateDataset(written.url), batch_size=1, num_workers=1, collate_fn=as_is, timeout=300)
    with pytest.raises(CorruptionError, match="id-000"):
        list(loader)


def test_pickling(write):
    written = write()
    dataset = HiddenStateDataset(written.url, layers=[1, 5], max_length=9, view="raw")
    dataset[0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.lengths.tolist() == dataset.lengths.tolist()
    assert copy.fingerprint == dataset.fingerprint
    for a, b in zip(copy, dataset, strict=True):
        assert torch.equal(a["hidden_states"], b["hidden_states"])


def test_fork_while_other_threads_read(write):
    """The child inherits locks as they are, threads not at all."""
    written = write(chunk_tokens=8)
    reader = SampleReader(written.url, options=ReadOptions(n_threads=2, part_cache_nbytes=1, chunk_cache_nbytes=1))
    stop = threading.Event()

    def keep_reading():
        while not stop.is_set():
            reader.read_many(range(10))

    readers = [threading.Thread(target=keep_reading) for _ in range(3)]
    for thread in readers:
        thread.start()
    try:
        for _ in range(8):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    for number, wanted in enumerate(written.content.values()):
                        assert_same(reader.read(number), wanted)
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        for thread in readers:
            thread.join()


class CountsThreads(torch.utils.data.Dataset):
    """Items are how many threads reading has started."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, number):
        before = threading.active_count()
        self.dataset[number]
        return threading.active_count() - before


@pytest.mark.local
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_decodes_in_one_thread(write, method, monkeypatch):
    # As on a machine with many cores; a spawned worker sees those that there are.
    monkeypatch.setattr(threads, "n_cores", lambda: 64)
    dataset = HiddenStateDataset(write([64] * 3).url)
    dataset[0]
    loader = DataLoader(CountsThreads(dataset), batch_size=None, num_workers=1, multiprocessing_context=method)
    assert list(loader) == [1, 0, 0]


class CountsRemoteThreads(CountsThreads):
    def __getitem__(self, number):
        return threads.default_threads(remote=True)


@pytest.mark.parametrize(("n_workers", "cores", "expected"), [(1, 12, 4), (2, 12, 4), (2, 7, 3), (2, 2, 1), (2, 1, 1)])
def test_workers_that_read_over_a_network_share_the_cores(n_workers, cores, expected, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(threads, "n_cores", lambda: cores)
    counts = CountsRemoteThreads([0] * n_workers)
    loader = DataLoader(counts, batch_size=None, num_workers=n_workers, multiprocessing_context="fork")
    assert list(loader) == [expected] * n_workers


def report_threads(reports):
    threads.n_cores = lambda: 64
    reports.put(threads.default_threads())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_rank_that_is_a_child_process_is_no_worker(method, monkeypatch):
    """As torch.multiprocessing.spawn starts them."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    context = multiprocessing.get_context(method)
    reports = context.Queue()
    rank = context.Process(target=report_threads, args=(reports,))
    rank.start()
    assert reports.get(timeout=300) == 4
    rank.join(300)


def test_two_datasets_share_the_threads(write):
    first, second = (HiddenStateDataset(write([64] * 3).url, n_threads=3) for _ in range(2))
    first[0]
    before = threading.active_count()
    second[0]
    first[1]
    assert threading.active_count() <= max(before, 3 + before - 1)
    assert threads._POOLS.get(3).n_started <= 3


def test_blosc_stays_off_the_main_thread(write, monkeypatch):
    """numcodecs decodes on the main thread with global state and threads of its own, which a fork breaks."""
    from hsfmt import codecs

    seen = set()
    decompress = codecs.blosc.decompress

    class Spy:
        def __getattr__(self, name):
            return getattr(blosc, name)

        def decompress(self, *args):
            seen.add(threading.current_thread() is threading.main_thread())
            return decompress(*args)

    blosc = codecs.blosc
    monkeypatch.setattr(codecs, "blosc", Spy())
    for n_threads in (1, 3):
        HiddenStateDataset(write([5]).url, n_threads=n_threads)[0]
    assert seen == {False}


def test_no_torch_below_the_dataset(run_python, repo_root, write):
    written = write()
    code = """
    import sys
    from hsfmt import HiddenStateDataset
    from hsfmt.readers.sample_reader import SampleReader
    reader = SampleReader(sys.argv[1])
    reader.read(3)
    dataset = HiddenStateDataset(sys.argv[1])
    assert dataset.lengths.sum() > 0 and dataset.index_of("id-003") == 3
    print([name for name in ("torch", "zarr") if name in sys.modules])
    """
    assert run_python("if 1:" + code, written.url, path=repo_root).strip() == "[]"
    assert "torch" in sys.modules
