"""BatchOrder in torchdata's StatefulDataLoader: it resumes by the loader's own state."""

import itertools
import json

import pytest
import torch  # noqa: F401  what marks this file's tests as needing it
from order_stub import Stub
from torchdata.stateful_dataloader import StatefulDataLoader

from hsfmt.errors import UsageError
from hsfmt.readers.order import BatchOrder

pytestmark = [
    # Python 3.12 and later warn of any fork in a process with threads; the tests of processes show that it works.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata 0.11 calls it
]

WORKERS = [(0, False, 1), (2, False, 1), (2, True, 1), (2, False, 3), (2, True, 3)]


def as_is(items):
    return items


def make(*, n_workers=0, persistent=False, snapshot_every=1, seed=0, world_size=1):
    """A loader of 7 batches an epoch on one rank."""
    order = BatchOrder(Stub([1] * 14), n_samples=2, seed=seed, rank=0, world_size=world_size)
    options = {"num_workers": n_workers, "persistent_workers": persistent, "snapshot_every_n_steps": snapshot_every}
    if n_workers:
        options |= {"timeout": 60, "multiprocessing_context": "fork"}
    return order, StatefulDataLoader(range(14), batch_sampler=order, collate_fn=as_is, **options)


def all_batches(n_epochs):
    order = make()[0]
    return [list(order.batches_of(epoch)) for epoch in range(n_epochs)]


@pytest.mark.parametrize(("n_workers", "persistent", "snapshot_every"), WORKERS)
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("k", [0, 1, 3, 5, 6])
def test_resume_mid_epoch(n_workers, persistent, snapshot_every, epoch, k):
    kind = {"n_workers": n_workers, "persistent": persistent, "snapshot_every": snapshot_every}
    _, loader = make(**kind)
    served = [list(loader) for _ in range(epoch)]
    iterator = iter(loader)
    begun = list(itertools.islice(iterator, k))
    state = loader.state_dict()
    del iterator, loader

    order, resumed = make(**kind)
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert order.epoch == epoch
    following = [list(resumed) for _ in range(2)]
    assert [*served, begun + rest, *following] == all_batches(epoch + 3)


@pytest.mark.parametrize(("n_workers", "persistent", "snapshot_every"), WORKERS)
def test_resume_between_epochs(n_workers, persistent, snapshot_every):
    kind = {"n_workers": n_workers, "persistent": persistent, "snapshot_every": snapshot_every}
    _, loader = make(**kind)
    served = [list(loader)]
    state = loader.state_dict()
    _, resumed = make(**kind)
    resumed.load_state_dict(state)
    served += [list(resumed) for _ in range(2)]
    assert served == all_batches(3)


@pytest.mark.parametrize(("n_workers", "persistent", "snapshot_every"), WORKERS)
def test_resume_behind_the_last_batch(n_workers, persistent, snapshot_every):
    """The loader has not said yet that the epoch is over: it does so, as torchdata's own samplers do, with no batch."""
    kind = {"n_workers": n_workers, "persistent": persistent, "snapshot_every": snapshot_every}
    _, loader = make(**kind)
    begun = list(itertools.islice(iter(loader), 7))
    state = loader.state_dict()
    _, resumed = make(**kind)
    resumed.load_state_dict(state)
    assert [begun + list(resumed), *(list(resumed) for _ in range(2))] == all_batches(3)


@pytest.mark.parametrize(("n_workers", "persistent", "snapshot_every"), WORKERS)
def test_set_epoch_in_the_loop(n_workers, persistent, snapshot_every):
    kind = {"n_workers": n_workers, "persistent": persistent, "snapshot_every": snapshot_every}
    order, loader = make(**kind)
    served, state = [], None
    for epoch in range(2):
        order.set_epoch(epoch)
        served.append([])
        for i, batch in enumerate(loader):
            served[-1].append(batch)
            if (epoch, i) == (1, 2):
                state = loader.state_dict()
                break
    order, resumed = make(**kind)
    resumed.load_state_dict(state)
    for epoch in range(1, 3):
        order.set_epoch(epoch)
        if epoch > 1:
            served.append([])
        served[-1] += list(resumed)
    assert served == all_batches(3)


def test_resume_again_and_again():
    served, state = [], None
    for k in (2, 1, 3, 1):
        _, loader = make(n_workers=2)
        if state is not None:
            loader.load_state_dict(state)
        served += list(itertools.islice(iter(loader), k))
        state = loader.state_dict()
    assert [served] == all_batches(1)


@pytest.mark.parametrize("n_workers", [0, 2])
def test_resume_at_another_world_size(n_workers):
    _, loader = make(n_workers=n_workers, world_size=3)
    next(iter(loader))
    state = loader.state_dict()
    _, alone = make(n_workers=n_workers)
    alone.load_state_dict(state)
    assert list(alone) == all_batches(1)[0][3:]


@pytest.mark.parametrize("n_workers", [0, 2])
def test_another_order_is_refused(n_workers):
    _, loader = make(n_workers=n_workers)
    next(iter(loader))
    state = loader.state_dict()
    _, other = make(n_workers=n_workers, seed=1)
    other.load_state_dict(state)
    with pytest.raises(UsageError, match="seed of the order's state"):
        next(iter(other))


def test_the_state_is_json():
    _, loader = make(n_workers=2)
    next(iter(loader))
    state = loader.state_dict()
    _, resumed = make(n_workers=2)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert len(list(resumed)) == 6
