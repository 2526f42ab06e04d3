"""Prefetcher: the right batches, in memory that is nobody else's, at a position that is what was handed out."""

import _thread
import copy
import itertools
import json
import pickle
import random
import threading
import time

import numpy as np
import pytest
import torch
from written import flip_bit

from hsfmt import HiddenStateDataset
from hsfmt.errors import CorruptionError, UsageError
from hsfmt.readers.order import BatchOrder
from hsfmt.readers.packing import PackingCollator
from hsfmt.readers.prefetch import Prefetcher
from hsfmt.readers.threads import run_all

N_TOKENS, HIDDEN = 16, 6


class Collator:
    """Fills a batch with the number of its first sample; records which memory it was given."""

    def __init__(self, seconds=0.0):
        self.places = []
        self.made = []
        self.seconds = seconds

    def allocate(self):
        states = torch.empty(N_TOKENS, HIDDEN, dtype=torch.bfloat16)
        return {"hidden_states": states, "odd": torch.empty(3, dtype=torch.uint8), "ids": torch.empty(N_TOKENS).long()}

    def __call__(self, indices, out=None):
        time.sleep(self.seconds)
        self.made.append(list(indices))
        self.places.append(out["hidden_states"].data_ptr())
        for tensor in out.values():
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 64 == 0
            tensor.fill_(indices[0])
        return out


def holds(batch, number):
    assert list(batch) == ["hidden_states", "odd", "ids"]
    assert batch["hidden_states"].shape == (N_TOKENS, HIDDEN)
    assert batch["hidden_states"].dtype == torch.bfloat16
    return all(torch.equal(tensor, torch.full_like(tensor, number)) for tensor in batch.values())


@pytest.fixture(autouse=True)
def no_thread_is_left():
    for n_threads in (1, 2):  # those that read are kept; all of them take part here, so that they have started
        everyone = threading.Barrier(n_threads)
        run_all(lambda _, everyone=everyone: everyone.wait(), [1, 2], n_threads, inline=False)
    before = _thread._count()
    yield
    deadline = time.monotonic() + 300
    while _thread._count() > before and time.monotonic() < deadline:
        time.sleep(0.002)
    assert _thread._count() <= before


@pytest.fixture
def dataset(write):
    written = write()
    found = HiddenStateDataset(written.url, n_threads=2)
    found.written = written
    found[0]
    return found


ORDER = [[number, number + 1] for number in range(40)]


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize(("depth", "n_readers"), [(1, 1), (2, 1), (5, 3)])
def test_the_batches_of_the_order(device, depth, n_readers):
    collator = Collator()
    prefetcher = Prefetcher(collator, ORDER, device=device, depth=depth, n_readers=n_readers)
    assert len(prefetcher) == 40
    for _epoch in range(2):
        for number, batch in enumerate(prefetcher):
            assert holds(batch, number)
        assert number == 39
    assert sorted(collator.made) == sorted(ORDER * 2)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_loop_that_keeps_nothing_uses_the_same_memory(device):
    collator = Collator()
    for batch in Prefetcher(collator, ORDER, device=device, depth=2):
        assert holds(batch, int(batch["ids"][0]))
    most = 4 if device is None else 4 + 2  # one being copied, one on the device
    assert len(set(collator.places)) <= most


