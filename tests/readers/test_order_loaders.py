"""BatchOrder in torch's own DataLoader, and with torch.distributed."""

import itertools
import socket

import pytest
import torch
import torch.multiprocessing
from order_stub import Stub
from torch.utils.data import DataLoader, Dataset

from hsfmt import HiddenStateDataset
from hsfmt.errors import UsageError
from hsfmt.readers.order import BatchOrder
from hsfmt.readers.packing import PackingCollator
from hsfmt.readers.shuffle import Locality

# Python 3.12 and later warn of any fork in a process with threads; the tests of processes show that it works.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")

LENGTHS = [30, 7, 8, 9, 16, 33, 3, 40, 5, 31]


def as_is(items):
    return items


class Batches(Dataset):
    """A dataset whose items are batches."""

    def __getitem__(self, numbers):
        return torch.tensor(numbers)


def loader(order, n_workers, **options):
    if n_workers:
        options |= {"num_workers": n_workers, "timeout": 60, "multiprocessing_context": "fork"}
    return DataLoader(range(10), batch_sampler=order, collate_fn=as_is, **options)


@pytest.mark.parametrize(("n_workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_epochs_of_a_loader(n_workers, persistent):
    order = BatchOrder(Stub(LENGTHS), n_tokens=40)
    batches = loader(order, n_workers, persistent_workers=persistent)
    for epoch in range(3):
        assert list(batches) == list(order.batches_of(epoch))
        assert order.epoch == epoch
        assert len(batches) == len(order.batches)


@pytest.mark.parametrize("n_workers", [0, 2])
def test_resume_of_a_loader_that_reads_ahead(n_workers):
    order = BatchOrder(Stub(LENGTHS), n_samples=1, rank=0, world_size=2)
    trained = []
    for i, batch in enumerate(loader(order, n_workers)):
        trained.append(batch)
        state = order.state_dict(n_batches=i + 1)
        if i == 1:
            break
    resumed = BatchOrder(Stub(LENGTHS), n_samples=1, rank=0, world_size=2)
    resumed.load_state_dict(state)
    rest = loader(resumed, n_workers)
    assert len(rest) == 3
    for epoch in range(resumed.epoch, 2):
        resumed.set_epoch(epoch)
        trained += list(rest)
    expected = [order.batches_of(epoch)[number] for epoch in range(2) for number in range(0, 10, 2)]
    assert trained == expected


@pytest.mark.parametrize("n_workers", [0, 2])
def test_as_a_sampler_of_whole_batches(n_workers):
    order = BatchOrder(Stub(LENGTHS), n_tokens=40)
    options = {"multiprocessing_context": "fork", "timeout": 60} if n_workers else {}
    batches = DataLoader(Batches(), sampler=order, batch_size=None, num_workers=n_workers, **options)
    assert [batch.tolist() for batch in batches] == list(order.batches)


def test_items_of_a_dataset(write):
    written = write()
    dataset = HiddenStateDataset(written.url)
    order = BatchOrder(dataset, n_tokens=64, shuffle=Locality(neighbours=2))
    batches = DataLoader(dataset, batch_sampler=order, collate_fn=as_is)
    served = [[item["sample_id"] for item in batch] for batch in batches]
    assert served == [[written.ids[number] for number in batch] for batch in order.batches]
    assert sorted(itertools.chain.from_iterable(served)) == written.ids


@pytest.mark.parametrize("view", ["eagle3", "dflash"])
def test_the_budget_is_what_the_collator_packs(write, view):
    dataset = HiddenStateDataset(write().url)
    collator = PackingCollator(dataset, 64, view=view, overflow="error")
    order = BatchOrder(dataset, n_tokens=collator.n_tokens, shift=collator.shift)
    packed = [batch["document_ids"] for batch in DataLoader(range(10), batch_sampler=order, collate_fn=collator)]
    n_tokens = sum(int((ids >= 0).sum()) for ids in packed)
    assert n_tokens == sum(length - collator.shift for length in dataset.lengths)
    # The dataset has one sample of one token, which the order counts even where the collator drops it.
    assert order.efficiency * 64 * len(packed) == pytest.approx(n_tokens + collator.shift)


def take_rank(rank, port, results):
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    order = BatchOrder(Stub(LENGTHS), n_samples=3)
    newer = Stub([*LENGTHS, 4, 4, 4], fingerprint=f"xxh3_128:{rank:032x}")
    differ = [None, None]
    for number, (dataset, seed) in enumerate([(newer, 0), (Stub(LENGTHS), rank)]):
        try:
            BatchOrder(dataset, n_samples=3, seed=seed)
        except UsageError as error:
            differ[number] = str(error).split(" — ")[0]
    results.put((rank, order.rank, order.world_size, list(order), differ))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=take_rank, args=(rank, port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    taken = sorted(results.get(timeout=300) for _ in processes)
    for process in processes:
        process.join(300)
    batches = list(BatchOrder(Stub(LENGTHS), n_samples=3, rank=0, world_size=1))
    differ = [
        f"fingerprint of the order: expected 'xxh3_128:{0:032x}', as on rank 0, got 'xxh3_128:{1:032x}' on rank 1",
        "seed of the order: expected 0, as on rank 0, got 1 on rank 1",
    ]
    assert taken == [(0, 0, 2, batches[0::2], differ), (1, 1, 2, batches[1::2], differ)]
    assert [process.exitcode for process in processes] == [0, 0]


@pytest.mark.parametrize("n_workers", [0, 2])
def test_set_epoch_after_a_loop_left_early(n_workers):
    order = BatchOrder(Stub(LENGTHS), n_samples=5)
    batches = loader(order, n_workers)
    for epoch in (0, 0, 1, 3):
        order.set_epoch(epoch)
        assert next(iter(batches)) == order.batches_of(epoch)[0]
