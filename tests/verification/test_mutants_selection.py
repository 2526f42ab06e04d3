"""Shares of the data: what each text asks for, and which units are chosen, without a dataset."""

import itertools

import pytest

from hsfmt.readers.verification.selection import Sample, Unit


def units(*sizes):
    return [Unit("p", (f"parts/p/hidden_states/c/{i}/0/0",), nbytes, "d") for i, nbytes in enumerate(sizes)]


@pytest.mark.parametrize(
    ("text", "fraction", "nbytes", "subset"),
    [
        ("5%", 0.05, None, None),
        ("0.5%", 0.005, None, None),
        ("100%", 1.0, None, None),
        ("3K", None, 3 * 1024, None),
        ("3M", None, 3 * 1024**2, None),
        ("3G", None, 3 * 1024**3, None),
        ("3T", None, 3 * 1024**4, None),
        ("1.5K", None, 1536, None),
        ("2KiB", None, 2048, None),
        ("2KB", None, 2048, None),
        ("1/1", None, None, (1, 1)),
        ("3/10", None, None, (3, 10)),
        ("10/10", None, None, (10, 10)),
        (" 7% ", 0.07, None, None),
    ],
)
def test_what_a_text_asks_for(text, fraction, nbytes, subset):
    sample = Sample.parse(text)
    assert (sample.fraction, sample.nbytes, sample.subset) == (pytest.approx(fraction), nbytes, subset)
    assert sample.text == text


def test_an_amount_takes_files_up_to_it_and_not_beyond():
    some = units(*[10] * 8)
    for seed in range(20):
        assert len(Sample("", nbytes=30).choose(some, seed)) == 3
        assert len(Sample("", nbytes=39).choose(some, seed)) == 3
        assert len(Sample("", fraction=0.5).choose(some, seed)) == 4
        assert len(Sample("", fraction=1.0).choose(some, seed)) == 8


def test_a_share_less_than_any_file_takes_the_smallest():
    some = units(50, 20, 30)
    assert Sample("", nbytes=19).choose(some, 1) == [some[1]]
    assert Sample("", fraction=0.01).choose(some, 1) == [some[1]]
    assert Sample("", fraction=0.5).choose([], 1) == []


def test_files_that_are_too_large_do_not_end_the_choice():
    some = units(100, 5, 5, 5)
    assert all(Sample("", nbytes=15).choose(some, seed) == some[1:] for seed in range(20))


@pytest.mark.parametrize("sizes", [[10] * 10, [1, 2, 3, 50, 1, 1, 7], [0, 0, 5], [0, 0, 0], [3]])
def test_subsets_have_every_file_once(sizes):
    some = units(*sizes)
    for t, seed in itertools.product((1, 2, 3, 10), (0, 7)):
        subsets = [Sample("", subset=(n, t)).choose(some, seed) for n in range(1, t + 1)]
        assert sorted(unit.name for subset in subsets for unit in subset) == sorted(unit.name for unit in some)
    if len(some) == 10:
        assert [len(subset) for subset in subsets] == [1] * 10


def test_the_choice_depends_on_the_seed_and_not_on_the_order():
    some = units(*[10] * 30)
    sample = Sample("", fraction=0.2)
    chosen = {seed: [unit.name for unit in sample.choose(some, seed)] for seed in range(20)}
    assert len(set(map(tuple, chosen.values()))) > 15
    assert all(sorted(unit.name for unit in sample.choose(some[::-1], seed)) == sorted(chosen[seed]) for seed in chosen)
    assert all(names == sorted(names, key=[unit.name for unit in some].index) for names in chosen.values())


def test_the_name_of_a_slice_counts_from_one():
    assert Unit("p", ("a", "b"), 3, "d", number=0, n_slices=2).name == "p 1/2"
    assert Unit("p", ("a", "b"), 3, "d", number=1, n_slices=2).name == "p 2/2"
    assert Unit("p", ("a",), 3, "d").name == "a"