@pytest.mark.parametrize("keep", ["batch", "a view", "numpy", "storage", "a view of a view"])
def test_what_is_kept_is_not_overwritten(keep):
    """All of it, or any part that shares the memory, for as long as it lives."""
    keeping = {
        "batch": lambda batch: batch,
        "a view": lambda batch: batch["ids"][2:3],
        "numpy": lambda batch: batch["ids"].numpy(),
        "storage": lambda batch: batch["ids"].untyped_storage(),
        "a view of a view": lambda batch: batch["hidden_states"][1:].flatten().view(torch.int16)[3:],
    }[keep]
    kept, chosen = {}, random.Random(0)
    collator = Collator()
    for number, batch in enumerate(Prefetcher(collator, ORDER, depth=2)):
        if chosen.random() < 0.4:
            kept[number] = (keeping(batch), batch["hidden_states"].data_ptr())
        if kept and chosen.random() < 0.3:
            kept.pop(chosen.choice(list(kept)))
        held_places = [place for _, place in kept.values()]
        assert len(set(held_places)) == len(kept)
    assert len(kept) > 3
    assert len(set(collator.places)) < 40, "and what was let go of is used again"
    for number, (held, _) in kept.items():
        if keep == "batch":
            assert holds(held, number)
        elif keep in ("a view", "numpy"):
            assert int(held[0]) == number
        elif keep == "storage":
            ids = torch.empty(0, dtype=torch.int64).set_(held, 0, (len(held.tolist()) // 8,))
            assert number in ids.tolist()
        else:
            assert torch.equal(held.view(torch.bfloat16), torch.full((len(held),), number, dtype=torch.bfloat16))


def test_a_list_of_all_batches():
    """As a warm-up does: no bound on what is read ahead keeps the loop from having more."""
    for number, batch in enumerate(list(Prefetcher(Collator(), ORDER, depth=1))):
        assert holds(batch, number)


def test_the_memory_goes_with_the_prefetcher():
    collator = Collator()
    prefetcher = Prefetcher(collator, ORDER)
    batch = next(iter(prefetcher))
    prefetcher.close()
    del prefetcher
    assert holds(batch, 0)


def test_max_nbytes():
    collator = Collator()
    nbytes = 192 + 64 + 128
    with pytest.raises(UsageError, match=f"{3 * nbytes} bytes"):
        Prefetcher(collator, ORDER, max_nbytes=3 * nbytes - 1)
    for n_batches, ahead in ((3, 1), (5, 3), (100, 4)):
        collator.made.clear()
        prefetcher = Prefetcher(collator, ORDER, max_nbytes=n_batches * nbytes, depth=4)
        batches = iter(prefetcher)
        for _ in range(3):
            next(batches)
        deadline = time.monotonic() + 300
        while len(collator.made) < 3 + ahead and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert len(collator.made) == 3 + ahead
        prefetcher.close()
        assert len(set(collator.places[-3 - ahead :])) <= n_batches


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 0},
        {"n_readers": 0},
        {"depth": 1.5},
        {"max_nbytes": 1e9},
        {"pin_memory": True},
        {"device": "cuda"},
        {"device": "mps"},
        {"device": "meta"},
        {"device": "nowhere"},
        {"device": 1.5},
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="what is refused for want of CUDA")
def test_settings_that_cannot_be(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        Prefetcher(Collator(), ORDER, **options)


def test_any_function_of_indices_will_do():
    batches = Prefetcher(lambda indices: {"sum": torch.tensor(sum(indices)), "name": str(indices)}, ORDER)
    assert [batch["name"] for batch in batches] == [str(indices) for indices in ORDER]
    with pytest.raises(UsageError, match="allocate"):
        Prefetcher(sum, ORDER, max_nbytes=1 << 30)


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("left_by", ["break", "close", "state alone"])
@pytest.mark.parametrize("n_taken", [0, 1, 7, 39, 40])
def test_resume_of_a_list_is_exact(device, left_by, n_taken):
    """Whatever was read ahead by then."""
    prefetcher = Prefetcher(Collator(), ORDER, device=device, depth=3)
    batches = iter(prefetcher)
    taken = [int(next(batches)["ids"][0]) for _ in range(n_taken)]
    time.sleep(0.01)
    if left_by == "break":
        del batches
    elif left_by == "close":
        batches.close()
    state = json.loads(json.dumps(prefetcher.state_dict()))
    again = Prefetcher(Collator(), ORDER, device=device)
    again.load_state_dict(state)
    assert again.state_dict() == state
    rest = [int(batch["ids"][0]) for batch in again]
    assert taken + rest == list(range(40))
    assert [int(batch["ids"][0]) for batch in again] == list(range(40)), "the next epoch is whole"
    prefetcher.load_state_dict(state)
    assert [int(batch["ids"][0]) for batch in prefetcher] == rest


def test_after_the_end_the_state_is_that_of_the_next_epoch():
    prefetcher = Prefetcher(Collator(), ORDER)
    assert len(list(prefetcher)) == 40
    again = Prefetcher(Collator(), ORDER)
    again.load_state_dict(prefetcher.state_dict())
    assert len(list(again)) == 40


@pytest.mark.parametrize(
    "change", [None, {}, {"version": 2}, {"n_batches": -1}, {"n_batches": 41}, {"n_batches": "1"}, {"n_batches": True}]
)
def test_states_that_are_none(change):
    prefetcher = Prefetcher(Collator(), ORDER)
    state = prefetcher.state_dict()
    with pytest.raises(UsageError):
        prefetcher.load_state_dict(change and state | change)
    assert len(list(prefetcher)) == 40


@pytest.mark.parametrize(
    "other",
    [
        ORDER[:10],
        ORDER[::-1],
        [*ORDER[:-1], [0]],
        [*ORDER, [0]],
        [[(n, 0, None)] for n, *_ in ORDER],
        [[*ORDER[0], *ORDER[1]], [], *ORDER[2:]],
    ],
)
@pytest.mark.parametrize("n_taken", [0, 20, 40])
def test_the_state_of_another_list_is_refused(other, n_taken):
    prefetcher = Prefetcher(Collator(), ORDER)
    batches = iter(prefetcher)
    for _ in range(n_taken):
        next(batches)
    state = prefetcher.state_dict()
    prefetcher.close()
    with pytest.raises(UsageError, match="list"):
        Prefetcher(Collator(), other).load_state_dict(state)


def test_lists_of_the_same_numbers_are_the_same():
    state = Prefetcher(Collator(), ORDER).state_dict()
    for same in (tuple(map(tuple, ORDER)), [list(map(np.int32, batch)) for batch in ORDER], np.array(ORDER)):
        assert Prefetcher(Collator(), same).state_dict() == state
    windows = [[(np.int64(1), 0, None)], [(2, 3, 4), 5]]
    state = Prefetcher(Collator(), windows).state_dict()
    assert state == Prefetcher(Collator(), [[[1, 0, None]], [[2, 3, 4], 5]]).state_dict()
    assert state != Prefetcher(Collator(), [[(1, 0, None)], [(2, 3, 5), 5]]).state_dict()


def test_a_list_shuffled_in_place_is_another_one():
    """For each epoch: states are of the list that they count in, and the epoch under way goes on as it began."""
    order = ORDER.copy()
    prefetcher = Prefetcher(Collator(), order)
    batches = iter(prefetcher)
    taken = [int(next(batches)["ids"][0]) for _ in range(7)]
    random.Random(0).shuffle(order)
    state = prefetcher.state_dict()
    assert taken + [int(batch["ids"][0]) for batch in batches] == list(range(40))
    with pytest.raises(UsageError, match="list"):
        prefetcher.load_state_dict(state)
    again = Prefetcher(Collator(), unshuffled := ORDER.copy())
    again.load_state_dict(state)
    unshuffled.reverse()
    with pytest.raises(UsageError, match="changed"):
        iter(again)
    assert firsts(prefetcher) == [number for number, *_ in order]


@pytest.mark.parametrize("n_taken", [0, 3])
def test_an_order_without_a_position_has_no_state(n_taken):
    """A count would mean other batches the next time."""
    sampler = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(range(40)), 1, drop_last=False)
    prefetcher = Prefetcher(Collator(), sampler)
    assert sorted(firsts(prefetcher)) == sorted(firsts(prefetcher)) == list(range(40))
    batches = iter(prefetcher)
    for _ in range(n_taken):
        next(batches)
    with pytest.raises(UsageError, match="BatchSampler"):
        prefetcher.state_dict()
    with pytest.raises(UsageError, match="BatchSampler"):
        prefetcher.load_state_dict(Prefetcher(Collator(), ORDER).state_dict())
    batches.close()


