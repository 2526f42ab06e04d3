"""Shuffling: how many orders there are, and that they are equally likely."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from order_stub import Stub, lognormal

from hsfmt.readers.order import BatchOrder
from hsfmt.readers.random_keys import RandomKeys
from hsfmt.readers.shuffle import Locality, StoredOrder, entropy_bits, shuffle


class GivenKeys:
    """Keys that sort as one of all the ways to sort things."""

    def __init__(self, **orders) -> None:
        self.orders = orders

    def draw(self, purpose, n):
        keys = np.array(self.orders[purpose], dtype=np.uint64)
        assert len(keys) == n
        return keys


def stored(part):
    part = np.array(part, dtype=np.int32)
    row = np.array([int((part[:i] == p).sum()) for i, p in enumerate(part)], dtype=np.int32)
    return StoredOrder.of(np.arange(len(part), dtype=np.int32), part, row)


@pytest.mark.parametrize("parts_at_once", [None, 1, 2, 3])
@pytest.mark.parametrize("neighbours", [1, 2, 3, 100])
@pytest.mark.parametrize(
    "part", [[], [4], [0, 0, 0, 1], [0, 1, 0, 1, 2], [0, 0, 1, 2, 2, 3], [0, 0, 0, 0, 3, 3]], ids=str
)
def test_entropy_counts_the_orders(part, neighbours, parts_at_once):
    order, locality = stored(part), Locality(neighbours, parts_at_once)
    n_runs = len(order.runs(neighbours)[1])
    n_groups = 1 if parts_at_once is None else -(-order.n_parts // parts_at_once)
    seen = Counter(
        tuple(shuffle(order, locality, GivenKeys(groups=groups, runs=runs)).samples.tolist())
        for groups in itertools.permutations(range(n_groups))
        for runs in itertools.permutations(range(n_runs))
    )
    assert math.log2(len(seen)) == pytest.approx(entropy_bits(order, locality), abs=1e-9)
    assert len(set(seen.values())) == 1, "some orders are likelier than others"
    assert all(sorted(one) == list(range(len(part))) for one in seen)


def test_keys_give_every_order_alike():
    order = stored([0, 0, 1, 1])
    seen = Counter(tuple(shuffle(order, Locality(), RandomKeys(seed, 0)).samples.tolist()) for seed in range(4800))
    assert len(seen) == 24
    assert sum((count - 200) ** 2 / 200 for count in seen.values()) < 49.7  # chi-square, 23 degrees, p = 0.001


def test_entropy_of_an_order():
    dataset = Stub(lognormal(1000), parts=10)

    def fraction(shuffle):
        return BatchOrder(dataset, n_samples=4, shuffle=shuffle).entropy_fraction

    assert (fraction(True), fraction(False)) == (1.0, 0.0)
    by_parts = [fraction(Locality(parts_at_once=k)) for k in (1, 2, 5, 10, None)]
    assert by_parts == sorted(by_parts)
    assert by_parts[-2:] == [1.0, 1.0]
    by_runs = [fraction(Locality(neighbours=k)) for k in (100, 32, 8, 2, 1)]
    assert by_runs == sorted(by_runs)
    bits = BatchOrder(dataset, n_samples=4, shuffle=Locality(neighbours=100)).entropy_bits
    assert bits == pytest.approx(math.log2(math.factorial(10)))


def test_runs_are_neighbours_in_storage():
    part = [1, 0, 1, 0, 1, 0, 0, 1, 1]
    sequence = shuffle(stored(part), Locality(neighbours=2), RandomKeys(3, 1))
    runs = np.split(sequence.samples, sequence.run_offsets[1:-1])
    assert sorted(tuple(run.tolist()) for run in runs) == [(0, 2), (1, 3), (4, 7), (5, 6), (8,)]


def test_parts_at_once():
    part = np.repeat(np.arange(7), 20)
    sequence = shuffle(stored(part), Locality(parts_at_once=3), RandomKeys(0, 0))
    groups = [set(part[group].tolist()) for group in np.split(sequence.samples, sequence.group_offsets[1:-1])]
    assert sorted(map(sorted, groups)) == [[0, 3, 6], [1, 4], [2, 5]]
    orders = {
        tuple(part[shuffle(stored(part), Locality(parts_at_once=3), RandomKeys(0, epoch)).samples[0]] % 3 for _ in "a")
        for epoch in range(20)
    }
    assert len(orders) == 3, "the groups come in other orders in other epochs"


def test_neighbours_share_batches():
    """What the knob is for: chunks that several samples share are read by fewer batches."""
    lengths = lognormal(20_000, median=200)
    chunk = np.cumsum(lengths) // 256

    def chunk_reads(shuffle):
        batches = BatchOrder(Stub(lengths, parts=10), n_tokens=8192, shuffle=shuffle).batches
        return sum(len(np.unique(chunk[batch])) for batch in batches)

    assert chunk_reads(Locality(neighbours=8)) < 0.85 * chunk_reads(True)


def test_raw_keys_are_those_of_philox():
    """Figures of NumPy's documented stream, under a key that is a digest of ours."""
    assert RandomKeys(0, 0).draw("runs", 2).tolist() == GOLDEN_KEYS
    assert not set(RandomKeys(0, 1).draw("runs", 9).tolist()) & set(RandomKeys(0, 0).draw("runs", 9).tolist())
    assert not set(RandomKeys(0, 0).draw("packs", 9).tolist()) & set(RandomKeys(0, 0).draw("runs", 9).tolist())


GOLDEN_KEYS = [13336648646846228660, 12986004224976160844]
