"""Programs that read remote datasets through DataLoaders, run by test_remote_loaders.py in processes of their own."""

import faulthandler
import json
import resource
import sys
from pathlib import Path

from loader_script import as_is, load, summary
from torch.utils.data import DataLoader, get_worker_info

from hsfmt import HiddenStateDataset
from hsfmt.readers.order import BatchOrder
from hsfmt.storage.clients import obstore_client

TIMEOUT_SECONDS = 900


def used_obstore(dataset):
    """Whether this process uses it, and whether one that it was forked from did."""
    return obstore_client._Use.here, obstore_client._Use.before_fork


class Telling(HiddenStateDataset):
    """Items say what read them."""

    def __getitems__(self, indices):
        items = super().__getitems__(indices)
        for item in items:
            item["used"] = used_obstore(self)
        return items


def workers(url, options, expected, method):
    """Read by workers: before the parent read anything, after, and once more with workers that stay."""
    faulthandler.dump_traceback_later(TIMEOUT_SECONDS, exit=True)
    with open(expected) as file:  # noqa: PTH123
        wanted = json.load(file)
    dataset = Telling(url, storage_options=json.loads(options))
    said = []
    for used_first in (False, True):
        if used_first:
            assert [summary(item) for item in dataset] == wanted
        loader = load(dataset, num_workers=2, persistent_workers=True, multiprocessing_context=method)
        for _ in range(2):
            items = [item for batch in loader for item in batch]
            assert [summary(item) for item in items] == wanted
        said.append(sorted({tuple(item["used"]) for item in items}))
        del loader
    assert [summary(item) for item in dataset] == wanted
    print(json.dumps(said))  # noqa: T201


def resident_nbytes():
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Weighing(HiddenStateDataset):
    """Items say what the process that read them takes by now."""

    def __getitems__(self, indices):
        items = super().__getitems__(indices)
        return [{"nbytes": item["hidden_states"].nbytes, "worker": get_worker_info().id, "rss": resident_nbytes()}
                | {"states": item["hidden_states"]} for item in items]  # fmt: skip


def epochs(url, options, n_epochs):
    """Read so many epochs by two workers; say what all processes take after each, and how many bytes were read."""
    faulthandler.dump_traceback_later(TIMEOUT_SECONDS, exit=True)
    dataset = Weighing(url, storage_options=json.loads(options), ahead_nbytes=4 << 20)
    order = BatchOrder(dataset, n_samples=1)
    loader = DataLoader(dataset, batch_sampler=order, collate_fn=as_is, num_workers=2, persistent_workers=True)
    said = []
    for epoch in range(int(n_epochs)):
        order.set_epoch(epoch)
        nbytes, workers = 0, {}
        for (item,) in loader:
            nbytes += item["nbytes"]
            workers[item["worker"]] = item["rss"]
        said.append({"nbytes": nbytes, "parent": resident_nbytes(), "workers": sum(workers.values())})
    print(json.dumps(said))  # noqa: T201


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