@pytest.mark.parametrize("order", [iter(ORDER), (batch for batch in ORDER), 3, None, "12", {0: [1]}, range(10), ["12"]])
def test_orders_that_are_none(order):
    with pytest.raises(UsageError, match="order"):
        Prefetcher(Collator(), order)


@pytest.mark.parametrize("item", [3, np.int64(3), "12", {0: 1}, None])
def test_what_is_no_batch_is_named_at_its_turn(item):
    prefetcher = Prefetcher(Collator(), [[0], item])
    with pytest.raises(UsageError, match=r"order.* as a batch"):
        prefetcher.state_dict()
    batches = iter(prefetcher)
    assert holds(next(batches), 0)
    with pytest.raises(UsageError, match=r"order.* as a batch"):
        next(batches)


def test_the_order_of_another_dataset_is_refused(dataset, write):
    other = BatchOrder(HiddenStateDataset(write([5, 6]).url), n_samples=2)
    with pytest.raises(UsageError, match=str(other.fingerprint)):
        Prefetcher(PackingCollator(dataset, 64, view="eagle3"), other)
    assert len(Prefetcher(PackingCollator(dataset, 64, view="eagle3"), BatchOrder(dataset, n_samples=1))) == 10


def test_it_is_not_picklable():
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"Prefetcher can't be pickled.* threads"):
            copied(Prefetcher(Collator(), ORDER))


