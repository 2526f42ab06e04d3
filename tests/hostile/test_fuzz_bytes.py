"""Mutated bytes under a limit of address space: only errors of this package ever come out."""

import random
from collections import Counter

import pytest
from address_space import address_space_limited
from fuzz_targets import Targets
from mutations import mutated

N_ROUNDS = {"dataset": 25}
NAMES = (
    "canonical", "metadata", "root", "manifest", "pointer", "table", "index", "snapshot", "ids", "attachment", "frame",
    "blocks", "dataset",
)  # fmt: skip
HEADROOM_NBYTES = 512 << 20


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    return Targets(tmp_path_factory.mktemp("fuzz"))


def fuzz(targets: Targets, name: str, rounds: int, seed: int) -> Counter[bool]:
    choose = random.Random(f"{name} {seed}")
    seeds = targets.table[name][1]
    taken: Counter[bool] = Counter()
    with address_space_limited(HEADROOM_NBYTES):
        for _ in range(rounds):
            data = mutated(choose.choice(seeds), choose, seeds)
            try:
                taken[targets.run(name, data)] += 1
            except Exception as error:
                error.add_note(f"{name}: {data.hex()}")
                raise
    return taken


def test_all_targets_are_fuzzed(targets):
    assert set(targets.table) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_seeds_are_taken(targets, name):
    if name in ("frame", "blocks"):
        assert targets.run(name, targets.table[name][1][0])
        return
    assert all(targets.run(name, data) for data in targets.table[name][1])


@pytest.mark.parametrize("name", NAMES)
def test_mutated_bytes(targets, name):
    rounds = N_ROUNDS.get(name, 400)
    taken = fuzz(targets, name, rounds, 0)
    assert taken.total() == rounds
    assert taken[False] > rounds // 10


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("name", NAMES)
def test_many_mutated_bytes(targets, name, seed):
    rounds = 40 * N_ROUNDS.get(name, 400)
    taken = fuzz(targets, name, rounds, seed)
    assert taken.total() == rounds
    assert taken[False] > rounds // 10
