"""Programs that read through DataLoaders, run by test_loader_*.py in processes of their own."""

import faulthandler
import hashlib
import itertools
import json
import multiprocessing
import os
import resource
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from hsfmt import HiddenStateDataset

TIMEOUT_SECONDS = 300
ALIVE = []  # until the interpreter goes


def as_is(items):
    return items


def say(value):
    """Tell the test."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def maps():
    return Path("/proc/self/maps").read_text()


def summary(item):
    """Id and digest of all that an item holds."""
    tensors = (item["hidden_states"].view(torch.uint8), item["input_ids"].view(torch.uint8), item["loss_mask"])
    return [item["sample_id"], hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()]


def load(dataset, **options):
    """A loader that is given up after some minutes."""
    return DataLoader(dataset, batch_size=3, collate_fn=as_is, timeout=TIMEOUT_SECONDS, **options)


def read_all(loader):
    return [summary(item) for batch in loader for item in batch]


def matrix(url, expected, method):
    """Read everything in every combination; those where the parent has never read come first."""
    wanted = json.loads(Path(expected).read_text())
    multiprocessing.set_forkserver_preload(["torch.utils.data", "hsfmt.readers.views"])
    combinations = [
        *itertools.product([False, True], [1, 4], [False, True]),
        (False, 0, False),
        (True, 0, False),
    ]
    combinations.sort(key=lambda combination: (combination[0], combination[1] == 0))
    for used_first, n_workers, persistent in combinations:
        name = f"{method}, used first: {used_first}, workers: {n_workers}, persistent: {persistent}"
        faulthandler.dump_traceback_later(TIMEOUT_SECONDS, exit=True)
        dataset = HiddenStateDataset(url, n_threads=2)
        if used_first:
            assert [summary(item) for item in dataset] == wanted
            assert dataset.index_of(wanted[3][0]) == 3
        if n_workers:
            loader = load(dataset, num_workers=n_workers, persistent_workers=persistent, multiprocessing_context=method)
        else:
            loader = DataLoader(dataset, batch_size=3, collate_fn=as_is)
        for _ in range(1 + persistent):
            assert read_all(loader) == wanted, name
        del loader
        faulthandler.cancel_dump_traceback_later()
        say(name)


def worker_ids(iterator):
    return [worker.pid for worker in iterator._workers]


def exit_with_workers(url):
    """End while persistent workers are alive and have read ahead."""
    iterator = iter(load(HiddenStateDataset(url), num_workers=2, persistent_workers=True))
    next(iterator)
    ALIVE.append(iterator)
    say(worker_ids(iterator))


def drop_iterators(url, expected):
    """Begin a few epochs and leave them."""
    for persistent in (False, True):
        loader = load(HiddenStateDataset(url), num_workers=2, persistent_workers=persistent)
        for n_taken in (0, 1, 2):
            iterator = iter(loader)
            for _ in range(n_taken):
                next(iterator)
            ids = worker_ids(iterator)
            del iterator
        assert read_all(loader) == json.loads(Path(expected).read_text())
    say(ids)


def wait_for_interrupt(url):
    """Read for ever."""
    loader = load(HiddenStateDataset(url), num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    say(worker_ids(iterator))
    while True:
        for batch in loader:
            assert batch
        time.sleep(0.01)


def few_descriptors(url, expected):
    """Read with 4 workers, a part a sample, and keep every batch."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    wanted = json.loads(Path(expected).read_text())
    dataset = HiddenStateDataset(url)
    loader = load(dataset, num_workers=4, persistent_workers=True)
    for _ in range(2):
        kept = list(loader)
        assert [summary(item) for batch in kept for item in batch] == wanted
        del kept
    assert [summary(item) for item in dataset] == wanted
    say(len(list(Path("/proc/self/fd").iterdir())))


def large_samples(url, expected):
    """Read samples with two workers; print the size of /dev/shm and of a sample."""
    loader = DataLoader(HiddenStateDataset(url), batch_size=2, num_workers=2, collate_fn=as_is, timeout=TIMEOUT_SECONDS)
    assert read_all(loader) == json.loads(Path(expected).read_text())
    shm = os.statvfs("/dev/shm")
    say([shm.f_frsize * shm.f_blocks, HiddenStateDataset(url)[0]["hidden_states"].nbytes])


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