def test_the_tensors_of_a_batch_share_an_allocation():
    """So says the documentation, with what follows for torch.save."""
    batch = next(iter(Prefetcher(Collator(), ORDER)))
    assert len({tensor.untyped_storage().data_ptr() for tensor in batch.values()}) == 1
    assert batch["ids"].clone().untyped_storage().nbytes() == batch["ids"].nbytes


def plain(order, n_epochs):
    return [[indices[0] for indices in order] for _ in range(n_epochs)]


def firsts(prefetcher):
    return [int(batch["ids"][0]) for batch in prefetcher]


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_batch_order_gives_the_same_as_without(dataset, device):
    options = {"n_samples": 2, "seed": 3}
    expected = plain(BatchOrder(dataset, **options), 3)
    prefetcher = Prefetcher(Collator(), BatchOrder(dataset, **options), device=device)
    assert [firsts(prefetcher) for _ in range(3)] == expected
    assert len({tuple(epoch) for epoch in expected}) == 3


@pytest.mark.parametrize("depth", [1, 3, 10])
def test_a_batch_order_resumes_where_the_loop_was(dataset, depth):
    options = {"n_samples": 2, "seed": 3}
    expected = list(itertools.chain(*plain(BatchOrder(dataset, **options), 3)))
    for n_taken in range(11):
        prefetcher = Prefetcher(Collator(), BatchOrder(dataset, **options), depth=depth)
        taken = []
        while len(taken) < n_taken:
            for batch in prefetcher:
                taken.append(int(batch["ids"][0]))
                if len(taken) == n_taken:
                    time.sleep(0.005)
                    break
        state = json.loads(json.dumps(prefetcher.state_dict()))
        # By the order alone, and by a Prefetcher.
        order = BatchOrder(dataset, **options)
        order.load_state_dict(state)
        assert [*taken, *itertools.chain(*plain(order, 3))][:15] == expected
        again = Prefetcher(Collator(), BatchOrder(dataset, **options), depth=depth)
        again.load_state_dict(state)
        assert [*taken, *itertools.chain(*(firsts(again) for _ in range(3)))][:15] == expected


@pytest.mark.parametrize("depth", [1, 10])
@pytest.mark.parametrize("n_taken", [0, 1, 4])
def test_leaving_an_epoch_half_way_begins_it_again(dataset, depth, n_taken):
    """As the order does without anyone reading ahead."""
    order = BatchOrder(dataset, n_samples=2)
    first = [indices[0] for indices in BatchOrder(dataset, n_samples=2)]
    prefetcher = Prefetcher(Collator(), order, depth=depth)
    for _ in range(2):
        batches = iter(prefetcher)
        assert [int(next(batches)["ids"][0]) for _ in range(n_taken)] == first[:n_taken]
        time.sleep(0.005)
        del batches
    assert firsts(prefetcher) == first


@pytest.mark.parametrize("through", ["prefetcher", "order"])
def test_set_epoch(dataset, through):
    order = BatchOrder(dataset, n_samples=2)
    epochs = plain(BatchOrder(dataset, n_samples=2), 4)
    prefetcher = Prefetcher(Collator(), order, depth=10)
    next(iter(prefetcher))
    target = {"prefetcher": prefetcher, "order": order}[through]
    if through == "order":
        prefetcher.close()
    target.set_epoch(3)
    assert prefetcher.state_dict() == order.state_dict()
    assert firsts(prefetcher) == epochs[3]
    target.set_epoch(1)
    assert firsts(prefetcher) == epochs[1]
    assert firsts(prefetcher) == epochs[2]
    with pytest.raises(UsageError, match="epochs"):
        Prefetcher(Collator(), ORDER).set_epoch(1)


class OwnState:
    """An order that keeps its position itself, as torchdata's samplers do."""

    def __init__(self):
        self.n = 0

    def __len__(self):
        return 10

    def __iter__(self):
        while self.n < 10:
            self.n += 1
            yield [self.n - 1]
        self.n = 0

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


