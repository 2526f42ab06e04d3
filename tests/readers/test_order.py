"""BatchOrder: every sample once an epoch, equal steps on every rank, the rest after a resume."""

import inspect
import itertools
import json
import pickle
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from order_stub import Stub, lognormal

from hsfmt import HiddenStateDataset
from hsfmt.errors import UsageError
from hsfmt.readers.order import BatchOrder
from hsfmt.readers.shuffle import Locality

MODES = [{"n_samples": 3}, {"n_tokens": 40}, {"n_tokens": 40, "shuffle": Locality(2, 1)}]
LENGTHS = [30, 7, 8, 9, 16, 33, 3, 40, 5, 31]


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def ranks(world_size, dataset=None, **settings):
    dataset = Stub(LENGTHS) if dataset is None else dataset
    return [BatchOrder(dataset, rank=rank, world_size=world_size, **settings) for rank in range(world_size)]


def in_global_order(orders):
    """The batches that all ranks take, step by step; the ranks take equally many."""
    taken = [list(order) for order in orders]
    assert len({len(batches) for batches in taken}) == 1
    return [batch for step in zip(*taken, strict=True) for batch in step]


@pytest.mark.parametrize("mode", [{"n_samples": 1}, {"n_samples": 3}, {"n_tokens": 40}])
def test_three_ranks_ten_samples_two_epochs(mode):
    orders = ranks(3, **mode)
    sequences = []
    for epoch in range(2):
        served = in_global_order(orders)
        batches = list(orders[0].batches)
        assert {order.epoch for order in orders} == {epoch}
        assert {len(order) for order in orders} == {len(served) // 3}
        assert served == batches + [batches[number] for number in orders[0].padding]
        assert len(orders[0].padding) == -len(batches) % 3
        assert sorted(flat(batches)) == list(range(10))
        sequences.append(batches)
    assert sequences[0] != sequences[1]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
def test_the_sequence_does_not_depend_on_the_world_size(mode, world_size):
    alone = list(BatchOrder(Stub(LENGTHS), **mode))
    assert in_global_order(ranks(world_size, **mode))[: len(alone)] == alone


def test_more_ranks_than_batches():
    orders = ranks(7, n_samples=5)
    batches = list(orders[0].batches)
    assert in_global_order(orders) == [batches[number % 2] for number in range(7)]
    assert orders[0].padding == (0, 1, 0, 1, 0)


@pytest.mark.parametrize("mode", [{"n_samples": 3}, {"n_tokens": 40}])
def test_drop_last(mode):
    orders = ranks(2, drop_last=True, **mode)
    served = in_global_order(orders)
    batches = list(orders[0].batches)
    assert served == batches[: len(batches) // 2 * 2]
    assert orders[0].padding == ()
    assert sorted([*flat(served), *orders[0].dropped.tolist()]) == list(range(10))
    assert all(len(batch) == 3 for batch in served) or "n_tokens" in mode


@pytest.mark.parametrize(
    ("settings", "n_batches"), [({"n_samples": 4}, 2), ({"n_samples": 11}, 0), ({"n_tokens": 182, "shuffle": False}, 1)]
)
def test_drop_last_must_leave_something(settings, n_batches):
    with pytest.raises(UsageError, match=rf"a batch for each of 3 ranks.*{n_batches} in epoch 0"):
        ranks(3, drop_last=True, **settings)


def test_drop_last_makes_no_epoch_where_there_are_surely_enough_batches():
    order = ranks(2, n_samples=5, drop_last=True)[0]
    assert order._batches is None
    assert len(order) == 1


@pytest.mark.parametrize("mode", [*MODES, {"n_samples": 3, "drop_last": True}, {"n_tokens": 40, "drop_last": True}])
def test_the_least_number_of_batches(mode):
    order = BatchOrder(Stub(LENGTHS), **mode)
    assert 0 < order._epochs.least_batches <= min(len(order.batches_of(epoch)) for epoch in range(20))


@pytest.mark.parametrize(("before", "after"), list(itertools.product([1, 2, 3], repeat=2)))
@pytest.mark.parametrize("mode", MODES)
def test_resume_at_every_step(mode, before, after):
    n_steps = len(ranks(before, **mode)[0])
    for k in range(n_steps + 1):
        orders = ranks(before, **mode)
        iterators = [iter(order) for order in orders]
        for iterator in iterators:
            ahead = list(itertools.islice(iterator, k + 2))  # as loaders that read ahead do
            assert len(ahead) == min(k + 2, n_steps)
        states = [json.loads(json.dumps(order.state_dict(n_batches=k))) for order in orders]
        assert all(state == states[0] for state in states)
        batches = list(orders[0].batches)

        resumed = ranks(after, **mode)
        for order in resumed:
            order.load_state_dict(states[-1])
        if k == n_steps:
            assert {order.epoch for order in resumed} == {1}
            assert in_global_order(resumed)[: len(resumed[0].batches)] == list(resumed[0].batches)
            continue
        rest = in_global_order(resumed)
        padding = [batches[number] for number in resumed[0].padding]
        assert rest == batches[k * before :] + padding
        assert len(padding) < after
        assert in_global_order(resumed)[: len(resumed[0].batches)] == list(
            BatchOrder(Stub(LENGTHS), **mode).batches_of(1)
        )


def test_resume_after_resume_at_other_world_sizes():
    batches = list(BatchOrder(Stub(LENGTHS), n_samples=1).batches)
    state, served = None, []
    for world_size, k in ((3, 1), (2, 2), (1, 1), (2, 1)):
        orders = ranks(world_size, n_samples=1)
        for order in orders:
            if state is not None:
                order.load_state_dict(state)
        taken = [list(itertools.islice(iter(order), k)) for order in orders]
        served += [batch for step in zip(*taken, strict=True) for batch in step]
        state = orders[0].state_dict(k)
    assert served == batches
    assert state["finished"]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_finished_epoch_goes_on_with_the_next_one(drop_last):
    order = ranks(3, n_samples=2, drop_last=drop_last)[0]
    list(order)
    state = order.state_dict(len(order))
    for world_size in (1, 2, 3):
        other = ranks(world_size, n_samples=2, drop_last=drop_last)[0]
        other.load_state_dict(state)
        assert other.epoch == 1
        assert next(iter(other)) == order.batches_of(1)[0]


def test_a_state_needs_the_number_of_batches_trained_on():
    order = BatchOrder(Stub(LENGTHS), n_samples=1)
    assert order.state_dict()["n_batches"] == 0
    iterator = iter(order)
    next(iterator)
    state = order.state_dict()
    assert state["n_batches"] is None
    other = BatchOrder(Stub(LENGTHS), n_samples=1)
    other.load_state_dict(state)
    for use in (lambda: next(iter(other)), lambda: len(other), other.state_dict):
        with pytest.raises(UsageError, match=r"load_state_dict\(state, n_batches="):
            use()
    other.load_state_dict(state, n_batches=4)
    assert list(other) == list(order.batches)[4:]
    with pytest.raises(UsageError, match="one that says 4"):
        other.load_state_dict(order.state_dict(4), n_batches=4)
    with pytest.raises(UsageError, match="0 to 10"):
        order.state_dict(11)


def test_the_state_of_an_iterator_says_it_by_itself():
    order = BatchOrder(Stub(LENGTHS), n_samples=1)
    iterator = iter(order)
    taken = [next(iterator), next(iterator)]
    other = BatchOrder(Stub(LENGTHS), n_samples=1)
    resumed = iter(other)
    resumed.load_state_dict(iterator.state_dict())
    assert taken + list(resumed) == list(order.batches)
    assert list(other) == list(order.batches_of(1))


def test_the_state_is_small_whatever_the_dataset():
    sizes = [len(json.dumps(BatchOrder(Stub([5] * n), n_tokens=64).state_dict())) for n in (10, 5000)]
    assert sizes[0] == sizes[1] < 1000


CHANGES = {
    "fingerprint": {"dataset": Stub(LENGTHS, fingerprint=f"xxh3_128:{1:032x}")},
    "lengths": {"dataset": Stub([*LENGTHS[:-1], 32])},
    "seed": {"seed": 1},
    "n_tokens": {"n_tokens": 41},
    "n_samples": {"n_tokens": None, "n_samples": 3},
    "neighbours": {"shuffle": Locality(neighbours=2)},
    "parts_at_once": {"shuffle": Locality(parts_at_once=1)},
    "shuffle": {"shuffle": False},
    "shift": {"shift": 1},
    "window": {"window": 7},
    "drop_last": {"drop_last": True},
    "samples": {"samples": [*range(8), 9, 8]},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_of_something_else_is_refused(name):
    settings = {"dataset": Stub(LENGTHS), "n_tokens": 40}
    state = BatchOrder(**settings).state_dict(1)
    order = BatchOrder(**(settings | CHANGES[name]))
    with pytest.raises(UsageError, match=f"{name} of the order's state") as refused:
        order.load_state_dict(state)
    assert all(problem.remedy for problem in refused.value.problems)
    with pytest.raises(UsageError, match=f"{name} of the order's state"):
        iter(order).load_state_dict(state)


def test_the_state_names_every_setting():
    no_part_of_the_sequence = {"self", "dataset", "rank", "world_size", "too_long", "fingerprint"}
    settings = set(inspect.signature(BatchOrder.__init__).parameters) - no_part_of_the_sequence
    assert settings <= set(BatchOrder(Stub(LENGTHS), n_samples=1).state_dict()["settings"])


def test_other_batches_under_the_same_settings_are_refused():
    order = BatchOrder(Stub(LENGTHS), n_samples=2)
    state = order.state_dict(1) | {"batches": f"xxh3_128:{5:032x}"}
    with pytest.raises(UsageError, match="batches of epoch 0"):
        order.load_state_dict(state)


@pytest.mark.parametrize(
    "broken",
    [
        None,
        [],
        {},
        {"kind": "other"},
        {"version": 2},
        {"version": None},
        {"start": "1"},
        {"start": -1},
        {"world_size": 0},
        {"world_size": True},
        {"n_batches": -1},
        {"n_batches": 1.5},
        {"epoch": None},
        {"settings": 3},
    ],
)
def test_broken_states(broken):
    order = BatchOrder(Stub(LENGTHS), n_samples=2)
    state = order.state_dict(1) | broken if isinstance(broken, dict) and broken else broken
    with pytest.raises(UsageError, match="order state"):
        order.load_state_dict(state)


def test_epochs_follow_each_other_and_set_epoch_says_which():
    order, other = (BatchOrder(Stub(LENGTHS), n_samples=1) for _ in range(2))
    by_itself = [list(order) for _ in range(3)]
    by_number = []
    for epoch in range(3):
        other.set_epoch(epoch)
        by_number.append(list(other))
    assert by_itself == by_number == [list(order.batches_of(epoch)) for epoch in range(3)]
    other.set_epoch(1)
    assert list(other) == by_itself[1]
    other.set_epoch(1)
    assert list(other) == by_itself[1]


def test_set_epoch_after_a_resume_keeps_the_place():
    order = BatchOrder(Stub(LENGTHS), n_samples=1)
    state = BatchOrder(Stub(LENGTHS), n_samples=1).state_dict(4)
    order.load_state_dict(state)
    order.set_epoch(0)
    assert len(order) == 6
    assert list(order) == list(order.batches_of(0))[4:]
    order.load_state_dict(state)
    order.set_epoch(1)
    assert len(order) == 10


def test_iterators_made_and_thrown_away_change_nothing():
    order = BatchOrder(Stub(LENGTHS), n_samples=1)
    first = list(order)
    thrown_away = iter(order)
    next(thrown_away)
    assert list(order) == list(order.batches_of(1)) != first
    assert len(list(thrown_away)) == 9
    assert order.epoch == 1
    assert list(order) == list(order.batches_of(2))


def test_an_iterator_of_another_epoch_does_not_end_this_one():
    order = BatchOrder(Stub(LENGTHS), n_samples=1)
    old = iter(order)
    order.set_epoch(5)
    assert list(old) == list(order.batches_of(0))
    assert order.state_dict()["n_batches"] == 0
    assert list(order) == list(order.batches_of(5))


def test_a_finished_iterator_stays_so_at_another_world_size():
    order = ranks(3, n_samples=1, drop_last=True)[0]
    iterator = iter(order)
    assert len(list(iterator)) == 3
    other = ranks(1, n_samples=1, drop_last=True)[0]
    resumed = iter(other)
    resumed.load_state_dict(iterator.state_dict())
    assert list(resumed) == []
    assert list(other) == list(order.batches_of(1))


def test_the_length_stays_while_training_lags_behind():
    order = BatchOrder(Stub(LENGTHS), n_tokens=40)
    lengths = {len(order)}
    for _ in order:
        lengths.add(len(order))
    lengths.add(len(order))
    assert lengths == {len(order.batches)}


def test_pickling():
    order = BatchOrder(Stub(LENGTHS), n_tokens=40, shuffle=Locality(2), rank=1, world_size=2)
    order.load_state_dict(ranks(2, n_tokens=40, shuffle=Locality(2))[0].state_dict(1))
    copy = pickle.loads(pickle.dumps(order))
    assert copy._batches is None
    iterator = iter(order)
    taken = next(iterator)
    assert [taken, *pickle.loads(pickle.dumps(iterator))] == list(copy) == [taken, *iterator]
    assert repr(copy) == "BatchOrder(n_tokens=40, seed=0, epoch=0, rank=1 of 2)"


def test_golden_order():
    """These figures never change: states of running trainings depend on them."""
    dataset = Stub(LENGTHS, parts=3)
    assert list(BatchOrder(dataset, n_samples=4, seed=7).batches_of(2)) == GOLDEN_SAMPLES
    assert list(BatchOrder(dataset, n_tokens=40, seed=7)) == GOLDEN_TOKENS
    assert list(BatchOrder(dataset, n_samples=5, shuffle=Locality(2, 1), seed=7)) == GOLDEN_LOCAL
    many = Stub((np.arange(5000) * 2654435761 % 4093) + 1, parts=7)
    settings = {"n_tokens": 8192, "seed": 123456789012345678901234567890, "shift": 1}
    assert BatchOrder(many, **settings).batches_of(3).digest == GOLDEN_DIGESTS[0]
    assert BatchOrder(many, **settings, shuffle=Locality(8, 3), window=64).batches_of(3).digest == GOLDEN_DIGESTS[1]


GOLDEN_SAMPLES = [[2, 5, 6, 4], [8, 3, 9, 0], [1, 7]]
GOLDEN_TOKENS = [[9, 3], [6, 4, 8], [5, 1], [7], [0, 2]]
GOLDEN_LOCAL = [[0, 1, 2, 3, 7], [8, 9, 6, 4, 5]]
GOLDEN_DIGESTS = ["xxh3_128:240f3e89890b50bbb32215d09d255785", "xxh3_128:361cf4d960ef03f59defd5db79f00778"]


def test_live_snapshots_need_their_fingerprint():
    live = Stub(LENGTHS, is_live=True)
    with pytest.raises(UsageError, match=r"snapshot=\"live\".*hsfmt seal"):
        BatchOrder(live, n_samples=1, rank=0, world_size=2)
    with pytest.raises(UsageError, match="expected xxh3_128:1"):
        BatchOrder(live, n_samples=1, fingerprint="xxh3_128:1")
    distributed = BatchOrder(live, n_samples=1, rank=0, world_size=2, fingerprint=live.fingerprint)
    assert len(distributed) == 5
    assert len(BatchOrder(live, n_samples=1, rank=0, world_size=1)) == 10


@pytest.mark.lists
def test_a_real_dataset(write):
    written = write(lengths=LENGTHS, parts=3)
    dataset = HiddenStateDataset(written.url, max_length=32)
    order = BatchOrder(dataset, n_tokens=32, shuffle=Locality(2, 1), rank=0, world_size=1)
    batches = list(order)
    assert sorted(flat(batches)) == list(range(10))
    assert all(dataset.lengths[batch].sum() <= 32 for batch in batches)
    assert order.fingerprint == dataset.fingerprint
    live = HiddenStateDataset(written.url, snapshot="live")
    with pytest.raises(UsageError, match="fingerprint"):
        BatchOrder(live, n_samples=1, rank=0, world_size=2)
    assert len(BatchOrder(live, n_samples=1, rank=0, world_size=2, fingerprint=live.fingerprint)) == 5
    with pytest.raises(
        UsageError, match=r"3 longer ones, up to 40 \[3 sample\(s\): id-000, id-005, id-007\].*max_length=29"
    ):
        BatchOrder(HiddenStateDataset(written.url, max_length=None), n_tokens=29, samples=range(9))


def test_too_long_samples():
    dataset = Stub([50, 8, 60, 9])
    with pytest.raises(
        UsageError, match=r"at most 41 tokens, got 2 longer ones, up to 60.*id-000, id-002.*max_length=41"
    ):
        BatchOrder(dataset, n_tokens=40, shift=1)
    order = BatchOrder(dataset, n_tokens=40, shift=1, too_long="cut")
    assert {tuple(batch) for batch in order} in ({(0,), (2,), (1, 3)}, {(0,), (2,), (3, 1)})
    assert order.efficiency == (40 + 40 + 7 + 8) / 120


def test_shift_makes_room():
    assert [len(batch) for batch in BatchOrder(Stub([11] * 4), n_tokens=20)] == [1] * 4
    assert [len(batch) for batch in BatchOrder(Stub([11] * 4), n_tokens=20, shift=1)] == [2] * 2
    assert len(BatchOrder(Stub([1] * 40), n_tokens=20, shift=3)) == 2


def test_only_some_samples():
    order = BatchOrder(Stub(LENGTHS), n_samples=2, samples=np.array([9, 4, 2], dtype=np.uint8))
    assert sorted(flat(order)) == [2, 4, 9]
    assert list(BatchOrder(Stub(LENGTHS), n_samples=2, samples=[9, 4, 2], shuffle=False)) == [[9, 4], [2]]
    assert len(BatchOrder(Stub([50, *LENGTHS]), n_tokens=40, samples=range(1, 11)).batches) > 0


@pytest.mark.parametrize("samples", [[0, 10], [-1], [1, 1], [0.5], [[0, 1]], [[]], [True, False]])
def test_samples_that_are_none(samples):
    with pytest.raises(UsageError, match="numbers from 0 to 9, each once"):
        BatchOrder(Stub(LENGTHS), n_samples=2, samples=samples)


@pytest.mark.parametrize("samples", [None, [], (), np.array([], dtype=np.int64)])
def test_no_samples_no_steps(samples):
    for mode in MODES:
        order = ranks(2, Stub([] if samples is None else LENGTHS), samples=samples, **mode)[1]
        assert (list(order), len(order), order.padding, order.efficiency, order.entropy_fraction) == (
            [],
            0,
            (),
            1.0,
            1.0,
        )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n_tokens": 5, "n_samples": 5},
        {"n_tokens": 0},
        {"n_tokens": 2.5},
        {"n_samples": True},
        {"n_samples": 1, "seed": -1},
        {"n_samples": 1, "shift": -1},
        {"n_samples": 1, "window": 0},
        {"n_samples": 1, "too_long": "skip"},
        {"n_samples": 1, "shuffle": 3},
        {"n_samples": 1, "rank": 0},
        {"n_samples": 1, "world_size": 2},
        {"n_samples": 1, "rank": 2, "world_size": 2},
        {"n_samples": 1, "rank": -1, "world_size": 2},
    ],
)
def test_settings_that_are_refused(settings):
    with pytest.raises(UsageError):
        BatchOrder(Stub(LENGTHS), **settings)


@pytest.mark.parametrize("settings", [{"neighbours": 0}, {"parts_at_once": 0}, {"neighbours": "2"}])
def test_localities_that_are_refused(settings):
    with pytest.raises(UsageError):
        Locality(**settings)


def test_localities_of_any_integers():
    local = Locality(np.int64(3), np.uint8(2))
    assert local == Locality(3, 2)
    state = BatchOrder(Stub(LENGTHS), n_samples=np.int32(1), shuffle=local, seed=np.int64(1)).state_dict(np.int64(1))
    order = BatchOrder(Stub(LENGTHS), n_samples=1, shuffle=Locality(3, 2), seed=1)
    order.load_state_dict(json.loads(json.dumps(state)))
    assert len(order) == 9


class Distributed:
    """torch.distributed as one process of a group of three sees it, whose others answer what `change` makes of it."""

    def __init__(self, change=lambda rank, values: (rank, values)) -> None:
        self.change, self.n_gathers, self.initialised = change, 0, True

    def is_available(self):
        return True

    def is_initialized(self):
        return self.initialised

    def get_rank(self):
        return 1

    def get_world_size(self):
        return 3

    def all_gather_object(self, gathered, value):
        self.n_gathers += 1
        gathered[:] = [value if rank == 1 else self.change(rank, value[1]) for rank in range(3)]


@pytest.fixture
def distributed(monkeypatch):
    distributed = Distributed()
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    return distributed


def test_rank_of_torch_distributed(distributed):
    order = BatchOrder(Stub(LENGTHS), n_samples=1)
    assert (order.rank, order.world_size) == (1, 3)
    distributed.initialised = False
    order = BatchOrder(Stub(LENGTHS), n_samples=1)
    assert (order.rank, order.world_size) == (0, 1)


def test_ranks_are_compared_once_where_they_can_be(distributed):
    order = BatchOrder(Stub(LENGTHS), n_samples=1)
    assert (len(list(order)), distributed.n_gathers) == (4, 1)
    assert BatchOrder(Stub(LENGTHS), n_samples=1, rank=1, world_size=3).fingerprint == order.fingerprint
    assert distributed.n_gathers == 2
    BatchOrder(Stub(LENGTHS), n_samples=1, fingerprint=order.fingerprint)
    ranks(1, n_samples=1)
    ranks(2, n_samples=1)  # of a group of three: whose others need not make an order
    distributed.initialised = False
    ranks(3, n_samples=1)
    assert distributed.n_gathers == 2


def test_ranks_that_differ_are_named(distributed):
    distributed.change = lambda rank, values: (rank, {**values, "fingerprint": "xxh3_128:1"} if rank == 2 else values)
    with pytest.raises(UsageError, match=r"fingerprint.*as on rank 0, got 'xxh3_128:1' on rank 2 .*snapshot="):
        BatchOrder(Stub(LENGTHS), n_samples=1)
    distributed.change = lambda rank, values: (rank, {**values, "seed": 7, "n_samples": 2} if rank == 0 else values)
    with pytest.raises(UsageError, match="expected 7, as on rank 0, got 0 on rank 1, 0 on rank 2 ") as caught:
        BatchOrder(Stub(LENGTHS), n_samples=1)
    assert [problem.where for problem in caught.value.problems] == ["n_samples of the order", "seed of the order"]


def test_ranks_that_are_the_same_one(distributed):
    distributed.change = lambda _rank, values: (0, values)
    with pytest.raises(UsageError, match=r"0 to 2, each once, got \[0, 1, 0\]"):
        BatchOrder(Stub(LENGTHS), n_samples=1, rank=1, world_size=3)


def test_ranks_that_can_not_be_asked(distributed):
    def fail(_rank, _values):
        raise RuntimeError("Timed out waiting 1800000ms for recv operation to complete")

    distributed.change = fail
    with pytest.raises(UsageError, match=r"Timed out.*on all ranks.*torch.cuda.set_device\(\).*fingerprint="):
        BatchOrder(Stub(LENGTHS), n_samples=1)


def test_a_live_snapshot_is_refused_after_all_ranks_were_asked(distributed):
    with pytest.raises(UsageError, match="hsfmt seal"):
        BatchOrder(Stub(LENGTHS, is_live=True), n_samples=1)
    assert distributed.n_gathers == 1


def test_a_launched_rank_does_not_take_itself_for_the_only_one(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(UsageError, match="init_process_group"):
        BatchOrder(Stub(LENGTHS), n_samples=1)
    assert BatchOrder(Stub(LENGTHS), n_samples=1, rank=3, world_size=8).rank == 3
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert BatchOrder(Stub(LENGTHS), n_samples=1).world_size == 1


def test_torch_is_not_imported(run_python, repo_root, write):
    code = """
    import sys
    from hsfmt import HiddenStateDataset
    from hsfmt.readers.order import BatchOrder
    order = BatchOrder(HiddenStateDataset(sys.argv[1]), n_tokens=64)
    order.load_state_dict(order.state_dict(1))
    print(len(order) > 0, [name for name in ("torch", "zarr") if name in sys.modules])
    """
    assert run_python("if 1:" + code, write().url, path=repo_root).strip() == "True []"


localities = st.builds(Locality, st.integers(1, 6), st.none() | st.integers(1, 4))


@given(
    st.lists(st.integers(1, 60), max_size=60),
    st.integers(1, 5),
    st.booleans() | localities,
    st.fixed_dictionaries({"n_samples": st.integers(1, 9)})
    | st.fixed_dictionaries({"n_tokens": st.integers(1, 80), "window": st.integers(1, 30), "shift": st.integers(0, 2)}),
    st.integers(1, 4),
    st.integers(0, 1 << 70),
)
def test_every_sample_once_and_every_budget_kept(lengths, parts, shuffle, mode, world_size, seed):
    dataset = Stub(lengths, parts)
    orders = ranks(world_size, dataset, shuffle=shuffle, seed=seed, too_long="cut", **mode)
    batches = list(orders[0].batches)
    assert in_global_order(orders) == batches + [batches[number] for number in orders[0].padding]
    assert sorted(flat(batches)) == list(range(len(lengths)))
    assert all(batches)
    if "n_samples" in mode:
        assert all(len(batch) == mode["n_samples"] for batch in batches[:-1])
        return
    tokens = np.clip(dataset.lengths - mode["shift"], 1, mode["n_tokens"])
    assert all(tokens[batch].sum() <= mode["n_tokens"] for batch in batches)
    if isinstance(shuffle, Locality) and shuffle.parts_at_once:
        parts_used, rank_of = np.unique(dataset.part, return_inverse=True)
        n_groups = -(-len(parts_used) // shuffle.parts_at_once)
        groups = [set((rank_of[batch] % n_groups).tolist()) for batch in batches]
        assert all(len(of_batch) == 1 for of_batch in groups)
        assert len(list(itertools.groupby(groups))) == n_groups, "one group after the other"


def test_packed_batches_are_nearly_full():
    for median, n_tokens in ((1400, 8192), (200, 8192), (1400, 16384)):
        dataset = Stub(lognormal(20_000, median), parts=10)
        for locality in (Locality(), Locality(neighbours=8), Locality(neighbours=8, parts_at_once=2)):
            assert BatchOrder(dataset, n_tokens=n_tokens, shuffle=locality).efficiency > 0.985


def test_long_and_short_batches_are_mixed():
    dataset = Stub(lognormal(20_000), parts=10)
    batches = list(BatchOrder(dataset, n_tokens=8192))
    counts = np.array([len(batch) for batch in batches], dtype=np.float64)
    assert abs(np.corrcoef(counts, np.arange(len(counts)))[0, 1]) < 0.05
    assert abs(np.corrcoef(counts[:-1], counts[1:])[0, 1]) < 0.05
