"""Which layers a drafter is trained on, and what is refused."""

import pytest

from hsfmt.errors import UsageError
from hsfmt.header import make_header
from hsfmt.readers.trained_layers import Verifier, trained_layers

VERIFIER = Verifier(n_layers=8, hidden_size=16)


def header(layers=(2, 4, 5, 8), final_norm="pre", hidden_size=16):
    return make_header(layers=layers, hidden_size=hidden_size, final_norm=final_norm)


def test_the_default_is_that_of_speculators():
    assert VERIFIER.default_targets == [2, 4, 5]
    assert trained_layers(header(), VERIFIER, None) == (2, 4, 5, 8)


@pytest.mark.parametrize(("targets", "layers"), [([5, 2], (2, 5, 8)), ([2, 4, 5], (2, 4, 5, 8)), ([8, 4], (4, 8))])
def test_targets_are_read_in_ascending_order_and_the_final_layer_last(targets, layers):
    assert trained_layers(header(), VERIFIER, targets) == layers


def test_mtp_reads_the_final_layer_alone():
    assert trained_layers(header(), VERIFIER, [2, 4], final_alone=True) == (8,)
    assert trained_layers(header(layers=[8]), VERIFIER, None, final_alone=True) == (8,)


@pytest.mark.parametrize(
    ("stored", "targets", "remedy"),
    [
        ((3, 4, 5, 8), None, "--target-layer-ids 3 4 5"),
        ((2, 4, 5, 8), [2, 4, 6], "--target-layer-ids 2 4 5"),
        ((2, 4, 5), [2, 4], "capture those layers"),
        ((2, 4, 5, 8, 9), [2, 4, 5], "capture those layers"),
        ((8,), None, "capture those layers"),
    ],
)
def test_layers_that_are_not_stored_are_refused(stored, targets, remedy):
    with pytest.raises(UsageError, match="layers") as caught:
        trained_layers(header(layers=stored), VERIFIER, targets)
    assert [problem.remedy for problem in caught.value.problems if problem.where == "layers"] == [
        remedy if "capture" in remedy else f"train on these: {remedy}"
    ]


def test_a_normalised_final_state_and_another_width_are_refused_together():
    with pytest.raises(UsageError) as caught:
        trained_layers(header(final_norm="post", hidden_size=32), VERIFIER, None)
    assert [problem.where for problem in caught.value.problems] == ["hidden_size", "final_norm"]