@pytest.mark.parametrize("n_taken", [0, 3, 9, 10])
def test_an_order_with_a_state_of_its_own(n_taken):
    prefetcher = Prefetcher(Collator(), OwnState(), depth=4)
    batches = iter(prefetcher)
    for _ in range(n_taken):
        next(batches)
    time.sleep(0.005)
    again = Prefetcher(Collator(), OwnState())
    again.load_state_dict(prefetcher.state_dict())
    assert firsts(again) == list(range(n_taken, 10))


def test_one_iteration_at_a_time():
    prefetcher = Prefetcher(Collator(), ORDER)
    first = iter(prefetcher)
    next(first)
    second = iter(prefetcher)
    with pytest.raises(UsageError, match="close"):
        next(first)
    assert firsts(second) == list(range(40))


def test_two_prefetchers_at_once():
    collator = Collator(0.001)
    one, other = Prefetcher(collator, ORDER), Prefetcher(collator, ORDER[::-1])
    for number, (left, right) in enumerate(zip(one, other, strict=True)):
        assert holds(left, number)
        assert holds(right, 39 - number)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_nothing_is_written_after_close(device):
    collator = Collator(0.01)
    prefetcher = Prefetcher(collator, ORDER, device=device, depth=3)
    batches = iter(prefetcher)
    held = [next(batches) for _ in range(3)]
    prefetcher.close()
    n_made = len(collator.made)
    time.sleep(0.05)
    assert len(collator.made) == n_made
    assert all(holds(batch, number) for number, batch in enumerate(held))


def reader(dataset):
    """A collator over a real dataset."""

    def collate(indices, out=None):
        for index, states in zip(indices, out.values(), strict=True):
            dataset.read(index, out=states[: dataset.lengths[index]])
        return out

    collate.allocate = lambda: {str(n): torch.empty(64, 3, 8, dtype=torch.bfloat16) for n in range(2)}
    return collate


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("n_readers", [1, 2])
def test_states_of_a_dataset(dataset, device, n_readers):
    order = [[a, b] for a, b in itertools.permutations(range(10), 2)]
    prefetcher = Prefetcher(reader(dataset), order, device=device, n_readers=n_readers)
    contents = list(dataset.written.content.values())
    for indices, batch in zip(order, prefetcher, strict=True):
        for index, states in zip(indices, batch.values(), strict=True):
            wanted = contents[index].states
            np.testing.assert_array_equal(states[: len(wanted)].view(torch.int16).numpy().view(np.uint16), wanted)


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize(("n_tokens", "n_readers"), [(64, 1), (64, 2), (None, 1)])
def test_packed_batches_are_those_of_the_collator(dataset, device, n_tokens, n_readers):
    collator = PackingCollator(dataset, n_tokens, view="eagle3")
    order = list(BatchOrder(dataset, n_tokens=64, shift=collator.shift)) * 3
    prefetcher = Prefetcher(collator, order, device=device, n_readers=n_readers)
    for indices, batch in zip(order, prefetcher, strict=True):
        expected = collator(indices)
        assert list(batch) == list(expected)
        for key, value in expected.items():
            assert torch.equal(batch[key], value) if torch.is_tensor(value) else batch[key] == value


def test_a_damaged_sample_is_named_at_its_turn(dataset):
    flip_bit(dataset.written.shards()[-1], 5)
    damaged = [n for n in range(10) if not readable(dataset, n)]
    assert damaged
    sound = [n for n in range(10) if n not in damaged]
    order = [[n, n] for n in [*sound, damaged[0], *sound]]
    prefetcher = Prefetcher(reader(dataset), order, depth=3)
    batches = iter(prefetcher)
    for _ in sound:
        next(batches)
    with pytest.raises(CorruptionError) as raised:
        next(batches)
    assert f"id-{damaged[0]:03}" in raised.value.problems[0].samples
    assert prefetcher.state_dict()["n_batches"] == len(sound)


def readable(dataset, number):
    try:
        dataset[number]
    except CorruptionError:
        return False
    return True


def test_a_consumer_in_another_thread():
    found = []
    thread = threading.Thread(target=lambda: found.extend(firsts(Prefetcher(Collator(), ORDER))))
    thread.start()
    thread.join(300)
    assert found == list(range(40))
