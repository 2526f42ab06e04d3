"""Which layers a drafter of SpecForge is trained on, and what is refused."""

import pytest

from hsfmt.errors import UsageError
from hsfmt.header import make_header
from hsfmt.readers.specforge_layers import Target, captured_layers, hf_layers

TARGET = Target(n_layers=8, hidden_size=16)


def header(layers=(2, 4, 5, 8), final_norm="post", hidden_size=16):
    return make_header(layers=layers, hidden_size=hidden_size, final_norm=final_norm)


def test_outputs_are_one_lower_than_hf_ids():
    assert hf_layers([1, 3, 4], "llama") == [2, 4, 5]


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2", "gpt_oss"])
def test_on_a_target_where_ids_mean_more_than_one_thing_they_are_asked_for(model_type):
    with pytest.raises(UsageError, match=rf"what \[3, 31, 59\] are on {model_type}"):
        hf_layers([3, 31, 59], model_type)


@pytest.mark.parametrize(("layers", "read"), [([2, 4, 5], (2, 4, 5, 8)), ([5, 2], (2, 5, 8)), ([4, 4], (4, 8))])
def test_layers_come_in_ascending_order_as_they_are_captured(layers, read):
    assert captured_layers(header(), TARGET, layers, with_final=True) == read


def test_without_the_final_state_its_norm_does_not_matter():
    for final_norm in ("pre", "post", "unknown"):
        assert captured_layers(header(final_norm=final_norm), TARGET, [2, 5], with_final=False) == (2, 5)


@pytest.mark.parametrize("final_norm", ["pre", "unknown"])
def test_a_final_state_that_is_not_normalised_is_refused(final_norm):
    with pytest.raises(UsageError, match="train with speculators") as caught:
        captured_layers(header(final_norm=final_norm), TARGET, [2, 4, 5], with_final=True)
    assert [(problem.where, problem.got) for problem in caught.value.problems] == [("final_norm", final_norm)]


@pytest.mark.parametrize(
    ("stored", "layers", "named"),
    [((2, 4, 5, 8), [2, 4, 6], "[1, 3, 4]"), ((2, 4, 5), [2, 4], "[1, 3, 4]"), ((0, 3, 8), [1], "[2]")],
)
def test_layers_that_are_not_stored_are_refused_and_those_that_are_named(stored, layers, named):
    with pytest.raises(UsageError) as caught:
        captured_layers(header(layers=stored), TARGET, layers, with_final=True)
    (problem,) = caught.value.problems
    assert problem.where == "layers"
    assert problem.remedy.endswith(f"stored are SpecForge's {named}")


def test_the_last_layer_as_an_auxiliary_one_has_no_norm():
    assert captured_layers(header(final_norm="pre"), TARGET, [2, 8], with_final=False) == (2, 8)
    with pytest.raises(UsageError, match="before the norm"):
        captured_layers(header(), TARGET, [2, 8], with_final=False)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(UsageError) as caught:
        captured_layers(header(final_norm="pre", hidden_size=32), TARGET, [7], with_final=True)
    assert [problem.where for problem in caught.value.problems] == ["hidden_size", "layers", "final_norm"]
