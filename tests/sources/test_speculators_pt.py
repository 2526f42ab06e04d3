"""Source `speculators-pt`: the `data_{i}` files of speculators up to 0.4."""

import json

import pytest
import torch

from hsfmt.errors import SourceError, UsageError
from hsfmt.readers.sources import SourceOptions, find_source, settle_final_norm, settle_layers


@pytest.fixture
def folder(tmp_path):
    """Three samples of two layers, as 0.4 writes them."""
    for i in range(3):
        torch.save(record(), tmp_path / f"data_{i}.pt")
    (tmp_path / "data_config.json").write_text(json.dumps(config([2, 7])))
    return tmp_path


def record(n_tokens=4, n_layers=2, hidden_size=8, dtype=torch.bfloat16):
    return {
        "input_ids": torch.arange(n_tokens),
        "hidden_states": [torch.full((n_tokens, hidden_size), layer, dtype=dtype) for layer in range(n_layers)],
        "loss_mask": torch.ones(n_tokens, dtype=torch.int64),
    }


def concatenated(n_tokens=4, hidden_size=8, dtype=torch.float16):
    return {
        "input_ids": torch.arange(n_tokens),
        "hidden_state": torch.arange(3, dtype=dtype).repeat_interleave(hidden_size).repeat(n_tokens, 1),
        "target": torch.full((n_tokens, hidden_size), 3, dtype=dtype),
        "loss_mask": torch.ones(n_tokens, dtype=torch.int64),
    }


def config(layer_ids, command="script.py --batch-size 4"):
    return {
        "speculators_version": "0.4.0",
        "reproducibility": {"command": command},
        "model": {"target_model_path": "org/model", "hidden_size": 8},
        "hidden_states": {"layer_ids": layer_ids},
    }


def test_layer_ids_are_after_the_layer_ascending_and_unique(folder):
    """The generator captures a set: the order that the config repeats is only what was asked for."""
    (folder / "data_config.json").write_text(json.dumps(config([7, 2, 7])))
    meaning = find_source(folder).meaning()
    assert meaning.layers == (3, 8)
    assert "data_config.json" in meaning.layers_from
    assert (meaning.model, meaning.producer["speculators_version"]) == ("org/model", "0.4.0")
    assert settle_layers(meaning, None) == (3, 8)
    with pytest.raises(UsageError, match="leave --layer-ids out"):
        settle_layers(meaning, [2, 7])


def test_lengths_document(folder, refused):
    (folder / "sample_lengths.json").write_text(json.dumps({"0": 4, "1": 5}))
    source = find_source(folder)
    source.load(source.items[0])
    assert "5 tokens as sample_lengths.json says" in str(refused(source, "data_1.pt"))
    # A resumed run of 0.4 lost the entries of earlier samples.
    source.load(source.items[2])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (config([2, 4, 7]), "expected 2 layers, got 3: 3, 5, 8"),
        (config([2, 7]) | {"model": {"hidden_size": 16}}, "expected 8, got 16"),
        (config("2,7"), "a list of layer numbers"),
        (config([]), "a list of layer numbers"),
        (config([-1, 2]), "a list of layer numbers"),
        ({}, "a list of layer numbers"),
    ],
)
def test_configs_that_do_not_fit(folder, change, words):
    (folder / "data_config.json").write_text(json.dumps(change))
    with pytest.raises(SourceError, match=words):
        find_source(folder).meaning()


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_configs_that_are_none(folder, text):
    (folder / "data_config.json").write_text(text)
    with pytest.raises(SourceError, match=r"data_config\.json"):
        find_source(folder)


def test_without_a_config_the_layers_are_asked_for(folder):
    (folder / "data_config.json").unlink()
    meaning = find_source(folder, "speculators-pt").meaning()
    assert (meaning.layers, meaning.final_norm) == (None, "pre")
    # Found by looking it is only a dump: a list of states in data_{i}.pt may be anyone's.
    assert find_source(folder).name == "pt"


def test_a_config_of_another_model(folder):
    (folder / "config.json").write_text('{"num_hidden_layers": 7, "hidden_size": 16}')
    with pytest.raises(UsageError) as info:
        find_source(folder, options=SourceOptions(model_config=str(folder))).meaning()
    assert [problem.got for problem in info.value.problems] == ["16", "7"]
    with pytest.raises(UsageError, match="--hidden-size"):
        find_source(folder, options=SourceOptions(hidden_size=16)).meaning()


def test_gaps_in_the_numbers_are_noted(folder):
    for number in (5, 9):
        torch.save(record(), folder / f"data_{number}.pt")
    (folder / "sample_lengths.json").write_text(json.dumps({"0": 4, "7": 4, "12": 4, "x": 1}))
    (note,) = find_source(folder).notes
    assert note == "the numbers of data_{i} have gaps, 6 without a file: 3, 4, 6, 7, 8, 12"
    (folder / "deep").mkdir()
    torch.save(record(), folder / "deep" / "data_1.pt")
    assert "the numbers of data_{i} in deep/ have gaps, 1 without a file: 0" in find_source(folder).notes


def test_two_runs_in_one_folder(folder):
    for name, layers in (("a", [2, 7]), ("b", [3, 7])):
        (folder / name).mkdir()
        torch.save(record(), folder / name / "data_0.pt")
        (folder / name / "data_config.json").write_text(json.dumps(config(layers)))
    with pytest.raises(UsageError, match="each folder by itself"):
        find_source(folder)


def test_masks_of_other_samples_are_warned_about(folder):
    """speculators 0.4.0 paired states with the masks of other samples in batches of more than ten."""
    assert find_source(folder).notes == []
    (folder / "data_config.json").write_text(json.dumps(config([2, 7], "script.py --batch-size 12")))
    (note,) = find_source(folder).notes
    assert "--batch-size 12" in note


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (record() | {"loss_mask": torch.ones(3, dtype=torch.int64)}, "a mask of 4 tokens, got 3"),
        (record() | {"loss_mask": torch.full((4,), 2)}, "a mask of 0 and 1"),
        (record() | {"hidden_states": torch.zeros(4, 2, 8, dtype=torch.bfloat16)}, r"a list of \[token, hidden\]"),
        (record() | {"hidden_states": [torch.zeros(4, 8, dtype=torch.bfloat16)] * 3}, "got 3 layers"),
        (record(dtype=torch.float16), "got float16 states"),
        (record(hidden_size=12), "a multiple of hidden size 8"),
        (record() | {"hidden_states": [torch.zeros(3, 8, dtype=torch.bfloat16)] * 2}, "got 3 tokens"),
        (record() | {"extra": torch.zeros(4)}, "expected the keys"),
        ({"input_ids": torch.arange(4)}, "expected the keys"),
        ([1, 2], "a dict of one sample"),
        ({1: 2}, "no strings"),
    ],
)
def test_files_that_are_not_like_the_others(folder, refused, bad, words):
    torch.save(bad, folder / "data_1.pt")
    source = find_source(folder)
    assert source.meaning().n_layers == 2
    with pytest.raises(SourceError, match=words):
        source.load(source.items[1])
    refused(source, "data_1.pt")


def test_mixed_with_the_older_files(folder, refused):
    torch.save(concatenated(dtype=torch.bfloat16), folder / "data_3.ckpt")
    assert "got 4 layers" in str(refused(find_source(folder), "data_3.ckpt"))


def test_concatenated_files(tmp_path, data_dir, accounted_for):
    for gpu in (0, 1):
        (tmp_path / str(gpu)).mkdir()
        for i in (2, 10):
            torch.save(concatenated(), tmp_path / str(gpu) / f"data_{i}.ckpt")
    source = find_source(tmp_path)
    accounted_for(source)
    assert [item.sample_id for item in source.items] == ["0/data_2", "0/data_10", "1/data_2", "1/data_10"]
    meaning = source.meaning()
    assert (meaning.layers, meaning.final_norm, meaning.dtype) == (None, "post", "float16")
    with pytest.raises(UsageError, match=r"3, n//2\+1, n-2 and n.*--model-config"):
        settle_layers(meaning, None)
    with pytest.raises(UsageError, match="the source fixes it"):
        settle_final_norm(meaning, "pre")
    assert settle_final_norm(meaning, None) == "post"
    states = source.load(source.items[0]).hidden_states
    assert states[:, :, 0].tolist() == [[0, 1, 2, 3]] * 4
    config_path = tmp_path / ".config.json"
    config_path.write_text('{"num_hidden_layers": 8, "hidden_size": 8}')
    assert find_source(tmp_path, options=SourceOptions(model_config=str(config_path))).meaning().layers == (3, 5, 6, 8)
    with pytest.raises(UsageError, match=r"tiny-llama.*\[hidden_size\]: expected 8, .* got 128"):
        find_source(tmp_path, options=SourceOptions(model_config=str(data_dir / "tiny-llama"))).meaning()


def test_concatenated_files_of_a_model_too_small_for_the_rule(tmp_path):
    torch.save(concatenated(), tmp_path / "data_0.ckpt")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 4, "hidden_size": 8}}))
    source = find_source(tmp_path, options=SourceOptions(model_config=str(tmp_path)))
    assert source.meaning().layers is None


@pytest.mark.parametrize("width", [16, 20])
def test_concatenated_files_of_another_width(tmp_path, width):
    torch.save(concatenated() | {"hidden_state": torch.zeros(4, width, dtype=torch.float16)}, tmp_path / "data_0.ckpt")
    with pytest.raises(SourceError, match=r"three layers|a multiple of hidden size 8"):
        find_source(tmp_path).meaning()


def test_one_sample_under_two_extensions(folder, refused):
    torch.save(record(), folder / "data_1.ckpt")
    source = find_source(folder)
    for key in ("data_1.pt", "data_1.ckpt"):
        assert "one file for the sample data_1" in str(refused(source, key))
    source.load(source.items[0])
